"""The program that a run trains: its model, its optimizer, and all else that a checkpoint holds.

Anything with state_dict/load_state_dict travels without pickle: tensors by name, the rest as JSON,
with the types that it had (`checkpoint.tensors.values`). Random generators are in `generators`.
tests/unit/runtime/test_tracked.py and tests/engines/test_resume.py hold the promises.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from hpctrain.checkpoint.tensors.boxes import State, refuse_unsaveable
from hpctrain.checkpoint.tensors.restore import Wanted
from hpctrain.checkpoint.tensors.value_reading import decode, has_sharded, placeholders
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.core.world import gather
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.data.loader import DataPlace
from hpctrain.train.data.stream_loader import StreamLoader
from hpctrain.train.engines import state as names
from hpctrain.train.engines.state import parameters
from hpctrain.train.runtime.fitting import NAME as GROUPS
from hpctrain.train.runtime.fitting import (
    NEW,
    OPTIMIZER,
    Fit,
    ParamGroups,
    counted,
    fit,
    other_inner,
    other_optimizer,
    way_out,
)
from hpctrain.train.runtime.generators import KINDS, Generators, seed_anew
from hpctrain.train.runtime.optimizer_rest import (
    LOST,
    Gradients,
    NamedOptimizer,
    OptimizerRest,
    are_lost,
    inner_optimizers,
    require_order,
)
from hpctrain.train.runtime.optimizer_rest import NAME as REST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import Manifest, TensorEntry
    from hpctrain.core.world import World
    from hpctrain.train.engines.engine import Engine

log = logging.getLogger("hpctrain.runtime")

RATES = "__rates__"
SCHEDULED = ("lr", "momentum", "betas")
"""What torch's schedulers set in the optimizer's groups."""
PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums",
             "max_momentums")  # fmt: skip
"""What a scheduler's state has for each of the optimizer's groups."""
INNER = "_schedulers"
"""The states of the schedulers in one that combines them."""
DATA = "data"
MOST_OF_RANK_0_BYTES = 1 << 20
"""A tensor of what is tracked beside the model is rank 0's up to here, and spread beyond."""
SCALER = "scaler"
BASE = "base_weights"
OWN = frozenset({GROUPS, SCALER, BASE})
"""Names that hpctrain gives to what it tracks itself; others begin with `OWN_PREFIX`."""
OWN_PREFIX = "hpctrain."


class Stateful(Protocol):
    """What `Run.track` takes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to continue."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Resume from there."""


Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
"""What `Run.track` takes besides."""


