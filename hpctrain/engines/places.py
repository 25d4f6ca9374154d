"""The mesh's axes as torch's device meshes: which ranks speak to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.base.mesh import AXES
from hpctrain.engines.torch_private import split_axis

if TYPE_CHECKING:
    import torch

    from hpctrain.base.mesh import Mesh


@dataclass(frozen=True)
class Places:
    """Device meshes, cut from one.

    Attributes:
        root: Over all ranks, with the axes of `plan.mesh.AXES`.
        dense: For parameters: `dp_shard`, with `dp_replicate` before it where there are copies.
        sparse: Under expert parallelism, all ranks again with `dp_shard` cut in two: `ep`, the
            ranks beside each other that share the experts, and before it `ep_shard`, the ranks
            that share one expert. Else None.
        expert_shard: For experts, like `dense`: `ep_shard` with copies before it. Else None.
    """

    root: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh | None = None
    expert_shard: DeviceMesh | None = None

    @property
    def tp(self) -> DeviceMesh:
        """Ranks that share matrices with this one."""
        return self.root["tp"]

    @property
    def pp(self) -> DeviceMesh:
        """Ranks of the pipeline that this one is in."""
        return self.root["pp"]

    @property
    def ep(self) -> DeviceMesh:
        """Ranks that share the experts with this one; only where there is expert parallelism."""
        assert self.sparse is not None, "no expert parallelism"  # noqa: S101 - our own bug
        return self.sparse["ep"]


def join_places(mesh: Mesh, device: torch.device) -> Places:
    """Make the groups of all axes. Collective: every rank calls it."""
    sizes = tuple(getattr(mesh, axis) for axis in AXES)
    root = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    dense = root["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else root["dp_shard"]
    if mesh.ep == 1:
        return Places(root, dense)
    cut = (mesh.dp_shard // mesh.ep, mesh.ep)
    # Cut from the same root: torch joins a parameter's meshes only where they have one in common.
    sparse = split_axis(root, "dp_shard", cut, ("ep_shard", "ep"))
    copied = mesh.dp_replicate > 1
    shard = sparse["dp_replicate", "ep_shard"] if copied else sparse["ep_shard"]
    return Places(root, dense, sparse, shard)
