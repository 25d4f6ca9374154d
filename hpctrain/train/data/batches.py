"""The division of a step's samples over ranks and passes, at any world size.

A step takes the global positions [first, first + global_batch), on any number of ranks.
Every position is taken exactly once, in as many passes as `base.mesh` says. `Holes` are positions
that a guard has left out: every resume leaves out the same ones. Standard library only. The
promises are held by tests/unit/data/test_batches.py and test_holes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.mesh import (
    ANY_PASSES,
    MicrobatchRules,
    count_leaves,
    plan_micro_batches,
    shares,
)
from hpctrain.errors import CheckpointError
from hpctrain.train.data.order import count_in, is_count, require_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpctrain.train.data.order import SampleOrder


class Holes:
    """Positions to be left out: ranges [first, last) that neither meet nor overlap, in order."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.add(ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out these too; the same ones again change nothing."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted((f, n) for f, n in chain(self._ranges, ranges) if f < n):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(joined[-1][1], last)
            else:
                joined.append((first, last))
        self._ranges = joined

    def end_at(self, position: int) -> int:
        """Where the hole ends in which a position lies; the position itself where it is in none."""
        return next((last for first, last in self._ranges if first <= position < last), position)

    def begin_after(self, position: int) -> int | None:
        """Where the next hole begins behind a position; None where there is none."""
        return next((first for first, _ in self._ranges if first > position), None)

    def positions(self, first: int, count: int) -> list[int]:
        """The first so many positions from one on that are in no hole."""
        places: list[int] = []
        position = first
        while len(places) < count:
            position = self.end_at(position)
            begin = self.begin_after(position)
            end = position + count - len(places)
            end = end if begin is None else min(end, begin)
            places += range(position, end)
            position = end
        return places

    def state(self) -> dict[str, list[list[int]]]:
        """For a state_dict: nothing where there is no hole."""
        return {"holes": [list(each) for each in self._ranges]} if self._ranges else {}


def holes_of(state: Any) -> list[tuple[int, int]]:
    """What a state_dict says of holes; none where it says nothing.

    Raises:
        CheckpointError: those are no ranges of samples.
    """
    given = state.get("holes", [])
    if not isinstance(given, list) or not all(map(_is_range, given)):
        raise CheckpointError(
            f"data state has holes {given!r}, not ranges of samples; resume from another checkpoint"
        )
    return [(first, last) for first, last in given]


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))  # noqa: PLR2004


def rank_positions(first_position: int, global_batch: int, rank: int, world_size: int) -> range:
    """The global positions that one rank takes of the step that begins at `first_position`."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    sizes = shares(global_batch, world_size)
    first = first_position + sum(sizes[:rank])
    return range(first, first + sizes[rank])


def pieces(positions: range, count: int) -> list[range]:
    """The positions cut into exactly `count` adjoining ranges, the last ones empty if too few."""
    cut: list[range] = []
    first = positions.start
    for size in shares(len(positions), count) if positions else [0] * count:
        cut.append(range(first, first + size))
        first += size
    return cut


@dataclass(frozen=True)
class MicrobatchSamples:
    """The samples of one forward and backward pass of one rank; never empty."""

    indices: list[int]
    weights: list[float]
    """1 for a sample that counts, 0 for one that only keeps this rank in step with the others."""
    leaf: int | None = None
    """Number among the passes of all ranks (`MicrobatchRules.leaves`); None if none counts."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank does in one step."""

    first: int
    last: int
    """The step takes the global positions [first, last), over all ranks."""
    pieces: list[MicrobatchSamples]
    """One for each pass; equally many on every rank."""

    @property
    def consumed(self) -> list[int]:
        """The samples that count, in the order of this rank: what an audit writes down."""
        return [
            index
            for piece in self.pieces
            for index, weight in zip(piece.indices, piece.weights, strict=True)
            if weight
        ]


def mean_weight(taken: StepBatch, ranks: int) -> float:
    """What a rank's mean loss of its part counts, where the means of `ranks` are averaged."""
    own = sum(sum(piece.weights) for piece in taken.pieces)
    return own * ranks / (taken.last - taken.first)


