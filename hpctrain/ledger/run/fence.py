"""The fence of a run: the newest attempt alone may publish, whatever an older one still does.

After a node failure the ranks of the old attempt may continue running beside the new one (seen for
35 s). So every attempt has a token, and a publisher checks, under the run's lock, whether its token
is still the newest. tests/unit/run/test_fence.py and tests/unit/base/test_locks.py hold the
promises.

`look_anew` and `left_text` show what another node has written just now. Clients of NFS keep for up
to a minute what they know of a folder: its list, and which names are not in it, however often one
asks. Opening a file that is there asks the server (close-to-open), as does every change of one's
own. tests/unit/run/test_fresh.py holds the promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock, locks
from hpctrain.core.base.files import all_of, plain_descriptor, read_plain, read_text, whole_file
from hpctrain.errors import CheckpointError, Fenced, RunLocked
from hpctrain.ledger.run.event_types import AttemptStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir

log = logging.getLogger("hpctrain.run")

LOCK_TIMEOUT_S = 120.0
START_TRIES = 4
"""A start waits for the lock so many times as long: the other agents wait for it for 10 minutes."""


IMPORT = "import-"
"""Begins the job's name of one that has trained nothing: it has imported a checkpoint."""


@dataclass(frozen=True)
class Attempt:
    """The right to write into a run, until a newer attempt takes it."""

    number: int
    """Counted from 1 by the run's own records."""
    token: str
    job_id: str
    restarts: int
    started: float
    """Seconds since the epoch."""


