"""The types of `values` that consist of a few parts: numbers, times, paths, generators.

Each has a word, a function that takes an object apart and one that builds it of the same parts.
Classes of the program's own are named by module and name, and looked up among what is imported.
"""

from __future__ import annotations

import datetime as dt
import enum
import random
import struct
import sys
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy import random as numpy_random

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        list, dict, set, int, float, str, bool, tuple, complex, bytes, frozenset, Counter,
        OrderedDict, deque,
    )
}  # fmt: skip
"""What a defaultdict may make its values with."""
FACTORY_OF = {factory: name for name, factory in FACTORIES.items()}
NUMPY_KINDS = frozenset("biufcSUMmV")
"""Of dtypes whose bytes are their values."""


@dataclass(frozen=True)
class Simple:
    """A type whose objects consist of parts.

    Attributes:
        word: In the JSON form.
        kind: The type itself, no subclass.
        parts: What an object consists of, in types that are saved.
        build: The object of these parts.
        is_mutable: Whether an object may change, so that two places may share it.
    """

    word: str
    kind: type
    parts: Callable[[Any], Sequence[Any]]
    build: Callable[..., Any]
    is_mutable: bool = False


def class_path(kind: type) -> dict[str, str] | None:
    """Return how a class is named in a checkpoint; None where it would not be found again."""
    path = {"module": str(kind.__module__), "class": kind.__qualname__}
    return path if _look_up(path) is kind else None


def class_of(path: dict[str, Any]) -> type:
    """Return the class of a checkpoint's name for it, among those that are imported.

    Nothing is imported and nothing run: the program's own modules are looked at.

    Raises:
        CheckpointError: it is not there.
    """
    owner = _look_up(path)
    if owner is None:
        raise CheckpointError(
            f"the checkpoint holds a {path['class']} of module {path['module']}, which this "
            "program has not imported; import it before run.steps()"
        )
    return owner


def _look_up(path: dict[str, Any]) -> type | None:
    owner: Any = sys.modules.get(path["module"])
    for part in path["class"].split("."):
        # Through the dictionaries alone: a module's own __getattr__ may import.
        owner = getattr(owner, "__dict__", {}).get(part)
    return owner if isinstance(owner, type) else None


def member_of(kind: type[enum.Enum], names: list[str]) -> enum.Enum | None:
    """The member of these names; of a flag, all of them together."""
    members = [kind.__members__[name] for name in names if name in kind.__members__]
    if len(members) != len(names):
        return None
    if not issubclass(kind, enum.Flag):
        return members[0] if len(members) == 1 else None
    whole: Any = kind(0)
    for member in members:
        whole |= member
    flag: enum.Enum = whole
    return flag


def descr_of(dtype: np.dtype[Any]) -> Any:
    """Return numpy's description of a dtype, as in its files; None where its bytes say nothing."""
    if dtype.hasobject or dtype.kind not in NUMPY_KINDS:
        return None
    descr = np.lib.format.dtype_to_descr(dtype)
    return descr if np.lib.format.descr_to_dtype(descr) == dtype else None


def dtype_of(descr: Any) -> np.dtype[Any]:
    """Return the dtype of a description.

    Raises:
        ValueError: it is one of objects.
    """
    dtype = np.lib.format.descr_to_dtype(descr)
    if dtype.hasobject or dtype.kind not in NUMPY_KINDS:
        raise ValueError(f"{dtype} is no dtype of values")
    return dtype


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name such as ``float32``.

    Raises:
        ValueError: torch has none.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")  # noqa: TRY004 - a value of the file
    return dtype


def _date_time(value: dt.datetime) -> Sequence[Any]:
    day = (value.year, value.month, value.day)
    return (*day, *_time(value))


def _time(value: dt.datetime | dt.time) -> Sequence[Any]:
    clock = (value.hour, value.minute, value.second, value.microsecond)
    return (*clock, value.tzinfo, value.fold)


def _build_date_time(*parts: Any) -> dt.datetime:
    *clock, fold = parts
    return dt.datetime(*clock, fold=fold)  # noqa: DTZ001 - the last of them is its zone


def _build_time(*parts: Any) -> dt.time:
    *clock, fold = parts
    return dt.time(*clock, fold=fold)


def _zone(value: Any) -> Sequence[Any]:
    made: Sequence[Any] = value.__getinitargs__()  # as it is pickled
    return made


