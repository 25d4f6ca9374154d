"""Anything with state_dict/load_state_dict in a checkpoint: its tensors by name, the rest as JSON. No pickle."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hpctrain.errors import CheckpointError

TENSOR, TUPLE = "__tensor__", "__tuple__"


class Stateful(Protocol):
    """What `Run.track` takes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Go on from there."""


def split(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The JSON form of a state; its tensors are put into `tensors` under names below `name`.

    Raises:
        CheckpointError: something in it is neither tensor nor JSON.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {TENSOR: name, "shape": list(value.shape), "dtype": str(value.dtype).split(".")[-1]}
    if isinstance(value, dict):
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
        return {key: join(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    return value


def _refuse_odd_keys(name: str, value: dict[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str) or key in {TENSOR, TUPLE}:
            raise CheckpointError(
                f"tracked state {name} has the key {key!r}; keys must be strings to be saved as JSON"
            )
