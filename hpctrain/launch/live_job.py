"""The run's own job: which may still write, whether it is this run's, and how it is cancelled.

A copied folder has the original's ledger, which names the original's job: `cancel` of the copy must
not end it, and `resume` must not wait for it. tests/slurm/test_two_writers.py,
tests/unit/submit/test_copied_run.py, tests/unit/cli/test_cancel.py and tests/slurm/test_cancel.py
hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.cluster.scheduler.base import Cluster, get_cluster
from hpctrain.core.base import clock
from hpctrain.core.base.files import write_plain
from hpctrain.core.base.records import TERMINAL_JOB, JobInfo, JobState
from hpctrain.core.terminal import echo_note
from hpctrain.errors import (
    AccountingSilent,
    ClusterError,
    ClusterUnreachable,
    HpctrainError,
    RunAlive,
    UsageError,
    WrongState,
)
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState, run_state
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CancelRequested, SubmitAdopted, SubmitFailed

if TYPE_CHECKING:
    from hpctrain.core.settings.spec import Entry, Spec
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.status.status import Answer


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
            f"{why}. If that job is gone for good, `hpctrain cancel {run.typed}` says so here, and "
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
    alive = outlasting(run, get_cluster(spec.cluster))
    if alive is not None:
        raise refusal(run, alive)


def outlasting(run: RunDir, cluster: Cluster) -> JobInfo | None:
    """The run's job that may still write; one that is ending is waited for a while.

    Raises:
        ClusterUnreachable: see `live_job`.
    """
    deadline = clock.monotonic() + ENDING_S
    alive = live_job(run, cluster)
    if alive is not None and (leaving := _leaving(run, alive, f"job {alive.job_id}")):
        echo_note(f"{leaving}; waiting for that up to {ENDING_S:.0f} s")
    while alive is not None and _leaving(run, alive) and clock.monotonic() <= deadline:
        clock.sleep(LOOK_S)  # a scheduler tells nobody
        alive = live_job(run, cluster)
    return alive


def _leaving(run: RunDir, alive: JobInfo, name: str = "it") -> str:
    """How a job is about to end; "" for one that continues, as far as anybody knows."""
    if alive.state == JobState.COMPLETING:
        return f"the cluster is ending {name}"
    now = RunHistory.read(run).state
    if now.job_id != alive.job_id:
        return ""
    if now.phase in OVER:
        return f"the run's end is on record, and {name} is about to be over"
    asked = {"save": "asked to save and leave", "cancel": "cancelled"}.get(now.cancel)
    return f"{name} was {asked}" if asked else ""


def refusal(run: RunDir, alive: JobInfo) -> RunAlive:
    """Why nothing can be started beside a job of the run, and what to do."""
    onward = f"end it with `hpctrain cancel {run.typed}`, or let it run"
    if leaving := _leaving(run, alive):
        onward = f"{leaving}: try again when it has, which `hpctrain status {run.typed}` shows"
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


def copied_from(run: RunDir, history: RunHistory) -> Path | None:
    """The directory of which this one is a copy; None for a run that is itself, or was moved.

    A run that was moved, or is seen under another path than by who submitted it, has left nothing
    at the old place or the very same folder there.
    """
    return _other_than(run, _written_in(history))


def _other_than(run: RunDir, written: Path | None) -> Path | None:
    """That directory, where it is there and is another than the run's."""
    if written is None or written == run.root:
        return None
    try:
        same = written.samefile(run.root)
    except FileNotFoundError:
        return None
    except OSError:  # there is something that we may not even look at: not what is ours here
        return written
    return None if same else written


def not_own(run: RunDir, history: RunHistory, token: str | None, job: JobInfo) -> str:
    """Why a job that the ledger names is not this run's, or "".

    `token` is of its newest submission, None for a job of a hand-written batch script. `job` is
    what the scheduler knows under the ledger's job id.
    """
    original = copied_from(run, history)
    if original is not None:
        return f"this is a copy of {original}, whose job {job.job_id} is"
    if not token or not job.script:
        return ""
    script = Path(job.script)
    if script.name != f"{token}.sh":
        return f"job {job.job_id} is another's by now ({job.script})"
    # A ledger of version 0.1 says nowhere in which directory it was written; SLURM knows.
    other = _other_than(run, script.parent.parent) if script.is_absolute() else None
    return f"this is a copy of {other}, whose job {job.job_id} is" if other is not None else ""


