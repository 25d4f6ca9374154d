"""A run stopped for good: which job to end, and whether it can save first.

tests/unit/cli/test_cancel.py and tests/slurm/test_cancel.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.base import clock
from hpctrain.base.files import write_plain
from hpctrain.base.records import TERMINAL_JOB
from hpctrain.errors import ClusterError, ClusterUnreachable, HpctrainError, UsageError, WrongState
from hpctrain.history.run_state import OVER, RunState, run_state
from hpctrain.run import events as ledger
from hpctrain.run.event_types import CancelRequested
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
                f"{run.name}: nobody can say whether it has a job ({answer.problem})"
            )
        return job_id
    if answer.note:
        raise WrongState(
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
