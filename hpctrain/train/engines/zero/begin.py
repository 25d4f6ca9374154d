"""How a model gets into DeepSpeed's hands: parameter by parameter.

DeepSpeed takes a model with all its values, rounds it, and cuts it when all of it is there. At
stage 3 it gets the parameters one by one here, by the way that `deepspeed.zero.Init` has for a
module that is there already: each is made whole, cut, and let go before the next one is made. At
the other stages each rank holds the model whole, in the precision that it works in.

DeepSpeed rounds weights to 16 bits before it makes fp32 masters of them. `Before` gives what they
were. tests/engines/test_deferred.py and test_zero.py hold the promises.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Made = Callable[[str, nn.Parameter], torch.Tensor]
    """Makes a parameter's elements, whole, by its name."""
    Before = Callable[[int, int], torch.Tensor]
    """A parameter's elements before they were rounded: from the n-th on, so many."""

ROUNDED = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What DeepSpeed takes to the precision that it works in."""


def fill(
    named: Mapping[str, nn.Parameter],
    made: Made | None,
    _config: dict[str, Any],
    precision: torch.dtype,
    device: torch.device,
) -> dict[int, Before]:
    """Give parameters their values whole, as stages 0 to 2 have them. In place; not collective.

    Args and returns as those of `spread`; `Before` gives any range.
    """
    before: dict[int, Before] = {}
    for name, parameter in _each(named):
        is_rounded = parameter.dtype in ROUNDED - {precision}
        if made is not None:
            whole = made(name, parameter)
            parameter.data = whole.to(device, precision if is_rounded else parameter.dtype)
            del whole  # else it would be there while the next one is made
        if is_rounded:
            before[id(parameter)] = _again(name, parameter, made)
    return before


def spread(
    named: Mapping[str, nn.Parameter],
    made: Made | None,
    config: dict[str, Any],
    precision: torch.dtype,
    device: torch.device,
) -> dict[int, Before]:
    """Cut every parameter over the ranks, as stage 3 has them. In place; collective.

    Beside this rank's ranges one whole parameter is held at a time. `named` has the names in the
    model as built. `made` makes the values; None if the parameters have them. Return this rank's
    range of each parameter that was rounded to `precision`, by identity.
    """
    # All memory first: what comes and goes between the ranges would leave holes that nothing fits.
    sizes = [p.numel() for _, p in _each(named) if p.dtype in ROUNDED - {precision}]
    working = torch.empty(max(sizes, default=0), dtype=precision, device=device)
    ranks = dist.get_world_size()
    room = torch.empty(sum(math.ceil(size / ranks) for size in sizes))
    before: dict[int, Before] = {}
    cut = _ParameterCut(config)
    for name, parameter in _each(named):
        is_rounded = parameter.dtype in ROUNDED - {precision}
        whole = parameter.data if made is None else made(name, parameter)
        if is_rounded:
            parameter.data = working[: whole.numel()].view(whole.shape).copy_(whole)
        else:
            parameter.data = whole.to(device, parameter.dtype)
        cut(parameter)
        if is_rounded:
            begin, count = range_of(parameter)
            own, room = room[:count], room[count:]
            own.copy_(whole.reshape(-1).narrow(0, begin, count))
            before[id(parameter)] = _kept(own, begin)
        del whole  # else it would be there while the next one is made
    return before


class _ParameterCut:
    """DeepSpeed's cutting of parameters, one by one. Collective."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._first: Any = None
        self._deepspeed: Any = importlib.import_module("deepspeed")
        backend = self._deepspeed.get_accelerator().communication_backend_name()
        self._deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)

    def __call__(self, parameter: nn.Parameter) -> None:
        """Leave a parameter's memory to this rank's range of it alone."""
        if self._first is not None:
            self._first.convert_to_zero_parameters(param_list=[parameter])
            return
        alone = nn.Module()
        alone.register_parameter("parameter", parameter)
        self._deepspeed.zero.Init(module=alone, config_dict_or_path=self._config)
        self._first = parameter


def range_of(parameter: Any) -> tuple[int, int]:
    """A rank's range of a parameter at stage 3, without the padding that makes ranges equal."""
    size = parameter.ds_tensor.ds_numel
    first = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    return first, min(size, parameter.ds_numel - first)


def _each(named: Mapping[str, nn.Parameter]) -> Iterable[tuple[str, nn.Parameter]]:
    """Every parameter once, by its first name."""
    first = dict[int, str]()
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    return [(name, named[name]) for name in first.values()]


def _kept(own: torch.Tensor, begin: int) -> Before:
    return lambda first, count: own.narrow(0, first - begin, count)


def _again(name: str, parameter: nn.Parameter, made: Made | None) -> Before:
    """From values that lie where they lay, or are made once more."""
    if made is None:
        whole = parameter.detach().reshape(-1)
        return lambda first, count: whole.narrow(0, first, count)
    return lambda first, count: made(name, parameter).reshape(-1).narrow(0, first, count)
