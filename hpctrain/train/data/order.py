"""The order of the samples, as a function of seed and position alone; also of several datasets.

Standard library, with numpy where many positions are asked for at once. World size, node count,
worker count and batch size do not enter, so the only state of the data is one number: how many
samples have been consumed.

A mixture cuts positions into blocks of 10,000, in which every dataset has its weight in
ten-thousandths of the places, at random. A dataset's own samples come in its own order, each once
per its own epoch, whatever the weights. The promises are held by tests/unit/data/test_order.py and
test_mixture.py.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    WalkOrder: TypeAlias = "FileOrder | SampleOrder | MixtureOrder"
    """What a loader walks through: a sample for each global position, counted over all epochs."""


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


def _as_integers(positions: Sequence[int]) -> Sequence[int]:
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
        return [position % self.size for position in _as_integers(positions)]


class SampleOrder:
    """Every sample once per epoch, in an order of its own in each epoch and for each seed.

    An epoch is a Feistel permutation of the smallest domain of an even number of bits that holds
    `size`; an index that falls outside is sent through again until it falls inside (cycle walking:
    fewer than four rounds trips on average). So nothing is stored, however large the data set is.
    The numbers are pinned by tests: a run must continue in the same order after an upgrade.
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
            return [self.index(position) for position in _as_integers(positions)]
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

    mixed = _mixed_many(halves.astype(np.uint64) ^ np.uint64(key))
    return (mixed & np.uint64((1 << bits) - 1)).astype(np.int64)


def mixed(value: int) -> int:
    """A bijection of 64-bit numbers; every input bit moves every output bit (SplitMix64)."""
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ value >> 30) * _FACTORS[0]) & _MASK_64
    value = ((value ^ value >> 27) * _FACTORS[1]) & _MASK_64
    return value ^ value >> 31