def elsewhere(history: RunHistory, cluster: Cluster) -> str:
    """Why this cluster is not to be asked about the newest job, or "".

    A folder of runs may be seen from the login nodes of several clusters, each of which counts its
    jobs from 1. A ledger that names no cluster is taken at its word.
    """
    named, job_id = history.clusters, history.state.job_id
    here = cluster.here() if named else ""
    if not here or here in named:
        return ""
    job = f"job {job_id}" if job_id else "its job"
    return f"{job} is one of the cluster {', '.join(sorted(named))}, and this is {here}: ask there"


def jobs_here(history: RunHistory, cluster: Cluster) -> list[str]:
    """Every job that a run had, but those of which the ledger says that another cluster has them.

    `cluster` is asked for its name where the ledger has names.
    """
    here = cluster.here() if any(history.jobs.values()) else ""
    return [job for job, named in history.jobs.items() if not here or not named or here in named]


def as_own_run(run: RunDir, spec: Spec) -> tuple[Spec, list[str]]:
    """The spec with which a run continues, and what its user should know.

    A copy gets an identity of its own, by which trackers tell it from the original; and what lies
    in the original's directory (the snapshot) is taken from the copy's.
    """
    original = copied_from(run, RunHistory.read(run))
    if original is None:
        return spec, []

    def here(path: str) -> str:
        inside = path and Path(path).is_relative_to(original)
        return str(run.root / Path(path).relative_to(original)) if inside else path

    def own_entry(entry: Entry) -> Entry:
        python_path = [here(path) for path in entry.python_path]
        return replace(entry, path=here(entry.path), python_path=python_path)

    own = replace(
        spec,
        name=run.name,
        run_id=os.urandom(8).hex(),
        entry=own_entry(spec.entry),
        beside={section: own_entry(entry) for section, entry in spec.beside.items()},
    )
    return own, [f"{run.name} is a copy of {original} and continues as a run of its own"]


def _written_in(history: RunHistory) -> Path | None:
    """Where the run lay when its ledger was last written by a submission or a job of its own."""
    kind, written = history.written_in
    if kind == "script":
        return Path(written).parent.parent if Path(written).is_absolute() else None
    return Path(written) if written else None


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

    `answer` is what the scheduler says of its newest job. `save` lets it save and exit by itself; a
    job that only waits has nothing to save.

    Raises:
        ClusterError: the scheduler refused.
        ClusterUnreachable: nobody can say whether there is a job, or it could not be reached.
        UsageError: its job is another run's, or a terminal's.
        HpctrainError: there is no room for the request.
    """
    job_id = _live_job(run, answer, history)
    if job_id is None:
        return Cancelled(None, saves=False)
    # A job that is suspended has something to save as well: it hears of it when it continues.
    state = run_state(history.state, answer.job, asked=answer.asked)
    if save and state in {RunState.RUNNING, RunState.SUSPENDED}:
        _ask_to_save(run, job_id, history)
        return Cancelled(job_id, saves=True)
    _cancel(run, job_id, cluster, answer)
    return Cancelled(job_id, saves=False)


def _live_job(run: RunDir, answer: Answer, history: RunHistory) -> str | None:
    """Return the job that may still write; None where there is none.

    Where the scheduler is silent, the job on record counts. A submission without an answer is given
    up then: if its job was accepted after all, it leaves as it starts.
    """
    if answer.job is not None and answer.job.alive:
        return answer.job.job_id
    state = run_state(history.state, answer.job, asked=answer.asked)
    job_id = history.state.job_id
    if not answer.asked and state not in OVER:
        if job_id is None:
            _give_up(run, history, answer)
        return job_id
    if answer.note:
        raise WrongState(
            f"{run.name} has no job that could be cancelled: it is {state.value}; {answer.note}"
        )
    return None


def _give_up(run: RunDir, history: RunHistory, answer: Answer) -> None:
    token = history.state.token
    why = f"{run.name}: nobody can say whether it has a job ({answer.problem})"
    if token is None:
        raise ClusterUnreachable(why)
    said = f"it was cancelled before the scheduler had answered ({answer.problem})"
    if not ledger.record(run, SubmitFailed(token=token, why=said)):
        raise ClusterUnreachable(f"{why}, and there is no room to record that it was given up")


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
