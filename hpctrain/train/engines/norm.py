"""One gradient norm over the whole mesh, and clipping by it.

Each rank adds up the squares of what it holds in fp64; what several ranks hold alike counts once.
One sum over the world follows, so pipeline stages, experts and mixed kinds of tensors need nothing
of their own, and all ranks have the same number. tests/engines/test_norm.py holds the promises.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.core.device import is_accelerator
from hpctrain.train.engines import torch_private
from hpctrain.train.engines.engine import global_sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.world import World


CHUNK, CPU_CHUNK = 1 << 24, 1 << 18
"""Elements at a time, of which there is a copy in fp64; on a CPU it stays in the cache."""


def copies_of(tensor: torch.Tensor, mesh: Mesh) -> int:
    """How many ranks hold the same part of a tensor of a model's."""
    if not isinstance(tensor, DTensor):
        return mesh.stage_ranks
    inside = 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            inside *= tensor.device_mesh.size(axis)
    return inside * outer_copies(tensor, mesh)


def outer_copies(tensor: DTensor, mesh: Mesh) -> int:
    """How many times a tensor's own device mesh fits into the ranks that hold its layer."""
    return mesh.stage_ranks // tensor.device_mesh.size()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a node for autograd."""
    return torch_private.local(tensor) if isinstance(tensor, DTensor) else tensor


def global_norm(gradients: Iterable[torch.Tensor], mesh: Mesh, world: World) -> float:
    """The 2-norm of all gradients of all ranks. Collective."""
    return math.sqrt(float(global_sum(world, square_sum(gradients, mesh, world))))


def square_sum(gradients: Iterable[torch.Tensor], mesh: Mesh, world: World) -> torch.Tensor:
    """This rank's part of the squares of all gradients, one fp64 number."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(copies_of(gradient, mesh), []).append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    most = CHUNK if is_accelerator(world.device) else CPU_CHUNK
    for copies, parts in by_copies.items():
        squares = [_squares(chunk, world.device) for part in parts for chunk in _chunks(part, most)]
        total += torch.stack(squares).sum() / copies
    return total


def _chunks(part: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    return (part,) if part.numel() <= most else torch.split(part.reshape(-1), most)


def _squares(chunk: torch.Tensor, device: torch.device) -> torch.Tensor:
    return chunk.to(device, torch.float64, copy=True).square_().sum()


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by, as torch's `clip_grad_norm_`; `limit` 0 clips nothing."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def scale_(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if gradients and factor != 1.0:
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
