"""What must hold of the records of a job, whoever led it: see `generations`."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from hpctrain.core.base.records import EndReason, Next
from hpctrain.ledger.run.event_types import AttemptEnded, AttemptStarted, NodeLost, Requeued
from tests.support.simulation.checks import LOSING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.simulation.generations import RecordedJob


def one_leader_each(job: RecordedJob) -> Iterator[str]:
    """A generation has one leader and one list of nodes; each node goes on once in it."""
    made = defaultdict(set)
    for _, generation in job.generations:
        made[generation.number].add(generation)
    for number, them in made.items():
        if len(them) > 1:
            yield f"generation {number} was begun {len(them)} times: {them}"
    times = Counter((node, generation.number) for node, generation in job.generations)
    for (node, number), count in times.items():
        if count > 1:
            yield f"n{node} went on {count} times in generation {number}"
    for node, generation in job.generations:
        if f"n{node}" not in generation.nodes or f"n{node}" in generation.lost:
            yield f"n{node} goes on in generation {number} without a place in it"


def each_end_once(job: RecordedJob) -> Iterator[str]:
    """Each attempt begins once and ends once; behind the run's end none begins."""
    started: list[int | None] = []
    ended: dict[int | None, AttemptEnded] = {}
    for event in job.events():
        fact = event.fact
        if isinstance(fact, AttemptStarted):
            if event.attempt in started:
                yield f"attempt {event.attempt} began twice"
            if any(end.next is not Next.RESTART for end in ended.values()):
                yield f"attempt {event.attempt} began behind the end of the run or of the job"
            started.append(event.attempt)
        if isinstance(fact, AttemptEnded):
            before = ended.get(event.attempt)
            if before is not None and before.next not in {Next.RESTART, Next.ASK_BATCH}:
                yield f"attempt {event.attempt} ended twice: {before}, {fact}"
            ended[event.attempt] = fact
    if started != sorted(started, key=lambda number: number or 0):
        yield f"attempts in this order: {started}"
    open_ones = [number for number in started[:-1] if number not in ended]
    if open_ones:
        yield f"attempts {open_ones} have no end, and others followed"


def requeued_once(job: RecordedJob) -> Iterator[str]:
    """At most one agent asks for the job's next start, and none behind the run's end."""
    if len(job.requeued) > 1:
        yield f"n{job.requeued} have all requeued the job"
    facts = [event.fact for event in job.events()]
    told = [fact for fact in facts if isinstance(fact, Requeued) and fact.by != "scheduler"]
    if len(told) > len(job.requeued):
        yield f"{told}, and nobody asked for that"
    if job.requeued and job.ended_by:
        yield "the job was requeued and ended"


def loses_the_lost(job: RecordedJob) -> Iterator[str]:
    """Only nodes to which something was done are written down as lost."""
    hurt = {f"n{fault.node}" for fault in job.faults if fault.kind in LOSING}
    deaths = Counter(fault.node for fault in job.faults if fault.kind == "rank")
    hurt |= {f"n{node}" for node, count in deaths.items() if count > 1}
    hurt |= {node.name for node in job.nodes if node.error is not None}
    # Whoever has the whole network against him takes the others for lost.
    is_apart = any(fault.kind in {"freezes", "cut"} for fault in job.faults)
    leads = {generation.leader for _, generation in job.generations} | {"n0"}
    is_cut = any(fault.kind == "cut" for fault in job.faults)
    for event in job.events():
        fact = event.fact
        is_loss = isinstance(fact, NodeLost) and fact.node not in hurt
        # Before the first attempt no record shows a node that is cut off that the first one lives.
        was_unbegun = is_loss and fact.was_first and is_cut and not job.attempts
        if is_loss and not was_unbegun and not (is_apart and hurt & leads):
            yield f"{event.fact}"


def somebody_sees_to_it(job: RecordedJob) -> Iterator[str]:
    """A job whose first node is lost goes on, or is requeued: it never just stands there."""
    first = [fault for fault in job.faults if fault.node == 0 and fault.kind in LOSING]
    hurt = {fault.node for fault in job.faults if fault.kind in LOSING}
    is_late = any(fault.kind == "over" and fault.at_s < 100.0 for fault in job.faults)
    well = [node for node in job.nodes if node.number not in hurt]
    ends = [event.fact for event in job.events() if isinstance(event.fact, AttemptEnded)]
    last = ends[-1] if ends else None
    gone = first and all(fault.kind in {"power", "dies"} for fault in first)
    said = {Next.STOP, Next.LEAVE} | ({Next.ASK_BATCH} if job.is_scheduler_silent else set())
    is_seen_to = bool(job.requeued) or (last is not None and last.next in said)
    if gone and well and not is_late and not is_seen_to:
        yield f"n0 is gone, {len(well)} live, and nobody sees to the job: {last}"
    assert job.setup.size is not None
    only = len(job.faults) - sum(fault.kind == "over" for fault in job.faults) == 1
    can_go_on = len(well) >= job.setup.size.least and only and gone and not job.signalled
    began_s = job.began_s(1)
    if can_go_on and 0 <= began_s < first[0].at_s and not job.program.done_at:
        yield f"{len(well)} nodes could have gone on: {last}"
    if last is not None and last.reason is EndReason.COMPLETED and not job.program.done_at:
        yield "the run is said to be done, and its program is not"


def decides_of_each_end(job: RecordedJob) -> Iterator[str]:
    """Where the first node lives its agent says what follows, and that is what follows."""
    if any(fault.node == 0 and fault.kind in LOSING for fault in job.faults):
        return
    if job.nodes[0].error is not None or job.nodes[0].is_killed:
        return  # the batch script decides
    ends = [event.fact for event in job.events() if isinstance(event.fact, AttemptEnded)]
    if not ends or ends[-1].next is Next.RESTART:
        yield f"the first node lives, and has not said what follows: {ends[-1:]}"
        return
    last = ends[-1]
    if (last.next is Next.REQUEUE) != bool(job.requeued):
        yield f"{last}, and requeued by {job.requeued}"
    expected = {
        "preempted": {(EndReason.PREEMPTED, Next.LEAVE)},
        "grace": {(EndReason.PREEMPTED, Next.REQUEUE)},
        "both": {(EndReason.PREEMPTED, Next.REQUEUE)},
        "limit": {(EndReason.TIMED_OUT, Next.REQUEUE)},
        "cancelled": {(EndReason.CANCELLED, Next.STOP)},
        "silent": {(EndReason.PREEMPTED, Next.ASK_BATCH)},
    }
    was_in_time = job.signalled and job.signalled[0][0] < job.round_end_s(1) - 2.0
    only_stop = not [fault for fault in job.faults if fault.kind != "over"]
    if was_in_time and only_stop and (last.reason, last.next) not in expected[job.stop_how]:
        yield f"a job that was stopped ({job.stop_how}) ended so: {last}"
    done = last.reason is EndReason.COMPLETED
    if not job.signalled and only_stop and not done:
        yield f"nothing happened to the job, and it ended so: {last}"


CHECKS = (
    one_leader_each,
    each_end_once,
    requeued_once,
    loses_the_lost,
    somebody_sees_to_it,
    decides_of_each_end,
)
