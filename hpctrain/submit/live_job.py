"""The run's own job: which may still write, and why nothing is started beside it.

tests/slurm/test_two_writers.py and tests/unit/submit/test_copied_run.py hold the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.base.records import JobState
from hpctrain.errors import AccountingSilent, ClusterUnreachable, RunAlive
from hpctrain.history.run_history import RunHistory
from hpctrain.history.run_state import OVER
from hpctrain.run import events as ledger
from hpctrain.run.event_types import SubmitAdopted
from hpctrain.scheduler.base import get_cluster
from hpctrain.submit.own_job import copied_from, elsewhere, not_own
from hpctrain.terminal import echo_note

if TYPE_CHECKING:
    from hpctrain.base.records import JobInfo
    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import Cluster
    from hpctrain.settings.spec import Spec

ENDING_S = 45.0
"""A job that is ending is waited for so long: SLURM's default KillWait is 30 s."""
LOOK_S = 0.5


def live_job(run: RunDir, cluster: Cluster) -> JobInfo | None:
    """The run's job that is pending or running; adopts one whose submission was never confirmed.

    Raises:
        ClusterUnreachable: the scheduler gave no answer, or it is another cluster's job, so nobody
            can say.
    """
    history = RunHistory.read(run)
    token, job_id = newest_submission(history)
    if token is None and job_id is None:
        return None
    if copied_from(run, history) is None and (why := elsewhere(history, cluster)):
        now = history.state
        if now.phase in OVER or now.cancel == "cancel":  # it ends itself, should it start yet
            return None
        raise ClusterUnreachable(
            f"{why}. If that job is gone for good, `hpctrain cancel {run.name}` says so here, and "
            "`resume` goes on"
        )
    try:
        job = cluster.job(job_id) if job_id is not None else cluster.find_job(token or "")
    except AccountingSilent:  # however it ended, it writes no more
        return None
    if job is None or not job.alive or not_own(run, history, token, job):
        return None
    if job_id is not None:
        return job
    ledger.record(run, SubmitAdopted(token=token or "", job_id=job.job_id))
    return job


def refuse_alive(run: RunDir, spec: Spec) -> None:
    """Refuse while a job of the run may still write; one that is ending is waited for a while.

    Who cancels a run, also with --save, or sees in `status` that it has stopped, and resumes it
    with the next command need not try again: an attempt's end is on record before its job is over.

    Raises:
        RunAlive: with the job and what to do.
    """
    cluster = get_cluster(spec.cluster)
    deadline = clock.monotonic() + ENDING_S
    alive = live_job(run, cluster)
    if alive is not None and (leaving := _leaving(run, alive, f"job {alive.job_id}")):
        echo_note(f"{leaving}; waiting for that up to {ENDING_S:.0f} s")
    while alive is not None:
        if not _leaving(run, alive) or clock.monotonic() > deadline:
            raise refusal(run, alive)
        clock.sleep(LOOK_S)  # a scheduler tells nobody
        alive = live_job(run, cluster)


def _leaving(run: RunDir, alive: JobInfo, name: str = "it") -> str:
    """How a job is about to end; "" for one that goes on, as far as anybody knows."""
    if alive.state == JobState.COMPLETING:
        return f"the cluster is ending {name}"
    now = RunHistory.read(run).state
    if now.job_id != alive.job_id:
        return ""
    if now.phase in OVER:
        return f"the run's end is on record, and {name} is about to be over"
    return f"{name} was asked to save and leave" if now.cancel == "save" else ""


def refusal(run: RunDir, alive: JobInfo) -> RunAlive:
    """Why nothing can be started beside a job of the run, and what to do."""
    onward = f"end it with `hpctrain cancel {run.name}`, or let it go on"
    if leaving := _leaving(run, alive):
        onward = f"{leaving}: try again when it has, which `hpctrain status {run.name}` shows"
    return RunAlive(
        f"{run.name} has job {alive.job_id} ({alive.shown.lower()}), which may still write; "
        f"{onward}"
    )


def newest_submission(history: RunHistory) -> tuple[str | None, str | None]:
    """Token and job id of the newest submission; the job id is None while it is not known."""
    newest = history.submissions[-1] if history.submissions else None
    if newest is not None and not newest.refused:
        return newest.token, newest.job_id or None
    since = [a.job_id for a in history.attempts if a.submission == len(history.submissions)]
    started = [job_id for job_id in since if job_id]  # by a hand-written batch script
    return None, started[-1] if started else None
