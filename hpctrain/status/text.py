"""A run's state in a sentence, and what one would most likely type next. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.text import clock, duration, fold_nodes
from hpctrain.ledger.derive import RunState
from hpctrain.status.status import ALIVE
from hpctrain.status.waiting import explained

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.derive import Standing
    from hpctrain.status.status import RunStatus


def in_words(status: RunStatus) -> str:
    """The state in a line: what is waited for, or why it ended."""
    return _WORDS[status.state](status, _job(status))


def _job(status: RunStatus) -> str:
    return f"job {status.standing.job_id}" if status.standing.job_id else "its job"


def _created(status: RunStatus, job: str) -> str:
    del job
    return f"not submitted yet; `hpctrain resume {status.label}{status.flags}` does"


def _submitting(status: RunStatus, job: str) -> str:
    del job
    resume = f"`hpctrain resume {status.label}{status.flags}`"
    return f"submitted, with no answer on record; {resume} finds the job if there is one"


def _queued(status: RunStatus, job: str) -> str:
    now = status.standing
    why = now.reason.value.replace("_", " ") if now.reason else ""
    before = f" after attempt {now.attempt} ({why})" if why else ""
    return f"{job} waits in the queue{before}{_waiting(status)}{_asked_to_end(now)}"


def _running(status: RunStatus, job: str) -> str:
    nodes, info = fold_nodes(nodes_of(status)), status.answer.job
    where = f" on {nodes}" if nodes else ""
    ending = ", which is ending" if info is not None and info.state == "COMPLETING" else ""
    return f"{job}{where}{ending}{_sign_of_life(status)}{_asked_to_end(status.standing)}"


def _completing(status: RunStatus, job: str) -> str:
    del status
    return f"{job} was cancelled, and the cluster still ends its processes"


def _done(status: RunStatus, job: str) -> str:
    del status, job
    return ""


def _failed(status: RunStatus, job: str) -> str:
    info, detail = status.answer.job, status.standing.detail
    if not detail and info is not None and not info.alive:
        return f"{job} ended as {info.state} before the run could say why"
    return f"ended: {detail}" if detail else ""


def _stopped(status: RunStatus, job: str) -> str:
    del job
    detail = status.standing.detail
    return (
        f"stopped for good: {detail}" if status.standing.exit_code else "saved and left, as asked"
    )


def _cancelled(status: RunStatus, job: str) -> str:
    del status
    return f"{job} was cancelled; it does not come back by itself"


def _lost(status: RunStatus, known: str) -> str:
    job, newest = status.answer.job, status.checkpoint
    who = {"slurm": "SLURM"}.get(status.cluster, "the cluster")
    what = f"{who} no longer knows {known}"
    if job is not None:
        what = f"{known} is over ({job.state}), and the run is not"
    if status.standing.detail:
        what += f" ({status.standing.detail})"
    onward = f"goes on from step {newest.step}" if newest else "starts it again"
    return f"{what}; `hpctrain resume {status.label}{status.flags}` {onward}"


def _waiting(status: RunStatus) -> str:
    job = status.answer.job
    if job is None:
        return ""
    text = f" ({job.reason})" if job.reason else ""
    if job.start_time is not None and job.start_time > status.now:
        when = clock(job.start_time, status.now)
        text += f", expected to start {when} (in {duration(job.start_time - status.now)})"
    words = explained(job.reason or "")
    return f"{text}: {words}" if words else text


def _asked_to_end(now: Standing) -> str:
    return {"cancel": "; cancelled, about to end", "save": "; asked to save and stop"}.get(
        now.cancel, ""
    )


def _sign_of_life(status: RunStatus) -> str:
    newest = status.attempts[-1] if status.attempts else None
    seen = status.progress.seen
    if newest is None or newest.ended is not None:
        return ", starting"
    if seen is None or seen < newest.started:
        return f", started {duration(status.now - newest.started)} ago, no step so far"
    return f", last heard of {duration(status.now - seen)} ago"


def nodes_of(status: RunStatus) -> Sequence[str]:
    """Host names of the newest attempt."""
    newest = status.attempts[-1] if status.attempts else None
    return newest.nodes if newest is not None else ()


def unaccounted(why: str) -> str:
    """What is not known where accounting is silent, in a line."""
    return (
        f"accounting did not answer ({why}): how jobs ended that left no word, and starts and "
        "waits that the ledger does not have, are not known"
    )


def next_commands(status: RunStatus) -> list[str]:
    """What one would most likely type now."""
    name, flags = status.label, status.flags
    logs, resume = f"hpctrain logs {name}{flags}", f"hpctrain resume {name}{flags}"
    if status.state is RunState.COMPLETING:
        return [f"{logs} -f", f"hpctrain status {name}{flags}"]
    if status.state in ALIVE:
        return [f"{logs} -f", f"hpctrain cancel {name} --save{flags}"]
    if status.state is RunState.DONE:
        return [logs, f"hpctrain checkpoints list {name}{flags}"]
    if status.state in {RunState.CREATED, RunState.SUBMITTING}:
        return [resume]
    if status.failure is not None and status.failure.rank:
        logs = f"hpctrain logs {name} --rank {status.failure.rank}{flags}"
    elif not status.attempts:
        logs = f"hpctrain logs {name} --rank batch{flags}"
    return [logs, resume]


_WORDS: dict[RunState, Callable[[RunStatus, str], str]] = {
    RunState.CREATED: _created,
    RunState.SUBMITTING: _submitting,
    RunState.PENDING: _queued,
    RunState.REQUEUED: _queued,
    RunState.RUNNING: _running,
    RunState.COMPLETING: _completing,
    RunState.DONE: _done,
    RunState.FAILED: _failed,
    RunState.STOPPED: _stopped,
    RunState.CANCELLED: _cancelled,
    RunState.LOST: _lost,
}
