"""A step under guard: what becomes of an update whose numbers are not finite, or jump.

Loss and norm are the same numbers on every rank, so every rank decides alike without asking.
tests/engines/test_nonfinite.py and test_guarded_runs.py hold the promises.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from hpctrain.core.base.env import HPCTRAIN_NODE
from hpctrain.core.device import is_accelerator, random_state, set_random_state
from hpctrain.core.world import gather
from hpctrain.ledger.run.event_types import StepNotFinite
from hpctrain.train.engines.norm import local
from hpctrain.train.engines.state import modules, parameters
from hpctrain.train.guards.rules import StepRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from hpctrain.core.settings.schema import GuardSettings
    from hpctrain.train.engines.engine import Engine, Loss, Microbatch
    from hpctrain.train.guards.rules import Spike


WEIGHTS, OUTPUT, LOSS, GRADIENT, UNKNOWN = range(5)
"""Where a number was found, the surest sign of its origin first."""


@dataclass(frozen=True)
class Found:
    """Something that is not finite, as this rank has it.

    Attributes:
        place: One of those above; UNKNOWN where this rank has found nothing by itself.
        microbatch: Which of this rank's in the step, from 0 on; None where nobody knows.
        parameter: Name of the first parameter, "" where nobody knows.
    """

    place: int = UNKNOWN
    microbatch: int | None = None
    parameter: str = ""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all of this rank's part of a tensor is; waits for the device."""
    part = local(tensor)
    if not part.is_floating_point():
        return True
    return bool(torch.isfinite(part.detach()).all())


def first_of(named: Iterable[tuple[str, torch.Tensor | None]]) -> str:
    """The name of the first tensor that is not finite; "" for none."""
    return next((name for name, t in named if t is not None and not is_finite(t)), "")


class BadNumbers:
    """Checks, while entered, what a model's layers return and their gradients.

    `found` is the first thing that was not finite, or None. `passes` counts the losses so far: it
    shows which pass is running.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: Found | None = None
        self.passes = 0
        self._model = model
        self._handles: list[Any] = []
        self._armed: dict[int, nn.Parameter] = {}

    def __enter__(self) -> Self:
        for module, stem in {module: stem for stem, module in modules(self._model)}.items():
            own = next((key for key, p in module._parameters.items() if p is not None), None)  # noqa: SLF001 - its own alone
            if own is not None:
                before = module.register_forward_pre_hook(self._arm(stem))
                self._handles += [before, module.register_forward_hook(self._look(stem + own))]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._armed.clear()

    def came_to(self, loss: torch.Tensor) -> None:
        """A pass has come to its loss."""
        if self.found is None and not is_finite(loss):
            self.found = Found(LOSS, self.passes)
        self.passes += 1

    def _arm(self, stem: str) -> Any:
        """Parameters are hooked when they are used: a sharded one is another tensor then."""

        def hook(module: nn.Module, _args: Any) -> None:
            for key, parameter in module._parameters.items():  # noqa: SLF001 - its own alone
                if parameter is None or not parameter.requires_grad or id(parameter) in self._armed:
                    continue
                self._armed[id(parameter)] = parameter
                name = stem + key
                handle = parameter.register_hook(self._note(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

        return hook

    def _note(self, name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            # A parameter is wanted: nothing was found yet, or a loss alone.
            may_name = self.found is None or not self.found.parameter
            if may_name and not is_finite(gradient):
                before = self.found.microbatch if self.found is not None else self.passes - 1
                place = GRADIENT if self.found is None else self.found.place
                self.found = Found(place, before, name)

        return hook

    def _look(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            given = output if isinstance(output, tuple | list) else [output]
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            if self.found is None and not all(map(is_finite, tensors)):
                self.found = Found(OUTPUT, self.passes, name)

        return hook


MOST_SAMPLES = 64
"""Of a microbatch that are named."""
LARGE = 65536
"""Elements of a buffer that is copied only where torch has counted a change: masks and tables. What
batch norm has, a number for each channel, changes uncounted."""


class GuardListener(Protocol):
    """What a guard asks of the run and reports to it. On every rank alike."""

    def samples_of(self, microbatch: int) -> Sequence[int]:
        """The samples of one of this rank's microbatches of the step in hand."""

    def not_finite(self, bad: StepNotFinite, *, must_stop: bool) -> None:
        """A step was not finite; raises if nothing more is to be trained."""

    def spiked(self, step: int, spike: Spike, *, is_left_out: bool) -> None:
        """A step's numbers have jumped."""


