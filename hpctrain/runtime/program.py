"""The program that a run trains: its model, its optimizer, and all else that a checkpoint holds.

Anything with state_dict/load_state_dict travels without pickle: tensors by name, the rest as JSON,
with the types that it had (`checkpoint.tensors.values`). Random generators are in `generators`.
tests/unit/runtime/test_tracked.py and tests/engines/test_resume.py hold the promises.
"""

from __future__ import annotations

import contextlib
import logging
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.checkpoint.tensors.restore import Wanted
from hpctrain.checkpoint.tensors.value_reading import decode, has_sharded, placeholders
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.data.loader import DataPlace
from hpctrain.data.stream_loader import Ranks, StreamLoader
from hpctrain.engines import state as names
from hpctrain.errors import UsageError
from hpctrain.runtime.generators import KINDS, Generators, seed_anew
from hpctrain.world import gather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.engines.engine import Engine
    from hpctrain.world import World

log = logging.getLogger("hpctrain.runtime")

RATES = "__rates__"
SCHEDULED = ("lr", "momentum", "betas")
"""What torch's schedulers set in the optimizer's groups."""
DATA = "data"
MOST_OF_RANK_0_BYTES = 1 << 20
"""A tensor of what is tracked beside the model is rank 0's up to here, and spread beyond."""
BASE = "base_weights"


class Stateful(Protocol):
    """What `Run.track` takes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Go on from there."""


Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
"""What `Run.track` takes besides."""


