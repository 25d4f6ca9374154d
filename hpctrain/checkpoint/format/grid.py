"""Bytes that lie apart: nested loops with strides, on the side of a chunk and on that of memory.

Pure numbers. However large a box is, a few loops describe it, and any part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Grid:
    """Bytes as nested loops, outermost first, laid out in a chunk and in a destination.

    The innermost loop runs over neighbouring bytes on both sides. Along the loops, positions in the
    chunk ascend.
    """

    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.counts)

    def before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of its bytes lie before each of these positions of the chunk."""
        left = np.maximum(positions - self.source, 0)
        found = np.zeros(len(positions), np.int64)
        inner = self.nbytes
        inside = np.ones(len(positions), bool)
        for count, stride in zip(self.counts, self.source_strides, strict=True):
            inner //= count
            steps = np.minimum(left // stride, count)
            found += np.where(inside, steps * inner, 0)
            inside &= steps < count  # behind the last step of a loop, all of it was counted
            left -= steps * stride
        return found

    def part(self, low: int, high: int) -> Iterator[Grid]:
        """Its bytes [low, high), counted along the loops, as few grids."""
        for begin, counts in _lexicographic(low, high, self.counts):
            yield Grid(
                counts,
                self.source_strides,
                self.target_strides,
                self.source + dot(begin, self.source_strides),
                self.target + dot(begin, self.target_strides),
            )

    def turned(self) -> Grid:
        """The same with chunk and destination exchanged."""
        return Grid(self.counts, self.target_strides, self.source_strides, self.target, self.source)


def grid_of(
    counts: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    at: tuple[int, int],
    itemsize: int,
) -> Grid:
    """Loops over elements as loops over bytes, those joined that go on where the inner one ends."""
    loops = [(itemsize, 1, 1)]
    for count, source, target in zip(
        reversed(counts), reversed(source_strides), reversed(target_strides), strict=True
    ):
        inner = loops[-1]
        if (source, target) == (inner[0] * inner[1], inner[0] * inner[2]):
            loops[-1] = (inner[0] * count, inner[1], inner[2])
        elif count > 1:
            loops.append((count, source, target))
    sizes, sources, targets = zip(*reversed(loops), strict=True)
    return Grid(sizes, sources, targets, *at)


def strides_of(sizes: Sequence[int], itemsize: int) -> list[int]:
    """Bytes from one index to the next in each dimension of a row-major box."""
    strides = []
    for size in reversed(sizes):
        strides.append(itemsize)
        itemsize *= size
    return strides[::-1]


def dot(index: Sequence[int], strides: Sequence[int]) -> int:
    """Where an index lies, in bytes."""
    return sum(at * stride for at, stride in zip(index, strides, strict=True))


def _lexicographic(
    low: int, high: int, counts: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Steps [low, high) of nested loops as boxes of their indices: begin, counts."""
    if low >= high:
        return
    if not counts:
        yield (), ()
        return
    inner, deeper = math.prod(counts[1:]), counts[1:]
    (first, head), (last, tail) = divmod(low, inner), divmod(high, inner)
    if first == last:
        for begin, size in _lexicographic(head, tail, deeper):
            yield (first, *begin), (1, *size)
        return
    if head:
        for begin, size in _lexicographic(head, inner, deeper):
            yield (first, *begin), (1, *size)
        first += 1
    if first < last:
        yield (first, *(0 for _ in deeper)), (last - first, *deeper)
    for begin, size in _lexicographic(0, tail, deeper):
        yield (last, *begin), (1, *size)
