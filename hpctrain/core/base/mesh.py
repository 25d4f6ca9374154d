"""The mesh of a run, and how many samples of a step each rank takes in how many passes. Pure.

Ranks are numbered with the tensor-parallel axis fastest and the pipeline's slowest, so that the
ranks that speak most often lie in one node: (pp, dp_replicate, dp_shard, tp).
Every rank runs the same number of forward and backward passes, since sharded engines communicate in
each of them: a rank with one pass less would leave the others waiting for ever. `data.batches` cuts
steps by these numbers. tests/unit/plan/test_mesh.py, tests/unit/base/test_batches.py and
tests/unit/data/test_batches.py hold the promises.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""From the slowest to the fastest. `ep` and `cp` are none of their own, but parts of `dp_shard`."""
INNER = ("ep", "cp")


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis.

    Attributes:
        pp: Pipeline stages' ranks.
        dp_replicate: Copies of the model that are kept equal.
        dp_shard: Ranks that one copy is spread over.
        tp: Ranks that share each layer's matrices.
        ep: Ranks that share the experts; `dp_shard` is a multiple of it.
        cp: Ranks that read the same samples, a part of each sequence; the same multiple.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_ranks // self.cp

    @property
    def dp_ranks(self) -> int:
        """Ranks over which gradients are added."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold parts of the same layers."""
        return self.dp_ranks * self.tp

    def pp_rank(self, rank: int) -> int:
        """Which part of the pipeline a rank is."""
        return rank // self.stage_ranks

    def data_rank(self, rank: int) -> int:
        """Which of the groups of ranks with samples of their own it is in."""
        return self.dp_rank(rank) // self.cp

    def dp_rank(self, rank: int) -> int:
        """Which of the ranks over which gradients are added it is."""
        return rank % self.stage_ranks // self.tp

    def cp_rank(self, rank: int) -> int:
        """Which part of each sequence it has."""
        return self.dp_rank(rank) % self.cp

    def tp_rank(self, rank: int) -> int:
        """Which part of each matrix it has."""
        return rank % self.tp

    def place(self, rank: int) -> dict[str, int]:
        """A rank's place on every axis; ranks that share experts or sequences lie side by side."""
        copy, shard = divmod(self.dp_rank(rank), self.dp_shard)
        axes = (self.pp_rank(rank), copy, shard, self.tp_rank(rank))
        return {
            **dict(zip(AXES, axes, strict=True)), "ep": shard % self.ep, "cp": shard % self.cp
        }  # fmt: skip

    def as_dict(self) -> dict[str, int]:
        """Axes and their sizes, without those of size 1; for manifests and screens."""
        return {name: size for name, size in asdict(self).items() if size > 1} or {"dp_shard": 1}

    @property
    def has_axes(self) -> bool:
        """Whether there is more to a rank's place than its number."""
        return len(self.as_dict()) > 1

    @property
    def text(self) -> str:
        """The same as people read it: "pp=2 dp_shard=2 tp=2"."""
        return axes_text(self.as_dict())


def axes_text(axes: Mapping[str, object]) -> str:
    """Axes and their sizes in a line, also of a mesh that another version wrote."""
    return " ".join(f"{name}={size}" for name, size in axes.items())


def shares(global_batch: int, world_size: int) -> list[int]:
    """How many samples of a step each rank takes: at most one more than any other, or none."""
    if global_batch < 1 or world_size < 1:
        raise ValueError(f"cannot share {global_batch} samples among {world_size} ranks")
    base, extra = divmod(global_batch, world_size)
    return [base + (rank < extra) for rank in range(world_size)]


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
        return MicroBatchPlan(count, min(micro_batch, global_batch))
    count = passes.count(-(-sizes[0] // micro_batch) if micro_batch else 1)
    return MicroBatchPlan(micro_batches=count, largest_piece=-(-sizes[0] // count))


def count_leaves(global_batch: int, micro_batch: int) -> int:
    """Passes of a step that count, of all ranks together, where they are the same at any number."""
    if micro_batch < 1:
        raise ValueError(
            f"passes that are the same at any number of ranks cannot have {micro_batch} samples; "
            "set a micro batch"
        )
    return -(-global_batch // micro_batch)
