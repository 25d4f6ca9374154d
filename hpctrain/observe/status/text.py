"""A run's state in a sentence and as JSON, why its job waits, its chain, what to type next. Pure.

As JSON: seconds since the epoch and bytes, as plain numbers; what is not known, or has no number in
JSON (NaN), is null.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.base import title_of
from hpctrain.core.base.records import JobState, Next
from hpctrain.core.base.text import count, duration, fold_nodes, fold_ranks, placed, time_of_day
from hpctrain.ledger.history.goodput import Goodput, TimeClass
from hpctrain.ledger.history.run_state import EndCause, LedgerState, RunState
from hpctrain.observe.status.status import ALIVE, UNDER_WAY_STATES, Link, RunStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.progress import RankSample, Saving


FORESEEN_S = 3 * 86_400.0
"""A start that SLURM plans later than that is no forecast: some job before it has no time limit."""


def in_words(status: RunStatus) -> str:  # noqa: C901, PLR0911 - a line or two for each state
    """The state in a line: what is waited for, or why it ended."""
    job, now = _job(status), status.ledger_state
    resume = f"`hpctrain resume {status.label}`"
    match status.state:
        case RunState.CREATED:
            return f"not submitted yet; {resume} does"
        case RunState.SUBMITTING:
            return f"submitted, with no answer on record; {resume} finds the job if there is one"
        case RunState.PENDING | RunState.REQUEUED:
            return _queued(status, job)
        case RunState.RUNNING:
            return _running(status, job)
        case RunState.SUSPENDED:
            return _suspended(status, job)
        case RunState.COMPLETING:
            return f"{job} was cancelled, and the cluster still ends its processes"
        case RunState.DONE:
            return _done(status)
        case RunState.FAILED:
            return _failed(status, job)
        case RunState.STOPPED if now.exit_code:
            return f"stopped for good: {now.detail}"
        case RunState.STOPPED:
            return "saved and stopped, as requested"
        case RunState.CANCELLED:
            return f"{job} was cancelled; it does not come back by itself"
        case RunState.LOST:
            return _lost(status, job)


def unaccounted(why: str) -> str:
    """What is not known where accounting is silent, in a line."""
    return (
        f"accounting did not answer ({why}): how jobs ended that left no word, and starts and "
        "waits that the ledger does not have, are not known"
    )


def next_commands(status: RunStatus) -> list[str]:
    """What one would most likely type now."""
    name = status.label
    logs, resume = f"hpctrain logs {name}", f"hpctrain resume {name}"
    if status.state is RunState.COMPLETING:
        return [f"{logs} -f", f"hpctrain status {name}"]
    if status.awaits_in_vain:
        first = [f"hpctrain resume {one.label}" for one in status.awaits_in_vain]
        return [*first, f"hpctrain cancel {name}"] if status.state in ALIVE else first
    if status.state in ALIVE:
        saves = status.listens or status.reported.tells
        return [f"{logs} -f", f"hpctrain cancel {name}{' --save' if saves else ''}"]
    if status.state is RunState.DONE:
        return [logs, f"hpctrain checkpoints list {name}"]
    if status.state in {RunState.CREATED, RunState.SUBMITTING}:
        return [resume]
    if status.failure is not None and status.failure.rank:
        logs = f"hpctrain logs {name} --rank {status.failure.rank}"
    elif not status.attempts:
        logs = f"hpctrain logs {name} --rank batch"
    doctor = [f"hpctrain doctor {name}"] if status.attempts else []
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
            f"{waits(bad.run)}, which {ENDED_BADLY[bad.state]}: `hpctrain resume {bad.label}` "
            f"resumes it and {status.name} follows, or `hpctrain cancel {status.label}`"
        )
    text = waits(", ".join(f"{one.run} ({one.state.value})" for one in status.awaited))
    if job is None or not (job.reason or "").startswith("DependencyNeverSatisfied"):
        return text
    again = f" {status.label}`"
    return (
        f"{text}, and not for its newest job: `hpctrain cancel{again}, then `hpctrain resume{again}"
    )


def _where(status: RunStatus) -> str:
    """The nodes of the attempt that runs; before it begins, those that the scheduler names."""
    newest = status.attempts[-1] if status.attempts else None
    info, own = status.answer.job, status.ledger_state.job_id
    if newest is not None and newest.job_id == own and newest.next in {None, Next.RESTART}:
        return f" on {fold_nodes(newest.nodes)}" if newest.nodes else ""
    return f" on {info.nodes}" if info is not None and info.nodes else ""


def _running(status: RunStatus, job: str) -> str:
    where, info = _where(status), status.answer.job
    ending = ", which is ending" if info is not None and info.state == JobState.COMPLETING else ""
    now = status.under_way
    waits = "" if now is None else f"{_awaited(now)}{_hang(status, now)}{_slow(now)}"
    return f"{job}{where}{ending}{_sign_of_life(status)}{waits}{_asked_to_end(status.ledger_state)}"


def _suspended(status: RunStatus, job: str) -> str:
    where, info = _where(status), status.answer.job
    since = None if info is None else info.suspended_at
    when = ""
    if since is not None:
        when = f" since {time_of_day(since, status.now)} (for {duration(status.now - since)})"
    return (
        f"{job}{where} is suspended by {title_of(status.cluster)}{when}: its ranks stand "
        "still, keep their memory and continue when it is resumed"
        f"{_asked_to_end(status.ledger_state)}"
    )


def _done(status: RunStatus) -> str:
    newest = status.newest
    if newest is None or newest.cause is not EndCause.HUNG_END:
        return ""
    return f"it was ended at its end: {newest.detail}; check that its last output is complete"


def _failed(status: RunStatus, job: str) -> str:
    info, detail = status.answer.job, status.ledger_state.detail
    if not detail and info is not None and not info.alive:
        return f"{job} ended as {info.shown} before the run could say why"
    return f"ended: {detail}" if detail else ""


def _lost(status: RunStatus, lost_text: str) -> str:
    job, newest = status.answer.job, status.checkpoint
    what = f"{title_of(status.cluster)} no longer knows {lost_text}"
    if job is not None:
        what = f"{lost_text} is over ({job.shown}), and the run is not"
    if status.ledger_state.detail:
        what += f" ({status.ledger_state.detail})"
    onward = "starts it again"
    if newest is not None:
        onward = f"resumes from {newest.name if newest.step is None else f'step {newest.step}'}"
    return f"{what}; `hpctrain resume {status.label}` {onward}"


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


def _awaited(now: AttemptView) -> str:
    """Which ranks have not returned, where others have."""
    fact = now.awaited
    if fact is None:
        return ""
    who = f"{fold_ranks(fact.left)} not" if fact.left else "processes of theirs are still there"
    limit = "" if fact.limit_s is None else f"; ended after {duration(fact.limit_s)} of nothing"
    return f"; {count(fact.returned or 0, 'rank')} returned, {who}{limit}"


def _hang(status: RunStatus, now: AttemptView) -> str:
    """Who holds up the others, where the ranks stand still."""
    fact = now.hang
    if fact is None:
        return ""
    how = "may hang" if fact.kind == "hang_suspected" else "hangs"
    since = "" if fact.stood_s is None else f" (nothing had moved for {duration(fact.stood_s)})"
    where = f"`hpctrain stacks {status.label}` shows where each rank is"
    return f"; it {how}: {fact.summary}{since}; {where}"


def _slow(now: AttemptView) -> str:
    """Who keeps the others waiting at every step."""
    return "" if now.straggler is None else f"; slow: {now.straggler.summary}"


def _sign_of_life(status: RunStatus) -> str:
    newest = status.newest
    seen = status.progress.seen
    if newest is None or newest.ended is not None:
        pause = None if newest is None else newest.restart_pause_s
        return f", starting again after a pause of {duration(pause)}" if pause else ", starting"
    if seen is None or seen < newest.started:
        return f", started {duration(status.now - newest.started)} ago, no step reported so far"
    return f", last heard of {duration(status.now - seen)} ago"


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
    """The runs that hang together with this one, predecessors first; none where it is alone."""
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


def as_json(status: RunStatus) -> dict[str, Any]:
    """Everything that the screen shows, and what it leaves out."""
    progress, now = status.progress, status.ledger_state
    value = {
        "run": status.name,
        "run_dir": status.root,
        "state": status.state.value,
        "words": in_words(status),
        "step": progress.step,
        "total_steps": progress.total,
        "loss": progress.loss,
        "step_s": progress.step_s,
        "left_s": status.left_s,
        "finish": asdict(status.finish) if status.finish else None,
        "last_seen": progress.seen,
        "since": now.t or None,
        "cluster": status.cluster,
        "image": status.image or None,
        "job_id": now.job_id,
        "job": asdict(status.answer.job) if status.answer.job else None,
        "cluster_problem": status.answer.problem or None,
        "accounting_problem": status.answer.unaccounted or None,
        "cancel_requested": now.cancel or None,
        "exit_code": now.exit_code,
        "why": now.detail or None,
        "checkpoint": asdict(status.checkpoint) if status.checkpoint else None,
        "verified": dict(status.verified),
        "not_taken": [asdict(one) for one in status.skipped],
        "interval": _interval_json(status.saving),
        "saves": _saves_json(status.saving),
        "evaluations": [asdict(one) for one in status.evaluations],
        "disk_free_bytes": status.disk_free_bytes,
        "after": list(status.after),
        "chain": [_link_json(link) for link in status.chain],
        "mesh": _mesh_json(status),
        "mishaps": asdict(status.incidents),
        "attempts": [_attempt_json(one) for one in status.attempts],
        "steps_lost": status.steps_lost.steps,
        "not_known": status.steps_lost.why or None,
        "speed": asdict(status.speed) if status.speed else None,
        "goodput": goodput_json(status.goodput),
        "last_24h": goodput_json(status.day),
        "failure": asdict(status.failure) if status.failure else None,
        "failure_log": status.failure_log or None,
        "next": next_commands(status),
    }
    finite: dict[str, Any] = plain(value)
    return finite


def goodput_json(spent: Goodput) -> dict[str, Any]:
    """Where the time went. `share` is of the allocated node-seconds; the queue has none in it."""
    classes = {
        kind.value: {
            "seconds": seconds,
            "node_seconds": spent.node_seconds.get(kind),
            "share": _share(spent, kind),
        }
        for kind, seconds in spent.seconds.items()
    }
    return {
        "classes": classes,
        "allocated_s": spent.allocated_s,
        "submitted_s": spent.submitted_s,
        "useful_of_allocated": spent.useful_of_allocated,
        "useful_since_submit": spent.useful_since_submit,
    }


def plain(value: Any) -> Any:
    """The value with null for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def _share(spent: Goodput, kind: TimeClass) -> float | None:
    if kind is TimeClass.QUEUE or spent.allocated_s <= 0:
        return None
    return spent.node_seconds[kind] / spent.allocated_s


