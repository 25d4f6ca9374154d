"""Where a program's scalars go besides the ledger: TensorBoard, wandb, trackers of the user's own.

Rank 0 only, and never in the way of training: each tracker works behind a queue in a thread of its
own (`tracker_lane.py`). docs/tracking.md shows how to write one; tests/unit/test_trackers.py holds
the promises.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.runtime.board import Board
from hpctrain.runtime.board_pages import public_settings
from hpctrain.runtime.tracker_lane import Lane
from hpctrain.settings.check_hooks import BUILT_IN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec

BOARD_IMPORTS = (
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.plugins.hparams.plugin_data_pb2",
)
BEFORE_SAVE_S, ONCE_SLOW_S = 2.0, 0.05
"""Longest wait for curves before a save: a kill after it must not leave a hole before its step.
It is over as soon as they are written, in milliseconds; a disk that took longer gets the second."""
CLOSE_S, CLOSE_LEAST_S = 10.0, 1.0
"""How long the end of an attempt waits for trackers: at most, and where a kill is near."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when it starts, once in each attempt."""

    run_id: str
    """Random; the same in all attempts of the run."""
    name: str
    dir: Path
    """The run's directory, shared by all nodes."""
    attempt: int
    """Counts from 1 over requeues and resumes."""
    resumed_step: int
    """Updates that the restored checkpoint has; later steps may be told once more."""
    project: str
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings, "section.key" to value, without those that may hold a secret."""


class Tracker(Protocol):
    """An experiment tracker. All calls come from one thread; one that raises ends it."""

    def log(self, step: int, values: Mapping[str, float], t: float) -> None:
        """Scalars of a step that were told at t (seconds since the epoch).

        Steps rise. After a hard kill the next attempt tells steps after its `resumed_step` again.
        """

    def flush(self) -> None:
        """Make what was logged outlive this process; called about once a second."""

    def close(self) -> None:
        """The attempt ends: the run is done, or goes on in another one."""


class Trackers:
    """All trackers of a run: TensorBoard, and what `track.loggers` names."""

    def __init__(
        self,
        run: RunDir,
        spec: Spec | None,
        *,
        attempt: int,
        resumed_step: int,
        world_size: int,
    ) -> None:
        """Start them; returns before they are ready.

        Args:
            run: The run.
            spec: Its spec; None for a program that runs without one, which has TensorBoard only.
            attempt: This attempt.
            resumed_step: Updates that the restored checkpoint has; 0 for a fresh start.
            world_size: Ranks.
        """
        for name in BOARD_IMPORTS:  # in this thread: see `find`
            import_module(name)
        board = partial(
            Board, run, attempt=attempt, resumed_step=resumed_step, world_size=world_size
        )
        self._step = 0
        self._values: dict[str, float] = {}
        self._patience_s = BEFORE_SAVE_S
        self._board = Lane("tensorboard", board)
        self._lanes = [self._board]
        # Not atexit, which a forked rank does not come by.
        self._at_exit = Finalize(None, self.close, exitpriority=0)
        if spec is not None:
            told = TrackedRun(
                run_id=spec.run_id,
                name=spec.name,
                dir=run.root,
                attempt=attempt,
                resumed_step=resumed_step,
                project=spec.settings.track.project,
                config=public_settings(spec.settings),
            )
            self._lanes += start_lanes(spec.settings.track.loggers, told)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take scalars of a step; never waits.

        They reach the trackers with the next step's, so that a name that a program tells several
        times in a step counts once, with its last value.
        """
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
            t = time.time()
            for lane in self._lanes:
                lane.put(self._step, self._values, t)
            self._values = {}

    def close(self, left_s: float | None = None) -> None:
        """End all trackers. Called by itself where the process ends.

        Args:
            left_s: Seconds until the process is killed, if it will be: half of them may be used.
        """
        self._hand_over()
        limit_s = CLOSE_S if left_s is None else min(CLOSE_S, max(CLOSE_LEAST_S, left_s / 2))
        deadline = time.monotonic() + limit_s
        for lane in self._lanes:
            lane.begin_close()
        for lane in self._lanes:
            lane.wait_closed(max(0.0, deadline - time.monotonic()))
        self._lanes = []
        self._at_exit.cancel()


def start_lanes(loggers: Sequence[str], run: TrackedRun) -> list[Lane]:
    """A lane for each logger that can be imported; the others are told on stderr."""
    lanes = []
    for name in loggers:
        try:
            make = find(name)
        except Exception as error:  # noqa: BLE001 - whatever its import does, the run goes on
            text = " ".join(str(error).split())
            print(
                f"hpctrain: tracker {name} cannot be imported ({type(error).__name__}: {text}); "
                "the run goes on without it",
                file=sys.stderr,
                flush=True,
            )
            continue
        lanes.append(Lane(name, partial(make, run)))
    return lanes


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
