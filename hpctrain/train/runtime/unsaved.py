"""Finds what influences a program's steps and is in no checkpoint, and names it.

Two looks, on rank 0 alone, each once in an attempt, so that no step is slower for them:

- After the first step: optimizers, schedulers, loss scalers and averages of weights that live in
  the process and that nothing tracked leads to. A resumed run begins them anew.
- At a resume: attributes of modules, of the optimizer and of tracked objects, and buffers that are
  not persistent, which had changed by the time of the checkpoint and have begun anew (`_is_new`).
  What a program computes from the step's number, or keeps of its last batch, is not named.

tests/engines/test_unsaved.py holds the promises; docs/checkpoints.md shows the messages.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from hpctrain.checkpoint.tensors.values import encode
from hpctrain.train.engines.state import is_wrapper
from hpctrain.train.runtime.generators import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.train.runtime.program import Program

log = logging.getLogger("hpctrain.runtime")

NAME = "hpctrain.unsaved"
"""Under this a manifest has, by path, an attribute's value at the start and at a save."""
LOOKED_AT = 4096
"""Elements of a tensor, evenly spread, that are compared."""
KEPT = 16
"""Of them, numbers that a manifest has."""
ITEMS = 64
"""Collections with more items are data, and not looked into."""
_NUMBERS = re.compile(r"torch\.(?:bool|bfloat16|float(?:16|32|64|8_\w+)|u?int(?:8|16|32|64))$")
"""Types of numbers that torch converts: those of less than a byte it does not."""
LARGEST = 1 << 63
"""Larger whole numbers are no counters, and some have no float."""
MOST = 100
"""Attributes that a manifest has: thousands of counters are of one kind."""
SHOWN = 3
DIGEST = " #"
DEPTH = 3
"""Tracked objects lead to others by so many attributes: a combined scheduler, a wrapper."""
OF_TORCH = frozenset(vars(nn.Module())) | {
    *vars(Optimizer([torch.zeros(1)], {})),
    *("_step_count", "_opt_called", "_warned_capturable_if_run_uncaptured"),
}
"""Attributes that torch gives to every module and optimizer, and to one that is scheduled."""
Scaler = torch.amp.GradScaler
NAME_OF: dict[type, str] = {
    Optimizer: "optimizer2", LRScheduler: "scheduler", AveragedModel: "ema", Scaler: "scaler",
}  # fmt: skip
"""What is looked for among the objects of the process, and its argument of `Run.track`."""


class Unsaved:
    """What one attempt's program holds beside its checkpoints."""

    def __init__(self, program: Program | None) -> None:
        """Take a program to look at from `begin` on; of none, nothing is ever found."""
        self._candidate = program
        self._program: Program | None = None
        self._recorded: Mapping[str, Any] | None = None
        self._step = self._due = 0
        self._at_start: dict[str, Seen] = {}
        self._after_one: dict[str, Seen] = {}
        self._changed: dict[str, Any] = {}

    def begin(self, manifest: Manifest | None, step: int) -> None:
        """Look before the first step, behind the checkpoint that was restored, if any was."""
        if self._candidate is None or self._candidate.model is None:
            return
        self._program = self._candidate
        self._recorded = manifest.extra.get(NAME, {}) if manifest is not None else None
        self._step, self._due = step, step + 1
        self._at_start = dict(_values(self._program))

    def after_first_step(self) -> None:
        """Log a line for each thing that is in no checkpoint."""
        if self._program is None:
            return
        self._after_one = dict(_values(self._program))
        for line in (*self._objects(self._program), *self._begun_anew()):
            log.warning("%s", line)

    def recorded_at(self, step: int) -> dict[str, Any]:
        """Return what has changed since the start and is not saved, as a manifest has it.

        Looks at steps that are twice as far each time, so copies at each step cost nothing.
        """
        if self._program is not None and step >= self._due:
            self._due = step + max(step - self._step, 1)
            now = dict(_values(self._program))
            changed = [
                path for path, value in self._at_start.items() if now.get(path, value) != value
            ]
            seen = (self._at_start, self._after_one, now)
            self._changed = {
                path: [asdict(each.get(path, now[path])) for each in seen]
                for path in changed[:MOST]
            }
        return {NAME: self._changed} if self._changed else {}

    def _objects(self, program: Program) -> Iterator[str]:
        roots = [program.engine, program.model, program.optimizer, program.data]
        reached = _reachable([*roots, *program.tracked.values()])
        untracked = [thing for thing in _alive() if id(thing) not in reached]
        if any(map(_progress, untracked)):  # what nobody has any more is no part of the program
            del untracked
            gc.collect()
            untracked = [thing for thing in _alive() if id(thing) not in reached]
        for thing in untracked:
            if not (progress := _progress(thing)):
                continue
            kind = type(thing).__name__
            name = next(name for base, name in NAME_OF.items() if isinstance(thing, base))
            if self._recorded is None:
                yield (
                    f"{kind} is not tracked, so no checkpoint has it and a resumed run begins it "
                    f"anew: run.track({name}=...)"
                )
            elif progress == 1:
                yield (
                    f"{kind} is not tracked and has begun anew at step {self._step}, as no "
                    f"checkpoint has it: run.track({name}=...)"
                )

    def _begun_anew(self) -> Iterator[str]:
        begun_anew = [
            _described(path, start, saved)
            for path, (start, after_one, saved) in _read(self._recorded or {})
            if self._at_start.get(path) == start
            and path in self._after_one
            and _is_new(self._after_one[path], start, after_one, saved)
        ]
        if begun_anew:
            rest = len(begun_anew) - SHOWN
            more = f"; and {rest} more" if rest > 0 else ""
            yield (
                f"not in the checkpoint: {'; '.join(begun_anew[:SHOWN])}{more}. If training "
                "depends on it, make it a persistent buffer, or give it to run.track"
            )


