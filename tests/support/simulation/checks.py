"""What must hold in every simulated job, whatever is done to it: the contract of a round.

Each check takes a job that has run, and says what it finds wrong, in words.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hpctrain.node.agent.coordinator import GOODBYE_S
from hpctrain.node.agent.liveness import LEAVE_S
from hpctrain.node.agent.ranks import is_echo
from hpctrain.node.agent.stop_deadline import ASK_AGAIN_S
from hpctrain.node.agent.stop_deadline import LEAVE_S as LEAVE_DEADLINE_S
from tests.support.simulation import agents
from tests.support.simulation.job import KILL_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.core.base.records import FailureReport
    from tests.support.simulation.job import Job

LOSING = frozenset({"power", "dies", "agent", "agent_stops", "freezes", "cut", "liveness"})
"""After these a node may be lost."""
HANGING = frozenset({"hangs", "stopped", "computes"})
DYING = frozenset({"rank", "raises", "control", "controls_end", "store", "store_stops"})


class Overlap:
    """Watches, as it happens, that no node has ranks of two attempts at once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.wrong: list[str] = []
        job.watchers.append(self.look)

    def look(self) -> None:
        """To be called as ranks begin."""
        job = self._job
        newest = max(job.attempts)
        for node in job.nodes:
            numbers = {rank.attempt.number for rank in node.live_ranks()}
            if len(numbers) > 1:
                self.wrong.append(f"ranks of attempts {sorted(numbers)} run on {node.name} at once")
            old = {number for number in numbers if number < newest}
            # A node that was lost may have old ranks: those of the others must be gone by now.
            if old and not self._was_touched(node.number) and not self._leaves(node.name):
                self.wrong.append(
                    f"ranks of attempt {sorted(old)} still run on {node.name} in attempt {newest}"
                )

    def _leaves(self, name: str) -> bool:
        """A node that was left out though it lives has a moment to end its ranks."""
        lost_at_s = self._job.lost_at_s.get(name, float("-inf"))
        return self._job.simulation.now_s < lost_at_s + LEAVE_S + self._job.poll_stretch

    def _was_touched(self, node: int) -> bool:
        touching = [0, node]  # what keeps node 0 from the others keeps them from it
        return any(fault.kind in LOSING and fault.node in touching for fault in self._job.faults)


def same_verdict(job: Job) -> Iterator[str]:
    """All members of a round that hear a verdict hear the same one, of node 0."""
    by_round = defaultdict(list)
    is_first_hurt = any(fault.node == 0 and fault.kind in LOSING | {"over"} for fault in job.faults)
    for one in job.verdicts:
        by_round[one.job_id, one.round].append(one)
    for (_, number), heard in by_round.items():
        plain = {(v.end.ending, v.end.restart, v.end.why, tuple(v.end.silent_nodes)) for v in heard}
        if len(plain) > 1:
            yield f"round {number} ended differently: {sorted(plain)}"
        if len({v.members for v in heard}) > 1:
            yield f"round {number} has different members"
        if len({v.node for v in heard}) < len(heard):
            yield f"a node heard two verdicts of round {number}"
        if 0 not in {v.node for v in heard} and not is_first_hurt:
            yield f"node 0 does not know how round {number} ended"
        for one in heard:
            if others := set(one.end.silent_nodes) - set(one.members):
                yield f"round {number} ended for {sorted(others)}, and has {one.members}"


def names_the_guilty(job: Job) -> Iterator[str]:
    """No verdict, loss or failure names a node or rank that nothing was done to."""
    guilty = _may_be_lost(job)
    names = [name for name, *_ in job.losses]
    if len(names) != len(set(names)):
        yield f"lost twice: {names}"
    if job.misnamed:
        yield f"{job.misnamed} are called spares, and were members"
    for name in names:
        if int(name[1:]) not in guilty:
            yield f"{name} was lost, and nothing was done to it"
    for one in job.verdicts:
        for node in one.end.silent_nodes:
            if node not in guilty:
                yield f"round {one.round}: n{node} is said to be silent"
        failure = one.end.failure
        if failure is not None and failure.kind not in {"hang", "desync"}:
            yield from _innocent(job, failure)


def _innocent(job: Job, failure: FailureReport) -> Iterator[str]:
    if is_echo(failure) and any(fault.kind in LOSING for fault in job.faults):
        return  # of a node that said nothing
    if not any(f"n{f.node}" == failure.node for f in job.faults if f.kind in DYING | LOSING):
        yield f"{failure.node} is blamed: {failure.summary}"


def _may_be_lost(job: Job) -> set[int]:
    """Nodes that something was done to after which they may be lost."""
    if any(fault.kind in {"freezes", "cut"} and fault.node == 0 for fault in job.faults):
        return set(range(len(job.nodes)))
    deaths = [fault.node for fault in job.faults if fault.kind == "rank"]
    lost = {fault.node for fault in job.faults if fault.kind in LOSING}
    lost |= {node for node in deaths if deaths.count(node) > 1}
    lost |= {node.number for node in job.nodes if node.name in job.bad}
    return lost


