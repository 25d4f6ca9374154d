"""Anything with state_dict/load_state_dict in a checkpoint: tensors by name, the rest as JSON.

No pickle.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hpctrain.errors import CheckpointError

TENSOR, TUPLE, ITEMS = "__tensor__", "__tuple__", "__items__"
RATES = "__rates__"
SCHEDULED = ("lr", "momentum", "betas")
"""What torch's schedulers set in the optimizer's groups."""


class Stateful(Protocol):
    """What `Run.track` takes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Go on from there."""


def state_of(thing: Stateful) -> dict[str, Any]:
    """Its state; of a scheduler also what it has set in its optimizer.

    A checkpoint holds no hyper-parameters, and torch's schedulers take the next rate from the last.
    """
    groups = _scheduled_groups(thing)
    if not groups:
        return thing.state_dict()
    rates = [{name: group[name] for name in SCHEDULED if name in group} for group in groups]
    return {**thing.state_dict(), RATES: rates}


def restore(thing: Stateful, state: dict[str, Any]) -> None:
    """Go on from what `state_of` gave."""
    thing.load_state_dict({name: value for name, value in state.items() if name != RATES})
    for group, rates in zip(_scheduled_groups(thing), state.get(RATES, []), strict=False):
        group.update(rates)


def _scheduled_groups(thing: Any) -> list[dict[str, Any]]:
    """The parameter groups of a scheduler's optimizer; none of anything else."""
    if not hasattr(thing, "get_last_lr") or not hasattr(thing, "optimizer"):
        return []
    groups: list[dict[str, Any]] = thing.optimizer.param_groups
    return groups


def split(name: str, value: Any, tensors: dict[str, Any]) -> Any:
    """The JSON form of a state; its tensors are put into `tensors` under names below `name`.

    Raises:
        CheckpointError: something in it is neither tensor nor JSON.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {TENSOR: name, "shape": list(value.shape), "dtype": str(value.dtype).split(".")[-1]}
    if isinstance(value, dict):
        if _has_whole_numbers_for_keys(value):  # a MultiStepLR's milestones
            items = [[k, split(f"{name}.{k}", item, tensors)] for k, item in value.items()]
            return {ITEMS: items}
        _refuse_odd_keys(name, value)
        return {key: split(f"{name}.{key}", item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [split(f"{name}.{i}", item, tensors) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"tracked state {name} holds a {type(value).__name__}, which is neither a tensor nor JSON; "
        "keep it out of state_dict() or turn it into numbers and strings"
    )


def empty_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Make a tensor for each one that a JSON form names, to be loaded into."""
    if isinstance(value, dict):
        if TENSOR in value:
            tensors[value[TENSOR]] = torch.empty(
                value["shape"], dtype=getattr(torch, value["dtype"])
            )
            return
        for item in value.values():
            empty_tensors(item, tensors)
    elif isinstance(value, list):
        for item in value:
            empty_tensors(item, tensors)


def join(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state as it was, from its JSON form and the loaded tensors."""
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        if TUPLE in value:
            return tuple(join(item, tensors) for item in value[TUPLE])
        if ITEMS in value:
            return {key: join(item, tensors) for key, item in value[ITEMS]}
        return {key: join(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    return value


def _has_whole_numbers_for_keys(value: dict[Any, Any]) -> bool:
    return bool(value) and all(isinstance(k, int) and not isinstance(k, bool) for k in value)


def _refuse_odd_keys(name: str, value: dict[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str) or key in {TENSOR, TUPLE, ITEMS}:
            raise CheckpointError(
                f"tracked state {name} has the key {key!r}; "
                "keys must be strings, or all whole numbers, to be saved as JSON"
            )
