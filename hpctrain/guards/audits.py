"""Who is wrong where ranks compute each other's gradients and come to different bits. Pure.

Each rank computes, beside a microbatch of its own, that of its right neighbour. What a faulty
device adds to a gradient reaches all copies of the weights alike, and is seen nowhere else.
tests/unit/guards/test_audits.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class GradientDigests:
    """What a rank has come to.

    Attributes:
        own: Digest of the gradient of its own microbatch.
        right: Of that of its right neighbour.
    """

    own: str
    right: str


@dataclass(frozen=True)
class Dispute:
    """A microbatch of which two ranks have different gradients.

    Attributes:
        owner: Whose it is.
        auditor: Who has computed it, too.
        third: Who is asked then; None where there is no third rank.
    """

    owner: int
    auditor: int
    third: int | None


@dataclass(frozen=True)
class AuditVerdict:
    """Ranks that have computed something wrong.

    Attributes:
        suspects: Who.
        is_certain: A third rank has agreed with the other; else it is one of them, or all.
    """

    suspects: tuple[int, ...]
    is_certain: bool


def right_of(rank: int, ranks: int) -> int:
    """Whose microbatch a rank computes beside its own."""
    return (rank + 1) % ranks


def disputes(answers: Sequence[GradientDigests]) -> list[Dispute]:
    """What ranks disagree about, and who is asked; by the answers of all, in their order."""
    ranks = range(len(answers))
    pairs = [(right_of(auditor, len(ranks)), auditor) for auditor in ranks]
    pairs = [pair for pair in pairs if answers[pair[0]].own != answers[pair[1]].right]
    parties = {rank for pair in pairs for rank in pair}
    disputed = []
    for owner, auditor in pairs:
        others = [rank for rank in ranks if rank not in {owner, auditor}]
        # One who is in a dispute of its own may be the one that is wrong.
        others.sort(key=lambda rank: (rank in parties, rank))
        disputed.append(Dispute(owner, auditor, others[0] if others else None))
    return disputed


def judged(
    answers: Sequence[GradientDigests], disputed: Sequence[Dispute], opinions: Mapping[Dispute, str]
) -> list[AuditVerdict]:
    """Who is wrong: a verdict that is certain, one that is not, or both.

    Args:
        answers: Of all ranks.
        disputed: What they disagree about.
        opinions: Of those who were asked.
    """
    certain: set[int] = set()
    open_: list[Dispute] = []
    for each in disputed:
        opinion = opinions.get(each)
        if opinion == answers[each.owner].own:
            certain.add(each.auditor)
        elif opinion == answers[each.auditor].right:
            certain.add(each.owner)
        else:
            open_.append(each)
    doubtful = {
        rank
        for each in open_
        if not certain & {each.owner, each.auditor}
        for rank in (each.owner, each.auditor)
    }
    verdicts = [AuditVerdict(tuple(sorted(certain)), is_certain=True)] if certain else []
    if doubtful:
        verdicts.append(AuditVerdict(tuple(sorted(doubtful)), is_certain=False))
    return verdicts
