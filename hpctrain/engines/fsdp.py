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
from torch.distributed.tensor import Shard

from hpctrain.engines.blocks import every_block
from hpctrain.engines.experts import find_experts
from hpctrain.engines.torch_private import cuts_over
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hpctrain.engines.places import Places
    from hpctrain.settings.schema import EngineSettings


def shard(
    model: nn.Module, places: Places, precision: torch.dtype, settings: EngineSettings
) -> None:
    """Shard a model in place, block by block. Collective.

    Gradients are added over ranks, not averaged: the loss carries its share. Experts that lie on
    several ranks are cut further over the ranks that have the same ones; their gradients are added
    over these alone, since the tokens of the others have come to them.

    Raises:
        UsageError: experts cannot be cut so.
    """
    options: dict[str, Any] = {
        "mesh": places.dense,
        "reshard_after_forward": settings.reshard_after_forward,
        # Experts are gathered with their block: a unit of their own inside it would count other
        # operators when the block is computed again, which selective recomputation refuses.
        "shard_placement_fn": _cuts(model, places),
    }
    if precision is not torch.float32:
        # Gradients are added in fp32 unless measured to be safe in less.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32
        )
    if settings.offload == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in every_block(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            add_gradients(module)


def _cuts(model: nn.Module, places: Places) -> Callable[[nn.Parameter], Any]:
    """Where each parameter is cut, and over which ranks."""
    names = {
        id(weight): f"{prefix}.{name}"
        for prefix, module in find_experts(model).items()
        for name, weight in module.named_parameters()
    }
    mesh = places.expert_shard
    over = None if mesh is None else cuts_over(mesh)

    def cut(weight: nn.Parameter) -> Any:
        name = names.get(id(weight))
        if name is None:
            return None
        if mesh is None or over is None:
            return _whole_experts(weight, places.dense.size(-1))
        return over(_within_experts(name, weight, mesh.size(-1)))

    return cut


def _whole_experts(weight: nn.Parameter, ranks: int) -> Shard | None:
    """Cut experts between experts, as all parameters along their first dimension.

    Fewer experts than ranks would lie on some ranks only, and fill these: then within each.
    """
    dimension = None if weight.shape[0] % ranks == 0 else _even_dimension(weight, ranks)
    return None if dimension is None else Shard(dimension)


def _within_experts(name: str, weight: nn.Parameter, ranks: int) -> Shard:
    """Cut experts that lie on several ranks already: along another dimension than the experts'.

    Along the same one a rank's part would be no single box, and could not be saved as one.
    """
    dimension = _even_dimension(weight, ranks)
    if dimension is None:
        raise UsageError(
            f"{name} of shape {list(weight.shape)} has no dimension after the experts' that can "
            f"be cut into {ranks} equal parts (engine.ep goes {ranks} times into the ranks of a "
            "copy); change the model's width, engine.ep, or the number of ranks"
        )
    return Shard(dimension)


def _even_dimension(weight: nn.Parameter, ranks: int) -> int | None:
    """The first dimension after the experts' that has so many equal parts; None without one."""
    fitting = (axis for axis in range(1, weight.ndim) if weight.shape[axis] % ranks == 0)
    return next(fitting, None)


def add_gradients(module: FSDPModule) -> None:
    """Have a sharded module's gradients added over ranks."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other than the plain sum
