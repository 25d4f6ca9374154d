"""One training step under any engine: forward precision, backward, clipping, update.

DDP and FSDP2 differ in how a model is wrapped and when gradients travel; the rest is the same code.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain.engines.blocks import find_blocks
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.settings.schema import EngineSettings
    from hpctrain.world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """A parallelised model with its optimizer.

    Attributes:
        kind: "ddp", "fsdp2", or "plain" for a single process.
        model: What the program calls; parameter names are those of the original.
        optimizer: Updates this rank's share of the parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, settings: EngineSettings, world: World
    ) -> None:
        """Parallelise. Collective: every rank calls it with the same model.

        Raises:
            UsageError: the optimizer has state already, or the precision is not to be had here.
        """
        if optimizer.state:
            raise UsageError("parallelize() needs a fresh optimizer; call it before the first step")
        self.precision = _precision(settings.precision, world.device)
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(
            world.device.type, enabled=self.precision is torch.float16
        )
        self._device = world.device
        self._clip_norm = settings.clip_norm
        if settings.activation_checkpointing:
            _recompute_blocks(model)
        model.to(world.device)
        self.model, self.kind = self._wrap(model, settings, world)

    def _wrap(
        self, model: nn.Module, settings: EngineSettings, world: World
    ) -> tuple[nn.Module, str]:
        if not world.is_distributed:
            return model, "plain"
        if settings.kind == "fsdp2":
            return _shard(model, self.optimizer, self.precision, settings, world), "fsdp2"
        # Without find_unused_parameters the reducer rebuilds its buckets after the first step, so
        # a resumed first step would add in another order: not bit-equal from 3 ranks on (research
        # runtime.md 1.8).
        devices = [world.device] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)
        return wrapped, "ddp"

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Around one microbatch's forward and backward pass; gradients travel in the last only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        quiet = isinstance(self.model, DistributedDataParallel) and not last
        waiting = self.model.no_sync() if quiet else contextlib.nullcontext()  # type: ignore[operator]
        enabled = self.precision is not torch.float32 and not isinstance(self.model, FSDPModule)
        with waiting, torch.autocast(self._device.type, dtype=self.precision, enabled=enabled):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a loss already weighted by its share of the global batch."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> float:
        """Clip over all ranks, update, clear the gradients; returns their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        limit = self._clip_norm or float("inf")
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


def global_sum(world: World, value: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks. Collective."""
    if world.is_distributed:
        dist.all_reduce(value)
    return value


def _precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fits = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fits else torch.float32
    if name not in DTYPES:
        raise UsageError(
            f"engine.precision {name!r} is not known; use one of auto, {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _recompute_blocks(model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    blocks = {id(block) for block in find_blocks(model)}
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: id(module) in blocks,
    )


def _shard(
    model: nn.Module,
    optimizer: Optimizer,
    precision: torch.dtype,
    settings: EngineSettings,
    world: World,
) -> nn.Module:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    options: dict[str, Any] = {
        "mesh": dist.init_device_mesh(  # type: ignore[attr-defined]
            world.device.type, (world.world_size,), mesh_dim_names=("dp_shard",)
        ),
        "reshard_after_forward": settings.reshard_after_forward,
    }
    if precision is not torch.float32:
        # Gradients are added in fp32 unless measured to be safe in less.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32
        )
    for block in find_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
    return model
