"""The order of the samples, as a function of seed and position alone.

Standard library, with numpy where many positions are asked for at once.

World size, node count, worker count and batch size do not enter, so the only state of the data is
one number: how many samples have been consumed. The promises are held by
tests/unit/data/test_order.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

ROUNDS = 8
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MANY = 48
"""From so many positions on numpy is faster than a loop, with all that it needs beforehand."""
_TABLE_BITS = 12
"""Of half a number: up to 16 million samples a round's results are a small table."""
_FEW = 10
"""Below so many values a loop is faster than numpy's eight rounds alone."""


class WalkOrder(Protocol):
    """What a loader walks through: a sample for each global position, counted over all epochs."""

    @property
    def size(self) -> int:
        """Samples of an epoch."""

    @property
    def seed(self) -> int | None:
        """None where nothing is shuffled."""

    def take(self, positions: Sequence[int]) -> list[int]:
        """The samples at these global positions."""


def as_integers(positions: Sequence[int]) -> Sequence[int]:
    """Python's own: numpy's overflow."""
    integers: Sequence[int] = positions.tolist() if hasattr(positions, "tolist") else positions
    return integers


class FileOrder:
    """The samples as they lie, epoch after epoch."""

    seed = None

    def __init__(self, size: int) -> None:
        self.size = size

    def take(self, positions: Sequence[int]) -> list[int]:
        """The samples at these global positions."""
        return [position % self.size for position in as_integers(positions)]


class SampleOrder:
    """Every sample once per epoch, in an order of its own in each epoch and for each seed.

    An epoch is a Feistel permutation of the smallest domain of an even number of bits that holds
    `size`; an index that falls outside is sent through again until it falls inside (cycle walking:
    fewer than four rounds trips on average). So nothing is stored, however large the data set is.
    The numbers are pinned by tests: a run must go on in the same order after an upgrade.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError(f"an order needs at least one sample, got size {size}")
        self.size: int = size
        self.seed: int = seed
        self._half_bits = ((size - 1).bit_length() + 1) // 2

    def index(self, position: int) -> int:
        """The sample at a global position, counted from 0 over all epochs."""
        if position < 0:
            raise IndexError(f"position {position} is before the first sample")
        epoch, index = divmod(position, self.size)
        keys = _round_keys(self.seed, epoch)
        return self._walk_inside(self._permute(index, keys), keys)

    def indices(self, first: int, last: int) -> list[int]:
        """The samples at the global positions [first, last)."""
        return self.take(range(first, last))

    def take(self, positions: Sequence[int]) -> list[int]:
        """The samples at these global positions, in the order in which they are given."""
        if len(positions) < _MANY:
            return [self.index(position) for position in as_integers(positions)]
        import numpy as np

        offsets = np.asarray(positions, np.int64)
        if offsets.min() < 0:
            raise IndexError(f"position {offsets.min()} is before the first sample")
        epochs = offsets // self.size
        indices = offsets - epochs * self.size
        if epochs.min() == epochs.max():
            indices = self._permute_epoch(indices, int(epochs[0]))
        else:
            for epoch in np.unique(epochs):
                among = epochs == epoch
                indices[among] = self._permute_epoch(indices[among], int(epoch))
        samples: list[int] = indices.tolist()
        return samples

    def _permute_epoch(self, offsets: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        import numpy as np

        keys = _round_keys(self.seed, epoch)
        indices = self._permute_many(offsets, epoch)
        outside = np.flatnonzero(indices >= self.size)
        while len(outside) >= _FEW:
            again = self._permute_many(indices[outside], epoch)
            indices[outside] = again
            outside = outside[again >= self.size]
        for place in outside.tolist():
            indices[place] = self._walk_inside(int(indices[place]), keys)
        return indices

    def _walk_inside(self, value: int, keys: tuple[int, ...]) -> int:
        while value >= self.size:
            value = self._permute(value, keys)
        return value

    def _permute_many(self, values: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        bits = self._half_bits
        left, right = values >> bits, values & ((1 << bits) - 1)
        if bits <= _TABLE_BITS:
            for table in _round_tables(self.seed, epoch, bits):
                left, right = right, left ^ table.take(right)
        else:
            for key in _round_keys(self.seed, epoch):
                left, right = right, left ^ _round_many(right, key, bits)
        return left << bits | right

    def _permute(self, value: int, keys: tuple[int, ...]) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        return left << self._half_bits | right


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    # Two mixings, so that (seed, epoch + 1) and (seed + 1, epoch) have nothing in common.
    start = mixed(mixed(seed) ^ epoch)
    return tuple(mixed(start + number * _GOLDEN) for number in range(1, ROUNDS + 1))


@lru_cache(maxsize=4)
def _round_tables(seed: int, epoch: int, bits: int) -> list[npt.NDArray[np.int64]]:
    """What each round makes of every half: to look it up takes a fifth of working it out."""
    import numpy as np

    halves = np.arange(1 << bits, dtype=np.int64)
    return [_round_many(halves, key, bits) for key in _round_keys(seed, epoch)]


def _round_many(halves: npt.NDArray[np.int64], key: int, bits: int) -> npt.NDArray[np.int64]:
    import numpy as np

    mixed = mixed_many(halves.astype(np.uint64) ^ np.uint64(key))
    return (mixed & np.uint64((1 << bits) - 1)).astype(np.int64)


def mixed(value: int) -> int:
    """A bijection of 64-bit numbers; every input bit moves every output bit (SplitMix64)."""
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ value >> 30) * _FACTORS[0]) & _MASK_64
    value = ((value ^ value >> 27) * _FACTORS[1]) & _MASK_64
    return value ^ value >> 31


def mixed_many(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mixed` of each; numpy's arrays of 64 bits drop what overflows."""
    import numpy as np

    mixed = values + np.uint64(_GOLDEN)
    shifted = mixed >> np.uint64(30)
    mixed ^= shifted
    mixed *= np.uint64(_FACTORS[0])
    np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed ^= shifted
    mixed *= np.uint64(_FACTORS[1])
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed
