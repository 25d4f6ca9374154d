"""A run's state in a sentence, why its job waits, its chain of runs, and what to type next. Pure.

tests/unit/cli/test_status.py and tests/unit/status/test_chain.py hold the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.base import title_of
from hpctrain.core.base.records import JobState
from hpctrain.core.base.text import count, duration, fold_nodes, fold_ranks, time_of_day
from hpctrain.ledger.history.causes import EndCause
from hpctrain.ledger.history.run_state import RunState
from hpctrain.observe.status.status import ALIVE, UNDER_WAY_STATES, Link

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.ledger.history.run_state import LedgerState
    from hpctrain.observe.status.status import RunStatus


FORESEEN_S = 3 * 86_400.0
"""A start that SLURM plans later than that is no forecast: some job before it has no time limit."""


def in_words(status: RunStatus) -> str:
    """The state in a line: what is waited for, or why it ended."""
    return _WORDS[status.state](status, _job(status))


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
    if status.awaits_in_vain:
        first = [f"hpctrain resume {one.label}{one.flags}" for one in status.awaits_in_vain]
        return [*first, f"hpctrain cancel {name}{flags}"] if status.state in ALIVE else first
    if status.state in ALIVE:
        saves = status.listens or status.reported.tells
        return [f"{logs} -f", f"hpctrain cancel {name}{' --save' if saves else ''}{flags}"]
    if status.state is RunState.DONE:
        return [logs, f"hpctrain checkpoints list {name}{flags}"]
    if status.state in {RunState.CREATED, RunState.SUBMITTING}:
        return [resume]
    if status.failure is not None and status.failure.rank:
        logs = f"hpctrain logs {name} --rank {status.failure.rank}{flags}"
    elif not status.attempts:
        logs = f"hpctrain logs {name} --rank batch{flags}"
    doctor = [f"hpctrain doctor {name}{flags}"] if status.attempts else []
    return [*doctor, logs, resume]


_OWN_WORDS = {
    RunState.PENDING: {JobState.PENDING},
    RunState.RUNNING: {JobState.RUNNING, JobState.COMPLETING},  # which the sentence says
    RunState.SUSPENDED: {JobState.SUSPENDED},
    RunState.REQUEUED: {JobState.PENDING, JobState.REQUEUED},
    RunState.COMPLETING: {JobState.COMPLETING},
}
"""What a scheduler calls a job's state where it means the same as the run's."""


def _job(status: RunStatus) -> str:
    """The job, and its scheduler's word for its state where that is another one than the run's."""
    name = f"job {status.ledger_state.job_id}" if status.ledger_state.job_id else "its job"
    info, own = status.answer.job, _OWN_WORDS.get(status.state)
    if info is None or own is None or info.shown in own:
        return name
    return f"{name} ({title_of(status.cluster)} says {info.shown})"


def _created(status: RunStatus, job: str) -> str:
    del job
    return f"not submitted yet; `hpctrain resume {status.label}{status.flags}` does"


def _submitting(status: RunStatus, job: str) -> str:
    del job
    resume = f"`hpctrain resume {status.label}{status.flags}`"
    return f"submitted, with no answer on record; {resume} finds the job if there is one"


def _queued(status: RunStatus, job: str) -> str:
    now = status.ledger_state
    if status.awaited:
        return f"{job} {_follows(status)}{_asked_to_end(now)}"
    why = now.reason.value.replace("_", " ") if now.reason else ""
    before = f" after attempt {now.attempt} ({why})" if why else ""
    return f"{job} waits in the queue{before}{_waiting(status)}{_asked_to_end(now)}"


def _follows(status: RunStatus) -> str:
    """For which runs it waits, and what to do where that is in vain."""
    job, waits = status.answer.job, "waits for {}".format
    if status.awaits_in_vain:
        bad = status.awaits_in_vain[0]
        return (
            f"{waits(bad.run)}, which {ENDED_BADLY[bad.state]}: `hpctrain resume {bad.label}"
            f"{bad.flags}` goes on and {status.name} follows, or `hpctrain cancel {status.label}"
            f"{status.flags}`"
        )
    text = waits(", ".join(f"{one.run} ({one.state.value})" for one in status.awaited))
    if job is None or not (job.reason or "").startswith("DependencyNeverSatisfied"):
        return text
    again = f" {status.label}{status.flags}`"
    return (
        f"{text}, and not for its newest job: `hpctrain cancel{again}, then `hpctrain resume{again}"
    )


def _running(status: RunStatus, job: str) -> str:
    nodes, info = fold_nodes(nodes_of(status)), status.answer.job
    where = f" on {nodes}" if nodes else ""
    ending = ", which is ending" if info is not None and info.state == JobState.COMPLETING else ""
    waits = _awaited(status) + _hang(status) + _slow(status)
    return f"{job}{where}{ending}{_sign_of_life(status)}{waits}{_asked_to_end(status.ledger_state)}"


def _suspended(status: RunStatus, job: str) -> str:
    nodes, info = fold_nodes(nodes_of(status)), status.answer.job
    where = f" on {nodes}" if nodes else ""
    since = None if info is None else info.suspended_at
    when = ""
    if since is not None:
        when = f" since {time_of_day(since, status.now)} (for {duration(status.now - since)})"
    return (
        f"{job}{where} is suspended by {title_of(status.cluster)}{when}: its ranks stand "
        "still, keep their memory and go on where they are when it is resumed"
        f"{_asked_to_end(status.ledger_state)}"
    )


def _completing(status: RunStatus, job: str) -> str:
    del status
    return f"{job} was cancelled, and the cluster still ends its processes"


def _done(status: RunStatus, job: str) -> str:
    del job
    newest = status.attempts[-1] if status.attempts else None
    if newest is None or newest.cause is not EndCause.HUNG_END:
        return ""
    return f"it was ended at its end: {newest.detail}; see whether its last output is whole"


def _failed(status: RunStatus, job: str) -> str:
    info, detail = status.answer.job, status.ledger_state.detail
    if not detail and info is not None and not info.alive:
        return f"{job} ended as {info.shown} before the run could say why"
    return f"ended: {detail}" if detail else ""


def _stopped(status: RunStatus, job: str) -> str:
    del job
    detail = status.ledger_state.detail
    return (
        f"stopped for good: {detail}"
        if status.ledger_state.exit_code
        else "saved and left, as asked"
    )


def _cancelled(status: RunStatus, job: str) -> str:
    del status
    return f"{job} was cancelled; it does not come back by itself"


def _lost(status: RunStatus, lost_text: str) -> str:
    job, newest = status.answer.job, status.checkpoint
    what = f"{title_of(status.cluster)} no longer knows {lost_text}"
    if job is not None:
        what = f"{lost_text} is over ({job.shown}), and the run is not"
    if status.ledger_state.detail:
        what += f" ({status.ledger_state.detail})"
    onward = "starts it again"
    if newest is not None:
        onward = f"goes on from {newest.name if newest.step is None else f'step {newest.step}'}"
    return f"{what}; `hpctrain resume {status.label}{status.flags}` {onward}"


def _waiting(status: RunStatus) -> str:
    job = status.answer.job
    if job is None:
        return ""
    text = f" ({job.reason})" if job.reason else ""
    ahead = 0.0 if job.start_time is None else job.start_time - status.now
    if job.start_time is not None and 0 < ahead <= FORESEEN_S:
        # By the time limits of the jobs before it, few of which use all of theirs.
        when = time_of_day(job.start_time, status.now)
        text += f", planned by SLURM for {when} (in {duration(ahead)}), often earlier"
    return f"{text}: {job.explained}" if job.explained else text


def _asked_to_end(now: LedgerState) -> str:
    return {"cancel": "; cancelled, about to end", "save": "; asked to save and stop"}.get(
        now.cancel, ""
    )


def _awaited(status: RunStatus) -> str:
    """Which ranks have not returned, where others have."""
    newest = status.attempts[-1] if status.attempts else None
    if newest is None or newest.ended is not None or newest.awaited is None:
        return ""
    fact = newest.awaited
    who = f"{fold_ranks(fact.left)} not" if fact.left else "processes of theirs are still there"
    limit = "" if fact.limit_s is None else f"; ended after {duration(fact.limit_s)} of nothing"
    return f"; {count(fact.returned or 0, 'rank')} returned, {who}{limit}"


def _hang(status: RunStatus) -> str:
    """Who holds up the others, where the ranks stand still."""
    newest = status.attempts[-1] if status.attempts else None
    if newest is None or newest.ended is not None or newest.hang is None:
        return ""
    fact, how = newest.hang, "may hang" if newest.hang.kind == "hang_suspected" else "hangs"
    since = "" if fact.stood_s is None else f" (nothing had moved for {duration(fact.stood_s)})"
    where = f"`hpctrain stacks {status.label}{status.flags}` shows where each rank is"
    return f"; it {how}: {fact.summary}{since}; {where}"


def _slow(status: RunStatus) -> str:
    """Who keeps the others waiting at every step."""
    newest = status.attempts[-1] if status.attempts else None
    if newest is None or newest.ended is not None or newest.straggler is None:
        return ""
    return f"; slow: {newest.straggler.summary}"


def _sign_of_life(status: RunStatus) -> str:
    newest = status.attempts[-1] if status.attempts else None
    seen = status.progress.seen
    if newest is None or newest.ended is not None:
        pause = None if newest is None else newest.restart_pause_s
        return f", starting again after a pause of {duration(pause)}" if pause else ", starting"
    if seen is None or seen < newest.started:
        return f", started {duration(status.now - newest.started)} ago, no step reported so far"
    return f", last heard of {duration(status.now - seen)} ago"


_WORDS: dict[RunState, Callable[[RunStatus, str], str]] = {
    RunState.CREATED: _created,
    RunState.SUBMITTING: _submitting,
    RunState.PENDING: _queued,
    RunState.REQUEUED: _queued,
    RunState.RUNNING: _running,
    RunState.SUSPENDED: _suspended,
    RunState.COMPLETING: _completing,
    RunState.DONE: _done,
    RunState.FAILED: _failed,
    RunState.STOPPED: _stopped,
    RunState.CANCELLED: _cancelled,
    RunState.LOST: _lost,
}


ENDED_BADLY = {
    RunState.CREATED: "was never submitted",
    RunState.FAILED: "has failed",
    RunState.STOPPED: "was stopped",
    RunState.CANCELLED: "was cancelled",
    RunState.LOST: "is lost",
}


def chained(runs: Sequence[RunStatus]) -> list[RunStatus]:
    """The same runs, each with the chain of which it is a part, if it is of one."""
    by_root = {run.root: run for run in runs}
    linked = {run.root: _link(run, by_root) for run in runs}
    beside: dict[str, set[str]] = {root: set() for root in linked}
    for root, link in linked.items():
        for path in set(link.after) & linked.keys():
            beside[root].add(path)
            beside[path].add(root)
    chains = {root: _around(root, linked, beside) for root in linked}
    return [replace(run, chain=chains[run.root]) for run in runs]


def _link(run: RunStatus, by_root: Mapping[str, RunStatus]) -> Link:
    return Link(
        run=run.name,
        run_dir=run.root,
        state=run.state,
        job_id=run.ledger_state.job_id,
        after=run.after,
        words=_words(run, [by_root[path] for path in run.after if path in by_root]),
        label=run.label,
        flags=run.flags,
    )


def _words(run: RunStatus, before: Sequence[RunStatus]) -> str:
    progress = run.progress
    if run.state in {RunState.PENDING, RunState.CREATED} and not run.has_begun:
        missing = [one for one in before if one.state is not RunState.DONE]
        waits = ", ".join(
            one.name
            if one.state in UNDER_WAY_STATES
            else f"{one.name}, which {ENDED_BADLY[one.state]}"
            for one in missing
        )
        return f"waits for {waits}" if waits else ""
    if run.state in UNDER_WAY_STATES:
        if progress.step is None:
            return ""
        return f"step {progress.step:,}" + (f"/{progress.total:,}" if progress.total else "")
    return "" if run.state is RunState.DONE else run.ledger_state.detail


def _around(root: str, linked: Mapping[str, Link], beside: Mapping[str, set[str]]) -> list[Link]:
    """The runs that hang together with this one, predecessors first; none where it is alone.

    Args:
        root: This one's directory.
        linked: All runs.
        beside: Which of them come right before or behind each.
    """
    if not beside[root]:
        return []
    members, new = {root}, {root}
    while new:
        new = {path for member in new for path in beside[member]} - members
        members |= new
    order: list[Link] = []
    for path in linked:
        if path in members:
            _put(path, linked, order, set())
    return order


def _put(path: str, linked: Mapping[str, Link], order: list[Link], above: set[str]) -> None:
    """Add a run behind all that come before it; of a circle none comes first."""
    link = linked[path]
    if link in order or path in above:
        return
    for before in link.after:
        if before in linked:
            _put(before, linked, order, above | {path})
    order.append(link)
