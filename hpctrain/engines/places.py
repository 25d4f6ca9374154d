"""The mesh's axes as torch's device meshes: which ranks speak to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.plan.mesh import AXES

if TYPE_CHECKING:
    import torch

    from hpctrain.plan.mesh import Mesh


@dataclass(frozen=True)
class Places:
    """Device meshes, cut from one.

    Attributes:
        root: Over all ranks, with the axes of `plan.mesh.AXES`.
        dense: For parameters: `dp_shard`, with `dp_replicate` before it where there are copies.
    """

    root: DeviceMesh
    dense: DeviceMesh

    @property
    def tp(self) -> DeviceMesh:
        """Ranks that share matrices with this one."""
        return self.root["tp"]

    @property
    def pp(self) -> DeviceMesh:
        """Ranks of the pipeline that this one is in."""
        return self.root["pp"]


def join_places(mesh: Mesh, device: torch.device) -> Places:
    """Make the groups of all axes. Collective: every rank calls it."""
    sizes = tuple(getattr(mesh, axis) for axis in AXES)
    root = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    dense = root["dp_replicate", "dp_shard"] if mesh.dp_replicate > 1 else root["dp_shard"]
    return Places(root, dense)
