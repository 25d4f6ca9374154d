"""Making a copy whole from other copies of the same parts, block by block. Pure but for its reads.

What is whole is known from the copy's digest, which its replica server has sent over a connection
with codes: it proves the proof at the copy's end, and that proves the header and each block. So a
copy that is not here at all, and one in which a byte has changed, are repaired alike: what does not
prove is read from elsewhere. tests/unit/memory/test_mending.py holds the promises.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.manifest import block_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpctrain.node.memory.copy_plan import CopyPlan

Range = tuple[int, int]
"""Bytes of a copy: the first, and the one behind the last."""
TURNS = 2
"""At each other copy: the proof, then what it shows to be bad."""


def blocks(plan: CopyPlan) -> Iterator[Range]:
    """The header of a copy, and each of its blocks."""
    yield 0, plan.head
    ends = plan.head + np.cumsum([0, *plan.sizes], dtype=np.int64)
    for low, high in pairwise(ends.tolist()):
        for begin in range(low, high, plan.block_bytes):
            yield begin, min(begin + plan.block_bytes, high)


def bad_ranges(view: memoryview, plan: CopyPlan, digest: str) -> list[Range]:
    """Return the ranges of a copy that are bad; the proof alone, if that is bad.

    `view` has `plan.size` bytes; `digest` is of the whole copy, as in a manifest.
    """
    ranges = list(blocks(plan))
    low = plan.size - shard.proof_bytes(len(ranges) - 1)
    proof = bytes(view[low : plan.size])
    if shard.proof_digest(proof) != digest:
        return [(low, plan.size)]
    said = np.frombuffer(proof, "<u8").tolist()
    return [
        (begin, end)
        for (begin, end), awaited in zip(ranges, said, strict=True)
        if block_digest(view[begin:end]) != awaited
    ]


def merged(ranges: Iterable[Range], most_bytes: int) -> Iterator[Range]:
    """The same bytes in fewer ranges: neighbours together, none longer than `most_bytes`."""
    low = high = -1
    for begin, end in ranges:
        if begin != high:
            yield from _cut(low, high, most_bytes)
            low = begin
        high = end
    yield from _cut(low, high, most_bytes)


def mend(
    view: memoryview,
    plan: CopyPlan,
    digest: str,
    others: Iterable[Callable[[list[Range]], Iterator[tuple[int, bytes]]]],
) -> bool:
    """Repair a copy in `view` from other copies; return whether all of it is complete then.

    Each of `others` reads ranges of another copy: bytes, and where they go.
    """
    bad = bad_ranges(view, plan, digest)
    for read in others:
        for _ in range(TURNS):
            if not bad:
                return True
            for low, content in read(bad):
                view[low : low + len(content)] = content
            bad = bad_ranges(view, plan, digest)
    return not bad


def _cut(low: int, high: int, most_bytes: int) -> Iterator[Range]:
    for begin in range(low, high, most_bytes):
        yield begin, min(begin + most_bytes, high)