def _bit_generator(value: Any) -> Sequence[Any]:
    seeds = value.seed_seq
    return (value.state, seeds if type(seeds) is numpy_random.SeedSequence else None)


def _builder_of_bits(kind: Any) -> Callable[..., Any]:
    def build(state: dict[str, Any], seeds: Any) -> Any:
        made = kind(0 if seeds is None else seeds)
        made.state = state
        return made

    return build


def _seeds(value: Any) -> Sequence[Any]:
    return (value.entropy, value.spawn_key, value.pool_size, value.n_children_spawned)


def _build_seeds(entropy: Any, spawn_key: Any, pool_size: int, spawned: int) -> Any:
    return numpy_random.SeedSequence(
        entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned
    )


def _build_random_state(state: dict[str, Any]) -> Any:
    made = numpy_random.RandomState(BITS[state["bit_generator"]](0))
    made.set_state(state)
    return made


def _random(value: random.Random) -> Sequence[Any]:
    version, words, gauss = value.getstate()
    return (version, struct.pack(f"<{len(words)}I", *words), gauss)


def _build_random(version: int, words: bytes, gauss: float | None) -> random.Random:
    made = random.Random()  # noqa: S311 - its state is set next
    made.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    return made


def _torch_generator(value: torch.Generator) -> Sequence[Any]:
    return (str(value.device), value.get_state().numpy().tobytes())


def _build_torch_generator(device: str, state: bytes) -> torch.Generator:
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


BITS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        numpy_random.MT19937, numpy_random.PCG64, numpy_random.PCG64DXSM, numpy_random.Philox,
        numpy_random.SFC64,
    )
}  # fmt: skip
_PATHS = (PosixPath, WindowsPath, PurePosixPath, PureWindowsPath)
_TYPES = [
    Simple("complex", complex, lambda z: (z.real, z.imag), complex),
    Simple("Decimal", Decimal, lambda number: (str(number),), Decimal),
    Simple("Fraction", Fraction, lambda q: (q.numerator, q.denominator), Fraction),
    Simple("range", range, lambda r: (r.start, r.stop, r.step), range),
    Simple("slice", slice, lambda s: (s.start, s.stop, s.step), slice),
    Simple("datetime", dt.datetime, _date_time, _build_date_time),
    Simple("date", dt.date, lambda day: (day.year, day.month, day.day), dt.date),
    Simple("time", dt.time, _time, _build_time),
    Simple("timedelta", dt.timedelta, lambda t: (t.days, t.seconds, t.microseconds), dt.timedelta),
    Simple("timezone", dt.timezone, _zone, dt.timezone),
    *(Simple(kind.__name__, kind, lambda path: (str(path),), kind) for kind in _PATHS),
    Simple("numpy.str", np.str_, lambda text: (str(text),), np.str_),
    Simple("numpy.bytes", np.bytes_, lambda data: (bytes(data),), np.bytes_),
    Simple("numpy.dtype", np.dtype, lambda dtype: (descr_of(dtype),), dtype_of),
    Simple("torch.Size", torch.Size, tuple, lambda *sizes: torch.Size(sizes)),
    Simple("torch.dtype", torch.dtype, lambda dtype: (str(dtype).split(".")[-1],), torch_dtype),
    Simple("torch.device", torch.device, lambda device: (str(device),), torch.device),
    Simple("random.Random", random.Random, _random, _build_random, is_mutable=True),
    Simple("SeedSequence", numpy_random.SeedSequence, _seeds, _build_seeds, is_mutable=True),
    *(
        Simple(word, kind, _bit_generator, _builder_of_bits(kind), is_mutable=True)
        for word, kind in BITS.items()
    ),
    Simple(
        "numpy.Generator",
        numpy_random.Generator,
        lambda generator: (generator.bit_generator,),
        numpy_random.Generator,
        is_mutable=True,
    ),
    Simple(
        "numpy.RandomState",
        numpy_random.RandomState,
        lambda generator: (generator.get_state(legacy=False),),
        _build_random_state,
        is_mutable=True,
    ),
    Simple(
        "torch.Generator",
        torch.Generator,
        _torch_generator,
        _build_torch_generator,
        is_mutable=True,
    ),
]
SIMPLE = {kind.word: kind for kind in _TYPES}
SIMPLE_OF = {kind.kind: kind for kind in _TYPES}
