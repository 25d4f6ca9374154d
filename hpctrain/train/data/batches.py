"""The division of a step's samples over ranks and passes, at any world size.

A step takes the global positions [first, first + global_batch), whoever is there to take them. Two
things are kept whatever the numbers are: every position is taken exactly once, and every rank runs
the same number of forward and backward passes, since sharded engines communicate in each of them (a
rank with one pass less would leave the others waiting for ever). `MicrobatchRules` is what an
engine asks of that number. Standard library only. The promises are held by
tests/unit/data/test_batches.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError
from hpctrain.train.data.holes import Holes, holes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpctrain.train.data.order import SampleOrder


def shares(global_batch: int, world_size: int) -> list[int]:
    """How many samples of a step each rank takes: at most one more than any other, or none."""
    if global_batch < 1 or world_size < 1:
        raise ValueError(f"cannot share {global_batch} samples among {world_size} ranks")
    base, extra = divmod(global_batch, world_size)
    return [base + (rank < extra) for rank in range(world_size)]


def rank_positions(first_position: int, global_batch: int, rank: int, world_size: int) -> range:
    """The global positions that one rank takes of the step that begins at `first_position`."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    sizes = shares(global_batch, world_size)
    first = first_position + sum(sizes[:rank])
    return range(first, first + sizes[rank])


@dataclass(frozen=True)
class MicrobatchRules:
    """What an engine asks of the way a step's samples are cut; the same on every rank.

    Attributes:
        equal: Every pass of every rank has as many samples, some of weight 0 where there are too
            few (pipelines pass on tensors of one shape).
        at_least: Passes per step, at least.
        multiple_of: Passes per step are a multiple of this.
        leaves: Passes are the same samples at any number of ranks: pass i of all ranks' together
            takes samples [i * micro_batch, (i + 1) * micro_batch) of the step, and is run by rank
            i % ranks. The last may have fewer.
    """

    equal: bool = False
    at_least: int = 1
    multiple_of: int = 1
    leaves: bool = False

    def count(self, needed: int) -> int:
        """Passes per step where so many are needed."""
        if self.at_least < 1 or self.multiple_of < 1:
            raise ValueError(
                f"cannot run at least {self.at_least} passes, a multiple of {self.multiple_of}"
            )
        return -(-max(needed, self.at_least) // self.multiple_of) * self.multiple_of


ANY_PASSES = MicrobatchRules()
"""Nothing is asked: as few passes as there can be, of shares as equal as they can be."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """How a step is cut into forward and backward passes; the same on every rank."""

    micro_batches: int
    """Passes per step of every rank."""
    largest_piece: int
    """Samples in the largest pass of any rank, for what memory must hold."""
    empty_pieces: int
    """Passes of a step, of all ranks together, that do no work: 0 where the shares are equal."""


def plan_micro_batches(
    global_batch: int, world_size: int, micro_batch: int, passes: MicrobatchRules = ANY_PASSES
) -> MicroBatchPlan:
    """The fewest passes in which no rank holds more than `micro_batch` samples (0: any number).

    Raises:
        ValueError: the numbers make no sense; or `passes.leaves` without a `micro_batch`.
    """
    if micro_batch < 0:
        raise ValueError(f"a micro batch cannot have {micro_batch} samples")
    sizes = shares(global_batch, world_size)
    if passes.leaves:
        leaves = count_leaves(global_batch, micro_batch)
        count = passes.count(-(-leaves // world_size))
        return MicroBatchPlan(count, min(micro_batch, global_batch), count * world_size - leaves)
    count = passes.count(-(-sizes[0] // micro_batch) if micro_batch else 1)
    return MicroBatchPlan(
        micro_batches=count,
        largest_piece=-(-sizes[0] // count),
        empty_pieces=sum(max(0, count - size) for size in sizes),
    )


def count_leaves(global_batch: int, micro_batch: int) -> int:
    """Passes of a step that count, of all ranks together, where they are the same at any number."""
    if micro_batch < 1:
        raise ValueError(
            f"passes that are the same at any number of ranks cannot have {micro_batch} samples; "
            "set a micro batch"
        )
    return -(-global_batch // micro_batch)


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
    walk goes on at exactly the next sample.

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
        """Go on where the state was taken, at whatever world size and batch size there is now.

        Raises:
            CheckpointError: the state is of another order: samples would be skipped or seen twice.
        """
        consumed = state.get("samples_consumed")
        if type(consumed) is not int or consumed < 0:
            raise CheckpointError(
                f"data state has samples_consumed {consumed!r}, not a count of samples; "
                "resume from another checkpoint"
            )
        for key, own in (("seed", self.order.seed), ("size", self.order.size)):
            if state.get(key) != own:
                raise CheckpointError(
                    f"data state of the checkpoint has {key} {state.get(key)!r}, this run {own}: "
                    "samples would be skipped or seen twice; set seed and data back, "
                    "or start a new run"
                )
        self._holes.add(holes_of(state))
        self.consumed = consumed
