"""FSDP2: every parameter is spread over the ranks, and gathered block by block when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from hpctrain.engines.blocks import find_blocks

if TYPE_CHECKING:
    from torch import nn

    from hpctrain.engines.places import Places
    from hpctrain.settings.schema import EngineSettings


def shard(
    model: nn.Module, places: Places, precision: torch.dtype, settings: EngineSettings
) -> None:
    """Shard a model in place, block by block. Collective.

    Gradients are added over ranks, not averaged: the loss carries its share.
    """
    options: dict[str, Any] = {
        "mesh": places.dense,
        "reshard_after_forward": settings.reshard_after_forward,
    }
    if precision is not torch.float32:
        # Gradients are added in fp32 unless measured to be safe in less.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32
        )
    if settings.offload == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in find_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            add_gradients(module)


def add_gradients(module: FSDPModule) -> None:
    """Have a sharded module's gradients added over ranks."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other than the plain sum