def one_attempt_each(job: Job) -> Iterator[str]:
    """Each attempt begins once, and has the ranks of its members alone."""
    numbers = [number for number, *_ in job.begun]
    if numbers != sorted(set(numbers)):
        yield f"attempts {numbers}"
    for number, names, spares, world_size in job.begun:
        if set(names) & set(spares):
            yield f"attempt {number}: a member is a spare"
        if world_size != len(names) * job.setup.ranks:
            yield f"attempt {number}: {world_size} ranks of {len(names)} nodes"
        size = job.setup.size
        if size is not None and not size.least <= len(names) <= size.most:
            yield f"attempt {number} has {len(names)} nodes"
        if size is None and len(names) != job.setup.nodes:
            yield f"attempt {number} has {len(names)} nodes"
        if names[0] != "n0":
            yield f"attempt {number} is not led by the first node"


def nothing_runs_on(job: Job) -> Iterator[str]:
    """Once all agents have ended no rank runs, but where nobody could end it."""
    for node in job.nodes:
        if node.live_ranks() and not node.machine.is_frozen:
            yield f"{node.name} still has ranks: {[r.number for r in node.live_ranks()]}"


def ends_well(job: Job) -> Iterator[str]:
    """The job comes to the program's end where enough nodes live, and nobody forbids it."""
    if not 0 <= len(job.crashes) <= job.setup.restarts or not job.may_go_on or job.bad:
        return
    first = {fault.kind for fault in job.faults if fault.node == 0}
    if first & LOSING:
        return
    hurt = {fault.node for fault in job.faults if fault.kind in LOSING}
    deaths = [f.node for f in job.faults if f.kind == "rank"]
    hurt |= {node for node in deaths if deaths.count(node) > 1}
    living = job.setup.nodes - len(hurt)
    least = job.setup.nodes if job.setup.size is None else job.setup.size.least
    if living < least:
        return
    if job.signalled or job.odd_counts or job.program.lingers:
        return
    if any(fault.kind in HANGING and fault.until_s > 390.0 for fault in job.faults):
        return
    if job.end is None or job.end.ending != "left" or not job.program.done_at:
        if job.nodes[0].error is not None and "did not come" in str(job.nodes[0].error):
            return  # before the first round each node has to come
        yield f"enough nodes live, and the job ended so: {job.end}"


def who_is_lost_leaves(job: Job) -> Iterator[str]:
    """A node that node 0 has lost has no ranks soon after it can know it."""
    for name, lost_at_s in job.lost_at_s.items():
        node = job.nodes[int(name[1:])]
        if not node.machine.has_power:
            continue
        apart = [
            f for f in job.faults if f.kind in {"freezes", "cut"} and f.node in {0, node.number}
        ]
        back_s = max([lost_at_s, *(fault.until_s for fault in apart)])
        latest_s = back_s + 1.5 * job.setup.lease_s + LEAVE_S + job.poll_stretch + 1.0
        late = [rank for rank in node.ranks if rank.ended_s > latest_s]
        if late and job.simulation.now_s > latest_s:
            yield f"{name} was lost at {lost_at_s:.1f} s, and rank {late[0].number} runs on"


def spares_leave(job: Job) -> Iterator[str]:
    """As the run is over nodes that wait hear that, and nothing of the agents is left."""
    first = job.nodes[0]
    is_well = first.error is None and not first.is_killed and first.machine.has_power
    if job.first_ended_s is None or not is_well:
        return
    for node in job.nodes:
        touched = any(
            f.node in {0, node.number} and f.kind in LOSING | {"over"} for f in job.faults
        )
        if touched or node.ended_s is None or node.is_killed:
            continue
        slack_s = 5.0 + job.poll_stretch + 4 * node.machine.slowness_s
        if node.ended_s > job.first_ended_s + slack_s:
            yield f"{node.name} leaves {node.ended_s - job.first_ended_s:.1f} s after the first"
        if node.stop_files:
            yield f"{node.name} leaves a stop file behind"
    if any(server.is_up for server in job.ports.values()):
        yield "a store is still served at the end"


def seals_what_is_true(job: Job) -> Iterator[str]:
    """What seals a program's saves hears once of each round whether its ranks returned."""
    ended = {one.round: one.end.ending == "left" for one in job.verdicts if one.node == 0}
    for number, watch in job.sealed:
        if watch.returned != ended.get(number - 1, False) and job.setup.size is None:
            yield f"attempt {number}: returned is {watch.returned}"
    if len({number for number, _ in job.sealed}) < len(job.sealed):
        yield f"sealed twice: {job.sealed}"


