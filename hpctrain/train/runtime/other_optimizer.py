"""Whether the state of a checkpoint is another optimizer's than the program's.

By the class, which newer checkpoints name, and by what torch's own optimizers keep for each
parameter: AdamW with `amsgrad` cannot begin with the state of AdamW without.
tests/engines/test_changed_programs.py holds the promises.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from hpctrain.train.engines import state as names
from hpctrain.train.engines.names import parameters
from hpctrain.train.runtime.param_groups import class_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from hpctrain.checkpoint.format.manifest import TensorEntry


def other_optimizer(
    optimizer: Any, model: nn.Module, saved: Mapping[str, TensorEntry], saved_class: str | None
) -> str:
    """Return how a checkpoint's state is another optimizer's; "" if it is not.

    `saved_class` is the class name of the checkpoint's optimizer, if it has one.
    """
    ours = class_name(optimizer)
    if saved_class is not None and saved_class != ours:
        return f"the checkpoint has the state of {saved_class}, and the program trains by {ours}"
    theirs = names.state_keys(saved, model)
    for parameter, group in _samples(optimizer, model, theirs.keys()):
        kept, made = theirs[parameter], keys_made(optimizer, group, parameter.ndim)
        if made is None:
            return ""
        if missing := sorted(made - kept):
            return (
                f"{ours} keeps {', '.join(missing)} of each parameter, which the checkpoint lacks"
            )
        if saved_class is None and (odd := sorted(kept - made)):
            return f"the checkpoint has {', '.join(odd)} of each parameter, which {ours} has not"
    return ""


def other_inner(saved: AbstractSet[str], ours: AbstractSet[str]) -> str:
    """Say which inner optimizer only one side has, by their names; "" if both have the same."""
    if not (differ := sorted(saved ^ ours)):
        return ""
    where = "checkpoint" if differ[0] in saved else "program"
    return f"only the {where} has an optimizer at {differ[0].removeprefix('hpctrain.')}"


def keys_made(optimizer: Any, group: dict[str, Any], dimensions: int) -> frozenset[str] | None:
    """Return under which keys an optimizer of torch's keeps state of a parameter.

    It is asked of a copy that steps a tensor of one element; None where that is not possible.
    """
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind in {LBFGS, SparseAdam}:
        return None
    tiny = nn.Parameter(torch.zeros((1,) * dimensions))
    tiny.grad = torch.zeros_like(tiny)
    probe: Optimizer = copy.copy(optimizer)
    probe._optimizer_step_pre_hooks = OrderedDict()  # noqa: SLF001 - the program's are not to run
    probe._optimizer_step_post_hooks = OrderedDict()  # noqa: SLF001 - the same
    probe.state = defaultdict(dict)
    plainly = dict.fromkeys(("foreach", "fused", "capturable"), False)
    own = {key: value for key, value in plainly.items() if key in group}
    probe.param_groups = [{**group, **own, "params": [tiny]}]
    probe.step()
    return frozenset(probe.state[tiny])


def _samples(
    optimizer: Any, model: nn.Module, have: Any
) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """One parameter with saved state for each group and number of dimensions."""
    members = {id(parameter) for _, parameter in parameters(model)}
    samples: dict[tuple[int, int], tuple[nn.Parameter, dict[str, Any]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in members and parameter in have:
                samples.setdefault((number, parameter.ndim), (parameter, group))
    return list(samples.values())
