"""What must hold where ranks hang, linger or are out of step: part of the contract of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.ledger.run.event_types import (
    HangCleared,
    HangFound,
    HangSuspected,
    RanksAwaited,
    RanksOutOfStep,
)
from hpctrain.node.hangs.verdict import DOUBTFUL
from tests.support.simulation.checks import HANGING, LOSING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpctrain.node.agent.rounds import RoundEnd
    from tests.support.simulation.job import Job


def names_hangs_in_time(job: Job) -> Iterator[str]:
    """A hang is named within its limit and some looks, never before, and by its ranks."""
    if any(fault.kind in LOSING for fault in job.faults):
        return  # of ranks on a node that is gone nobody knows what they do
    for at_s, number, fact in _found(job):
        stood = {rank: (how, since_s) for n, rank, how, since_s in job.stood if n == number}
        if not stood or not set(fact.ranks) <= set(stood):
            yield f"attempt {number}: {fact.ranks} are named, and {sorted(stood)} stand"
        else:
            is_alone = job.attempts[number].world_size == 1  # nothing proves that it hangs
            yield from _in_time(job, at_s, fact, stood, is_alone=is_alone)


def _found(job: Job) -> list[tuple[float, int, HangFound]]:
    return [(at_s, n, fact) for at_s, n, fact in job.facts if isinstance(fact, HangFound)]


def _in_time(
    job: Job,
    at_s: float,
    fact: HangFound,
    stood: Mapping[int, tuple[str, float]],
    *,
    is_alone: bool,
) -> Iterator[str]:
    limit_s = fact.limit_s or 0.0
    after_s = at_s - min(since_s for _, since_s in stood.values())
    if after_s < 2 * limit_s - 0.5:
        yield f"named after {after_s:.1f} s, with a limit of {limit_s:g} s"
    only = {how for how, _ in stood.values()}
    is_sure = only == {"hangs"} and len(stood) == len(job.stood) == 1 and not is_alone
    if is_sure and after_s > 2.7 * limit_s + 10.0:
        yield f"named only after {after_s:.1f} s, with a limit of {limit_s:g} s"
    if only == {"computes"} and after_s < DOUBTFUL * limit_s:
        yield f"a rank that computes is ended after {after_s:.1f} s"


def misses_no_hang(job: Job) -> Iterator[str]:
    """Where somebody watches, ranks that stand for good are named; each suspicion comes to an end.

    But for a node without a board, whose heartbeats nobody can read.
    """
    limits, found = job.setup.limits, _found(job)
    if not limits.watches:
        if found:
            yield "hangs are named, and nobody watches"
        return
    if any(fact.ended != limits.ends_round for _, _, fact in found):
        yield f"{found}"
    for _, number, fact in found:
        ended = [one.end for one in job.verdicts if one.round == number - 1 and one.node == 0]
        failure = ended[0].failure if ended else None
        if fact.ended and ended and (failure is None or failure.summary.find(fact.summary) < 0):
            yield f"attempt {number} was ended by {fact.summary}, and that is told: {failure}"
    told = [fact for _, _, fact in job.facts]
    suspected = sum(isinstance(fact, HangSuspected) for fact in told)
    cleared = sum(isinstance(fact, HangCleared) for fact in told)
    if not cleared <= suspected <= cleared + len(job.attempts):
        yield f"{suspected} suspicions, {cleared} of them cleared"
    if len(found) > suspected:
        yield f"{len(found)} hangs, {suspected} suspicions"
    last = max(job.attempts, default=0)
    if last and not any(node.lacks_board for node in job.nodes):
        yield from _stands_unnamed(job, last)


def _stands_unnamed(job: Job, number: int) -> Iterator[str]:
    attempt = job.attempts[number]
    stands = [rank.number for rank in attempt.ranks.values() if rank.state in HANGING]
    was_long = job.was_killed_at_s is not None and job.was_killed_at_s - attempt.began_s > 200
    if stands and was_long and number not in {n for _, n, _ in _found(job)}:
        yield f"attempt {number} hangs by ranks {stands}, and nobody says so"


def answers_users(job: Job) -> Iterator[str]:
    """A user hears where the ranks are, while there are some."""
    for token, at_s in job.asked.items():
        if token in job.answered:
            if job.answered[token] < at_s:
                yield f"{token} was answered before it was asked"
            continue
        newer = any(other != token and later >= at_s for other, later in job.asked.items())
        runs = [
            attempt
            for attempt in job.attempts.values()
            if attempt.began_s + 1.0 < at_s and job.round_end_s(attempt.number) > at_s + 12.0
        ]
        if runs and not newer:
            yield f"{token} was asked at {at_s:.1f} s, and nobody has answered"


def looks_with_reason(job: Job) -> Iterator[str]:
    """Ranks are looked at where some stand, or a user asks: never else."""
    is_quiet = not job.faults and not job.asked and not job.program.lingers
    limits = job.setup.limits
    if is_quiet and job.looks_at_s and limits.hang_s > 1.0:
        yield f"nothing stands, and there were {len(job.looks_at_s)} looks"
    for node in job.nodes:
        has_ended = node.task is not None and node.task.is_over and not node.is_killed
        if has_ended and node.machine.has_power and node.boards:
            yield f"{node.name} holds {node.boards} boards at its end"


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
    yield from _names_who_hangs(job, end)
    yield from _tells_of_waiting(job, end)
    stays = {rank for rank, how in lingers.items() if how in {"hangs", "stays"}}
    if end.ending in {"hung", "left"} and stays:
        after_s = at_s - max(job.program.came_s or [0.0])
        if not wait_s - 0.5 <= after_s <= 2.0 * wait_s + 20.0:
            yield f"ended {after_s:.1f} s after the last rank had returned"


def _names_who_hangs(job: Job, end: RoundEnd) -> Iterator[str]:
    hangs = {rank for rank, how in job.program.lingers.items() if how == "hangs"}
    works = {rank for rank, how in job.program.lingers.items() if how == "works"}
    if end.ending == "hung":
        named = {end.failure.rank, *end.failure.others} if end.failure else set()
        if named != hangs:
            yield f"ranks {sorted(named)} are ended as hung, and {sorted(hangs)} are"
    elif hangs:
        yield f"ranks {sorted(hangs)} do not return, and it ended so: {end}"
    if any(job.attempts[1].ranks[rank].exitcode != 0 for rank in works):
        yield "a rank that worked was ended"


def _tells_of_waiting(job: Job, end: RoundEnd) -> Iterator[str]:
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
    if limits.desync == "off" or not job.odd_counts:
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


CHECKS = (
    names_hangs_in_time,
    misses_no_hang,
    answers_users,
    looks_with_reason,
    waits_for_who_works,
    names_who_is_out_of_step,
)