def _mixed_many(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
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


log = logging.getLogger("hpctrain.data")

BLOCK = 10_000


class Mixture:
    """Map-style datasets with weights as one, for `Run.loader`.

    Of any 10,000 samples in a row each dataset gives its weight's share, give or take the ends. Its
    own samples are each used once before any is used again: one with few samples and a large weight
    goes through many epochs while another goes through its first.

    An epoch of the loader is as many samples as the datasets have together. Weights that are others
    after a restart count from there on, and a line in the log says so; every dataset continues with
    its next sample.

    Attributes:
        datasets: What is mixed.
        weights: The share of each, in ten-thousandths; they add up to 1.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float]) -> None:
        """Mix them.

        Args:
            datasets: With a length, and samples by their number.
            weights: Of each, in any unit; they count in ten-thousandths of their sum, and at least
                one. 0 leaves a dataset out.

        Raises:
            UsageError: the weights are not as many, none, negative or no numbers; or a dataset with
                a weight has no samples.
        """
        self.datasets = list(datasets)
        self._sizes = [len(dataset) for dataset in self.datasets]
        self._quotas = _quotas(self._sizes, [float(weight) for weight in weights])
        self.weights = [quota / BLOCK for quota in self._quotas]
        self._ends = list(accumulate(self._sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not one of {len(self)}")
        source = bisect_right(self._ends, index)
        return self.datasets[source][index - self._ends[source] + self._sizes[source]]

    def sample_order(self, seed: int | None) -> MixtureOrder:
        """What `Run.loader` walks through; None for a seed keeps each dataset's own order."""
        return MixtureOrder(self._sizes, self._quotas, seed)


class MixtureOrder:
    """The order of a mixture: indices count through its datasets, one behind the other."""

    def __init__(self, sizes: list[int], quotas: list[int], seed: int | None) -> None:
        self.size = sum(sizes)
        self.seed = seed
        self._sizes = sizes
        self._quotas = quotas
        self._since = 0
        self._drawn = [0] * len(sizes)
        """Samples of each that were taken before the position from which these weights count."""
        self._begins = [0, *accumulate(sizes)]
        # One without samples has no places either, but no order could be made for it.
        whole = [max(1, size) for size in sizes]
        self._orders: list[FileOrder | SampleOrder] = [
            FileOrder(size) if seed is None else SampleOrder(size, seed * 1_000_003 + number)
            for number, size in enumerate(whole, start=1)
        ]

    def take(self, positions: Sequence[int]) -> list[int]:
        """The samples at these global positions."""
        asked: dict[int, tuple[list[int], list[int]]] = {}
        for place, position in enumerate(_as_integers(positions)):
            block, offset = divmod(position - self._since, BLOCK)
            sources, counts = self._table(block)
            source = sources[offset]
            own = self._drawn[source] + block * self._quotas[source] + counts[offset]
            places, owns = asked.setdefault(source, ([], []))
            places.append(place)
            owns.append(own)
        samples = [0] * len(positions)
        for source, (places, owns) in asked.items():
            for place, index in zip(places, self._orders[source].take(owns), strict=True):
                samples[place] = self._begins[source] + index
        return samples

    def state_dict(self) -> dict[str, Any]:
        """By which weights it goes, and since when; equal on all ranks."""
        return {
            "sizes": self._sizes,
            "weights": self._quotas,
            "since": self._since,
            "drawn": self._drawn,
        }

    def load_state_dict(self, state: Any, position: int) -> None:
        """Resume from there; with other weights each dataset continues with its next sample.

        Raises:
            CheckpointError: the datasets are others.
        """
        sizes, quotas, since, drawn = _checked(state, len(self._sizes))
        if sizes != self._sizes:
            raise CheckpointError(
                f"data state of the checkpoint mixes datasets of {sizes} samples, this run of "
                f"{self._sizes}: samples would be skipped or seen twice; set the datasets back, or "
                "start a new run"
            )
        if position < since:
            raise CheckpointError(
                f"data state has weights since position {since} and stands at {position}; "
                "resume from another checkpoint"
            )
        self._since, self._drawn = since, drawn
        if quotas == self._quotas:
            return
        before = MixtureOrder(sizes, quotas, self.seed)
        before._since, before._drawn = since, drawn
        self._since, self._drawn = position, before.drawn_at(position)
        log.warning(
            "the weights of the mixture are others than in the checkpoint (in ten-thousandths %s, "
            "now %s); the new ones count from sample %d on, and each dataset goes on with its next "
            "sample",
            quotas,
            self._quotas,
            position,
        )

    def drawn_at(self, position: int) -> list[int]:
        """How many samples of each dataset are taken before a position."""
        block, offset = divmod(position - self._since, BLOCK)
        taken = self._table(block)[0][:offset]
        return [
            drawn + block * quota + taken.count(source)
            for source, (drawn, quota) in enumerate(zip(self._drawn, self._quotas, strict=True))
        ]

    def _table(self, block: int) -> tuple[list[int], list[int]]:
        return _block(tuple(self._quotas), self.seed or 0, self._since, block)


@lru_cache(maxsize=8)
def _block(
    quotas: tuple[int, ...], seed: int, since: int, block: int
) -> tuple[list[int], list[int]]:
    """For each place of a block its dataset, and how many of that dataset come before it."""
    import numpy as np

    key = mixed(mixed(mixed(seed) ^ since) ^ block)
    shuffled = np.argsort(_mixed_many(np.arange(BLOCK, dtype=np.uint64) ^ np.uint64(key)))
    sources: npt.NDArray[np.int64] = np.repeat(np.arange(len(quotas)), quotas)[shuffled]
    counts = np.empty(BLOCK, np.int64)
    for source, quota in enumerate(quotas):
        counts[sources == source] = np.arange(quota)
    return sources.tolist(), counts.tolist()


def _quotas(sizes: list[int], weights: list[float]) -> list[int]:
    """Places of each dataset in a block: largest remainders, and one at least."""
    if len(weights) != len(sizes) or not sizes:
        raise UsageError(f"a mixture of {len(sizes)} datasets has {len(weights)} weights")
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise UsageError(f"weights {weights} of a mixture: 0 or more each, and one above 0")
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        if weight and not size:
            raise UsageError(f"dataset {number} of a mixture has no samples, and weight {weight}")
    if sum(weight > 0 for weight in weights) > BLOCK:
        raise UsageError(f"a mixture of more than {BLOCK} datasets")
    largest = max(weights)  # sums and shares of huge numbers must not overflow
    total = math.fsum(weight / largest for weight in weights)
    shares = [weight / largest / total * BLOCK for weight in weights]
    quotas = [max(int(share), int(own > 0)) for share, own in zip(shares, weights, strict=True)]
    by_rest = sorted(range(len(shares)), key=lambda n: (quotas[n] - shares[n], n))
    for number in by_rest[: max(0, BLOCK - sum(quotas))]:
        quotas[number] += 1
    while sum(quotas) > BLOCK:  # many that got one although they weigh less
        quotas[quotas.index(max(quotas))] -= 1
    return quotas


# ---- states, checked


def require_order(state: Mapping[str, Any], order: WalkOrder) -> None:
    """Refuse the state of another order: samples would be skipped or seen twice."""
    for key, own in (("seed", order.seed), ("size", order.size)):
        if state.get(key) != own:
            raise CheckpointError(
                f"data state of the checkpoint has {key} {state.get(key)!r}, this run {own}: "
                "samples would be skipped or seen twice; set seed, shuffle and dataset back, "
                "or start a new run"
            )


def count_in(state: Mapping[str, Any], key: str) -> int:
    """A count of samples or epochs in a state_dict; refused where it is none."""
    value: Any = state.get(key)
    if not is_count(value):
        raise CheckpointError(
            f"data state has {key} {value!r}, not a count of samples or epochs; "
            "resume from another checkpoint"
        )
    return int(value)


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on, which torch's generators take as a seed."""
    return type(value) is int and 0 <= value < 1 << 63


def _checked(state: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """The parts of a state, each of the kind that it must be."""
    parts = state if isinstance(state, dict) else {}
    since = parts.get("since")
    rows: list[Any] = [parts.get(key) for key in ("sizes", "weights", "drawn")]
    sizes, quotas, drawn = rows
    numbers = [since]
    for row in rows:
        numbers += row if isinstance(row, list) else [None]
    if not all(map(is_count, numbers)):
        raise CheckpointError(
            "data state of the checkpoint is not that of a mixture, or is damaged; set the dataset "
            "back, or resume from another checkpoint"
        )
    if len(sizes) == count and (len(quotas), len(drawn), sum(quotas)) != (count, count, BLOCK):
        raise CheckpointError("data state of a mixture is damaged; resume from another checkpoint")
    return sizes, quotas, since, drawn
