"""What an optimizer keeps beside the state of its parameters, and gradients that wait for it.

- Optimizers inside of it, such as that of SAM or Lookahead.
- State under keys that are no parameters (MADGRAD's ``state["k"]``).
- What its own `state_dict` has beside ``state`` and ``param_groups``.
- Gradients that were added up since its last step, where a stop comes between two micro-batches;
  all of them in a program that never clears them. They are each rank's own; on another mesh they
  are dropped, and a line says so.

tests/engines/test_optimizer_rest.py holds the promises.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpctrain.errors import CheckpointError
from hpctrain.train.engines.norm import local
from hpctrain.train.engines.state import parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from hpctrain.checkpoint.format.manifest import Manifest


NAME = "hpctrain.optimizer"
"""Under this, and names below it, among what is tracked."""
GRADIENTS = "tracked.hpctrain.gradients."
INDICES, VALUES = ":indices", ":values"
"""Ends of the names of a sparse gradient's parts, as torch's Embedding has one."""
LOST = (
    "gradients that were added up since the last update are each rank's own, and are dropped at "
    "another number of ranks"
)
OWN_KEYS = frozenset({"state", "param_groups"})
SPLIT = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"


class OptimizerRest:
    """What the tracked optimizer keeps by itself, as something that is tracked."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Take an optimizer.

        Raises:
            CheckpointError: it keeps on each rank the state of other parameters.
        """
        if any(
            f"{kind.__module__}.{kind.__qualname__}" == SPLIT for kind in type(optimizer).__mro__
        ):
            raise CheckpointError(
                "ZeroRedundancyOptimizer keeps on each rank the state of other parameters, which "
                "is not saved; use run.parallelize with --set engine.kind=fsdp2, or a plain "
                "optimizer under DDP"
            )
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """State under keys that are no parameters, and what only its own `state_dict` has."""
        state: Mapping[Any, Any] = self._optimizer.state
        shared = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        return {"shared": shared, "own": self._own()}

    def load_own(self, state: Mapping[str, Any]) -> None:
        """Give the optimizer what only its own `state_dict` has, by its own `load_state_dict`.

        Its state and its groups come behind this: torch would round moments to a parameter's type.
        """
        if state["own"]:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), **state["own"]})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the state under keys that are no parameters."""
        self._optimizer.state.update(state["shared"])

    def _own(self) -> dict[str, Any]:
        optimizer = self._optimizer
        hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
        if type(optimizer).state_dict is Optimizer.state_dict and not hooks:
            return {}  # torch takes long for a large model's
        saved_ids = {
            id(tensor)
            for each in (optimizer, *inner_optimizers(optimizer).values())
            for tensor in _tensors(each.state)
        }
        own = {key: value for key, value in optimizer.state_dict().items() if key not in OWN_KEYS}
        return {key: value for key, value in own.items() if not _is_saved(value, saved_ids)}


def require_order(state: Mapping[str, Any], order: Sequence[int | None] | None) -> None:
    """Refuse groups in another order, if a state that names no parameters depends on it.

    `state` is as `OptimizerRest.state_dict` returned it, `order` as `ParamGroups.order`.

    Raises:
        CheckpointError: what the optimizer's own `state_dict` gives would go to other parameters.
    """
    if order is None or order == list(range(len(order))):
        return
    for key, value in state["own"].items():
        if any(True for _ in _tensors(value)):
            raise CheckpointError(
                f"the optimizer's own state_dict() has {key} without the names of parameters, and "
                "its groups come in another order than in the checkpoint; give them in that order"
            )


NAMES = "__names__"