def cut_step(
    positions: range,
    rank: int,
    world_size: int,
    micro_batch: int,
    *,
    index: Callable[[int], int],
    passes: MicrobatchRules = ANY_PASSES,
) -> StepBatch:
    """One rank's part of the global positions of a step.

    Args:
        positions: The step's global positions, of all ranks together.
        rank: Whose part.
        world_size: How many ranks there are now.
        micro_batch: Samples per pass of one rank at most; 0 for any number.
        index: The sample at a global position, e.g. `SampleOrder.index`.
        passes: What the engine asks of the cuts.

    Raises:
        ValueError: see `plan_micro_batches`.
    """
    plan = plan_micro_batches(len(positions), world_size, micro_batch, passes)
    spare = index(positions.start)
    if passes.leaves:
        cut = _leaves(positions, rank, world_size, micro_batch, plan.micro_batches)
    else:
        positions_of_rank = rank_positions(positions.start, len(positions), rank, world_size)
        cut = [(piece, None) for piece in pieces(positions_of_rank, plan.micro_batches)]
    microbatches = []
    for taken, leaf in cut:
        # A pass of leaves that counts nothing is as large as the others: it takes no time that they
        # do not take, and a compiled model sees the same shapes at any number of ranks.
        full = passes.equal or (passes.leaves and leaf is None)
        missing = (plan.largest_piece if full else 1) - len(taken)
        microbatches.append(
            MicrobatchSamples(
                [*map(index, taken), *([spare] * missing)],
                [1.0] * len(taken) + [0.0] * missing,
                leaf,
            )
        )
    return StepBatch(positions.start, positions.stop, microbatches)


def _leaves(
    positions: range, rank: int, world_size: int, micro_batch: int, count: int
) -> list[tuple[range, int | None]]:
    """One rank's passes: positions and number among those of all ranks, None where none is left."""
    leaves = count_leaves(len(positions), micro_batch)
    passes_of_rank: list[tuple[range, int | None]] = []
    for leaf in range(rank, count * world_size, world_size):
        if leaf < leaves:
            passes_of_rank.append((positions[leaf * micro_batch : (leaf + 1) * micro_batch], leaf))
        else:
            passes_of_rank.append((positions[:0], None))
    return passes_of_rank


class GlobalBatches:
    """One rank's endless walk through the sample order, step by step.

    Its state is the number of samples consumed by all ranks together, those that were left out
    counted with them. World size, micro batch and global batch may be others after a restart: the
    walk continues at exactly the next sample.

    Attributes:
        taken: The step that was handed out last; None before the first.
    """

    def __init__(
        self,
        order: SampleOrder,
        global_batch: int,
        rank: int,
        world_size: int,
        micro_batch: int,
        *,
        consumed: int = 0,
        passes: MicrobatchRules = ANY_PASSES,
    ) -> None:
        self.order = order
        self.global_batch = global_batch
        self.rank = rank
        self.world_size = world_size
        self.micro_batch = micro_batch
        self.consumed = consumed
        self.passes = passes
        self.taken: StepBatch | None = None
        self._holes = Holes()

    def next_step(self) -> StepBatch:
        """This rank's part of the next step; from here on its samples count as consumed."""
        positions: Sequence[int] = range(self.consumed, self.consumed + self.global_batch)
        if self._holes:
            positions = self._holes.positions(self.consumed, self.global_batch)
        step = cut_step(
            range(self.global_batch),
            self.rank,
            self.world_size,
            self.micro_batch,
            index=lambda number: self.order.index(positions[number]),
            passes=self.passes,
        )
        self.taken = replace(step, first=positions[0], last=positions[-1] + 1)
        self.consumed = self.taken.last
        return self.taken

    def leave_out(self, holes: Iterable[tuple[int, int]]) -> None:
        """Come by these ranges of positions without handing them out; the same on every rank."""
        self._holes.add(holes)

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands: equal on all ranks. `global_batch` is for the reader only."""
        return {
            "samples_consumed": self.consumed,
            "seed": self.order.seed,
            "size": self.order.size,
            "global_batch": self.global_batch,
            **self._holes.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken, at whatever world size and batch size there is now.

        Raises:
            CheckpointError: the state is of another order: samples would be skipped or seen twice.
        """
        require_order(state, self.order)
        consumed = count_in(state, "samples_consumed")
        self._holes.add(holes_of(state))
        self.consumed = consumed
