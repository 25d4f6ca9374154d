"""What a profile says: what training is bound by, and who is waited for. Pure.

A rank is bound by a kind that takes at least `MOST` of its time outside saves, or at least `MUCH`
and `CLEAR` times as much as any other; else there is no clear bound.

A rank is waited for where it communicates least by a margin of `WAITS`: the others stand in a
collective until it comes. Then the run is bound by what that rank is bound by, and its own
communication is left out of the question. Else the run's shares are the ranks' mean.
tests/unit/test_profile_verdict.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hpctrain.profile.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.profile.trace import RankShares

MOST = 0.5
MUCH = 0.3
CLEAR = 1.5
WAITS = 0.1
"""Of the step: how much less the rank that is waited for communicates than the one that waits."""


class Bound(StrEnum):
    """What holds training up: a closed set."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    DATA = "data"
    MEMORY = "memory"
    HOST = "host"
    NONE = "none"
    """Nothing clearly does."""


ADVICE = {
    Bound.COMPUTE: "the device is busy: faster kernels (engine.compile, bf16) or more ranks help",
    Bound.COMMUNICATION: "fewer, larger or hidden exchanges help: more accumulation, "
    "engine.dp_replicate across nodes, tp within a node; check NCCL's transport",
    Bound.DATA: "load ahead of training: more DataLoader workers, pinned memory, "
    "data on a faster disk",
    Bound.MEMORY: "copies and allocations cost: pin host memory, copy without blocking, "
    "keep shapes constant; see the memory below",
    Bound.HOST: "the device waits for Python: larger batches, engine.compile, fewer .item()",
}


@dataclass(frozen=True)
class Verdict:
    """What a profile says.

    Attributes:
        bound: Of the run.
        bounds: Of each rank.
        waited_for: The rank that the others wait for; None where nobody waits noticeably.
        waiting: Largest share of a step that another rank communicates more than it.
        shares: What `bound` was found from: the waited-for rank's, or the mean of all.
    """

    bound: Bound
    bounds: dict[int, Bound]
    waited_for: int | None
    waiting: float
    shares: dict[Kind, float]


def judge(ranks: Sequence[RankShares]) -> Verdict:
    """The verdict on the ranks of a profile; at least one."""
    shares = {kind: sum(r.shares[kind] for r in ranks) / len(ranks) for kind in Kind}
    least = min(ranks, key=lambda r: r.shares[Kind.COMMUNICATION])
    most = max(ranks, key=lambda r: r.shares[Kind.COMMUNICATION])
    waiting = most.shares[Kind.COMMUNICATION] - least.shares[Kind.COMMUNICATION]
    bounds = {r.rank: bound_of(r.shares) for r in ranks}
    if waiting < WAITS:
        return Verdict(bound_of(shares), bounds, None, waiting, shares)
    own = {**least.shares, Kind.COMMUNICATION: 0.0}
    return Verdict(bound_of(own), bounds, least.rank, waiting, dict(least.shares))


def advice_on(verdict: Verdict) -> str | None:
    """What may help, in a line; None where nothing clearly holds training up."""
    rank = verdict.waited_for
    if rank is not None and verdict.bound in {Bound.COMPUTE, Bound.NONE}:
        return f"why is rank {rank} slower than the others: more work, or a slower node?"
    return ADVICE.get(verdict.bound)


def bound_of(shares: Mapping[Kind, float]) -> Bound:
    """What time of these shares is bound by."""
    outside = {kind: share for kind, share in shares.items() if kind is not Kind.SAVE}
    whole = sum(outside.values())
    if whole <= 0:
        return Bound.NONE
    first, second = sorted(outside, key=lambda kind: -outside[kind])[:2]
    largest = outside[first] / whole
    if largest >= MOST or (largest >= MUCH and outside[first] >= CLEAR * outside[second]):
        return Bound(first.value)
    return Bound.NONE
