"""What must hold in every simulated job, whatever is done to it: the contract of a round.

Each check takes a job that has run, and says what it finds wrong, in words.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hpctrain.agent.lifeline import LEAVE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.simulation.job import Job

LOSING = frozenset({"power", "dies", "agent", "freezes", "cut", "lifeline"})
"""After these a node may be lost."""
HANGING = frozenset({"hangs", "stopped"})
DYING = frozenset({"rank", "raises"})


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
            if old and not self._was_touched(node.number):
                self.wrong.append(
                    f"ranks of attempt {sorted(old)} still run on {node.name} in attempt {newest}"
                )

    def _was_touched(self, node: int) -> bool:
        touching = [0, node]  # what keeps node 0 from the others keeps them from it
        return any(fault.kind in LOSING and fault.node in touching for fault in self._job.faults)


def same_verdict(job: Job) -> Iterator[str]:
    """All members of a round that hear a verdict hear the same one, of node 0."""
    by_round = defaultdict(list)
    for one in job.verdicts:
        by_round[one.round].append(one)
    for number, heard in by_round.items():
        plain = {(v.end.ending, v.end.restart, v.end.why, tuple(v.end.silent_nodes)) for v in heard}
        if len(plain) > 1:
            yield f"round {number} ended differently: {sorted(plain)}"
        if len({v.members for v in heard}) > 1:
            yield f"round {number} has different members"
        if len({v.node for v in heard}) < len(heard):
            yield f"a node heard two verdicts of round {number}"
        if 0 not in {v.node for v in heard}:
            yield f"node 0 does not know how round {number} ended"


def names_the_guilty(job: Job) -> Iterator[str]:
    """No verdict, loss or failure names a node or rank that nothing was done to."""
    lost = {fault.node for fault in job.faults if fault.kind in LOSING}
    cut_off = any(fault.kind in {"freezes", "cut"} and fault.node == 0 for fault in job.faults)
    died = defaultdict(int)
    for fault in job.faults:
        died[fault.node] += fault.kind == "rank"
    for name, _, _ in job.losses:
        number = int(name[1:])
        if number in lost or cut_off or died[number] > 1 or name in job.bad or job.setup.swaps:
            continue
        yield f"{name} was lost, and nothing was done to it"
    for one in job.verdicts:
        for node in one.end.silent_nodes:
            if node not in lost and not cut_off and died[node] < 2 and f"n{node}" not in job.bad:
                if not job.setup.swaps:
                    yield f"round {one.round}: n{node} is said to be silent"
        failure = one.end.failure
        if failure is None or failure.kind in {"hang", "desync"}:
            continue
        if not any(f"n{f.node}" == failure.node for f in job.faults if f.kind in DYING | LOSING):
            yield f"{failure.node} is blamed: {failure.summary}"


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
    if job.setup.swaps or job.is_stop_asked or any(node.arrivals for node in job.nodes):
        return
    if job.end is None or job.end.ending != "left" or not job.program.done_at:
        if job.nodes[0].error is not None and "did not come" in str(job.nodes[0].error):
            return  # before the first round each node has to come
        yield f"enough nodes live, and the job ended so: {job.end}"


def who_is_lost_leaves(job: Job) -> Iterator[str]:
    """A node that node 0 has lost has no ranks soon after it can know it."""
    wait_s = 3 * job.setup.lease_s + LEAVE_S
    for fault in job.faults:
        node = job.nodes[fault.node]
        if fault.kind not in {"freezes", "cut"} or fault.until_s == float("inf"):
            continue
        ended = [rank for rank in node.ranks if rank.is_alive]
        over_s = job.simulation.now_s - fault.until_s
        if ended and over_s > wait_s:
            yield f"{node.name} has ranks {over_s:.1f} s after it came back"


def hears_its_stop(job: Job) -> Iterator[str]:
    """A stop is never lost: no round begins behind it."""
    heard_s = [
        arrival.at_monotonic_s - job.nodes[0].machine.booted_s for arrival in job.nodes[0].arrivals
    ]
    if not heard_s:
        return
    began = [job.attempts[n].began_s for n in job.attempts]
    for at_s in began:
        if at_s > min(heard_s) + 1.0:
            yield f"ranks began at {at_s:.1f} s, and a stop was told at {min(heard_s):.1f} s"


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
        if node.number or not (is_too_few or is_absent):
            yield f"{node.name} raises {type(node.error).__name__}: {node.error}"


CHECKS = (
    raises_with_reason,
    same_verdict,
    names_the_guilty,
    one_attempt_each,
    nothing_runs_on,
    ends_well,
    who_is_lost_leaves,
    hears_its_stop,
)


def wrong_with(job: Job, overlap: Overlap) -> list[str]:
    """All that is wrong."""
    return [*overlap.wrong, *(words for check in CHECKS for words in check(job))]