def _read(recorded: Mapping[str, Any]) -> Iterator[tuple[str, list[Seen]]]:
    for path, values in recorded.items():
        yield path, [Seen(one["text"], tuple(one["numbers"])) for one in values]


def _is_new(now: Seen, start: Seen, after_one: Seen, saved: Seen) -> bool:
    """Whether a value that was at its start before this step has begun anew."""
    if now == saved:
        return False
    return now == after_one or 2 * now.distance(start) < now.distance(saved)


def _described(path: str, start: Seen, saved: Seen) -> str:
    if DIGEST in start.text or DIGEST in saved.text:
        return f"{path} ({saved.text.partition(DIGEST)[0]}) had changed and began again"
    return f"{path} was {saved.text} and began again at {start.text}"


# ---- objects


def _alive() -> list[Any]:
    """Return all optimizers, schedulers, scalers and averages of this process."""
    things = gc.get_objects()  # a million in a large program, of some thousand types
    wanted = {kind for kind in set(map(type, things)) if issubclass(kind, tuple(NAME_OF))}
    return [thing for thing in things if type(thing) in wanted] if wanted else []


def _progress(thing: Any) -> int:
    """Return how far an object has come, roughly: 0 if it takes no part, 1 after a first step."""
    if isinstance(thing, Optimizer):
        states = [state for state in thing.state.values() if isinstance(state, dict)]
        return max((_number(state.get("step")) for state in states), default=0)
    if isinstance(thing, LRScheduler):
        return max(1, _number(getattr(thing, "last_epoch", None)))
    if isinstance(thing, AveragedModel):
        return _number(getattr(thing, "n_averaged", 0))
    state = thing.state_dict()  # empty if it is switched off
    return max(1, _number(state.get("_growth_tracker"))) if state else 0