class Program:
    """What there is to save, and to go on with.

    Attributes:
        engine: Of a program that called `parallelize`.
        model: The engine's, or the program's own.
        optimizer: The same.
        data: The position in the data.
        tracked: Everything else by its name.
        generators: This rank's random generators.
        awaits_weights: The model has memory and no values: a checkpoint's go straight into it.
    """

    def __init__(self, world: World) -> None:
        self.engine: Engine | None = None
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.data: Any = None
        self.tracked: dict[str, Stateful] = {}
        self.generators = Generators(world)
        self.awaits_weights = False
        self._tells_updates = False
        self._world = world
        self._loading: dict[str, Any] = {}
        self._generators_loaded: dict[str, Any] = {}

    def use(self, engine: Engine) -> None:
        """Take an engine's model and optimizer, and what it needs to go on."""
        self.engine, self.model, self.optimizer = engine, engine.model, engine.optimizer
        if engine.loss_scale is not None:
            self.tracked["scaler"] = engine.loss_scale
        if engine.base is not None:
            self.tracked[BASE] = engine.base

    @property
    def kind(self) -> str:
        """The engine's, or "own"."""
        return self.engine.kind if self.engine is not None else "own"

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and their sizes; a program without an engine copies its model, as far as we know."""
        if self.engine is not None:
            return self.engine.mesh.as_dict()
        return {"dp_replicate": self._world.world_size}

    @property
    def state_bytes(self) -> int:
        """About what this rank writes: its share of weights and two moments; 0 without a model.

        Ranks share evenly in what they hold together, copies and shards alike; pipeline stages
        hold parts of their own.
        """
        if self.model is None:
            return 0
        saved = [p for p in self.model.parameters() if p.requires_grad or BASE not in self.tracked]
        whole = sum(_whole_numel(p) * p.element_size() for p in saved)
        return 3 * whole * self.mesh.get("pp", 1) // self._world.world_size

    def track(self, others: Mapping[str, Any]) -> None:
        """Take objects and generators by name; what cannot be saved is refused now.

        Raises:
            UsageError: one is neither a generator nor has it a state.
            CheckpointError: its state holds something that cannot be saved.
        """
        for name, thing in others.items():
            if type(thing) in KINDS:
                encode(thing, f"tracked.{name}")
            elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
                encode(state_of(thing), f"tracked.{name}")
            else:
                raise UsageError(
                    f"run.track({name}=...): a {type(thing).__name__} has no state_dict() and "
                    "load_state_dict(), and is no random generator; give it these two methods"
                )
        for name, thing in others.items():
            taken = self.generators.tracked if type(thing) in KINDS else self.tracked
            taken[name] = thing

    def add_data(self, name: str, loader: Stateful) -> None:
        """Take a loader; the one named "data" is the position in the data.

        Raises:
            UsageError: there is one of that name.
        """
        taken = {"model", "optimizer", *self.tracked, *self.generators.tracked}
        taken |= {DATA} if self.data is not None else set()
        if name in taken:
            raise UsageError(
                f"{name!r} is tracked already; give this loader another name (name=...)"
            )
        if name == DATA:
            self.data = loader
        else:
            self.tracked[name] = loader

    def data_place(self) -> DataPlace:
        """Which part of every batch this rank reads; the engine's word where there is one."""
        if self.engine is None:
            return DataPlace(self._world.rank, self._world.world_size)
        return DataPlace(self.engine.data_rank, self.engine.data_ranks, self.engine.passes)

    def ranks(self) -> Ranks:
        """How a loader speaks with those of the other ranks."""
        speak = partial(gather, self._world)
        return Ranks(self.data_place, numbers=speak, values=speak)

    def consumed(self) -> int | None:
        """Samples consumed by all ranks, where the data tells."""
        if isinstance(self.data, StreamLoader):  # its state is collective
            return self.data.consumed
        count = self.data.state_dict().get("samples_consumed") if self.data is not None else None
        return None if count is None else int(count)

    # ---- saving

    def snapshot(self) -> tuple[State, dict[str, Any], dict[str, Any]]:
        """All tensors, what is tracked as JSON, and the position in the data as JSON.

        Collective where the engine shards.
        """
        state = self._tensors()
        tracked: dict[str, Any] = {}
        extra = {}
        for name, thing in self.tracked.items():
            extra[name], found = encode(state_of(thing), f"tracked.{name}")
            tracked |= found
        data: dict[str, Any] = {}
        if self.data is not None:
            data, found = encode(self.data.state_dict(), f"tracked.{DATA}")
            tracked |= found
        copies = {**state.copies, **self._of_the_first(state, tracked)}
        state = replace(state, shared={**state.shared, **tracked}, copies=copies)
        own = self.generators.capture()
        return replace(state, own=own, steady=self._steady(state)), extra, data

    def _of_the_first(
        self, state: State, tracked: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[int, int]]:
        """Copies of which only those of the first rank are saved, as `State.copies` says it.

        Ranks may hold them differently, and a part from each would be a state that nobody had:
        running means are of a rank's own batches until the next pass (torch's DDP goes on with
        rank 0's then), and what is tracked may count on each rank by itself. Large tensors that
        are tracked are taken for averages of the weights, which are alike.
        """
        rank = self._world.rank
        first = {n: (rank, 1) for n, each in tracked.items() if each.nbytes <= MOST_OF_RANK_0_BYTES}
        for name in names.persistent_buffers(self.model) if self.model is not None else ():
            if name in state.shared and not isinstance(state.shared[name], DTensor):
                first[name] = (state.copies.get(name, (rank, 1))[0], 1)
        return first

    def call_before_update(self, act: Callable[[], None]) -> None:
        """Have something called each time before the optimizer changes weights, where it can be.

        From here on a snapshot says what is steady until then.
        """
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            return
        # A wrapper around an optimizer may have no hooks, or never call them.
        with contextlib.suppress(AttributeError):
            self.optimizer.register_step_pre_hook(lambda *_: act())
            self._tells_updates = True

    def _steady(self, state: State) -> frozenset[str]:
        """See `State`. Buffers are not: batch norm changes its own in the forward pass.

        DeepSpeed gives masters of its own to the program's optimizer, and changes them there alone.
        A program's own loop may have a second optimizer, of which nobody hears: there it is what
        the one that is tracked updates.
        """
        # Nobody waits for an update otherwise, and walking through the names holds up training.
        if not self._tells_updates or self.model is None or self.optimizer is None:
            return frozenset()
        weights = self.model.named_parameters(remove_duplicate=False)
        if self.engine is None:
            groups = self.optimizer.param_groups
            updated = {id(parameter) for group in groups for parameter in group["params"]}
            weights = ((name, weight) for name, weight in weights if id(weight) in updated)
        named = {names.MODEL + names.unwrapped(name) for name, _ in weights}
        return frozenset(n for n in state.shared if n.startswith(names.OPTIM) or n in named)

    # ---- restoring

    def wanted(self, manifest: Manifest) -> Wanted:
        """The tensors to fill from a checkpoint; the program's own, not copies."""
        state = self._tensors(with_optimizer=_has_optimizer(manifest))
        empty = (names.OPTIM, names.MODEL) if self.awaits_weights else (names.OPTIM,)
        fresh = {name for name in state.shared if name.startswith(empty)}
        found = self._wanted_of_tracked(manifest)
        own = self.generators.wanted(manifest, is_same_mesh=self._has_generators(manifest))
        state = replace(state, shared={**state.shared, **found}, own=own)
        self._loading = {**state.shared, **own}
        return Wanted(state, frozenset(fresh | set(found) | set(own)))

    def _wanted_of_tracked(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Tensors for what this program tracks, each as it was or as the program shards it now."""
        found = {}
        for name, thing in self.tracked.items():
            if name in manifest.extra:
                form = manifest.extra[name]
                like = encode(state_of(thing), f"tracked.{name}")[1] if has_sharded(form) else None
                found.update(placeholders(form, like, self._world.device))
        if self.data is not None:
            found.update(placeholders(manifest.data, device=self._world.device))
        return found

    def take_over(self, manifest: Manifest) -> None:
        """Go on from what has been loaded into the tensors that were wanted."""
        tensors, self._loading = self._loading, {}
        has_optimizer = _has_optimizer(manifest)
        if self.engine is not None:
            self.engine.apply(tensors, with_optimizer=has_optimizer)
        elif self.model is not None and has_optimizer:
            names.apply(self.model, self.optimizer, tensors)
        for name, thing in self.tracked.items():
            if name in manifest.extra:
                restore(thing, decode(manifest.extra[name], tensors))
        if self.data is not None and manifest.data:
            self.data.load_state_dict(decode(manifest.data, tensors))
        self._generators_loaded = tensors

    def seed(self, manifest: Manifest | None, seed: int, step: int) -> None:
        """Start this rank's generators, or let them go on from the checkpoint's. Collective."""
        tensors, self._generators_loaded = self._generators_loaded, {}
        is_same_mesh = manifest is not None and self._has_generators(manifest)
        if not is_same_mesh:
            number = self.engine.random_rank if self.engine is not None else self._world.rank
            seed_anew(number, seed, step)
        if manifest is not None:
            self.generators.apply(tensors, is_same_mesh=is_same_mesh, seed=seed, step=step)

    def _tensors(self, *, with_optimizer: bool = True) -> State:
        if self.engine is not None:
            return self.engine.state(with_optimizer=with_optimizer)
        if self.model is None:
            return State()
        return State(dict(names.collect(self.model, self.optimizer if with_optimizer else None)))

    def _has_generators(self, manifest: Manifest) -> bool:
        """Whether this rank's generators are in a checkpoint: it was saved on the same mesh."""
        return manifest.world_size == self._world.world_size and manifest.mesh == self.mesh


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


def _whole_numel(parameter: torch.Tensor) -> int:
    """Of a sharded parameter too; ZeRO-3 leaves an empty tensor in its place."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _has_optimizer(manifest: Manifest) -> bool:
    """Not where weights alone were imported: then a new optimizer begins with them."""
    if manifest.engine != "import":
        return True
    return any(one.name.startswith(names.OPTIM) for one in manifest.tensors)