class Program:
    """What there is to save, and to continue with.

    Attributes:
        engine: Of a program that called `parallelize`.
        model: The engine's, or the program's own.
        optimizer: The same.
        data: The position in the data.
        tracked: Everything else by its name.
        generators: This rank's random generators.
        awaits_weights: The model has memory and no values: a checkpoint's go straight into it.
        allow: Changes of the program since the checkpoint that may pass; of `fitting.CHANGES`.
    """

    def __init__(self, world: World) -> None:
        self.engine: Engine | None = None
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.data: Any = None
        self.tracked: dict[str, Stateful] = {}
        self.generators = Generators(world)
        self.awaits_weights = False
        self.allow: frozenset[str] = frozenset()
        self._notes: list[str] = []
        self._groups: ParamGroups | None = None
        self._rest: OptimizerRest | None = None
        self._gradients: Gradients | None = None
        self._has_state = self._takes_groups = False
        self._world = world
        self._loading: dict[str, Any] = {}
        self._generators_loaded: dict[str, Any] = {}

    def use(self, engine: Engine) -> None:
        """Take an engine's model and optimizer, and what it needs to continue."""
        self.engine, self.model, self.optimizer = engine, engine.model, engine.optimizer
        if engine.loss_scale is not None:
            self.tracked[SCALER] = engine.loss_scale
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
        saved = [
            parameter
            for parameter in self.model.parameters()
            if (parameter.requires_grad or BASE not in self.tracked)
            and not isinstance(parameter, UninitializedParameter)
        ]
        # Of sharded parameters too; ZeRO-3 leaves an empty tensor in the place of each.
        whole = sum(int(getattr(p, "ds_numel", p.numel())) * p.element_size() for p in saved)
        return 3 * whole * self.mesh.get("pp", 1) // self._world.world_size

    def track(self, others: Mapping[str, Any], data: Any = None) -> None:
        """Take objects and generators by name, and the position in the data, if they have a state.

        Raises:
            UsageError: one is neither a generator nor has it a state.
            CheckpointError: its state holds something that cannot be saved.
        """
        for name, thing in {**others, **({} if data is None else {DATA: data})}.items():
            is_generator = type(thing) in KINDS and name != DATA
            has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
            if not (is_generator or has_state):
                other = ", or use run.loader()" if name == DATA else ""
                raise UsageError(
                    f"run.track({name}=...): a {type(thing).__name__} has no state_dict() and "
                    f"load_state_dict(), and is no random generator; give it both methods{other}"
                )
            if name != DATA:
                encode(thing if is_generator else state_of(thing), f"tracked.{name}")
        for name, thing in others.items():
            taken = self.generators.tracked if type(thing) in KINDS else self.tracked
            taken[name] = thing
        self.data = self.data if data is None else data

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
            extra[name], own_tensors = encode(state_of(thing), f"tracked.{name}")
            tracked |= own_tensors
        data: dict[str, Any] = {}
        if self.data is not None:
            data, own_tensors = encode(self.data.state_dict(), f"tracked.{DATA}")
            tracked |= own_tensors
        copies = {**state.copies, **self._of_the_first(state, tracked)}
        state = replace(state, shared={**state.shared, **tracked}, copies=copies)
        own = self.generators.capture()
        if self._gradients is not None:
            own |= self._gradients.capture()
        return replace(state, own=own), extra, data

    def _of_the_first(
        self, state: State, tracked: Mapping[str, torch.Tensor]
    ) -> dict[str, tuple[int, int]]:
        """Return copies of which only the first rank's are saved, as `State.copies` has them.

        A part from each rank would be a state that nobody had. Running means are of a rank's own
        batches until the next pass (torch's DDP continues with rank 0's), and tracked objects may
        count per rank. Large tracked tensors are taken for averages of the weights, which are
        alike.
        """
        rank = self._world.rank
        first = {n: (rank, 1) for n, each in tracked.items() if each.nbytes <= MOST_OF_RANK_0_BYTES}
        for place, _ in names.buffers(self.model) if self.model is not None else ():
            name = names.MODEL + place.name
            if name in state.shared and not isinstance(state.shared[name], DTensor):
                first[name] = (state.copies.get(name, (rank, 1))[0], 1)
        return first

    # ---- restoring

    def begin(self) -> None:
        """Note how the program has made its optimizer. Collective where ranks differ in it."""
        optimizer, model = self.optimizer, self.model
        # At a second loop the groups have been noted: what training has made of them is no start.
        noted = self._groups
        is_new = noted is None or noted.optimizer is not optimizer or noted.model is not model
        if isinstance(optimizer, torch.optim.Optimizer) and model is not None and is_new:
            self._groups = ParamGroups(
                optimizer, model, driven=self._driven, allow=lambda: self.allow
            )
            has_stages = self.mesh.get("pp", 1) > 1
            self._groups.begin(partial(gather, self._world) if has_stages else None)
            self.tracked[GROUPS] = self._groups
            self._rest = self.tracked[REST] = OptimizerRest(optimizer)
            inner = inner_optimizers(optimizer)
            if inner and has_stages:
                raise CheckpointError(
                    f"{type(optimizer).__name__} holds another optimizer, whose state is not saved "
                    "under pipeline parallelism; use another engine, or a plain optimizer"
                )
            for name, each in inner.items():
                if not any(each is thing for thing in self.tracked.values()):
                    named = NamedOptimizer(each, {"model": model}, optimizer)
                    self.tracked[f"{REST}.{name}"] = named
            if self.engine is None:
                self._gradients = Gradients(optimizer, model, self._world.rank)
        models = {n: one for n, one in self.tracked.items() if isinstance(one, torch.nn.Module)}
        models |= {"model": self.model} if self.model is not None else {}
        for name, thing in self.tracked.items():
            if isinstance(thing, torch.optim.Optimizer):
                self.tracked[name] = NamedOptimizer(thing, models)

    def step_begins(self) -> None:
        """A step of the program begins."""
        if self._gradients is not None:
            self._gradients.step_begins()

    def _drives(self, thing: Stateful) -> bool:
        """Whether something is a scheduler of the tracked optimizer."""
        groups = _scheduled_groups(thing)
        return self.optimizer is not None and groups is self.optimizer.param_groups

    def _order_for(self, thing: Stateful) -> Sequence[int | None] | None:
        """Of a scheduler the order of its optimizer's groups, where they were loaded by names."""
        if self._groups is not None and self._drives(thing):
            return self._groups.order
        groups = _scheduled_groups(thing)
        for other in self.tracked.values():
            if isinstance(other, NamedOptimizer) and other.optimizer.param_groups is groups:
                return other.order
        return None

    def _driven(self) -> frozenset[str]:
        """What tracked schedulers set in the groups of the tracked optimizer."""
        drivers = [thing for thing in self.tracked.values() if self._drives(thing)]
        if not drivers:
            return frozenset()
        cycled = any(map(_cycles_momentum, drivers))
        return frozenset(SCHEDULED if cycled else SCHEDULED[:1])

    def _optimizer_fits(self, manifest: Manifest, saved: Mapping[str, TensorEntry]) -> bool:
        """Return whether to load the optimizer's state; refuse another's, unless allowed."""
        self._takes_groups = False
        if self.model is None or self.optimizer is None:
            return False
        # Where weights alone were imported, a new optimizer begins with them.
        if manifest.engine == "import" and not any(name.startswith(names.OPTIM) for name in saved):
            return False
        theirs = manifest.extra.get(GROUPS, {}).get("class")
        why = other_optimizer(self.optimizer, self.model, saved, theirs)
        if REST in manifest.extra and not why:
            why = other_inner(
                *(
                    {name for name in tracked if name.startswith(f"{REST}.")}
                    for tracked in (manifest.extra, self.tracked)
                )
            )
        if why and OPTIMIZER not in self.allow:
            raise CheckpointError(f"{why}. {way_out([OPTIMIZER])}")
        if why:
            self._notes.append(f"{why}: the optimizer begins without state")
        self._takes_groups = not why and self._groups is not None and theirs is not None
        return not why

    def wanted(self, manifest: Manifest) -> Wanted:
        """The tensors to fill from a checkpoint; the program's own, not copies."""
        saved = {entry.name: entry for entry in manifest.tensors}
        self._notes = []
        self._has_state = self._optimizer_fits(manifest, saved)
        state = self._tensors(with_optimizer=self._has_state, saved=saved)
        common = self._common(state, saved)
        # State of another parameter's shape is none of what has taken its name.
        stems = tuple(f"{names.OPTIM}{name.removeprefix(names.MODEL)}." for name in common.fresh)
        asked_for = {
            name: tensor
            for name, tensor in state.shared.items()
            if name in saved and name not in common.fresh and not name.startswith(stems)
        }
        state = replace(state, shared=asked_for)
        empty = (names.OPTIM, names.MODEL) if self.awaits_weights else (names.OPTIM,)
        fresh = {name for name in state.shared if name.startswith(empty)}
        of_tracked = self._wanted_of_tracked(manifest)
        is_same_mesh = self._has_generators(manifest)
        own = self.generators.wanted(manifest, is_same_mesh=is_same_mesh)
        if self._gradients is not None:
            own |= self._gradients.wanted(manifest, is_same_mesh=is_same_mesh)
        state = replace(state, shared={**state.shared, **of_tracked}, own=own)
        self._loading = {**state.shared, **own}
        new = frozenset(fresh | set(of_tracked) | set(own))
        return Wanted(state, new, left_out=common.dropped)

    def _wanted_of_tracked(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """Tensors for what this program tracks, each as it was or as the program shards it now."""
        targets = {}
        for name, thing in self.tracked.items():
            if name in manifest.extra:
                form = manifest.extra[name]
                like = encode(state_of(thing), f"tracked.{name}")[1] if has_sharded(form) else None
                targets.update(placeholders(form, like, self._world.device))
        if self.data is not None:
            targets.update(placeholders(manifest.data, device=self._world.device))
        return targets

    def _common(self, state: State, saved: Mapping[str, TensorEntry]) -> Fit:
        """Return what the model and a checkpoint have in common; keep notes of the rest."""
        if self.model is None:
            return Fit(frozenset(), frozenset(), ())
        ours, theirs = (
            {name: tuple(one.shape) for name, one in each.items() if name.startswith(names.MODEL)}
            for each in (state.shared, saved)
        )
        named = list(parameters(self.model))
        loaded = {id(one) for name, one in named if names.MODEL + name in saved}
        for name, parameter in named:  # a tied weight may have come under one of its names
            if names.MODEL + name not in saved and id(parameter) in loaded:
                ours.pop(names.MODEL + name, None)
        common = fit(ours, state.elsewhere, theirs, self.allow)
        if common.fresh and self.awaits_weights:
            raise CheckpointError(
                f"{counted(sorted(common.fresh))} are not in the checkpoint, and the model was "
                f"made without values; {way_out([NEW])}"
            )
        self._notes += common.notes
        for name, form, now in names.buffers_of_other_form(self.model, saved):
            self._notes.append(
                f"buffer {name} is {form} in the checkpoint and {now} in the model: the "
                "checkpoint's is taken"
            )
        has_state = self._has_state and any(name.startswith(names.OPTIM) for name in saved)
        if has_state and isinstance(self.optimizer, torch.optim.Optimizer):
            lacking = names.without_state(self.model, self.optimizer, saved)
            if bare := [name for name in lacking if names.MODEL + name not in common.fresh]:
                self._notes.append(
                    f"no optimizer state in the checkpoint for {counted(bare)}: they begin without"
                )
        return common

    def _unlike(self, manifest: Manifest) -> list[str]:
        """Lines on objects that only the checkpoint has, or only this program tracks."""
        theirs = {*manifest.extra, *self.generators.saved_names(manifest)}
        theirs |= {DATA} if manifest.data else set()
        ours = {*self.tracked, *self.generators.tracked}
        ours |= {DATA} if self.data is not None else set()
        dropped, new = (
            sorted(name for name in names if name not in OWN and not name.startswith(OWN_PREFIX))
            for names in (theirs - ours, ours - theirs)
        )
        notes = [f"{', '.join(dropped)}: in the checkpoint, and not tracked by this program"]
        begins = [f"{', '.join(new)}: not in the checkpoint, begins as the program has made it"]
        return notes * bool(dropped) + begins * bool(new)

    def take_over(self, manifest: Manifest) -> None:
        """Resume from what has been loaded into the tensors that were wanted."""
        tensors, self._loading = self._loading, {}
        self._take_over_optimizer(manifest, tensors)
        optimizers_first = sorted(
            self.tracked.items(), key=lambda item: not isinstance(item[1], NamedOptimizer)
        )
        for name, thing in optimizers_first:
            is_own = name == GROUPS or (name.startswith(REST) and not self._has_state)
            if name in manifest.extra and not is_own:
                restore(thing, decode(manifest.extra[name], tensors), self._order_for(thing))
        if self.data is not None and manifest.data:
            self.data.load_state_dict(decode(manifest.data, tensors))
        self._generators_loaded = tensors
        self._notes += self._unlike(manifest)
        for note in dict.fromkeys(chain(*gather(self._world, self._notes))):
            if self._world.rank == 0:
                log.warning("%s", note)

    def _take_over_optimizer(self, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
        """Continue with the model, the optimizer and its groups, and gradients that wait for it."""
        takes_rest = self._rest is not None and self._has_state and REST in manifest.extra
        rest = decode(manifest.extra[REST], tensors) if takes_rest else None
        if self._rest is not None and rest is not None:
            self._rest.load_own(rest)
        if self.engine is not None:
            self.engine.apply(tensors, with_optimizer=self._has_state)
        elif self.model is not None:
            names.apply(self.model, self.optimizer if self._has_state else None, tensors)
        if self._groups is not None and self._takes_groups:
            self._groups.load_state_dict(decode(manifest.extra[GROUPS], tensors))
            self._notes += self._groups.notes
            if rest is not None:
                require_order(rest, self._groups.order)
        if self._gradients is not None:
            self._gradients.apply(tensors)
        if are_lost(manifest, is_same_mesh=self._has_generators(manifest)):
            self._notes.append(LOST)

    def seed(self, manifest: Manifest | None, seed: int, step: int) -> None:
        """Start this rank's generators, or let them resume from the checkpoint's. Collective."""
        tensors, self._generators_loaded = self._generators_loaded, {}
        is_same_mesh = manifest is not None and self._has_generators(manifest)
        if not is_same_mesh:
            number = self.engine.random_rank if self.engine is not None else self._world.rank
            seed_anew(number, seed, step)
        if manifest is not None:
            self.generators.apply(tensors, is_same_mesh=is_same_mesh, seed=seed, step=step)

    def _tensors(
        self, *, with_optimizer: bool = True, saved: Mapping[str, TensorEntry] | None = None
    ) -> State:
        if self.engine is not None:
            return self.engine.state(with_optimizer=with_optimizer, saved=saved)
        if self.model is None:
            return State()
        optimizer = self.optimizer if with_optimizer else None
        if saved is None:
            return State(dict(names.collect(self.model, optimizer)))
        return State(dict(names.wanted(self.model, optimizer, saved)))

    def _has_generators(self, manifest: Manifest) -> bool:
        """Whether this rank's generators are in a checkpoint: it was saved on the same mesh."""
        return manifest.world_size == self._world.world_size and manifest.mesh == self.mesh


def refuse_unsaveable_model(model: nn.Module) -> None:
    """Refuse a model with a tensor that no checkpoint can hold, before it trains.

    Raises:
        CheckpointError: which tensor, and what to do.
    """
    held: dict[str, torch.Tensor | None] = {
        names.MODEL + name: parameter for name, parameter in model.named_parameters()
    }
    held |= {names.MODEL + place.name: buffer for place, buffer in names.buffers(model)}
    for name, tensor in held.items():
        if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
            refuse_unsaveable(name, tensor)


def state_of(thing: Stateful) -> dict[str, Any]:
    """Its state; of a scheduler also what it has set in its optimizer.

    A checkpoint holds no hyper-parameters, and torch's schedulers take the next rate from the last.
    """
    groups = _scheduled_groups(thing)
    if not groups:
        return thing.state_dict()
    rates = [{name: group[name] for name in SCHEDULED if name in group} for group in groups]
    return {**thing.state_dict(), RATES: rates}


def restore(
    thing: Stateful, state: dict[str, Any], order: Sequence[int | None] | None = None
) -> None:
    """Resume from what `state_of` gave.

    `order` is that of a scheduler whose optimizer's groups have their values already. It has for
    each group the number of the checkpoint's, None for a new one.

    Raises:
        CheckpointError: a scheduler's optimizer has more or fewer groups than it had.
    """
    own = {name: value for name, value in state.items() if name != RATES}
    if order is not None:
        thing.load_state_dict(in_order(own, thing.state_dict(), order))
        return
    groups, rates = _scheduled_groups(thing), state.get(RATES)
    if rates is not None and len(rates) != len(groups):
        raise CheckpointError(
            f"the optimizer of a tracked {type(thing).__name__} has {len(groups)} parameter groups "
            f"and had {len(rates)} in the checkpoint"
        )
    thing.load_state_dict(own)
    for group, values in zip(groups, rates or [], strict=False):
        group.update(values)


def in_order(
    saved: dict[str, Any], now: dict[str, Any], order: Sequence[int | None]
) -> dict[str, Any]:
    """Return a scheduler's state with what it has for each group in the order of the groups."""
    state = dict(saved)
    for key in PER_GROUP:
        theirs, ours = saved.get(key), now.get(key)
        if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(order):
            state[key] = [
                ours[place] if number is None or number >= len(theirs) else theirs[number]
                for place, number in enumerate(order)
            ]
    inner, inner_now = saved.get(INNER), now.get(INNER)
    if isinstance(inner, list) and isinstance(inner_now, list) and len(inner) == len(inner_now):
        state[INNER] = [in_order(a, b, order) for a, b in zip(inner, inner_now, strict=True)]
    return state


def _cycles_momentum(scheduler: Any) -> bool:
    inner = getattr(scheduler, INNER, [])
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(map(_cycles_momentum, inner))


def _scheduled_groups(thing: Any) -> list[dict[str, Any]]:
    if not hasattr(thing, "get_last_lr") or not hasattr(thing, "optimizer"):
        return []
    groups: list[dict[str, Any]] = thing.optimizer.param_groups
    return groups