class NamedOptimizer:
    """An optimizer as something that is tracked.

    Attributes:
        order: As `ParamGroups.order`; None where nothing was loaded by names.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        models: Mapping[str, nn.Module],
        outer: Optimizer | None = None,
    ) -> None:
        """Take an optimizer, and the modules that may hold its parameters, by their names.

        `outer` is the optimizer that calls it, if any; both may have the same groups.
        """
        self.optimizer, self._outer = optimizer, outer
        self.order: list[int | None] | None = None
        self._models = models

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, and the names of its parameters if all are known."""
        names = self._names()
        return {**self.optimizer.state_dict(), **({NAMES: names} if names else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from there, whatever the order of groups and parameters was.

        Groups that are the outer optimizer's stay so.

        Raises:
            CheckpointError: the optimizer has other parameters, or groups that are cut otherwise.
        """
        own = {key: value for key, value in state.items() if key != NAMES}
        now = self._names()
        if NAMES in state and now:
            own |= self._in_order(own, state[NAMES], now)
        groups, outer = self.optimizer.param_groups, self._outer
        is_shared = outer is not None and list(map(id, groups)) == list(map(id, outer.param_groups))
        self.optimizer.load_state_dict(own)
        self._keep_types(own["state"])
        if is_shared:
            self.optimizer.param_groups = groups

    def _keep_types(self, state: Mapping[Any, Any]) -> None:
        """Torch rounds what it loads to a parameter's type; the optimizer keeps its own."""
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        for number, saved in state.items():
            values = self.optimizer.state[parameters[number]] if isinstance(number, int) else {}
            for key, value in saved.items() if isinstance(saved, dict) else ():
                loaded = values.get(key)
                if not isinstance(loaded, torch.Tensor):
                    continue
                if not isinstance(value, torch.Tensor):  # Adam makes a tensor of a subclass's count
                    values[key] = value
                elif loaded.dtype != value.dtype:
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
        places = dict(_numbered(now))
        if number.keys() != places.keys():
            name = min(number.keys() ^ places.keys())
            where = "checkpoint" if name in number else "program"
            raise CheckpointError(f"{name} is updated by a tracked optimizer in the {where} alone")
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


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that one holds in attributes and that have state of their own."""
    inner_by_name: dict[str, Optimizer] = {}
    seen = {id(optimizer.state)}
    pending = [("", optimizer)]
    while pending:
        stem, outer = pending.pop()
        for name, inner in _optimizers_in(vars(outer)):
            if id(inner.state) not in seen:
                seen.add(id(inner.state))
                inner_by_name[stem + name] = inner
                pending.append((f"{stem}{name}.", inner))
    return inner_by_name


def _optimizers_in(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Optimizer]]:
    for name, value in attributes.items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                if isinstance(each, Optimizer):
                    yield f"{name}.{number}", each


def _is_saved(value: Any, saved_ids: set[int]) -> bool:
    """Whether a value consists of tensors that are saved by their names anyway, or is empty."""
    tensors = list(_tensors(value))
    if not tensors:
        return isinstance(value, dict | list | tuple) and not value
    return all(id(tensor) in saved_ids for tensor in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


class Gradients:
    """Gradients of this rank that its optimizer has not applied yet."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, rank: int) -> None:
        """Hear of the optimizer's steps; where it has no hooks, nothing is ever pending."""
        self._model, self._rank = model, rank
        self._optimizer = optimizer
        self._is_applied, self._is_heard, self._is_never_cleared = True, False, False
        self._last: tuple[Any, int] | None = None
        for each in (optimizer, *inner_optimizers(optimizer).values()):
            with contextlib.suppress(AttributeError):
                each.register_step_post_hook(lambda *_: self._note_update())
                self._is_heard = True

    def step_begins(self) -> None:
        """From here on an update counts."""
        self._is_applied = not self._is_heard

    def _note_update(self) -> None:
        """Note an update, and whether its gradients were added to those of the update before.

        Torch counts a tensor's changes: one if a pass added to it, two if the program zeroed it
        first. It takes two updates to see that.
        """
        self._is_applied = True
        # Of the optimizer's own parameters: it clears no others, and may be given them later.
        grads = (one.grad for group in self._optimizer.param_groups for one in group["params"])
        if (grad := next((one for one in grads if one is not None), None)) is not None:
            last, self._last = self._last, (weakref.ref(grad), grad._version)  # noqa: SLF001 - torch's own count
            self._is_never_cleared = (
                last is not None and last[0]() is grad and grad._version == last[1] + 1  # noqa: SLF001 - the same
            )

    def capture(self) -> dict[str, torch.Tensor]:
        """Return what is pending, by names that no other rank has."""
        if self._is_applied and not self._is_never_cleared:
            return {}
        pending = {}
        for name, parameter in parameters(self._model):
            if parameter.grad is None:
                continue
            grad, stem = local(parameter.grad).detach(), _stem(self._rank) + name
            if not grad.is_sparse:
                pending[stem] = grad
                continue
            # As they lie: the public ones add up first, and other roundings would follow.
            pending[stem + INDICES] = grad._indices()  # noqa: SLF001
            pending[stem + VALUES] = grad._values()  # noqa: SLF001
        return pending

    def wanted(self, manifest: Manifest, *, is_same_mesh: bool) -> dict[str, torch.Tensor]:
        """Return tensors to load this rank's gradients into; none of another mesh."""
        saved = {entry.name: entry for entry in manifest.tensors}
        targets = {}
        for name, parameter in parameters(self._model) if is_same_mesh else ():
            own, stem = local(parameter), _stem(self._rank) + name
            entry = saved.get(stem)
            if entry is not None and entry.shape == tuple(own.shape):
                targets[entry.name] = torch.empty_like(own)
            for mark, dtype in ((INDICES, torch.int64), (VALUES, own.dtype)):
                if (entry := saved.get(stem + mark)) is not None:
                    targets[entry.name] = torch.empty(entry.shape, dtype=dtype, device=own.device)
        return targets

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give parameters the gradients that `wanted` asked for."""
        for name, parameter in parameters(self._model):
            stem = _stem(self._rank) + name
            grad = tensors.get(stem)
            if stem + INDICES in tensors:
                parts = tensors[stem + INDICES], tensors[stem + VALUES]
                grad = torch.sparse_coo_tensor(*parts, parameter.shape, check_invariants=False)
            if grad is not None and isinstance(parameter, DTensor):
                parameter.grad = DTensor.from_local(
                    grad, parameter.device_mesh, parameter.placements, run_check=False,
                    shape=parameter.shape, stride=parameter.stride(),
                )  # fmt: skip
            elif grad is not None:
                parameter.grad = grad


def are_lost(manifest: Manifest, *, is_same_mesh: bool) -> bool:
    """Whether a checkpoint has gradients that nobody can take over."""
    stem = _stem(0)
    return not is_same_mesh and any(entry.name.startswith(stem) for entry in manifest.tensors)


def _stem(rank: int) -> str:
    return f"{GRADIENTS}rank-{rank:05d}."
