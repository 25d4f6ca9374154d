"""The random generators of a rank: those of the process, and those that `run.track` was given.

A checkpoint holds each rank's own, so at the same number of ranks all continue where they were. On
another mesh they start from (seed, step, rank); but numpy's global one and the tracked ones, where
the program has made them alike on all ranks, are rank 0's on all (they may shuffle data).
tests/unit/runtime/test_generators.py and tests/engines/test_resume.py hold the promises.
"""

from __future__ import annotations

import json
import random
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy import random as numpy_random

from hpctrain.checkpoint.tensors.value_reading import decode
from hpctrain.checkpoint.tensors.value_types import BITS
from hpctrain.checkpoint.tensors.values import encode
from hpctrain.core.device import is_accelerator, random_state, set_random_state
from hpctrain.core.world import gather
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.core.world import World

PREFIX = "rng."
NUMPY = "numpy"
TRACKED = "tracked."
KINDS = (numpy_random.Generator, numpy_random.RandomState, random.Random, torch.Generator)
"""What `run.track` takes beside objects with a state_dict."""
TEXT_BYTES, SLACK_BYTES = 1024, 128
"""A state's text is filled up to a multiple, so that its length stays the same: numbers have more
digits at one step than at another."""


class Generators:
    """One rank's generators.

    Attributes:
        tracked: Those that `run.track` was given, by name.
    """

    def __init__(self, world: World) -> None:
        self.tracked: dict[str, Any] = {}
        self._world = world

    def capture(self) -> dict[str, torch.Tensor]:
        """Return the state of all by name; every rank has its own names."""
        stem = _stem(self._world.rank)
        version, words, gauss = random.getstate()
        state = {
            stem + "torch": torch.get_rng_state(),
            stem + "python": torch.tensor([version, *words], dtype=torch.int64),
            stem + "python_gauss": torch.tensor(
                [float("nan") if gauss is None else gauss], dtype=torch.float64
            ),
        }
        for name, content in self.texts().items():
            state[stem + name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if is_accelerator(self._world.device):
            state[stem + self._world.device.type] = random_state(self._world.device)
        return state

    def texts(self) -> dict[str, bytes]:
        """Return what is saved as text: numpy's global generator and the tracked ones."""
        state = {NUMPY: _numpy_state()}
        state |= {TRACKED + name: each for name, each in self.tracked.items()}
        return {name: _text(name, each) for name, each in state.items()}

    def saved_names(self, manifest: Manifest) -> set[str]:
        """Return the names of the tracked generators that a checkpoint has."""
        stem = _stem(0) + TRACKED
        return {
            one.name.removeprefix(stem) for one in manifest.tensors if one.name.startswith(stem)
        }

    def wanted(self, manifest: Manifest, *, is_same_mesh: bool) -> dict[str, torch.Tensor]:
        """Return tensors to load into: this rank's states, or rank 0's on another mesh."""
        stem = _stem(self._world.rank if is_same_mesh else 0)
        there = {one.name: one for one in manifest.tensors if one.name.startswith(stem)}
        names = {NUMPY, *(TRACKED + name for name in self.tracked)}
        if is_same_mesh:
            names |= {"torch", "python", "python_gauss", self._world.device.type}
        targets = {}
        for name in sorted(names):
            entry = there.get(stem + name)
            if entry is not None:
                dtype = {"U8": torch.uint8, "I64": torch.int64, "F64": torch.float64}[entry.dtype]
                targets[entry.name] = torch.empty(entry.shape, dtype=dtype)
        return targets

    def apply(
        self, state: Mapping[str, torch.Tensor], *, is_same_mesh: bool, seed: int, step: int
    ) -> None:
        """Continue with what `wanted` gave and what was loaded into it. Collective on another mesh.

        Raises:
            CheckpointError: a tracked generator is of another kind than the saved one.
        """
        stem = _stem(self._world.rank if is_same_mesh else 0)
        names = (NUMPY, *(TRACKED + name for name in self.tracked))
        texts = {name: state[stem + name] for name in names if stem + name in state}
        saved = {name: _value(name, text) for name, text in texts.items()}
        if is_same_mesh:
            self._apply_plain(stem, state)
        else:
            number = self._world.rank
            alike = self._alike(sorted(saved))
            for name in saved.keys() - alike:
                saved[name] = _seeded(self._live(name), name, number, seed, step)
        for name, value in saved.items():
            _set(name, self._live(name), value)

    def _apply_plain(self, stem: str, state: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(state[stem + "torch"])
        version, *words = state[stem + "python"].tolist()
        gauss = float(state[stem + "python_gauss"].item())
        random.setstate((version, tuple(words), None if gauss != gauss else gauss))  # noqa: PLR0124 - NaN
        if stem + self._world.device.type in state:
            set_random_state(self._world.device, state[stem + self._world.device.type])

    def _live(self, name: str) -> Any:
        return None if name == NUMPY else self.tracked[name.removeprefix(TRACKED)]

    def _alike(self, names: list[str]) -> set[str]:
        """Those that every rank's program has made with the same state. Collective."""
        texts = self.texts()
        digests = gather(self._world, tuple(zlib.crc32(texts[name]) for name in names))
        return {name for name, *each in zip(names, *digests, strict=True) if len(set(each)) == 1}


def seed_anew(number: int, seed: int, step: int) -> None:
    """Start torch's and Python's generators from (seed, step, number).

    `number` is the rank's; ranks that must draw the same numbers have the same.
    """
    value = _mixed(number, seed, step)
    torch.manual_seed(value)  # CUDA's too
    random.seed(value)


def _mixed(number: int, seed: int, step: int) -> int:
    return ((seed * 1_000_003 + step) * 1_000_003 + number) & 0x7FFF_FFFF_FFFF_FFFF


def _stem(rank: int) -> str:
    return f"{PREFIX}rank-{rank:05d}."


def _numpy_state() -> Any:
    return numpy_random.get_state(legacy=False)  # noqa: NPY002 - the one that programs draw from


def _text(name: str, value: Any) -> bytes:
    form, tensors = encode(value, name, inline=True)
    if tensors:
        raise CheckpointError(f"generator {name} holds a tensor, which no generator does")
    text = json.dumps(form).encode("ascii")
    return text.ljust(-(-(len(text) + SLACK_BYTES) // TEXT_BYTES) * TEXT_BYTES)


def _value(name: str, content: torch.Tensor) -> Any:
    try:
        form = json.loads(content.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the state of generator {name} cannot be read: {error}") from error
    return decode(form, {})


def _seeded(live: Any, name: str, number: int, seed: int, step: int) -> Any:
    """A state of the same kind as a live generator's, from (seed, step, number) and its name."""
    value = _mixed(number, seed, step)
    words = [value, zlib.crc32(name.encode())]
    if isinstance(live, random.Random):
        return random.Random(json.dumps(words))  # noqa: S311 - for training
    if isinstance(live, torch.Generator):
        return torch.Generator(live.device).manual_seed(value ^ words[1])
    bits = live.bit_generator.state if isinstance(live, numpy_random.Generator) else None
    seeds = np.random.SeedSequence(words)
    if bits is not None:
        return numpy_random.Generator(BITS[bits["bit_generator"]](seeds))
    state = _numpy_state() if live is None else live.get_state(legacy=False)
    made = numpy_random.RandomState(BITS[state["bit_generator"]](seeds))
    return made if live is not None else made.get_state(legacy=False)


def _set(name: str, live: Any, saved: Any) -> None:
    """Put a saved state into a generator that the program holds; None is numpy's global one."""
    try:
        if live is None:
            numpy_random.set_state(saved)  # noqa: NPY002 - see _numpy_state
        elif isinstance(live, random.Random):
            live.setstate(saved.getstate())
        elif isinstance(live, torch.Generator):
            live.set_state(saved.get_state())
        elif isinstance(live, numpy_random.RandomState):
            live.set_state(saved.get_state(legacy=False))
        else:
            live.bit_generator.state = saved.bit_generator.state
            _set_spawned(live.bit_generator.seed_seq, saved.bit_generator.seed_seq)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"generator {name} cannot continue from the checkpoint: {error}; make it as the "
            "program that saved it did, or track it under another name"
        ) from error


def _set_spawned(live: Any, saved: Any) -> None:
    """Let `spawn` continue where it was: of the seeds only the count of children can change."""
    if not saved.n_children_spawned:
        return
    if (live.entropy, live.spawn_key) != (saved.entropy, saved.spawn_key):
        raise ValueError("it has spawned others, and was made from another seed in this start")
    if live.n_children_spawned < saved.n_children_spawned:
        live.spawn(saved.n_children_spawned - live.n_children_spawned)
