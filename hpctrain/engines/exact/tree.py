"""Sums whose bits depend on the number of summands alone, not on who adds them up or when.

Floating-point addition is not associative: gradients that are added in another order differ in
their last bits, and after some hundred steps a loss curve shows it. Here the order is a binary
tree over the summands' numbers. It is grown like a binary counter, so that of n summands only
log2(n) + 1 partial sums are ever held. The promise is tested in tests/engines/test_tree.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Counter:
    """Adds up lists of tensors, element by element, as they come: leaf 0, leaf 1 and so on.

    Attributes:
        count: Leaves so far.
    """

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
