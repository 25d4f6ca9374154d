"""A further optimizer that is tracked beside the main one, matched by its parameters' names.

Torch numbers parameters by their place in the groups. Where all of them are in tracked modules,
their names are saved besides, and groups that a program gives in another order keep their own state
and values. tests/engines/test_param_groups.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import CheckpointError
from hpctrain.train.engines.names import parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn
    from torch.optim import Optimizer

NAMES = "__names__"


class NamedOptimizer:
    """An optimizer as something that is tracked.

    Attributes:
        optimizer: The program's.
        order: As `ParamGroups.order`; None where nothing was loaded by names.
    """

    def __init__(self, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> None:
        """Take an optimizer, and the modules that may hold its parameters, by their names."""
        self.optimizer = optimizer
        self.order: list[int | None] | None = None
        self._models = models

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, and the names of its parameters if all are known."""
        names = self._names()
        return {**self.optimizer.state_dict(), **({NAMES: names} if names else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, whatever the order of groups and parameters was.

        Raises:
            CheckpointError: the optimizer has other parameters, or groups that are cut otherwise.
        """
        own = {key: value for key, value in state.items() if key != NAMES}
        now = self._names()
        if NAMES in state and now:
            own |= self._in_order(own, state[NAMES], now)
        self.optimizer.load_state_dict(own)
        self._keep_types(own["state"])

    def _keep_types(self, state: Mapping[Any, Any]) -> None:
        """Torch rounds what it loads to a parameter's type; the optimizer keeps its own."""
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        for number, saved in state.items():
            values = self.optimizer.state[parameters[number]] if isinstance(number, int) else {}
            for key, value in saved.items() if isinstance(saved, dict) else ():
                loaded = values.get(key)
                if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    values[key] = value.to(loaded.device)

    def _names(self) -> list[list[str]]:
        """Names in each group; nothing where a parameter is in no tracked module."""
        names_by_id: dict[int, str] = {}
        for stem, model in self._models.items():
            for name, parameter in parameters(model):
                names_by_id.setdefault(id(parameter), f"{stem}.{name}")
        groups = [
            [names_by_id.get(id(parameter), "") for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]
        return groups if all(all(group) for group in groups) else []

    def _in_order(
        self, state: Mapping[str, Any], saved: list[list[str]], now: list[list[str]]
    ) -> dict[str, Any]:
        number = dict(_numbered(saved))
        if number.keys() != dict(_numbered(now)).keys():
            raise CheckpointError(_other_parameters(number, dict(_numbered(now))))
        group_of = {name: place for place, group in enumerate(saved) for name in group}
        order = []
        for place, group in enumerate(now):
            sources = {group_of[name] for name in group} or {min(place, len(saved) - 1)}
            if len(sources) > 1:
                raise CheckpointError(
                    f"{group[0]} and others of its group were in {len(sources)} groups of a "
                    f"tracked {type(self.optimizer).__name__} in the checkpoint"
                )
            order.append(min(sources))
        self.order = [*order]
        places = dict(_numbered(now))
        return {
            "state": {
                places[name]: state["state"][old]
                for name, old in number.items()
                if old in state["state"]
            },
            "param_groups": [
                {**state["param_groups"][old], "params": [places[name] for name in group]}
                for old, group in zip(order, now, strict=True)
            ],
        }


def _numbered(groups: Iterable[Iterable[str]]) -> Iterable[tuple[str, int]]:
    """Each name and its number, as torch counts parameters."""
    names = (name for group in groups for name in group)
    return ((name, number) for number, name in enumerate(names))


def _other_parameters(saved: Mapping[str, int], now: Mapping[str, int]) -> str:
    name = min(saved.keys() ^ now.keys())
    where = "checkpoint" if name in saved else "program"
    return f"{name} is updated by a tracked optimizer in the {where} alone"
