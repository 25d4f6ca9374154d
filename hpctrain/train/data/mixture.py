"""Several datasets with weights as one: from which a position takes, and which sample of it.

Positions are cut into blocks of 10,000. In each block every dataset has the same number of places,
its weight in ten-thousandths, at random among the others. So how many samples of each were taken
before a position is arithmetic, and the order is a function of seed, weights and position alone.
A dataset's own samples come in its own order, each once per its own epoch, whatever the weights.
The promises are held by tests/unit/data/test_mixture.py.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.data.order import FileOrder, SampleOrder, as_integers, mixed, mixed_many

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from hpctrain.train.data.order import WalkOrder

log = logging.getLogger("hpctrain.data")

BLOCK = 10_000


class Mixture:
    """Map-style datasets with weights as one, for `Run.loader`.

    Of any 10,000 samples in a row each dataset gives its weight's share, give or take the ends. Its
    own samples are each used once before any is used again: one with few samples and a large weight
    goes through many epochs while another goes through its first.

    An epoch of the loader is as many samples as the datasets have together. Weights that are others
    after a restart count from there on, and a line in the log says so; every dataset goes on with
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
        self._orders: list[WalkOrder] = [
            FileOrder(size) if seed is None else SampleOrder(size, seed * 1_000_003 + number)
            for number, size in enumerate(whole, start=1)
        ]

    def take(self, positions: Sequence[int]) -> list[int]:
        """The samples at these global positions."""
        asked: dict[int, tuple[list[int], list[int]]] = {}
        for place, position in enumerate(as_integers(positions)):
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
        """Go on from there; with other weights each dataset goes on with its next sample.

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
    shuffled = np.argsort(mixed_many(np.arange(BLOCK, dtype=np.uint64) ^ np.uint64(key)))
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


def _checked(state: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """The parts of a state, each of the kind that it must be."""
    parts = state if isinstance(state, dict) else {}
    since = parts.get("since")
    rows: list[Any] = [parts.get(key) for key in ("sizes", "weights", "drawn")]
    sizes, quotas, drawn = rows
    numbers = [since]
    for row in rows:
        numbers += row if isinstance(row, list) else [None]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CheckpointError(
            "data state of the checkpoint is not that of a mixture, or is damaged; set the dataset "
            "back, or resume from another checkpoint"
        )
    if len(sizes) == count and (len(quotas), len(drawn), sum(quotas)) != (count, count, BLOCK):
        raise CheckpointError("data state of a mixture is damaged; resume from another checkpoint")
    return sizes, quotas, since, drawn
