"""What must hold in every simulated job, whatever is done to it: the contract of a round.

Each check takes a job that has run, and says what it finds wrong, in words.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from hpctrain.agent.growth import FIRST_PAUSE_S
from hpctrain.agent.last_will import may_count
from hpctrain.agent.lifeline import LEAVE_S
from hpctrain.agent.node import GOODBYE_S
from hpctrain.agent.ranks import is_echo
from hpctrain.agent.stop_deadline import ASK_AGAIN_S
from hpctrain.agent.stop_deadline import LEAVE_S as LEAVE_DEADLINE_S
from hpctrain.hangs.suspicion import DOUBTFUL
from hpctrain.run.event_types import (
    HangCleared,
    HangFound,
    HangSuspected,
    RanksAwaited,
    RanksOutOfStep,
)
from tests.support.simulation import agents
from tests.support.simulation.job import KILL_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.base.records import FailureReport
    from tests.support.simulation.job import Job

LOSING = frozenset({"power", "dies", "agent", "freezes", "cut", "lifeline"})
"""After these a node may be lost."""
HANGING = frozenset({"hangs", "stopped", "computes"})
DYING = frozenset({"rank", "raises", "control", "controls_end"})


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
            if strangers := set(one.end.silent_nodes) - set(one.members):
                yield f"round {number} ended for {sorted(strangers)}, and has {one.members}"


def names_the_guilty(job: Job) -> Iterator[str]:
    """No verdict, loss or failure names a node or rank that nothing was done to."""
    guilty = _may_be_lost(job)
    for name, _, _ in job.losses:
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
    return lost if job.slow is None else lost | {job.slow}


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
    if job.slow is not None:
        hurt.add(job.slow)
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
    (at_s, how), *_ = job.signalled
    if not any(attempt.began_s < at_s for attempt in job.attempts.values()):
        return  # nodes may still be awaited, and then nobody looks
    slack_s = 2.0 + job.poll_stretch + 4 * max(node.machine.slowness_s for node in job.nodes)
    for attempt in job.attempts.values():
        if attempt.began_s > at_s + slack_s + agents.READ_S:
            yield f"ranks begin at {attempt.began_s:.1f} s, behind a stop at {at_s:.1f} s"
    for one in job.verdicts:
        if one.end.restart and one.node == 0 and one.at_s > at_s + slack_s:
            yield f"round {one.round} is to begin anew behind a stop at {at_s:.1f} s"
    if how == "user":
        limit_s = 30.0 if job.program.heeds_stop else None
    elif job.stop_how == "cancelled":
        limit_s = ASK_AGAIN_S
    elif job.stop_how in {"grace", "both"}:
        limit_s = 40.0
    else:
        limit_s = KILL_WAIT_S - LEAVE_DEADLINE_S
    if limit_s is not None and job.simulation.now_s > at_s + limit_s + slack_s + GOODBYE_S:
        yield f"stop ({how}, {job.stop_how}) at {at_s:.1f} s; ends at {job.simulation.now_s:.1f} s"
    for one in job.verdicts:
        if one.end.ending != "killed" or one.node or "no rank had started" in one.end.why:
            continue
        least_s = 0.0 if job.stop_how == "cancelled" else KILL_WAIT_S - LEAVE_DEADLINE_S
        if one.at_s < at_s + least_s - 0.01 or (job.program.heeds_stop and least_s):
            yield f"ranks are killed {one.at_s - at_s:.1f} s after a stop: {one.end.why}"


def names_hangs_in_time(job: Job) -> Iterator[str]:
    """A hang is named within its limit and some looks, never before, and by its ranks."""
    found = [(at_s, n, fact) for at_s, n, fact in job.facts if isinstance(fact, HangFound)]
    for at_s, number, fact in found:
        stood = {rank: (how, since_s) for n, rank, how, since_s in job.stood if n == number}
        others = {f.node for f in job.faults if f.kind in LOSING}
        if not stood and not others:
            yield f"attempt {number} is said to hang, and no rank stands: {fact.summary}"
            continue
        if not set(fact.ranks) <= set(stood) and not others:
            yield f"attempt {number}: ranks {fact.ranks} are named, and {sorted(stood)} stand"
        if others or not stood:
            continue
        since_s = min(since_s for _, since_s in stood.values())
        if at_s - since_s < 2 * fact.limit_s - 0.5:
            yield f"named after {at_s - since_s:.1f} s, with a limit of {fact.limit_s:g} s"
        only = {how for how, _ in stood.values()}
        most_s = 2.7 * fact.limit_s + 10.0
        if only == {"hangs"} and len(stood) == len(job.stood) == 1 and at_s - since_s > most_s:
            yield f"named only after {at_s - since_s:.1f} s, with a limit of {fact.limit_s:g} s"
        if only == {"computes"} and at_s - since_s < DOUBTFUL * fact.limit_s:
            yield f"a rank that computes is ended after {at_s - since_s:.1f} s"
    limits = job.setup.limits
    if limits is None or not limits.watches:
        if found:
            yield "hangs are named, and nobody watches"
        return
    for number, attempt in job.attempts.items():
        named = [fact for _, n, fact in found if n == number]
        stands = [r for r in attempt.ranks.values() if r.state in HANGING]
        was_long = job.was_killed_at_s and job.was_killed_at_s - attempt.began_s > 200
        if stands and was_long and attempt is list(job.attempts.values())[-1] and not named:
            yield f"attempt {number} hangs by rank {stands[0].number}, and nobody says so"
        if any(fact.ended != limits.ends_round for fact in named):
            yield f"attempt {number}: {named}"
    told = [fact for _, _, fact in job.facts]
    suspected = sum(isinstance(fact, HangSuspected) for fact in told)
    cleared = sum(isinstance(fact, HangCleared) for fact in told)
    if not cleared <= suspected <= cleared + len(job.attempts):
        yield f"{suspected} suspicions, {cleared} of them cleared"
    if len(found) > suspected:
        yield f"{len(found)} hangs, {suspected} suspicions"


def answers_users(job: Job) -> Iterator[str]:
    """A user hears where the ranks are, while there are some."""
    for token, at_s in job.asked.items():
        if token in job.answered:
            if job.answered[token] < at_s:
                yield f"{token} was answered before it was asked"
            continue
        newer = any(other != token and later >= at_s for other, later in job.asked.items())
        runs = [
            a
            for a in job.attempts.values()
            if a.began_s + 1.0 < at_s and job.round_end_s(a.number) > at_s + 12.0
        ]
        if runs and not newer:
            yield f"{token} was asked at {at_s:.1f} s, and nobody has answered"


def waits_for_who_works(job: Job) -> Iterator[str]:
    """Ranks that stay behind are ended after their time, and only where none of them works."""
    lingers, wait_s = job.program.lingers, job.setup.end_wait_s
    if not wait_s or any(fault.kind != "over" for fault in job.faults):
        return
    if set(lingers.values()) == {"hangs"} and len(lingers) == len(job.attempts[1].ranks):
        return  # of which none returns
    first = [one for one in job.verdicts if one.round == 0 and one.node == 0]
    if not first:
        yield "the first round has not ended"
        return
    end, at_s = first[0].end, first[0].at_s
    hangs = {rank for rank, how in lingers.items() if how == "hangs"}
    stays = {rank for rank, how in lingers.items() if how == "stays"}
    works = {rank for rank, how in lingers.items() if how == "works"}
    of_all = set(job.attempts[1].ranks)
    if end.ending == "hung":
        named = {end.failure.rank, *end.failure.others} if end.failure else set()
        if named != hangs:
            yield f"ranks {sorted(named)} are ended as hung, and {sorted(hangs)} are"
    elif hangs and hangs != of_all:
        yield f"ranks {sorted(hangs)} do not return, and it ended so: {end}"
    if end.ending in {"hung", "left"} and (hangs or stays) and hangs != of_all:
        came_s = max(job.program.came_s or [0.0])
        if at_s < came_s + wait_s - 0.5:
            yield f"ended {at_s - came_s:.1f} s after the last rank had returned"
        most_s = came_s + 2.0 * wait_s + 20.0
        if at_s > most_s:
            yield f"ended only {at_s - came_s:.1f} s after the last rank had returned"
    if works and any(job.attempts[1].ranks[rank].exitcode != 0 for rank in works):
        yield "a rank that worked was ended"
    awaited = [fact for _, n, fact in job.facts if isinstance(fact, RanksAwaited) and n == 1]
    is_waiting = end.ending == "hung" or (end.ending == "left" and bool(end.why))
    if [fact.ended for fact in awaited].count(True) != is_waiting:
        yield f"ended as {end.ending} ({end.why}), and this was written down: {awaited}"
    if len([fact for fact in awaited if not fact.ended]) > 1:
        yield f"said more than once: {awaited}"


def names_who_is_out_of_step(job: Job) -> Iterator[str]:
    """Ranks whose counts differ are named, once in a round."""
    limits = job.setup.limits
    told = [(n, fact) for _, n, fact in job.facts if isinstance(fact, RanksOutOfStep)]
    if limits is None or limits.desync == "off" or not job.odd_counts:
        if told:
            yield f"{told}"
        return
    for number, fact in told:
        if set(fact.ranks) != set(job.odd_counts) and job.attempts[number].world_size > 2:
            yield f"ranks {fact.ranks} are named, {sorted(job.odd_counts)} are out of step"
        if fact.ended != (limits.desync == "restart"):
            yield f"{fact}"
    since = min(job.odd_counts.values())
    last = job.attempts[max(job.attempts)]
    if not told and not job.faults and last.step > since + 20 and last.world_size > 1:
        yield f"out of step from {since} on, at step {last.step} now, and nobody says so"


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


def asks_for_nodes_in_order(job: Job) -> Iterator[str]:
    """One node at a time is asked for, where one is missing; nothing is asked for at the end."""
    pause_s, before = FIRST_PAUSE_S, None
    for request in job.requests:
        if not any(fault.kind in LOSING | DYING for fault in job.faults):
            yield f"n{request.number} is asked for, and none is missing"
        if before is not None and before.came_s is None and not before.is_taken_back:
            if before.ended_s is None:
                yield f"n{request.number} is asked for beside n{before.number}"
            elif request.asked_s < before.ended_s + pause_s - 0.5:
                yield f"asked again after {request.asked_s - before.ended_s:.1f} s"
            elif before.is_final:
                yield f"n{request.number} is asked for, though none is ever added"
            pause_s = 2 * pause_s
        if before is not None and before.came_s is not None:
            pause_s = FIRST_PAUSE_S
        before = request
    first = job.nodes[0]
    is_well = not any(fault.node == 0 and fault.kind in LOSING | {"over"} for fault in job.faults)
    for request in job.requests:
        if is_well and first.error is None and request.came_s is None and request.ended_s is None:
            yield f"n{request.number} is still asked for at the end"
    for name, waited_s in job.joined:
        request = next((one for one in job.requests if one.node.name == name), None)
        if waited_s is not None and request is not None and request.came_s is not None:
            least_s = request.came_s - request.asked_s
            if not least_s - 0.1 <= waited_s <= least_s + 10.0 + 2 * job.setup.lease_s:
                yield f"{name} came after {least_s:.1f} s, and {waited_s:.1f} s are told"
    yield from _asks_soon(job)
    names = [name for name, _ in job.joined]
    if len(names) != len(set(names)):
        yield f"joined twice: {names}"


def _asks_soon(job: Job) -> Iterator[str]:
    """A lost node is missed at once; one that has come is taken in at a save."""
    is_on = job.setup.growth is not None and not job.signalled and not job.crashes
    if not is_on or any(fault.node == 0 and fault.kind in LOSING for fault in job.faults):
        return
    first = job.nodes[0]
    ended_s = job.first_ended_s
    if first.error is not None or ended_s is None or not job.lost_at_s:
        return
    lost_s = min(job.lost_at_s.values())
    began_s = [a.began_s for a in job.attempts.values() if a.began_s > lost_s - 20.0]
    runs_on = bool(began_s) and ended_s > max(lost_s, min(began_s)) + 15.0
    if runs_on and not job.requests and not job.never_grows:
        yield f"a node was lost at {lost_s:.1f} s, and none was asked for by {ended_s:.1f} s"
    for request in job.requests:
        stays = request.came_s is not None and request.ended_s is None
        hurt = any(f.node == request.number for f in job.faults)
        if not stays or hurt or request.came_s is None:
            continue
        began = [n for n, names, *_ in job.begun if request.node.name in names]
        last = job.begun[-1]
        has_room = len(last[1]) < job.size_most
        if not began and has_room and ended_s > request.came_s + 30.0 + 2 * job.setup.lease_s:
            yield f"{request.node.name} came at {request.came_s:.1f} s, and is not taken in"


def grows_behind_saves(job: Job) -> Iterator[str]:
    """A round ends for an added node, and the next one has it; where it is to, behind a save."""
    for at_s, why in job.grown:
        later = [begun for begun in job.begun if job.began_s(begun[0]) > at_s]
        names = why.removesuffix(" joined the job").split(", ")
        if later and not set(names) & set(later[0][1]) and not _hurt_since(job, at_s - 30.0):
            yield f"the round ended since {why}, and the next one is {later[0][1]}"
        if job.grows_by_saves and not any(0 <= at_s - saved < 2.0 for saved in job.saves_at_s):
            yield f"a round ended for {names} at {at_s:.1f} s, and not behind a save"
    if job.setup.growth is None and job.grown:
        yield "a round ended for a node that nobody has asked for"


def _hurt_since(job: Job, at_s: float) -> bool:
    return any(fault.at_s > at_s for fault in job.faults)


def swaps_when_it_pays(job: Job) -> Iterator[str]:
    """A slow node gives its place to a spare behind a save, once it has cost a new start."""
    if job.slow is None:
        return
    for name, _, members in job.losses:
        number = int(name[1:])
        touched = [f for f in job.faults if f.node == number and f.kind in LOSING | {"rank"}]
        if number != job.slow or touched or name in job.bad:
            continue
        if number == 0:
            yield "the first node gives its place away"
        lost_at_s = job.lost_at_s[name]
        if lost_at_s < job.slow_from_s + job.restart_s:
            yield f"{name} is changed at {lost_at_s:.1f} s, slow since {job.slow_from_s:.1f} s"
        if not any(0 <= lost_at_s - saved < 2.0 for saved in job.saves_at_s):
            yield f"{name} is changed at {lost_at_s:.1f} s, and not behind a save"
        if members is not None and len(members) < len(job.verdicts[0].members) and not job.faults:
            yield f"{name} is changed for none: {members}"
    if job.faults or job.bad or not job.slow or job.size_most == job.setup.nodes:
        return
    first = job.begun[0]
    due = [s for s in job.saves_at_s if s > job.slow_from_s + job.restart_s + 5.0]
    if (
        len(due) > 2
        and f"n{job.slow}" in first[1]
        and f"n{job.slow}" not in dict.fromkeys(name for name, *_ in job.losses)
    ):
        yield f"n{job.slow} is slow, a spare waits, and it keeps its place"


def leaves_the_bad_out(job: Job) -> Iterator[str]:
    """No round begins with a node that guards have named by then."""
    for number, names, _, _ in job.begun:
        bad = set(names) & {
            name for name in job.bad_at_s if job.bad_at_s[name] < _fail_s(job, number)
        }
        if bad:
            yield f"attempt {number} begins with {sorted(bad)}"


def _fail_s(job: Job, number: int) -> float:
    """When the attempt before it was judged, as a crash; never for other ends."""
    before = [v for v in job.verdicts if v.round == number - 2 and v.node == 0]
    is_crash = bool(before) and before[0].end.failure is not None
    return before[0].at_s - 1.0 if is_crash else float("-inf")


def looks_with_reason(job: Job) -> Iterator[str]:
    """Ranks are looked at where some stand, or a user asks: never else."""
    is_quiet = not job.faults and not job.asked and not job.program.lingers
    limits = job.setup.limits
    if is_quiet and job.looks_at_s and (limits is None or limits.hang_s > 1.0):
        yield f"nothing stands, and there were {len(job.looks_at_s)} looks"
    for node in job.nodes:
        has_ended = node.task is not None and node.task.is_over and not node.is_killed
        if has_ended and node.machine.has_power and node.boards:
            yield f"{node.name} holds {node.boards} boards at its end"


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


def asks_for_wills(job: Job) -> Iterator[str]:
    """Where last wills count every node has asked for them before its ranks were ended."""
    for node in job.nodes:
        if node.is_killed or not node.machine.has_power:
            continue
        for what, attempt, end in node.wills:
            gathered = ("gather", attempt, None) in node.wills
            if what == "settle" and end is not None and may_count(end) and not gathered:
                if not job.signalled and any(r.attempt.number == attempt for r in node.ranks):
                    yield f"{node.name} asked for no wills in attempt {attempt}: {end}"


def copies_together(job: Job) -> Iterator[str]:
    """Copies go to disk at the end of the last round alone, by all that live, who agree on that."""
    if not job.saves_copies:
        if job.copied:
            yield f"{job.copied}"
        return
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
        if job.signalled and job.copied[0][3] == "" and job.copied[0][0] == 0:
            stop_s = job.signalled[0][0]
            if stop_s < last[0].at_s - 1.0:
                yield "copies are saved while the job is to end"
    for node in job.nodes:
        is_well = not node.is_killed and node.machine.has_power
        if is_well and any(not line.is_closed for line in node.lines):
            yield f"{node.name} holds a line to its keeper"


CHECKS = (
    looks_with_reason,
    begins_again_soon,
    asks_for_wills,
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
    names_hangs_in_time,
    answers_users,
    waits_for_who_works,
    names_who_is_out_of_step,
    asks_for_nodes_in_order,
    grows_behind_saves,
    swaps_when_it_pays,
    leaves_the_bad_out,
)


def wrong_with(job: Job, overlap: Overlap) -> list[str]:
    """All that is wrong."""
    return [*overlap.wrong, *(words for check in CHECKS for words in check(job))]