def hears_its_stop(job: Job) -> Iterator[str]:
    """A stop is never lost: all leave in time, and no round begins behind it."""
    if not job.signalled:
        return
    at_s = job.signalled[0][0]
    if not any(attempt.began_s < at_s for attempt in job.attempts.values()):
        return  # nodes may still be awaited, and then nobody looks
    slack_s = 2.0 + job.poll_stretch + 4 * max(node.machine.slowness_s for node in job.nodes)
    for attempt in job.attempts.values():
        if attempt.began_s > at_s + slack_s + agents.READ_S:
            yield f"ranks begin at {attempt.began_s:.1f} s, behind a stop at {at_s:.1f} s"
    for one in job.verdicts:
        if one.end.restart and one.node == 0 and one.at_s > at_s + slack_s:
            yield f"round {one.round} is to begin anew behind a stop at {at_s:.1f} s"
    limit_s = _stop_limit_s(job)
    thaws_s = max((f.until_s for f in job.faults if f.kind == "freezes"), default=0.0)
    latest_s = max(at_s + limit_s, thaws_s) if limit_s is not None else float("inf")
    if job.simulation.now_s > latest_s + slack_s + GOODBYE_S:
        yield f"a stop ({job.stop_how}) at {at_s:.1f} s; ends at {job.simulation.now_s:.1f} s"
    yield from _kills_in_time(job, at_s, slack_s)


def _stop_limit_s(job: Job) -> float | None:
    """So long after a stop all is over; None where nobody ends ranks that stay."""
    if job.signalled[0][1] == "user":
        return 30.0 if job.program.heeds_stop else None
    by_grace = 40.0 if job.stop_how in {"grace", "both"} else KILL_WAIT_S - LEAVE_DEADLINE_S
    return ASK_AGAIN_S if job.stop_how == "cancelled" else by_grace


def _kills_in_time(job: Job, at_s: float, slack_s: float) -> Iterator[str]:
    """Ranks that stay are killed when they must be gone, not before, and no others."""
    expected_s = KILL_WAIT_S - LEAVE_DEADLINE_S
    if job.stop_how in {"grace", "both"}:
        expected_s = 40.0 - job.setup.margin_s / 2
    if job.stop_how == "cancelled":
        expected_s = 0.0
    for one in job.verdicts:
        if one.end.ending != "killed" or one.node or "no rank had started" in one.end.why:
            continue
        after_s = one.at_s - at_s
        is_in_time = expected_s - 0.2 < after_s < expected_s + slack_s
        if not is_in_time or (job.program.heeds_stop and expected_s):
            yield f"ranks are killed {after_s:.1f} s after a stop: {one.end.why}"


def raises_with_reason(job: Job) -> Iterator[str]:
    """An agent raises only where too few nodes are left, or where the first one was hurt."""
    hurt = {fault.node for fault in job.faults if fault.kind in LOSING}
    for node in job.nodes:
        if node.error is None or node.number in hurt or 0 in hurt:
            continue
        size = job.setup.size
        lost = {name for name, *_ in job.losses} | {f"n{number}" for number in hurt}
        least = job.setup.nodes if size is None else size.least
        is_too_few = job.setup.nodes - len(lost) < least
        is_absent = "did not come" in str(node.error) and hurt
        follows = node.number and job.nodes[0].error is not None  # it has taken its store along
        waits = node.number and isinstance(node.error, TimeoutError) and hurt
        if not (follows or waits) and (node.number or not (is_too_few or is_absent)):
            yield f"{node.name} raises {type(node.error).__name__}: {node.error}"


def begins_again_soon(job: Job) -> Iterator[str]:
    """Where ranks are to start again they do so at once: nobody is waited for who is lost."""
    for one in job.verdicts:
        if one.node != 0 or not one.end.restart:
            continue
        began = [a.began_s for a in job.attempts.values() if a.began_s > one.at_s]
        until_s = min(began, default=job.simulation.now_s)
        slack_s = 10.0 + 2 * job.setup.lease_s + job.reads_s + job.poll_stretch
        later = [f for f in job.faults if one.at_s - 2 * job.setup.lease_s < f.at_s < until_s]
        if until_s - one.at_s > slack_s and not later:
            yield f"round {one.round} ended at {one.at_s:.1f} s, and ranks begin at {until_s:.1f} s"


def copies_together(job: Job) -> Iterator[str]:
    """Copies go to disk at the end of the last round alone, by all that live, who agree on that."""
    if not job.saves_copies and job.copied:
        yield f"{job.copied}"
    if len({living for _, _, living, _ in job.copied}) > 1:
        yield f"they do not agree on who lives: {job.copied}"
    for number, _, _, why in job.copied:
        if number and why and "was lost" not in why:
            yield f"n{number} knows why no copies are saved: {why}"
    last = [one for one in job.verdicts if one.node == 0][-1:]
    if last and job.copied:
        end = last[0].end
        is_loss = end.silent_nodes or (end.failure is not None and end.failure.kind == "signal")
        if end.restart or not is_loss:
            yield f"copies are saved at such an end: {end}"
    for node in job.nodes:
        is_well = not node.is_killed and node.machine.has_power
        if is_well and any(not line.is_closed for line in node.lines):
            yield f"{node.name} holds a line to its replica server"


CHECKS = (
    begins_again_soon,
    copies_together,
    raises_with_reason,
    same_verdict,
    names_the_guilty,
    one_attempt_each,
    nothing_runs_on,
    ends_well,
    who_is_lost_leaves,
    spares_leave,
    seals_what_is_true,
    hears_its_stop,
)
