"""What must hold where nodes are added, changed and left out: part of the contract of a round."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hpctrain.agent.growth import FIRST_PAUSE_S
from tests.support.simulation.checks import DYING, LOSING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.simulation.job import Job
    from tests.support.simulation.requests import Request


def asks_for_nodes_in_order(job: Job) -> Iterator[str]:
    """One node at a time is asked for, where one is missing, and seldom where none is given."""
    if job.requests and not any(fault.kind in LOSING | DYING for fault in job.faults):
        yield f"n{job.requests[0].number} is asked for, and none is missing"
    pause_s = FIRST_PAUSE_S
    for before, request in pairwise(job.requests):
        if before.came_s is not None:
            pause_s = FIRST_PAUSE_S
        elif not before.is_taken_back:
            yield from _asked_again(before, request, pause_s)
            pause_s *= 2


def _asked_again(before: Request, request: Request, pause_s: float) -> Iterator[str]:
    if before.ended_s is None:
        yield f"n{request.number} is asked for beside n{before.number}"
    elif request.asked_s < before.ended_s + pause_s - 0.5:
        yield f"asked again after {request.asked_s - before.ended_s:.1f} s"
    elif before.is_final:
        yield f"n{request.number} is asked for, though none is ever added"


def takes_requests_back(job: Job) -> Iterator[str]:
    """Nothing is asked for at the end, and what is told of those that came is true."""
    is_well = not any(fault.node == 0 and fault.kind in LOSING | {"over"} for fault in job.faults)
    for request in job.requests:
        is_open = request.came_s is None and request.ended_s is None
        if is_well and job.nodes[0].error is None and is_open:
            yield f"n{request.number} is still asked for at the end"
    for name, waited_s in job.joined:
        request = next(one for one in job.requests if one.node.name == name)
        if waited_s is not None and request.came_s is not None:
            least_s = request.came_s - request.asked_s
            if not least_s - 0.1 <= waited_s <= least_s + 10.0 + 2 * job.setup.lease_s:
                yield f"{name} came after {least_s:.1f} s, and {waited_s:.1f} s are told"
    names = [name for name, _ in job.joined]
    if len(names) != len(set(names)):
        yield f"joined twice: {names}"


def grows_soon(job: Job) -> Iterator[str]:
    """A lost node is missed at once; one that has come is taken in, at the next save at last."""
    is_on = job.setup.growth is not None and not job.signalled and not job.crashes
    is_first_hurt = any(fault.node == 0 and fault.kind in LOSING for fault in job.faults)
    ended_s = job.first_ended_s
    if not is_on or is_first_hurt or job.nodes[0].error or ended_s is None or not job.lost_at_s:
        return
    lost_s = min(job.lost_at_s.values())
    began_s = [a.began_s for a in job.attempts.values() if a.began_s > lost_s - 20.0]
    runs_on = bool(began_s) and ended_s > max(lost_s, min(began_s)) + 15.0
    if runs_on and not job.requests and not job.never_grows:
        yield f"a node was lost at {lost_s:.1f} s, and none was asked for by {ended_s:.1f} s"
    for request in job.requests:
        if request.came_s is None or request.ended_s is not None:
            continue
        is_in = any(request.node.name in names for _, names, *_ in job.begun)
        is_hurt = any(fault.node == request.number for fault in job.faults)
        has_room = len(job.begun[-1][1]) < job.size_most
        was_long = ended_s > request.came_s + 30.0 + 2 * job.setup.lease_s
        if has_room and was_long and not is_in and not is_hurt:
            yield f"{request.node.name} came at {request.came_s:.1f} s, and is not taken in"


def grows_behind_saves(job: Job) -> Iterator[str]:
    """A round ends for an added node, and the next one has it; where it is to, behind a save."""
    for at_s, why in job.grown:
        later = [begun for begun in job.begun if job.began_s(begun[0]) > at_s]
        names = why.removesuffix(" joined the job").split(", ")
        is_hurt = any(fault.at_s > at_s - 30.0 for fault in job.faults)
        if later and not set(names) & set(later[0][1]) and not is_hurt:
            yield f"the round ended since {why}, and the next one is {later[0][1]}"
        if job.grows_by_saves and not _is_behind_a_save(job, at_s):
            yield f"a round ended for {names} at {at_s:.1f} s, and not behind a save"
    if job.setup.growth is None and job.grown:
        yield "a round ended for a node that nobody has asked for"


def _is_behind_a_save(job: Job, at_s: float) -> bool:
    return any(0 <= at_s - saved < 2.0 for saved in job.saves_at_s)


def swaps_when_it_pays(job: Job) -> Iterator[str]:
    """A slow node gives its place to a spare behind a save, once it has cost a new start."""
    if job.slow is None:
        return
    name = f"n{job.slow}"
    kinds = {fault.kind for fault in job.faults if fault.node == job.slow}
    lost_at_s = job.lost_at_s.get(name)
    if lost_at_s is not None and not kinds & (LOSING | {"rank"}) and name not in job.bad:
        if job.slow == 0:
            yield "the first node gives its place away"
        if lost_at_s < job.slow_from_s + job.restart_s:
            yield f"{name} is changed at {lost_at_s:.1f} s, slow since {job.slow_from_s:.1f} s"
        if not _is_behind_a_save(job, lost_at_s):
            yield f"{name} is changed at {lost_at_s:.1f} s, and not behind a save"
    if job.faults or job.bad or not job.slow or job.size_most == job.setup.nodes:
        return
    due = [s for s in job.saves_at_s if s > job.slow_from_s + job.restart_s + 5.0]
    if len(due) > 2 and name in job.begun[0][1] and lost_at_s is None:
        yield f"{name} is slow, a spare waits, and it keeps its place"


def leaves_the_bad_out(job: Job) -> Iterator[str]:
    """No round follows a crash with a node that guards had named by then."""
    for number, names, _, _ in job.begun:
        before = [one for one in job.verdicts if one.round == number - 2 and one.node == 0]
        if not before or before[0].end.failure is None:
            continue
        judged_s = before[0].at_s - 1.0
        if bad := {name for name, at_s in job.bad_at_s.items() if at_s < judged_s} & set(names):
            yield f"attempt {number} begins with {sorted(bad)}"


CHECKS = (
    asks_for_nodes_in_order,
    takes_requests_back,
    grows_soon,
    grows_behind_saves,
    swaps_when_it_pays,
    leaves_the_bad_out,
)
