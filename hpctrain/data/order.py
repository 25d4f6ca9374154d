"""The order of the samples, as a function of seed and position alone. Standard library only.

World size, node count, worker count and batch size do not enter, so the only state of the data is
one number: how many samples have been consumed. The promises are held by
tests/unit/data/test_order.py.
"""

from __future__ import annotations

from functools import lru_cache

ROUNDS = 8
_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
        self.size = size
        self.seed = seed
        self._half_bits = ((size - 1).bit_length() + 1) // 2

    def index(self, position: int) -> int:
        """The sample at a global position, counted from 0 over all epochs."""
        if position < 0:
            raise IndexError(f"position {position} is before the first sample")
        epoch, index = divmod(position, self.size)
        keys = _round_keys(self.seed, epoch)
        index = self._permute(index, keys)
        while index >= self.size:
            index = self._permute(index, keys)
        return index

    def indices(self, first: int, last: int) -> list[int]:
        """The samples at the global positions [first, last)."""
        return [self.index(position) for position in range(first, last)]

    def _permute(self, value: int, keys: tuple[int, ...]) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._half_bits | right


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    # Two mixings, so that (seed, epoch + 1) and (seed + 1, epoch) have nothing in common.
    start = _mix(_mix(seed) ^ epoch)
    return tuple(_mix(start + number * _GOLDEN) for number in range(1, ROUNDS + 1))


def _mix(value: int) -> int:
    """A bijection of 64-bit numbers; every input bit moves every output bit (SplitMix64)."""
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK_64
    return value ^ value >> 31
