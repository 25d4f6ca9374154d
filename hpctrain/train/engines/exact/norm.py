"""Sums and norms whose bits do not depend on who adds what up, or when.

Floating-point addition is not associative: gradients that are added in another order differ in
their last bits, and after some hundred steps a loss curve shows it. `PairwiseSum` adds in the order
of a binary tree over the summands' numbers. It is grown like a binary counter, so that of n
summands only log2(n) + 1 partial sums are ever held.

`exact_norm` is the 2-norm of a gradient, the same bits however its elements are spread over ranks:
a sum of squares in fp64 depends on the order of its summands in the last bit, and now and then a
clip factor shows that. Here each square becomes an integer, of which sums are exact. An fp32 number
has an exact square in fp64; scaled by a power of two that all ranks agree on, it is cut into
`LIMBS` integers small enough that no sum of all of them overflows 63 bits.

tests/engines/test_pairwise_sum.py holds the promises.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.core.world import World

LIMBS = 3
CHUNK = 1 << 22
"""Elements at a time: each needs some forty bytes beside the gradient's own."""


def exact_norm(parts: Sequence[torch.Tensor], count: int, world: World, *, spread: bool) -> float:
    """Return the 2-norm of all parts of all ranks; infinite if any element is not finite.

    Collective if `spread`: then each element is on one rank only; otherwise this rank has them all.
    `count` is at least the elements on all ranks together, and the same at any world size.
    """
    largest = torch.zeros((), dtype=torch.float64, device=world.device)
    for part in parts:
        if part.numel():
            largest = torch.maximum(largest, part.detach().abs().max().to(largest))
    # A MAX over ranks may lose what is not a number.
    largest = torch.where(largest.isfinite(), largest, math.inf)
    if spread:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    top = float(largest)
    if top == 0.0 or not math.isfinite(top):
        return top
    exponent = math.frexp(top)[1]  # every square is below 2 ** (2 * exponent)
    bits = 62 - max(1, count).bit_length()
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=world.device)
    for part in parts:
        for chunk in torch.split(part.detach().reshape(-1), CHUNK):
            limbs += limbs_of(chunk.to(world.device), bits - 2 * exponent, bits)
    if spread:
        dist.all_reduce(limbs)
    return root_of(limbs.tolist(), bits, exponent)


def limbs_of(values: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Return squares times 2 ** shift as integers, in digits of so many bits, each digit added up.

    The scaled squares of `values` are below 2 ** bits. The result is `LIMBS` integers, the highest
    digit's first; what is below the last one is cut off.
    """
    rest = values.to(torch.float64).square().mul_(2.0**shift)
    digits = []
    for _ in range(LIMBS):
        whole = rest.floor()
        digits.append(whole.to(torch.int64).sum())
        rest = rest.sub_(whole).mul_(2.0**bits)
    return torch.stack(digits)


def root_of(limbs: Sequence[int], bits: int, exponent: int) -> float:
    """The square root of what digits of squares add up to."""
    total = 0
    for limb in limbs:
        total = (total << bits) + limb
    return math.sqrt(math.ldexp(float(total), 2 * exponent - LIMBS * bits))


class PairwiseSum:
    """Adds up lists of tensors by element, as they come (leaf 0, leaf 1, ...); `count` so far."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[tuple[int, list[torch.Tensor]]] = []
        """Sums of 2^level adjoining leaves each, with their level, from the left."""

    def push(self, leaf: Sequence[torch.Tensor]) -> None:
        """Add the next leaf. What is kept of it is a copy: the caller may use its memory again.

        Raises:
            ValueError: its tensors are not shaped like those of the leaves before.
        """
        if self._sums:
            before = [tuple(part.shape) for part in self._sums[0][1]]
            now = [tuple(part.shape) for part in leaf]
            if before != now:
                raise ValueError(f"leaf {self.count} has shapes {now}, those before it {before}")
        level, added = 0, list(leaf)
        while self._sums and self._sums[-1][0] == level:
            _, left = self._sums.pop()
            added = [one.add_(other) for one, other in zip(left, added, strict=True)]
            level += 1
        if level == 0:
            added = [part.clone() for part in added]
        self._sums.append((level, added))
        self.count += 1

    def total(self) -> list[torch.Tensor]:
        """The sum of all leaves; the counter is empty afterwards.

        Raises:
            ValueError: there are none.
        """
        if not self._sums:
            raise ValueError("there is nothing to add up")
        _, right = self._sums.pop()
        while self._sums:
            _, left = self._sums.pop()
            right = [one.add_(other) for one, other in zip(left, right, strict=True)]
        self.count = 0
        return right

    def clear(self) -> None:
        """Forget all leaves."""
        self.count = 0
        self._sums.clear()
