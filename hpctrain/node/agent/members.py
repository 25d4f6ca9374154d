"""Which nodes of a job take part in a round of its ranks, where some have been lost. Pure.

A round keeps the members of the one before it that live, in their order, so that most ranks keep
their place. Spares take the places that are free, and where none is left the round has fewer nodes,
if the settings allow that and the model can be spread so. tests/unit/agent/test_members.py holds
the promises.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

OFTEN_S = 3600.0
"""A node whose ranks died twice within so long is left out, where the round can do without it."""


@dataclass(frozen=True)
class RoundSize:
    """How many nodes a round may have.

    Attributes:
        most: No round has more; the nodes beyond are spares.
        least: No round has fewer.
    """

    most: int
    least: int


def round_size(least: int, most: int, *, allocated: int, spares: int, shrinks: bool) -> RoundSize:
    """Return the sizes that the settings allow in a job.

    `least` and `most` are of `slurm.nodes`, `spares` is `alive.spares`; `allocated` includes
    spares. A run that `shrinks` may have fewer nodes than in the round before.
    """
    # A job that SLURM has run again after a loss may have fewer than were asked for.
    wanted = min(max(allocated - spares, least), most, allocated)
    return RoundSize(wanted, min(least, wanted) if shrinks else wanted)


def choose_members(
    before: Sequence[int],
    living: Collection[int],
    size: RoundSize,
    fits: Callable[[int], bool] = lambda _count: True,
) -> tuple[int, ...] | None:
    """Return the nodes of the next round by their place in it; None if there can be none.

    `before` is by place, empty for the first round; `fits`: whether so many nodes' ranks have a
    mesh.
    """
    order = [node for node in before if node in living]
    order += sorted(set(living) - set(order))
    for count in range(min(size.most, len(order)), max(size.least, 1) - 1, -1):
        if fits(count):
            return tuple(order[:count])
    return None


class RankDeaths:
    """How often ranks of a node died lately: one that is broken does it again."""

    def __init__(self) -> None:
        """None has."""
        self._at: defaultdict[int, list[float]] = defaultdict(list)

    def note(self, node: int, now: float) -> bool:
        """Record a rank's death, `now` in monotonic seconds; return whether that is too often."""
        recent = [at for at in self._at[node] if now - at < OFTEN_S]
        self._at[node] = [*recent, now]
        return bool(recent)
