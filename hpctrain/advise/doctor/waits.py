"""Ranks that waited in collectives until their time was up: who did not come, or went astray. Pure.

tests/unit/doctor/test_judge.py holds the promises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.faults import Certainty, FaultKind
from hpctrain.core.base.text import duration, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.advise.doctor.sighting import Sighting

NEAR = 8
"""Collectives of one group that differ by no more than so many numbers are of one place."""


@dataclass(frozen=True)
class WaitVerdict:
    """What the time-outs of all ranks say together.

    Attributes:
        kind: HANG, or DESYNC where they waited in different collectives.
        certainty: How sure that is.
        summary: One line: who waited in what, and who is missing.
        missing: Ranks that have not reported, though others beside them have.
    """

    kind: FaultKind
    certainty: Certainty
    summary: str
    missing: tuple[int, ...] = ()


def judge_waits(waits: Sequence[Sighting], world_size: int | None = None) -> WaitVerdict:
    """Who waited for whom.

    Args:
        waits: Time-outs of collectives, in the order of the logs.
        world_size: How many ranks there are; None where nobody told.
    """
    calls: dict[int, tuple[str, int]] = {}
    for wait in waits:
        number = wait.details.get("number")
        if wait.rank is not None and wait.details.get("operation") and number:
            calls.setdefault(wait.rank, (wait.details["operation"], int(number)))
    if not calls:
        return WaitVerdict(FaultKind.HANG, Certainty.LIKELY, _alone(waits))
    reported = {wait.rank for wait in waits if wait.rank is not None}
    missing = _missing(reported, world_size)
    groups = Counter(calls.values())
    if len(groups) == 1:
        (operation, place), _ = groups.popitem()
        text = f"{fold_ranks(sorted(reported))} waited in {operation} #{place}{_limit(waits)}"
        if missing:
            text += f"; {fold_ranks(missing)} did not report: look there first"
        return WaitVerdict(FaultKind.HANG, Certainty.LIKELY, text, missing)
    return _astray(calls, missing, _limit(waits))


def _astray(calls: dict[int, tuple[str, int]], missing: tuple[int, ...], limit: str) -> WaitVerdict:
    """Ranks that were in different collectives: of one group they have parted ways."""
    by_call: dict[tuple[str, int], list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    parts = [
        f"{fold_ranks(ranks)} in {operation} #{number}"
        for (operation, number), ranks in sorted(by_call.items(), key=lambda item: item[1])
    ]
    numbers = [number for _, number in by_call]
    operations = {operation for operation, _ in by_call}
    text = f"ranks waited in different collectives{limit}: {', '.join(parts[:6])}"
    near = max(numbers) - min(numbers) <= NEAR
    if near and (len(operations) > 1 or len(set(numbers)) > 1):
        return WaitVerdict(FaultKind.DESYNC, Certainty.LIKELY, text, missing)
    return WaitVerdict(
        FaultKind.HANG, Certainty.LIKELY, f"{text} (they may be of different groups)", missing
    )


def _missing(reported: set[int], world_size: int | None) -> tuple[int, ...]:
    """Ranks beside those that reported; none where too few did to tell."""
    size = world_size or max(reported) + 1
    missing = tuple(rank for rank in range(size) if rank not in reported)
    return missing if 0 < len(missing) < len(reported) else ()


def _limit(waits: Sequence[Sighting]) -> str:
    limits = [int(wait.details["limit"]) for wait in waits if wait.details.get("limit")]
    return f" for {duration(limits[0] / 1000)}" if limits else ""


def _alone(waits: Sequence[Sighting]) -> str:
    """Where no line says in which collective."""
    ranks = sorted({wait.rank for wait in waits if wait.rank is not None})
    who = fold_ranks(ranks) if ranks else "ranks"
    return f"{who} waited for the others{_limit(waits)}"
