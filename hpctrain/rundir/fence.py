"""Which attempt may write into a run.

After a node failure the ranks of the old attempt may go on running beside the new one (seen for
35 s, shared research `launch.md` section 1.8). So every attempt carries a token, and whoever
publishes something asks, under the run's lock, whether its token is still the newest.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from filelock import FileLock

from hpctrain.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.rundir.layout import RunDir

LOCK_TIMEOUT_S = 120.0


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
def run_lock(run: RunDir, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the run's lock for a moment; the kernel frees it when the holder dies."""
    with FileLock(run.lock, timeout=timeout_s):
        yield


def read_fence(run: RunDir) -> Attempt | None:
    """The newest attempt, or None in a run that never started."""
    try:
        return Attempt(**json.loads(run.fence.read_text()))
    except FileNotFoundError:
        return None


def take_attempt(run: RunDir, *, job_id: str, restarts: int, follows: int | None = None) -> Attempt:
    """Begin the next attempt; every older one is refused from here on. Called by one agent only.

    Args:
        run: The run.
        job_id: The job that the attempt runs in.
        restarts: Which start of the job.
        follows: The number of the attempt that goes on with this one in the same allocation.

    Raises:
        Fenced: the run has gone on without this start of the job, e.g. after its node was lost.
    """
    with run_lock(run):
        previous = read_fence(run)
        if previous is not None and _is_left_behind(previous, job_id, restarts, follows):
            raise Fenced(
                f"job {job_id} (start {restarts}) may not go on: attempt {previous.number} has "
                f"taken {run.name} over"
            )
        attempt = Attempt(
            number=1 if previous is None else previous.number + 1,
            token=secrets.token_hex(8),
            job_id=job_id,
            restarts=restarts,
            started=time.time(),
        )
        staged = run.fence.with_suffix(".json.new")
        staged.write_text(json.dumps(asdict(attempt)) + "\n")
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        staged.replace(run.fence)
        return attempt


def _is_left_behind(newest: Attempt, job_id: str, restarts: int, follows: int | None) -> bool:
    """Whether a dead node's agent, which lives on, would take the run from its own successor."""
    if newest.job_id == job_id and newest.restarts > restarts:
        return True
    return follows is not None and newest.number != follows


@contextlib.contextmanager
def publishing(run: RunDir, attempt: Attempt) -> Iterator[None]:
    """Hold the lock while this attempt publishes something.

    Raises:
        Fenced: a newer attempt has begun; nothing may be published any more.
    """
    with run_lock(run):
        newest = read_fence(run)
        if newest is None or newest.token != attempt.token:
            raise Fenced(
                f"attempt {attempt.number} (job {attempt.job_id}) may not write any more: "
                f"attempt {newest.number if newest else 0} has taken {run.name} over"
            )
        yield