def _link_json(link: Link) -> dict[str, Any]:
    names = ("run", "run_dir", "state", "job_id", "after", "words")
    return {name: getattr(link, name) for name in names}


def _mesh_json(status: RunStatus) -> dict[str, Any] | None:
    """The newest attempt's mesh, with every rank's node and place on each axis."""
    if status.mesh is None:
        return None
    now = status.mesh
    return {**asdict(now), "ranks": placed(now.mesh, now.nodes, now.ranks_per_node)}


def _interval_json(saves: Saving) -> dict[str, Any] | None:
    """Of seconds and steps, the one that does not count is null."""
    each = saves.interval
    if each is None:
        return None
    return {**asdict(each), "seconds": each.seconds or None, "steps": each.steps or None}


def _saves_json(saves: Saving) -> dict[str, Any]:
    value = asdict(saves)
    del value["interval"]
    return value


def _attempt_json(attempt: AttemptView) -> dict[str, Any]:
    value = asdict(attempt)
    value["failure"] = attempt.failure.summary if attempt.failure else None
    value["read_from"] = attempt.read_from or None
    return value


def ranks_as_json(sample: RankSample | None) -> dict[str, Any] | None:
    """The newest sample of every rank; null where there is none."""
    return None if sample is None else plain(asdict(sample))