class StepGuard(StepRules):
    """Stands between a step's gradients and its update."""

    def __init__(self, engine: Engine, settings: GuardSettings, listener: GuardListener) -> None:
        """Guard the steps of an engine."""
        super().__init__(settings)
        self._engine = engine
        self._listener = listener
        self._kept = KeptState(engine.model, engine.world.device) if self._leaves_out else None
        self._calls: list[tuple[Sequence[Microbatch], Loss]] = []
        self._losses: list[torch.Tensor] = []
        self._loss: float | None = None
        self._spike: Spike | None = None
        self._suspect = ""

    # ---- called by the engine

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """As the engine's; what is needed to do it once more is kept."""
        if self._kept is not None and not self._calls:
            self._kept.keep()
        self._calls.append((microbatches, loss))
        value = self._engine.accumulate(microbatches, self._noting(loss))
        self._loss = value if self._loss is None else self._loss + value
        return value

    def accepts(self, norm: float) -> bool:
        """Whether the update with a gradient of this norm is to be applied; asked before it."""
        if not self._is_finite(norm):
            self._suspect = first_of(
                (name, parameter.grad) for name, parameter in parameters(self._engine.model)
            )
            return not self._leaves_out
        if self._spikes is not None:
            self._spike = self._spikes.judge(self._loss, norm)
        return self._spike is None or not self._skips_spikes

    def step(self) -> float:
        """As the engine's. Collective where the step is not finite."""
        engine = self._engine
        self._count += 1
        try:
            norm = engine.update()
            if not self._is_finite(norm):
                if not self._is_daily_business(norm):
                    norm = self._not_finite(norm)
            else:
                self._was_bad = False
                if self._rule is not None:
                    self._rule.overflows = 0
            if engine.decides_alone and self._is_finite(norm):
                self.accepts(norm)  # it has not asked
            if self._spike is not None:
                if engine.left_out and self._kept is not None:
                    self._kept.put_back_buffers()
                self._listener.spiked(engine.begun + 1, self._spike, is_left_out=engine.left_out)
            return norm
        finally:
            self._clear()

    # ---- a step that is not finite

    def _is_finite(self, norm: float) -> bool:
        return math.isfinite(norm) and (self._loss is None or math.isfinite(self._loss))

    def _is_daily_business(self, norm: float) -> bool:
        """Whether nobody need hear of it: no guard is on, or fp16's scale was too high."""
        if self._rule is None:
            return True
        scale = self._engine.loss_scale
        overflowed = scale is not None and not math.isfinite(norm)
        return scale is not None and overflowed and not self._rule.overflowed(scale.scale)

    def _not_finite(self, norm: float) -> float:
        """Find out whose it is, try once more, tell, and stop where that is the ruling."""
        assert self._rule is not None, "nobody asked"  # noqa: S101 - our own bug
        engine, first_loss, first_norm = self._engine, self._loss, norm
        # What the first try has left: this rank's own losses, and gradients of all ranks.
        bad = (n for n, loss in enumerate(self._losses) if not math.isfinite(float(loss)))
        number, transient = next(bad, None), None
        seen = Found(UNKNOWN if number is None else LOSS, number, self._suspect)
        if self._kept is not None and engine.left_out and self._calls:
            norm, again = self._once_more()
            transient = self._is_finite(norm)
            if not transient:
                seen = again
            if engine.left_out:
                self._kept.put_back_buffers()
        if self._was_bad and not self._leaves_out:
            return norm  # told once: every step after it is the same
        self._was_bad = True
        named = self._blame(seen)
        must_stop = False
        if self._leaves_out:
            must_stop = self._rule.met(self._count, transient=bool(transient))
            must_stop |= named["in_weights"]  # no step could be finite any more
        fact = StepNotFinite(
            step=engine.begun + 1,
            loss=first_loss,
            grad_norm=first_norm,
            transient=transient,
            left_out=engine.left_out,
            **named,
        )
        self._listener.not_finite(fact, must_stop=must_stop)
        return norm

    def _once_more(self) -> tuple[float, Found]:
        """Compute the step again from the same state; its norm, and what this rank has found."""
        assert self._kept is not None, "nothing was kept"  # noqa: S101 - our own bug
        engine = self._engine
        self._kept.put_back()
        self._loss, self._spike = 0.0, None
        with BadNumbers(engine.model) as numbers:
            for microbatches, loss in self._calls:
                self._loss += engine.accumulate(microbatches, _telling(loss, numbers.came_to))
        norm = engine.update()
        seen = numbers.found or Found(UNKNOWN, None, self._suspect)
        if seen.place == GRADIENT and engine.mesh.pp > 1:
            seen = Found(GRADIENT, None, seen.parameter)  # passes go forth and back by turns
        if not self._is_finite(norm):
            weights = first_of(parameters(engine.model))
            seen = Found(WEIGHTS, None, weights) if weights else seen
        return norm, seen

    def _blame(self, seen: Found) -> dict[str, Any]:
        """Whose it is, by what every rank has found. Collective."""
        engine = self._engine
        samples: list[int] = []
        if seen.microbatch is not None:
            samples = list(self._listener.samples_of(seen.microbatch))[:MOST_SAMPLES]
        node = os.environ.get(HPCTRAIN_NODE) or os.uname().nodename
        rows = gather(engine.world, (seen.place, seen.parameter, samples, node))

        def order(rank: int) -> tuple[int, int, int]:
            place, stage = rows[rank][0], engine.mesh.pp_rank(rank)
            # A bad activation spoils the stages behind it, a bad gradient those before it.
            return place, -stage if place == GRADIENT else stage, rank

        first = min(range(len(rows)), key=order)
        place, parameter, named, where = rows[first]
        guilty = tuple(rank for rank, row in enumerate(rows) if row[0] != UNKNOWN)
        is_known = place not in {UNKNOWN, WEIGHTS} or 0 < len(guilty) < len(rows)
        return {
            "rank": first if is_known else None,
            "ranks": guilty,
            "node": where if is_known else "",
            "parameter": parameter,
            "samples": tuple(named),
            "in_weights": place == WEIGHTS,
        }

    # ---- small things

    def _noting(self, loss: Loss) -> Loss:
        if self._rule is None:
            return loss

        def note(value: torch.Tensor) -> None:
            if torch.is_grad_enabled():  # else it is only tried
                self._losses.append(value)

        return _telling(loss, note)

    def _clear(self) -> None:
        self._calls, self._losses = [], []
        self._loss, self._spike, self._suspect = None, None, ""