def _number(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 1


def _reachable(roots: Iterable[Any]) -> set[int]:
    reached: set[int] = set()
    layer = list(roots)
    for _ in range(DEPTH + 1):
        layer = [thing for thing in layer if id(thing) not in reached]
        reached.update(map(id, layer))
        layer = [below for thing in layer for below in _below(thing)]
    return reached


def _below(thing: Any) -> Iterator[Any]:
    if isinstance(thing, (list, tuple)):
        yield from thing[:ITEMS]
    elif isinstance(thing, dict):
        yield from list(thing.values())[:ITEMS]
    elif not isinstance(thing, type):
        yield from getattr(thing, "__dict__", {}).values()


# ---- attributes


@dataclass(frozen=True)
class Seen:
    """A value as text that tells it from others, and some of its numbers."""

    text: str
    numbers: tuple[float, ...]

    def distance(self, other: Seen) -> float:
        """Return how far the numbers are apart."""
        return sum(abs(a - b) for a, b in zip(self.numbers, other.numbers, strict=False))


def _values(program: Program) -> Iterator[tuple[str, Seen]]:
    if program.model is not None:
        yield from _of_module("model", program.model)
    if isinstance(program.optimizer, Optimizer):
        yield from _of_object("optimizer", program.optimizer)
    for name, thing in program.tracked.items():
        if isinstance(thing, nn.Module):
            yield from _of_module(name, thing)
        elif hasattr(thing, "__dict__") and not type(thing).__module__.startswith("hpctrain."):
            yield from _of_object(name, thing)


def _of_module(name: str, model: nn.Module) -> Iterator[tuple[str, Seen]]:
    for prefix, module in model.named_modules(prefix=name):
        if not is_wrapper(module):
            yield from _of_object(prefix, module)
        for key, parameter in module._parameters.items():  # noqa: SLF001 - its own alone
            if parameter is not None:
                yield from _one(f"{prefix}.{key}.requires_grad", parameter.requires_grad)
        for key in module._non_persistent_buffers_set:  # noqa: SLF001 - torch has no other way
            yield from _one(f"{prefix}.{key}", module._buffers.get(key))  # noqa: SLF001


def _of_object(prefix: str, thing: Any) -> Iterator[tuple[str, Seen]]:
    for key, value in list(vars(thing).items()):
        if key not in OF_TORCH:
            yield from _one(f"{prefix}.{key}", value)


def _one(path: str, value: Any) -> Iterator[tuple[str, Seen]]:
    if (seen := _seen(value)) is not None:
        yield path, seen


def _seen(value: Any) -> Seen | None:
    """Return a value; None of what holds no numbers, or is made anew in each step."""
    if isinstance(value, KINDS):
        state = json.dumps(encode(value, "generator", inline=True)[0]).encode()
        return Seen(f"{type(value).__name__}{DIGEST}{_digest(state)}", ())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) or (isinstance(value, int) and -LARGEST < value < LARGEST):
        return Seen(repr(value), (_finite(value),))
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        flat = value.reshape(-1)
        few = torch.tensor(flat[:: _stride(flat)].astype(np.float64))
        return _of_numbers(str(value.dtype), value.shape, few)
    if isinstance(value, (list, tuple)) and 0 < len(value) <= ITEMS:
        parts = [_seen(one) for one in value]
        if all(part is not None and DIGEST not in part.text for part in parts):
            texts, numbers = zip(*((p.text, p.numbers[0]) for p in parts if p), strict=True)
            return Seen(f"[{', '.join(texts)}]", numbers[:KEPT])
    return None


def _of_tensor(value: torch.Tensor) -> Seen | None:
    is_made_anew = value.grad_fn is not None or isinstance(value, nn.Parameter)
    if is_made_anew or value.is_meta or value.layout != torch.strided or not value.numel():
        return None
    if (
        type(value) is not torch.Tensor
        or value.is_quantized
        or not _NUMBERS.match(str(value.dtype))
    ):
        return None
    if value.numel() == 1:
        return _seen(value.item())
    flat = value.detach().flatten()
    dtype = str(value.dtype).removeprefix("torch.")
    return _of_numbers(dtype, value.shape, flat[:: _stride(flat)].cpu())


def _of_numbers(dtype: str, shape: Iterable[int], flat: torch.Tensor) -> Seen | None:
    numbers = flat.double().contiguous()
    if not numbers.numel():
        return None
    digest = _digest(numbers.numpy().tobytes())
    few = numbers[:: max(1, len(numbers) // KEPT)][:KEPT].tolist()
    return Seen(f"{dtype}{list(shape)}{DIGEST}{digest}", tuple(map(_finite, few)))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def _finite(number: float) -> float:
    """JSON has no other numbers."""
    return float(number) if math.isfinite(number) else 0.0


def _stride(flat: Any) -> int:
    return max(1, len(flat) // LOOKED_AT)
