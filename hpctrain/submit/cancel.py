"""A run stopped for good: which job to end, and whether it can save first; and a run deleted.

tests/unit/cli/test_cancel.py and tests/slurm/test_cancel.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.base import clock
from hpctrain.base.files import write_plain
from hpctrain.base.records import TERMINAL_JOB
from hpctrain.errors import (
    ChecksFailed,
    ClusterError,
    ClusterUnreachable,
    HpctrainError,
    RunAlive,
    UsageError,
)
from hpctrain.history.run_state import OVER, RunState, run_state
from hpctrain.run import events as ledger
from hpctrain.run.event_types import CancelRequested
from hpctrain.run.fence import run_lock
from hpctrain.run.ownership import is_mine
from hpctrain.scheduler.base import get_cluster

if TYPE_CHECKING:
    from hpctrain.history.run_history import RunHistory
    from hpctrain.run.layout import RunDir
    from hpctrain.status.status import Answer


class Cancelled(NamedTuple):
    """What was asked of whom."""

    job_id: str | None
    """None where no job of the run was left to cancel."""
    saves: bool
    """It was asked to save and leave; otherwise it was cancelled."""


def cancel_run(
    run: RunDir, cluster: str, history: RunHistory, answer: Answer, *, save: bool
) -> Cancelled:
    """End the run's job, which is not requeued.

    Args:
        run: The run.
        cluster: Its scheduler.
        history: Its own.
        answer: What the scheduler says of its newest job.
        save: Let it save and leave by itself; a job that only waits has nothing to save.

    Raises:
        ClusterError: the scheduler refused.
        ClusterUnreachable: nobody can say whether there is a job, or it could not be told.
        UsageError: its job is another run's, or a terminal's.
        HpctrainError: there is no room for the request.
    """
    job_id = _live_job(run, answer, history)
    if job_id is None:
        return Cancelled(None, saves=False)
    # A job that is suspended has something to save as well: it hears of it when it goes on.
    state = run_state(history.state, answer.job, asked=answer.asked)
    if save and state in {RunState.RUNNING, RunState.SUSPENDED}:
        _ask_to_save(run, job_id, history)
        return Cancelled(job_id, saves=True)
    _cancel(run, job_id, cluster, answer)
    return Cancelled(job_id, saves=False)


def _live_job(run: RunDir, answer: Answer, history: RunHistory) -> str | None:
    """Return the job that may still write; None where there is none.

    Where the scheduler is silent, the job on record counts.

    Raises:
        ClusterUnreachable: nobody can say whether there is one.
        UsageError: the run's newest job is another run's.
    """
    if answer.job is not None and answer.job.alive:
        return answer.job.job_id
    state = run_state(history.state, answer.job, asked=answer.asked)
    job_id = history.state.job_id
    if not answer.asked and state not in OVER:
        if job_id is None:
            raise ClusterUnreachable(
                f"{run.name}: nobody can say whether it has a job ({answer.problem}); try again"
            )
        return job_id
    if answer.note:
        raise UsageError(
            f"{run.name} has no job that could be cancelled: it is {state.value}; {answer.note}"
        )
    return None


def _ask_to_save(run: RunDir, job_id: str, history: RunHistory) -> None:
    """Leave the request that rank 0 looks for, whole or not at all."""
    request = {"time": clock.now(), "job_id": job_id, "token": history.state.token}
    staged = run.stop_request.with_suffix(".new")
    try:
        write_plain(staged, json.dumps(request) + "\n")
        # On record before it can be heard: an attempt that ends for another reason meanwhile must
        # not be requeued. Only after there was room for it: else the run trains on, and is done
        # for at its next preemption.
        ledger.append(run, CancelRequested(save=True, job_id=job_id))
        staged.replace(run.stop_request)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise HpctrainError(
            f"{run.name} cannot be asked to save: {error.strerror} ({run.root}); make "
            "room, or leave out --save to end it at once"
        ) from None


def _cancel(run: RunDir, job_id: str, cluster: str, answer: Answer) -> None:
    """Cancel the job; that it was meant to is written down first, so that it is never requeued.

    Where the scheduler could not say that the number is this run's job, nothing is cancelled: on a
    cluster that shares the folder it may be another one.
    """
    if job_id.startswith(TERMINAL_JOB):
        pid = job_id.removeprefix(TERMINAL_JOB)
        raise UsageError(
            f"{run.name} runs in a terminal (process {pid}); press Ctrl-C there, or use --save"
        )
    recorded = ledger.record(run, CancelRequested(save=False, job_id=job_id))
    on_record = f"it is on record that {run.name} is not to be requeued. " if recorded else ""
    try:
        if answer.problem:
            raise ClusterUnreachable(answer.problem)
        get_cluster(cluster).cancel(job_id)
    except ClusterError as error:
        again = "Cancel it there" if answer.note else "Try again"
        raise type(error)(f"job {job_id} was not cancelled: {error}; {on_record}{again}") from error


def why_kept(run: RunDir) -> None:
    """Refuse to delete a run that something still needs.

    Raises:
        ChecksFailed: it belongs to another user, or is a link.
        ClusterUnreachable: nobody can say whether it has a job.
        RunAlive: it has a job, or a live run waits for it.
    """
    from hpctrain.status.reader import StatusReader
    from hpctrain.status.status import UNDER_WAY_STATES

    if not is_mine(run.root):
        raise ChecksFailed(f"{run.root} belongs to another user, who can delete it")
    if run.root.is_symlink():
        target = run.root.readlink()
        raise ChecksFailed(f"{run.root} is a link to {target}: name that, and remove the link")
    status = StatusReader(run.root.parent).look(run, thorough=False)
    if not status.answer.asked and status.ledger_state.phase not in OVER:
        raise ClusterUnreachable(
            f"nobody can say whether {run.name} has a job: {status.answer.problem}; try again"
        )
    if status.state in UNDER_WAY_STATES:
        job = status.ledger_state.job_id
        raise RunAlive(
            f"{run.name} is {status.state.value}{f' (job {job})' if job else ''}: "
            f"`hpctrain cancel {status.label}` first"
        )
    after = (one for one in status.chain if status.root in one.after)
    waits = [one.run for one in after if one.state in UNDER_WAY_STATES]
    if waits:
        raise RunAlive(f"{', '.join(waits)} waits for {run.name}; cancel that first")


def size_of(run: RunDir) -> tuple[int, int]:
    """How many files a run has, and how many bytes; what cannot be looked at is left out."""
    files = nbytes = 0
    for folder, _, names in os.walk(run.root):
        for name in names:
            with contextlib.suppress(OSError):
                nbytes += (Path(folder) / name).lstat().st_size
                files += 1
    return files, nbytes


def delete_run(run: RunDir) -> None:
    """Delete a run's folder; where that is cut short, no half of a run is left under its name.

    Raises:
        RunAlive: a job was submitted meanwhile.
        HpctrainError: something of it cannot be deleted.
    """
    gone = run.root.with_name(f".removed-{run.name}-{secrets.token_hex(3)}")
    try:
        with run_lock(run):
            why_kept(run)
            run.root.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        where = gone if gone.exists() else run.root
        raise HpctrainError(f"{where} cannot be deleted: {error.strerror or error}") from None
