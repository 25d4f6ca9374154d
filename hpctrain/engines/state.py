"""The state of a model and its optimizer as full parameter names -> tensors, under any engine.

Names are those of the unwrapped model (``model.blocks.0.attn.wq.weight``,
``optim.blocks.0.attn.wq.weight.exp_avg``); sharded parameters stay sharded (DTensor).
Hyper-parameters stay
out: the run's settings supply them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL, OPTIM = "model.", "optim."


def collect(model: nn.Module, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer by its full name; memory is shared, not copied.

    Collective under a sharding engine: every rank calls it. The optimizer's state is made if it is
    not there yet (zeros, step 0).
    """
    state: dict[str, Any] = {
        MODEL + name: value for name, value in get_model_state_dict(model).items()
    }
    if optimizer is not None:
        for name, value in _optimizer_state(model, optimizer).items():
            if name.startswith("state."):
                state[OPTIM + name.removeprefix("state.")] = torch.as_tensor(value)
    return state


def apply(model: nn.Module, optimizer: Optimizer | None, state: dict[str, torch.Tensor]) -> None:
    """Make an optimizer go on with the tensors that `collect` gave and that were filled since.

    The model's own share their memory with what `collect` gives and need nothing. Collective under
    a sharding engine: every rank calls it.
    """
    if optimizer is None:
        return
    full = _optimizer_state(model, optimizer)  # its param_groups are this run's own
    for name, value in state.items():
        if name.startswith(OPTIM):
            full["state." + name.removeprefix(OPTIM)] = value
    with _quiet():
        set_optimizer_state_dict(model, optimizer, full, options=_FLAT)


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by name; where there was none yet, it is that of step 0.

    Torch makes missing state by a real step and leaves Adam's count at 1 (research runtime.md 1.9).
    """
    fresh = not optimizer.state
    rates = [group["lr"] for group in optimizer.param_groups]
    with _quiet():
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if fresh:
        for values in optimizer.state.values():
            step = values.get("step")
            if isinstance(step, torch.Tensor):
                step.zero_()
            elif step is not None:
                values["step"] = 0
        state.update(
            {
                k: torch.zeros_like(torch.as_tensor(v))
                for k, v in state.items()
                if k.endswith(".step")
            }
        )
    return state


class _quiet(warnings.catch_warnings):  # noqa: N801 - reads as what it does
    """torch warns of its own internals here; nothing in it that a user could act on."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