class _KeptBuffer:
    """A buffer, and what it was."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.value = buffer, buffer.detach().clone()
        self.version = buffer._version  # noqa: SLF001 - no public name

    def may_differ(self) -> bool:
        """Whether it may have changed since."""
        return self.buffer.numel() <= LARGE or self.buffer._version != self.version  # noqa: SLF001


class KeptState:
    """What a forward pass changes beside gradients: generators, and buffers as batch norm has."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._tables = [
            (module._buffers, name)  # noqa: SLF001 - a buffer may be put in another's place
            for module in model.modules()
            for name, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        ]
        self._copies: list[_KeptBuffer | None] = [None] * len(self._tables)
        self._generators: list[torch.Tensor] = []

    def keep(self) -> None:
        """Before a step's first pass. A large buffer that has not changed is not copied again."""
        self._generators = [torch.get_rng_state()]
        if is_accelerator(self._device):
            self._generators.append(random_state(self._device))
        here, kept = [], []
        for place, (table, name) in enumerate(self._tables):
            buffer, copy = table[name], self._copies[place]
            if buffer is None:
                continue
            if copy is None or copy.buffer is not buffer or copy.value.shape != buffer.shape:
                self._copies[place] = _KeptBuffer(buffer)
            elif copy.may_differ():
                here.append(buffer.detach())
                kept.append(copy.value)
                copy.version = buffer._version  # noqa: SLF001 - no public name
        if kept:
            torch._foreach_copy_(kept, here)  # all of them in one call

    def put_back(self) -> None:
        """As it was before the step."""
        self.put_back_buffers()
        torch.set_rng_state(self._generators[0])
        if is_accelerator(self._device):
            set_random_state(self._device, self._generators[1])

    def put_back_buffers(self) -> None:
        """A batch whose update is left out shall leave nothing in running means either."""
        with torch.no_grad():
            for (table, name), copy in zip(self._tables, self._copies, strict=True):
                if copy is None:
                    continue
                if table[name] is not copy.buffer or copy.may_differ():
                    copy.buffer.copy_(copy.value)
                    table[name] = copy.buffer


def _telling(loss: Loss, note: Callable[[torch.Tensor], None]) -> Loss:
    """The loss, of which each value is noted."""

    @functools.wraps(loss)
    def telling(output: torch.Tensor, targets: Any) -> torch.Tensor:
        value = loss(output, targets)
        note(value.detach())
        return value

    return telling
