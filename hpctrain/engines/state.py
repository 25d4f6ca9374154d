"""The state of a model and its optimizer as full parameter names -> tensors, under any engine.

Names are those of the unwrapped model (``model.blocks.0.attn.wq.weight``,
``optim.blocks.0.attn.wq.weight.exp_avg``); sharded parameters stay sharded (DTensor).
Hyper-parameters stay out: the run's settings supply them. tests/engines/test_what_steps_do.py and
test_save_and_restore.py hold the promises.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn
    from torch.optim import Optimizer

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL, OPTIM = "model.", "optim."
_KNOWN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models of which torch and `_collect_by_name` say the same."""
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def collect(model: nn.Module, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer by its full name; memory is shared, not copied.

    Collective under a sharding engine: every rank calls it. The optimizer's state is made if it is
    not there yet (zeros, step 0). Torch gives the names, and takes ten milliseconds for some
    hundred parameters, which training would wait for at each save; so they are also told from the
    modules themselves, and from the second time on, where both agreed, from these alone.
    """
    if optimizer is None or not optimizer.state or model not in _KNOWN:
        state = _collect_by_torch(model, optimizer)
        by_name = _collect_by_name(model, optimizer)
        if optimizer is not None and optimizer.state and _same(state, by_name):
            _KNOWN.add(model)
        return state
    return _collect_by_name(model, optimizer)


def _collect_by_torch(model: nn.Module, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {
        MODEL + name: value for name, value in get_model_state_dict(model).items()
    }
    if optimizer is not None:
        for name, value in _optimizer_state(model, optimizer).items():
            if name.startswith("state."):
                state[OPTIM + name.removeprefix("state.")] = torch.as_tensor(value)
    return state


def _collect_by_name(model: nn.Module, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """The same from the modules as they are now; nothing is kept from one time to the next."""
    state: dict[str, torch.Tensor] = {}
    moments: dict[str, torch.Tensor] = {}
    held = optimizer.state if optimizer is not None else {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        stem = _plain_name(prefix + "." if prefix else "")
        for name, parameter in module._parameters.items():  # noqa: SLF001 - as torch's own walks
            if parameter is None:
                continue
            state[f"{MODEL}{stem}{name}"] = parameter.detach()
            for key, value in held.get(parameter, {}).items():
                moments[f"{OPTIM}{stem}{name}.{key}"] = torch.as_tensor(value)
        for name, buffer in module._buffers.items():  # noqa: SLF001 - the same
            if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
                state[f"{MODEL}{stem}{name}"] = buffer
    return state | moments


def persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Buffers that belong to the state, by their full names: who holds each, and as what.

    Not the tensors: moving a model to its device makes new ones, and a program may put others in
    their place.
    """
    buffers = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():  # noqa: SLF001 - as torch's state_dict does
            if buffer is not None and key not in module._non_persistent_buffers_set:  # noqa: SLF001
                stem = _plain_name(prefix + "." if prefix else "")
                buffers[f"{MODEL}{stem}{key}"] = (module, key)
    return buffers


def _plain_name(name: str) -> str:
    """A module's name in the model that nothing wraps."""
    parts = [part + "." for part in name.split(".")[:-1]]
    return "".join(part for part in parts if part not in _WRAPPERS)


def unwrapped(name: str) -> str:
    """A parameter's name in the model that nothing wraps."""
    stem, _, own = name.rpartition(".")
    return _plain_name(stem + "." if stem else "") + own


def _same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, each for the same memory or the same single value."""
    return first.keys() == other.keys() and all(
        _memory(first[name]) == _memory(other[name]) for name in first
    )


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    where = (local.data_ptr(), tuple(local.shape), tuple(tensor.shape), local.dtype)
    return where if local.numel() != 1 else (*where[1:], local.item())


def apply(model: nn.Module, optimizer: Optimizer | None, state: Mapping[str, Any]) -> None:
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
    with _quiet(), _without_empty_groups(optimizer):
        set_optimizer_state_dict(model, optimizer, full, options=_FLAT)


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by name; where there was none yet, it is that of step 0."""
    fresh = not optimizer.state
    if fresh:
        _make_state(optimizer)
    with _quiet(), _without_empty_groups(optimizer):
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
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


def _make_state(optimizer: Optimizer) -> None:
    """Make what an optimizer has no state of yet, by a step of rate 0; Adam's count is at 1 then.

    Torch would give all parameters gradients of zeros at once, as much memory as the weights take.
    Here they lie in the memory of the largest, one after the other.
    """
    groups = optimizer.param_groups
    trained = [
        (group, parameter)
        for group in groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter.grad is None
    ]
    zeros = dict[tuple[torch.dtype, torch.device], torch.Tensor]()
    for local in sorted((_local(parameter) for _, parameter in trained), key=torch.Tensor.numel):
        zeros[local.dtype, local.device] = local
    zeros = {key: torch.zeros_like(local).view(-1) for key, local in zeros.items()}
    try:
        for group, parameter in trained:
            rate = group["lr"]
            still = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            optimizer.param_groups = [{**group, "params": [parameter], "lr": still}]
            parameter.grad = _like(parameter, zeros[parameter.dtype, _local(parameter).device])
            optimizer.step()
            parameter.grad = None
    finally:
        optimizer.param_groups = groups


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The first elements of some memory as a tensor of a parameter's kind."""
    local = _local(parameter)
    view = flat[: local.numel()].view(local.shape)
    if not isinstance(parameter, DTensor):
        return view
    return DTensor.from_local(
        view, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


@contextlib.contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """A group may be empty on a pipeline stage, where torch asks for its first parameter's name."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)  # loading makes new ones
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]


class _quiet(warnings.catch_warnings):  # noqa: N801 - reads as what it does
    """torch warns of its own internals here; nothing in it that a user could act on."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
