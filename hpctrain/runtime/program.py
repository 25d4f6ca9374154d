"""The program that a run trains: its model, its optimizer, and all else that a checkpoint holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.checkpoint.tensors.restore import Wanted
from hpctrain.engines import state as names
from hpctrain.runtime import rng, tracked

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.engines.engine import Engine
    from hpctrain.world import World


class Program:
    """What there is to save, and to go on with.

    Attributes:
        engine: Of a program that called `parallelize`.
        model: The engine's, or the program's own.
        optimizer: The same.
        data: The position in the data.
        tracked: Everything else by its name.
    """

    def __init__(self, world: World) -> None:
        self.engine: Engine | None = None
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.data: Any = None
        self.tracked: dict[str, tracked.Stateful] = {}
        self._world = world
        self._loading: dict[str, Any] = {}

    def use(self, engine: Engine) -> None:
        """Take an engine's model and optimizer, and what it needs to go on."""
        self.engine, self.model, self.optimizer = engine, engine.model, engine.optimizer
        if engine.loss_scale is not None:
            self.tracked["scaler"] = engine.loss_scale

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
        whole = sum(_whole_numel(p) * p.element_size() for p in self.model.parameters())
        return 3 * whole * self.mesh.get("pp", 1) // self._world.world_size

    def consumed(self) -> int | None:
        """Samples consumed by all ranks, where the data tells."""
        count = self.data.state_dict().get("samples_consumed") if self.data is not None else None
        return None if count is None else int(count)

    # ---- saving

    def snapshot(self) -> tuple[State, dict[str, Any]]:
        """All tensors, and what else is tracked as JSON. Collective where the engine shards."""
        state = self._tensors()
        extra = {
            name: tracked.split(f"tracked.{name}", tracked.state_of(thing), state.shared)
            for name, thing in self.tracked.items()
        }
        return replace(state, own=rng.capture(self._world)), extra

    # ---- restoring

    def wanted(self, manifest: Manifest) -> Wanted:
        """The tensors to fill from a checkpoint; the program's own, not copies."""
        state = self._tensors(with_optimizer=_has_optimizer(manifest))
        fresh = {name for name in state.shared if name.startswith(names.OPTIM)}
        placeholders: dict[str, torch.Tensor] = {}
        tracked.empty_tensors(manifest.extra, placeholders)
        own = rng.capture(self._world) if self._has_generators(manifest) else {}
        state = replace(state, shared={**state.shared, **placeholders}, own=own)
        self._loading = {**state.shared, **own}
        return Wanted(state, frozenset(fresh | set(placeholders) | set(own)))

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
                tracked.restore(thing, tracked.join(manifest.extra[name], tensors))
        if self.data is not None and manifest.data:
            self.data.load_state_dict(manifest.data)
        if self._has_generators(manifest):
            rng.apply(self._world, tensors)

    def seed(self, manifest: Manifest | None, seed: int, step: int) -> None:
        """Start this rank's generators, unless they went on from the checkpoint's."""
        if manifest is None or not self._has_generators(manifest):
            number = self.engine.random_rank if self.engine is not None else self._world.rank
            rng.seed_anew(number, seed, step)

    def _tensors(self, *, with_optimizer: bool = True) -> State:
        if self.engine is not None:
            return self.engine.state(with_optimizer=with_optimizer)
        if self.model is None:
            return State()
        return State(dict(names.collect(self.model, self.optimizer if with_optimizer else None)))

    def _has_generators(self, manifest: Manifest) -> bool:
        """Whether this rank's generators are in a checkpoint: it was saved on the same mesh."""
        return manifest.world_size == self._world.world_size and manifest.mesh == self.mesh


def _whole_numel(parameter: torch.Tensor) -> int:
    """Of a sharded parameter too; ZeRO-3 leaves an empty tensor in its place."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _has_optimizer(manifest: Manifest) -> bool:
    """Not where weights alone were imported: then a new optimizer begins with them."""
    if manifest.engine != "import":
        return True
    return any(one.name.startswith(names.OPTIM) for one in manifest.tensors)