@contextlib.contextmanager
def run_lock(run: RunDir, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the run's lock for a moment; the kernel frees it when the holder dies.

    Its holder sees the run as others have left it, not as its client of the disk remembers it.

    Raises:
        RunLocked: another process has kept it for `LOCK_TIMEOUT_S`.
        CheckpointError: it cannot be locked at all.
    """
    wait_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.held(run.lock, wait_s))
        except TimeoutError as error:
            raise RunLocked(
                f"{run.lock} has been held by another process for {wait_s:g} s: `lslocks` or "
                f"`fuser -v {run.lock}` on the run's hosts names it; end it if it was left behind"
            ) from error
        except OSError as error:
            raise CheckpointError(_why_not(run, error)) from error
        look_anew(run.root, run.checkpoints)
        yield


def read_fence(run: RunDir) -> Attempt | None:
    """The newest attempt, or None in a run that never started."""
    try:
        return Attempt(**json.loads(read_plain(run.fence)))
    except FileNotFoundError:
        return None


def take_attempt(
    run: RunDir,
    *,
    job_id: str,
    restarts: int,
    follows: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> Attempt:
    """Begin the next attempt; every older one is refused from here on. Called by one agent only.

    `restarts` is which start of the job it is, `follows` the number of the attempt that it
    continues in the same allocation. `check` is called while the lock is held, and may raise
    Fenced.

    Raises:
        Fenced: the run continued without this start of the job, e.g. after its node was lost.
        CheckpointError: the run's lock cannot be had.
    """
    import secrets  # every command reads this module, few take an attempt

    with _lock_at_start(run):
        previous = read_fence(run)
        if previous is not None and _is_left_behind(previous, job_id, restarts, follows):
            raise Fenced(
                f"job {job_id} (start {restarts}) may not continue: attempt {previous.number} has "
                f"taken {run.name} over"
            )
        check()
        attempt = Attempt(
            number=1 if previous is None else previous.number + 1,
            token=secrets.token_hex(8),
            job_id=job_id,
            restarts=restarts,
            started=clock.now(),
        )
        _write(run, attempt)
        # Before the other nodes look into it: told that it is not there, their clients of the disk
        # would believe it for a minute, and the first save would fail.
        try:
            run.checkpoints.mkdir(exist_ok=True)
        except OSError as error:  # the nodes' memory may hold the state; else the ranks say so
            log.warning("no checkpoint can be read or saved for now: %s", error)
        return attempt


def identity(run: RunDir, attempt: Attempt) -> dict[str, Any]:
    """The fields by which `AttemptStarted` says whose it is."""
    own = {name: getattr(attempt, name) for name in ("job_id", "restarts", "token")}
    return own | {"run_dir": str(run.root)}


def start_without_ranks(
    run: RunDir,
    attempt: Attempt,
    *,
    by: str,
    nodes: Sequence[str],
    job_started: float | None,
    ranks_per_node: int = 0,
) -> AttemptStarted:
    """What the ledger hears of a start of the job that came to no ranks, so that it counts.

    `job_started` is when the scheduler began the job, None where unknown.
    """
    return AttemptStarted(
        **identity(run, attempt),
        by=by,
        nodes=tuple(nodes),
        world_size=0,
        ranks_per_node=ranks_per_node,
        job_started=job_started,
    )


@contextlib.contextmanager
def publishing(run: RunDir, attempt: Attempt) -> Iterator[None]:
    """Hold the lock while this attempt publishes something.

    Raises:
        Fenced: a newer attempt has begun; nothing may be published any more.
        CheckpointError: the run's lock cannot be had.
    """
    with run_lock(run):
        newest = read_fence(run)
        if newest is None or newest.token != attempt.token:
            raise Fenced(
                f"attempt {attempt.number} (job {attempt.job_id}) may not write any more: "
                f"attempt {newest.number if newest else 0} has taken {run.name} over"
            )
        yield


def look_anew(*folders: Path) -> None:
    """Make this node forget what it knew of folders, a parent before what is in it.

    A name is made there and taken away, which lets the client ask the server. Where that cannot be,
    what is listed may be a minute old; most file systems are coherent without it.
    """
    for folder in folders:
        name = folder / f".look-{socket.gethostname()}"
        with contextlib.suppress(OSError):
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            name.unlink()


def stop_is_asked(request: Path, job_id: str) -> bool:
    """Whether `cancel --save` has left its request for this job.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        asked = json.loads(left_text(request))
    except ValueError:  # none, or seen while NFS still shows half of it
        return False
    return isinstance(asked, dict) and str(asked.get("job_id")) == job_id


def left_text(path: Path) -> str:
    """What a file says that another node may leave at any moment; "" while there is none.

    It is opened so that it would be made, which the server decides: a client that has once been
    told that there is no such file believes it for a while. So it may be there empty from then on.

    Raises:
        OSError: it is there and cannot be read.
    """
    # Nothing else asks the server and leaves no empty file: a list of the folder may be as old as
    # the word that there is no such file, and a name of our own, made and taken away, is two
    # changes of the folder where this is one question, for each run twice a second.
    try:
        descriptor = plain_descriptor(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:  # no room for a name, or a folder that may only be read
        with contextlib.suppress(FileNotFoundError):
            return read_text(path)
        return ""
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
        return all_of(file, path).decode(errors="replace")


def _why_not(run: RunDir, error: OSError) -> str:
    what = f"{run.lock} cannot be locked: {error.strerror}"
    if error.errno in locks.NO_LOCKS:
        return (
            f"{what}: its file system has no flock, which keeps two writers apart; have it mounted "
            "with locks (Lustre: -o flock), or choose another disk with --runs"
        )
    if isinstance(error, PermissionError):
        with contextlib.suppress(OSError):
            return f"{what}; it belongs to user {run.root.stat().st_uid}, who alone may change it"
    return f"{what}; try again when the disk answers"


@contextlib.contextmanager
def _lock_at_start(run: RunDir) -> Iterator[None]:
    """The same, with more patience: that somebody holds the lock is no reason to end a run."""
    with contextlib.ExitStack() as stack:
        for left in reversed(range(START_TRIES)):
            try:
                stack.enter_context(run_lock(run))
            except RunLocked as error:
                if not left:
                    raise
                log.warning("%s; waiting on", error)
            else:
                break
        yield


def _write(run: RunDir, attempt: Attempt) -> None:
    """Put the fence up, whole: of two starts at once, where locks do not hold, the last has it."""
    with whole_file(run.fence, attempt.token) as staged, staged.open("x") as file:
        file.write(json.dumps(asdict(attempt)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _is_left_behind(newest: Attempt, job_id: str, restarts: int, follows: int | None) -> bool:
    """Whether a dead node's agent, which lives on, would take the run from its own successor."""
    if newest.job_id == job_id and newest.restarts > restarts:
        return True
    return follows is not None and newest.number != follows
