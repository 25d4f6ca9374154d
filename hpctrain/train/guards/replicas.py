"""Ranks that hold the same weights: what is compared of them at which step, and who is wrong. Pure.

Copies of a model are changed alike on every rank, by the same gradients. Where their bits differ, a
bit has flipped or a device computes wrong, and each further step trains on a mixture. A slice of
the weights is digested at each step; after a turn through all slices each rank says one number.
tests/unit/guards/test_replicas.py holds the promises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FEW_RANKS = 256
"""With more, each says its number after as many turns more: rank 0 hears so many a turn at most."""


@dataclass(frozen=True)
class Divergence:
    """Ranks that should hold the same weights, and do not.

    Attributes:
        suspects: Those that differ from most others; all of them where there is no majority.
        is_certain: There is one: a majority of three or more.
        compared: All ranks that should hold the same.
    """

    suspects: tuple[int, ...]
    is_certain: bool
    compared: tuple[int, ...]


def slices(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of tensors, in so many slices that take about as long; the same on every rank.

    Args:
        sizes: Bytes of each tensor.
        count: Slices; some are empty where there are fewer tensors.
    """
    cut: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        lightest = loads.index(min(loads))
        cut[lightest].append(number)
        loads[lightest] += sizes[number]
    return [sorted(numbers) for numbers in cut]


def window_of(count: int, world_size: int) -> int:
    """Steps after which each rank says its number: whole turns, so that every tensor was seen."""
    return count * max(1, -(-world_size // FEW_RANKS))


def differing(digests: Sequence[float], groups: Sequence[Sequence[int]]) -> list[Divergence]:
    """Whose weights are not those of the ranks that should hold the same.

    Args:
        digests: Of each rank.
        groups: Ranks that should hold the same; each rank in one at most.
    """
    wrong = []
    for ranks in groups:
        counts = Counter(digests[rank] for rank in ranks)
        if len(counts) == 1:
            continue
        usual, votes = counts.most_common(1)[0]
        is_certain = 2 * votes > len(ranks)
        suspects = tuple(rank for rank in ranks if not is_certain or digests[rank] != usual)
        wrong.append(Divergence(suspects, is_certain, tuple(ranks)))
    return wrong


def clean_step(said_at: int, window: int) -> int:
    """The last step whose weights were surely right, where a comparison is the first to differ.

    A flip may have come right behind the look at its slice, in the turn before: only what was there
    before that turn is known to be right.

    Args:
        said_at: The step after which the ranks said their numbers.
        window: Steps between two such times.
    """
    return max(0, said_at - 2 * window)
