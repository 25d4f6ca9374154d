"""What a rank leaves beside checkpoints: events, the outcome, and scalars for trackers.

Rank 0 of a run writes. Each tracker (TensorBoard, wandb, the user's own) works behind a queue in a
thread of its own. TensorBoard's files are written by hpctrain, one for each attempt: TensorBoard
reads files in the order of their names, and torch's SummaryWriter names them by the node's clock.
docs/watching.md shows how to write a tracker; tests/unit/runtime/test_trackers.py,
test_event_file.py and test_rank_record.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections import deque
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from hpctrain.core.base import clock
from hpctrain.core.base.files import replace_text
from hpctrain.core.settings.check import BUILT_IN
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.results import file_head, scalars_record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.base.records import StopCause
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


log = logging.getLogger("hpctrain.runtime")

MOST = 10_000
"""Logged steps that may wait for a tracker; what comes then is dropped, counted and told."""
EVERY_S = 1.0
"""Between two looks at the queue: woken for each step, the thread would take the GIL as often."""
BEFORE_SAVE_S, ONCE_SLOW_S = 2.0, 0.05
"""Longest wait for curves before a save: a kill after it must not leave a hole before its step.
It is over as soon as they are written, in milliseconds; a disk that took longer gets the second."""
CLOSE_S, CLOSE_LEAST_S = 10.0, 1.0
"""How long the end of an attempt waits for trackers: at most, and where a kill is near."""
CONNECT_S = 2.0
FINISH_S = 8.0
"""After so long wandb gives up on sending the rest, which then lies in its folder."""
LOGGED = "hpctrain-logged.json"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets when it starts, once in each attempt."""

    run_id: str
    """Random; the same in all attempts of the run."""
    name: str
    dir: Path
    """The run's directory, shared by all nodes."""
    attempt: int
    """Counts from 1 over requeues and resumes."""
    resumed_step: int
    """Updates that the restored checkpoint has; later steps may be logged once more."""
    project: str
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings, "section.key" to value, without those that may hold a secret."""


class Tracker(Protocol):
    """An experiment tracker. All calls come from one thread; one that raises ends it."""

    def log(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Scalars of a step that were logged at t (seconds since the epoch).

        Steps rise. After a hard kill the next attempt tells steps after its `resumed_step` again.
        """

    def flush(self) -> None:
        """Make what was logged outlive this process; called about once a second."""

    def close(self) -> None:
        """The attempt ends: the run is done, or continues in another one."""


