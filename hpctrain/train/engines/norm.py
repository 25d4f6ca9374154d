"""One gradient norm over the whole mesh, clipping by it, and the scale of losses under fp16.

Each rank adds up the squares of what it holds in fp64; what several ranks hold alike counts once.
tests/engines/test_norm.py holds the promises.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.core import torch_private
from hpctrain.core.device import computes_bf16, is_accelerator
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer

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


def global_sum(world: World, value: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks. Collective."""
    if world.is_distributed:
        dist.all_reduce(value)
    return value


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
        squares = [
            chunk.to(world.device, torch.float64, copy=True).square_().sum()
            for part in parts
            for chunk in _chunks(part, most)
        ]
        total += torch.stack(squares).sum() / copies
    return total


def _chunks(part: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    return (part,) if part.numel() <= most else torch.split(part.reshape(-1), most)


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Of all parameters that an optimizer updates."""
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by, as torch's `clip_grad_norm_`; `limit` 0 clips nothing."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def scale_(gradients: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply gradients in place."""
    if gradients and factor != 1.0:
        torch._foreach_mul_([local(gradient) for gradient in gradients], factor)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH, BACKOFF = 2.0, 0.5
"""Of the scale: after `growth_interval` good steps, and after an overflow."""


def precision_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `engine.precision` means on a device.

    Raises:
        UsageError: there is none of that name.
    """
    if name == "auto":
        return torch.bfloat16 if computes_bf16(device) else torch.float32
    if name not in DTYPES:
        raise UsageError(
            f"engine.precision {name!r} is not known; use one of auto, {', '.join(DTYPES)}"
        )
    return DTYPES[name]


class LossScale:
    """How far losses are scaled; can be tracked."""

    def __init__(self, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, norm: float) -> bool:
        """Take note of the gradient norm of all ranks; return whether the step counts."""
        if not math.isfinite(norm):
            self.scale = max(1.0, self.scale * BACKOFF)
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale *= GROWTH
            self.good_steps = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Scale and the number of steps since it changed."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there; also from the state of a torch.amp.GradScaler.

        Raises:
            CheckpointError: it is the state of something else.
        """
        scale = state.get("scale")
        good = state.get("good_steps", state.get("_growth_tracker"))
        if not isinstance(scale, int | float) or not isinstance(good, int):
            raise CheckpointError(f"{state} is not the state of a loss scale")
        self.scale, self.good_steps = float(scale), good
