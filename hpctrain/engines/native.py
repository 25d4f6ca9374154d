"""The engines that torch has itself: one process, DDP, and FSDP2 with what builds on it.

They differ in how a model is wrapped and when gradients travel; the rest is the same code.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.engines import state as names
from hpctrain.engines.engine import Engine
from hpctrain.engines.loss_scale import LossScale
from hpctrain.engines.norm import clip_factor, global_norm, outer_copies, scale_

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.engines.engine import Parts


class Native(Engine):
    """See `Engine`."""

    def __init__(self, kind: str, model: nn.Module, optimizer: Optimizer, parts: Parts) -> None:
        """Take a model that is wrapped already; `parallelize.py` does that."""
        super().__init__(kind, model, optimizer, parts)
        self.loss_scale = LossScale() if self.precision is torch.float16 else None
        self._known = frozenset(names.MODEL + name for name in parts.known)
        self._sharded = kind == "fsdp2"

    # ---- a step

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Engine`."""
        with super().evaluating(), self.autocast():
            yield

    def autocast(self) -> Any:
        """Around forward passes; a sharded model casts its parameters itself."""
        enabled = self.precision is not torch.float32 and not self._sharded
        return torch.autocast(self.world.device.type, dtype=self.precision, enabled=enabled)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """See `Engine`."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        quiet = isinstance(self.model, DistributedDataParallel) and not last
        waiting = self.model.no_sync() if quiet else contextlib.nullcontext()  # type: ignore[operator]
        with waiting, self.autocast():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """See `Engine`."""
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale
        if isinstance(self.model, DistributedDataParallel):
            factor *= self.data_ranks  # it averages
        (loss * factor).backward()  # type: ignore[no-untyped-call]

    def step(self) -> float:
        """See `Engine`."""
        gradients = self.gradients()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        norm = self.norm(gradients) / scale
        if self.loss_scale is None or self.loss_scale.update(norm):
            scale_(gradients, clip_factor(norm, self.clip_norm) / scale)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gradients(self) -> list[torch.Tensor]:
        """Of all parameters that the optimizer updates."""
        return [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Over all ranks. Collective."""
        return global_norm(gradients, self.mesh, self.world)

    # ---- state

    def state(self, *, with_optimizer: bool = True) -> State:
        """See `Engine`."""
        tensors = names.collect(self.model, self.optimizer if with_optimizer else None)
        copies = {}
        if self.mesh.pp > 1 or self._sharded:
            copies = {name: self._copies(tensor) for name, tensor in tensors.items()}
        return State(dict(tensors), copies=copies, known=self._known - tensors.keys())

    def apply(self, tensors: Mapping[str, Any], *, with_optimizer: bool = True) -> None:
        """See `Engine`."""
        if with_optimizer:
            names.apply(self.model, self.optimizer, tensors)

    def _copies(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Which copy of its part of a tensor this rank has, beyond what the tensor knows itself."""
        place = self.world.rank % self.mesh.stage_ranks
        if not isinstance(tensor, DTensor):
            return place, self.mesh.stage_ranks
        count = outer_copies(tensor, self.mesh)
        # A tensor's mesh that leaves an axis out leaves the fastest one out: `tp`.
        return place % count, count
