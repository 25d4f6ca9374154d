"""The mesh of a run: how many ranks each axis has, and who stands where. Pure.

Ranks are numbered with the tensor-parallel axis fastest and the pipeline's slowest, so that the
ranks that speak most often lie in one node: (pp, dp_replicate, dp_shard, tp).
tests/unit/plan/test_mesh.py holds the promises.
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