class Trackers:
    """All trackers of a run: TensorBoard, and what `track.loggers` names."""

    def __init__(
        self,
        run: RunDir,
        spec: Spec | None,
        *,
        attempt: int,
        resumed_step: int,
    ) -> None:
        """Start them; return before they are ready.

        `spec` is None for a program that runs without one, which has TensorBoard only.
        `resumed_step` is 0 for a fresh start.
        """
        begins_at = resumed_step + 1 if resumed_step else 0
        board = partial(EventFile, run.tensorboard / file_name(attempt), purge_step=begins_at)
        self._step = 0
        self._values: dict[str, float] = {}
        self._patience_s = BEFORE_SAVE_S
        self._board = TrackerThread("tensorboard", board)
        self._threads = [self._board]
        # Not atexit, which a forked rank does not come by.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        if spec is not None:
            tracked_run = TrackedRun(
                run_id=spec.run_id,
                name=spec.name,
                dir=run.root,
                attempt=attempt,
                resumed_step=resumed_step,
                project=spec.settings.track.project,
                config=public_settings(spec.settings),
            )
            self._threads += start_threads(spec.settings.track.loggers, tracked_run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take scalars of a step; never waits."""
        if step != self._step:
            self._hand_over()
            self._step = step
        self._values.update(values)

    def flush(self) -> None:
        """Before a save: what was logged outlives a kill, unless the disk is too slow for that."""
        self._hand_over()
        in_time = self._board.flush(self._patience_s)
        self._patience_s = BEFORE_SAVE_S if in_time else ONCE_SLOW_S

    def _hand_over(self) -> None:
        if self._values:
            t = clock.now()
            for thread in self._threads:
                thread.put(self._step, self._values, t)
            self._values = {}

    def close(self, left_s: float | None = None) -> None:
        """End all trackers. Called by itself when the process ends.

        At most half of `left_s`, the seconds until the process is killed, is used.
        """
        self._hand_over()
        limit_s = CLOSE_S if left_s is None else min(CLOSE_S, max(CLOSE_LEAST_S, left_s / 2))
        deadline = clock.monotonic() + limit_s
        for thread in self._threads:
            thread.begin_close()
        for thread in self._threads:
            thread.wait_closed(max(0.0, deadline - clock.monotonic()))
        self._threads = []
        self._at_exit.cancel()


def start_threads(loggers: Sequence[str], run: TrackedRun) -> list[TrackerThread]:
    """A thread for each logger that can be imported; the others are named on stderr."""
    threads = []
    for name in loggers:
        try:
            make = find(name)
        except Exception as error:  # noqa: BLE001 - whatever its import does, the run continues
            log.warning(
                "tracker %s cannot be imported (%s: %s); the run continues without it",
                name,
                type(error).__name__,
                " ".join(str(error).split()),
            )
            continue
        threads.append(TrackerThread(name, partial(make, run)))
    return threads


def find(name: str) -> Callable[[TrackedRun], Tracker]:
    """The factory that `track.loggers` names: wandb, or module:name.

    Imported here, in the main thread: a DataLoader worker that is forked while another thread
    imports would hang at its own first import of the same module.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such name.
    """
    if name in BUILT_IN:
        import_module(name)
    module, _, attribute = BUILT_IN.get(name, name).partition(":")
    make: Callable[[TrackedRun], Tracker] = getattr(import_module(module), attribute)
    return make


class TrackerThread:
    """Feeds one tracker.

    The tracker is made, called and closed in a thread of its own. One that raises is reported once
    on stderr and gets nothing more; one that hangs fills its queue, and keeps `flush` and `close`
    no longer than they allow.
    """

    def __init__(
        self, name: str, start: Callable[[], Tracker], *, most: int = MOST, every_s: float = EVERY_S
    ) -> None:
        """Begin; call `start` in the thread, since it may wait for a network.

        At most `most` items wait, and none longer than `every_s` for a tracker that is ready.
        """
        self.name = name
        self._start = start
        self._most = most
        self._every_s = every_s
        self._waiting: deque[tuple[int, Mapping[str, float], float]] = deque()
        self._dropped = 0
        self._condition = threading.Condition()
        self._asked = 0
        self._flushed = 0
        self._closing = False
        self._over = False
        self._thread = threading.Thread(
            target=self._work, name=f"hpctrain-tracker-{name}", daemon=True
        )
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Hand over scalars of a step; never waits."""
        if self._over:
            return
        if len(self._waiting) >= self._most:
            if not self._dropped:
                self._log("it is too slow or hangs; steps are left out of it")
            self._dropped += 1
            return
        self._waiting.append((step, values, t))

    def flush(self, limit_s: float) -> bool:
        """Wait until all that was put is with the tracker and flushed; whether that is so."""
        with self._condition:
            self._asked += 1
            ticket = self._asked
            self._condition.notify_all()
            return self._condition.wait_for(
                lambda: self._flushed >= ticket or self._over, timeout=limit_s
            )

    def begin_close(self) -> None:
        """Let the tracker end; `wait_closed` waits for it."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    def wait_closed(self, limit_s: float) -> bool:
        """Whether the tracker has ended, after this time at most."""
        with self._condition:
            over = self._condition.wait_for(lambda: self._over, timeout=limit_s)
        if not over:
            self._log(f"it was given up: {len(self._waiting)} steps and its end were under way")
        if self._dropped:
            self._log(f"it was too slow for {self._dropped} steps, which it lacks")
        return over

    def _work(self) -> None:
        try:
            tracker = self._start()
            is_over = False
            while not is_over:
                is_over = self._round(tracker)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - a tracker's bug costs its curves, not the run
            text = " ".join(str(error).split())
            self._log(f"{type(error).__name__}: {text}; the run continues without it")
        finally:
            with self._condition:
                self._over = True
                self._waiting.clear()
                self._condition.notify_all()

    def _round(self, tracker: Tracker) -> bool:
        """Hand over what waits; whether that was the last time."""
        with self._condition:
            if self._asked == self._flushed and not self._closing:
                clock.wait(self._condition, self._every_s)
            ticket, last = self._asked, self._closing
        moved = False
        while self._waiting:
            tracker.log(*self._waiting.popleft())
            moved = True
        if moved or ticket > self._flushed:
            tracker.flush()
        with self._condition:
            self._flushed = ticket
            self._condition.notify_all()
        return last

    def _log(self, text: str) -> None:
        log.warning("tracker %s: %s", self.name, text)


def start(run: TrackedRun) -> WandbTracker:
    """Begin or continue with the run's wandb run; offline where the server cannot be used.

    Raises:
        Exception: whatever wandb raises, where not even its offline mode works.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return WandbTracker(run, mode)
    if not is_reachable(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"):
        return WandbTracker(run, "offline")
    try:
        return WandbTracker(run, "online")
    except Exception as error:  # noqa: BLE001 - no key, no permission: the data is kept all the same
        log.warning("wandb writes offline: %s", " ".join(str(error).split()))
        return WandbTracker(run, "offline")


def is_reachable(url: str) -> bool:
    """Whether a TCP connection to the URL's host comes about in 2 s."""
    parts = urlsplit(url)
    try:
        address = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
        socket.create_connection(address, timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


class WandbTracker:
    """Implements `trackers.Tracker`."""

    def __init__(self, run: TrackedRun, mode: str) -> None:
        """Begin or resume the wandb run of this id; `mode` is online, offline, disabled, shared."""
        import wandb

        # wandb makes its folder below the run's, and falls back to /tmp where that is missing.
        self._logged = run.dir / "wandb" / LOGGED
        self._logged.parent.mkdir(exist_ok=True)
        self._step = _read_logged(self._logged)
        self._logged_step = self._step
        # Output is kept in the ranks' logs; wandb would put itself between them and the program.
        wanted = {"console": "off", "finish_timeout": FINISH_S, "silent": True}
        understood = getattr(wandb.Settings, "model_fields", wanted)
        self._run: Any = wandb.init(
            id=run.run_id,
            name=run.name,
            project=run.project,
            dir=str(run.dir),
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            config=run.config,
            settings={k: v for k, v in wanted.items() if k in understood},
        )

    def log(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Tell wandb of a step, unless an earlier attempt has: it cannot take a step back."""
        if step <= self._logged_step:
            return
        self._step = max(self._step, step)
        self._run.log({**values, "_timestamp": t}, step=step)

    def flush(self) -> None:
        """Note how far we are, for the next attempt."""
        if self._step > self._logged_step or not self._logged.exists():
            replace_text(self._logged, json.dumps({"step": self._step}))

    def close(self) -> None:
        """End this attempt's part; wandb marks the run as finished until the next one comes."""
        self.flush()
        self._run.finish()


def _read_logged(path: Path) -> int:
    """The last step that an earlier attempt has told wandb of."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return int(json.loads(path.read_text())["step"])
    return 0


# ---- TensorBoard

_PRIVATE = ("notify.command", "notify.webhook_file", "slurm.setup")
"""May hold a password or a key: a command line of the user's, lines of shell."""


class EventFile:
    """One attempt's event file: the `Tracker` of TensorBoard.

    Nothing is kept in a buffer that a forked child could write a second time: records are collected
    in a list and handed to the kernel by `flush`.

    Raises:
        OSError: from any method, where the file cannot be written.
    """

    def __init__(self, path: Path, *, purge_step: int) -> None:
        """Begin the file and make its folder.

        Steps of earlier files from `purge_step` on no longer count.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._records = file_head(clock.now(), purge_step)
        self.flush()

    def log(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Keep scalars of one step (may be NaN), as one record, until the next flush."""
        self._records.append(scalars_record(t, step, values))

    def flush(self) -> None:
        """Hand everything to the kernel: it outlives this process, though not its node."""
        if self._records:
            text = b"".join(self._records)
            self._records.clear()
            while text:
                text = text[os.write(self._descriptor, text) :]

    def close(self) -> None:
        """Flush, and close the file, which sends it to the server where it lies on NFS."""
        self.flush()
        os.close(self._descriptor)


def file_name(attempt: int) -> str:
    """A name that sorts after those of earlier attempts, and after all that begin with a time."""
    return f"events.out.tfevents.attempt-{attempt:010d}"


def public_settings(settings: Settings) -> dict[str, Any]:
    """Every setting as "section.key", without those that may hold a secret."""
    return {
        f"{section}.{key}": value
        for section, values in asdict(settings).items()
        for key, value in values.items()
        if f"{section}.{key}" not in _PRIVATE
    }


# ---- what a rank leaves


class RankRecord:
    """The events, scalars and outcome of one rank.

    Attributes:
        metrics: The newest value of each scalar that the program has logged.
    """

    def __init__(self, world: World, place: SavePlace | None, spec: Spec | None) -> None:
        """Begin without trackers; `spec` is None for a program that runs without one."""
        self.metrics: dict[str, float] = {}
        self._place = place if world.rank == 0 else None
        self._spec = spec
        self._trackers: Trackers | None = None

    def start_trackers(self, step: int) -> None:
        """Start TensorBoard and what `track.loggers` names; `step` updates are applied."""
        if self._place is None or self._trackers is not None:
            return
        self._trackers = Trackers(
            self._place.run,
            self._spec,
            attempt=self._place.attempt.number,
            resumed_step=step,
        )

    def event(self, fact: LedgerFact) -> None:
        """Append to the ledger. A full disk costs the fact, never the training."""
        if self._place is not None:
            ledger.record(self._place.run, fact, attempt=self._place.attempt.number)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take scalars of a step; never waits."""
        self.metrics.update(values)
        if self._trackers is not None:
            self._trackers.log(step, values)

    def outcome(self, outcome: str, step: int | None, cause: StopCause | None) -> None:
        """Leave word for the agent how the program ended, see `write_outcome`."""
        if self._place is not None:
            write_outcome(self._place.run, self._place.attempt, outcome, step=step, cause=cause)

    def flush(self) -> None:
        """Hand the scalars over, so that a kill after the next save leaves no hole before it."""
        if self._trackers is not None:
            self._trackers.flush()

    def close(self, left_s: float | None = None) -> None:
        """End the trackers, `left_s` before the processes are killed; None where nobody says."""
        if self._trackers is not None:
            self._trackers.close(left_s)


def write_outcome(
    run: RunDir, attempt: Attempt, outcome: str, *, step: int | None, cause: StopCause | None
) -> None:
    """Leave the outcome for the agent. Rank 0 calls it.

    `outcome` is "done", "stopped", "failed" or "left". "failed" means that no other start would do
    better. "left" means that the program left its loop, or has one of its own, which need not
    report its end. `step` is None if the ledger knows it. `cause` is that of a stop.
    """
    path = run.outcome(attempt.number)
    text = {"outcome": outcome, "step": step, "cause": cause.value if cause else None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(text))
    except OSError as error:  # the agent knows as much of a program that never leaves word
        log.warning("no word for the agent: %s", error)
