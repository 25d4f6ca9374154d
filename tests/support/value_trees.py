"""Trees of every type that tracked state may hold, and how two of them are compared."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.tensors.boxes import AS_STORED, DTYPES


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


class Mark(enum.Flag):
    A = 1
    B = 2
    C = 4


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped kind too


class Pair(NamedTuple):
    left: Any
    right: Any = None


@dataclasses.dataclass
class Settings:
    rate: Any
    name: Any = "a"
    made: list[Any] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self):
        if type(self.rate) is str:
            raise AssertionError("a checkpoint must not run this")

    class Inner(enum.Enum):
        DEEP = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    number: int
    text: str


KEYS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5) | st.tuples(st.integers(), st.text(max_size=3))
    | st.frozensets(st.integers(), max_size=3) | st.sampled_from([*Colour, *Level, Word.YES])
    | st.builds(Key, st.integers(), st.text(max_size=3)) | st.dates()
    | st.sampled_from([torch.float32, torch.device("cpu"), np.int64(3), np.str_("x"), Path("a/b")])
)  # fmt: skip


def _nan(bits: int) -> float:
    return struct.unpack(">d", struct.pack(">Q", 0x7FF0_0000_0000_0000 | bits))[0]


NUMPY_SCALARS = [
    np.float32(0.1), np.float64(-0.0), np.float16("inf"), np.int8(-3), np.uint64(2**64 - 1),
    np.bool_(1), np.complex64(1 - 2j), np.str_("äb"), np.bytes_(b"a\0"), np.longdouble("0.1"),
    np.datetime64("2026-11-27T17:00", "ns"), np.timedelta64(7, "s"), np.datetime64("NaT"),
    np.array([(1, 2.5)], [("a", "i4"), ("b", ">f8")])[0], np.str_(""),
]  # fmt: skip
ARRAYS = [
    np.arange(12, dtype=">i4").reshape(3, 4), np.asfortranarray(np.arange(24.0).reshape(4, 6)),
    np.array(["a", "längst"]), np.array([b"x", b"yy\0"]), np.zeros((0, 3)), np.array(3.5),
    np.array(["2026-01-01", "NaT"], "M8[D]"), np.arange(400, dtype=np.uint16)[::3],
    np.array([(1, (2.5, 3.5))], [("a", "i8"), ("b", "f4", (2,))]), np.array([True, False]),
    np.array([], "U0"), np.array([1 + 2j]), np.array([float("nan"), -0.0]),
]  # fmt: skip


def _array(value):
    return value.copy(order="A")


def _numpy_generator(kind, seed, draws):
    generator = np.random.Generator(kind(seed))
    generator.random(draws, dtype=np.float32)
    generator.spawn(draws % 2 + 1)
    return generator


def _random_state(seed):
    state = np.random.RandomState(seed)
    state.standard_normal(3)
    return state


def _random(seed):
    dice = random.Random(seed)
    dice.gauss(0, 1)
    return dice


def _torch_generator(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    torch.rand(3, generator=generator)
    return generator


BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]
SEEDS = st.integers(0, 99)
GENERATORS = (
    st.builds(_numpy_generator, st.sampled_from(BITS), SEEDS, st.integers(0, 3))
    | st.builds(_random_state, SEEDS) | st.builds(_random, SEEDS)
    | st.builds(_torch_generator, SEEDS)
)  # fmt: skip


@st.composite
def tensors(draw):
    """A tensor of any dtype, layout of memory and kind."""
    dtype = draw(st.sampled_from(list(DTYPES)) | st.just(torch.float32))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    seed = draw(st.integers(0, 2**31))
    content = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == torch.bool:
        content &= 1
    tensor = torch.empty(shape, dtype=AS_STORED.get(dtype, dtype)).view(dtype)
    if count:
        tensor = torch.from_numpy(content).view(dtype).reshape(shape)
    is_plain = dtype in {torch.float32, torch.float64, torch.bfloat16}
    if is_plain and draw(st.booleans()):
        tensor = tensor.transpose(0, -1) if tensor.dim() > 1 else tensor
        kind = draw(st.sampled_from(["plain", "grad", "parameter", "frozen"]))
        if kind == "grad":
            tensor.requires_grad_()
        elif kind != "plain":
            tensor = torch.nn.Parameter(tensor, requires_grad=kind == "parameter")
    return tensor


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**300), 2**300) | st.floats()
    | st.builds(_nan, st.integers(1, 2**52 - 1)) | st.complex_numbers() | st.text()
    | st.binary(max_size=200) | st.builds(bytearray, st.binary(max_size=100))
    | st.decimals() | st.fractions() | st.datetimes() | st.dates() | st.times() | st.timedeltas()
    | st.builds(
        dt.datetime, st.just(2026), st.just(1), st.just(2), fold=st.sampled_from([0, 1]),
        tzinfo=st.builds(
            lambda m, name: dt.timezone(dt.timedelta(minutes=m), *name),
            st.integers(-1400, 1400), st.sampled_from([(), ("here",)]),
        ),
    )
    | st.sampled_from([Path("a/b"), PurePosixPath("/"), PureWindowsPath("c:\\x"), range(1, 9, 2)])
    | st.sampled_from([*Colour, *Level, *Word, *Mark, Mark.A | Mark.C, Mark(0)])
    | st.just(Settings.Inner.DEEP)
    | st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), slice(1, None)])
    | st.sampled_from([np.dtype("f4"), np.dtype([("a", ">i2")]), np.dtype("M8[us]")])
    | st.sampled_from(NUMPY_SCALARS) | st.builds(_array, st.sampled_from(ARRAYS))
    | tensors() | GENERATORS
)  # fmt: skip


def _ordered(items, has_metadata):
    made = OrderedDict(items)
    if has_metadata:
        made._metadata = OrderedDict({"": {"version": 1}})
    return made


def _counter(items):
    made = Counter()
    dict.update(made, items)
    return made


def _settings(rate, name, made):
    settings = Settings(0, name)
    settings.rate, settings.made = rate, made
    return settings


def _branches(inner):
    items = st.lists(st.tuples(KEYS, inner), max_size=3)
    return (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | items.map(dict) | st.builds(_ordered, items, st.booleans())
        | items.map(_counter)
        | st.builds(defaultdict, st.sampled_from([None, list, int, Counter]), items)
        | st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 3, 9]))
        | st.sets(KEYS, max_size=3) | st.frozensets(KEYS, max_size=3)
        | st.builds(Point, inner, inner) | st.builds(Pair, inner, inner)
        | st.builds(_settings, inner, inner, st.lists(inner, max_size=2))
        | st.dictionaries(st.sampled_from(["__tensor__", "__tuple__", "__hpctrain__"]), inner)
    )  # fmt: skip


@st.composite
def leaves(draw):
    """One of LEAVES; Hypothesis would print all of them in each message."""
    return draw(LEAVES)


@st.composite
def branches(draw, inner):
    """One of the containers, of inner values."""
    return draw(_branches(inner))


class Tree:
    """A value, printed without the elements of tensors: torch cannot print all of its types."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return str(facts(self.value))


TREES = st.recursive(leaves(), branches, max_leaves=12).map(Tree)


def facts(value):  # noqa: C901, PLR0911, PLR0912 - a line for each type
    """All that must be the same of a value, in types whose equality is plain."""
    kind = type(value)
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        local = value.detach().contiguous().reshape(-1)
        content = local.view(torch.uint8).numpy().tobytes() if local.numel() else b""
        pairs = zip(value.stride(), value.shape, strict=True) if value.numel() else ()
        stride = tuple(step for step, size in pairs if size > 1)
        return (kind, value.dtype, value.shape, value.requires_grad, stride, content)
    if isinstance(value, np.ndarray):
        order = value.flags.f_contiguous, value.flags.c_contiguous
        dense = order if any(order) else (False, True)
        return (kind, value.dtype.str, str(value.dtype), value.shape, dense, value.tobytes())
    if isinstance(value, np.generic):
        if kind in {np.str_, np.bytes_}:
            return (kind, value.item())
        return (kind, str(value.dtype), value.tobytes())
    if kind is float:
        return (kind, struct.pack(">d", value))
    if kind is complex:
        return (kind, struct.pack(">dd", value.real, value.imag))
    if kind is Decimal:
        return (kind, str(value))
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        beside = facts(vars(value)) if getattr(value, "__dict__", None) else None
        return (kind, factory, beside, [(facts(k), facts(v)) for k, v in value.items()])
    if isinstance(value, set | frozenset):
        return (kind, sorted(map(repr, map(facts, value))))
    if isinstance(value, list | tuple):
        return (kind, [facts(item) for item in value])
    if isinstance(value, deque):
        return (kind, value.maxlen, [facts(item) for item in value])
    if dataclasses.is_dataclass(value):
        return (kind, [facts(getattr(value, f.name)) for f in dataclasses.fields(value)])
    if isinstance(value, dt.datetime | dt.time):
        return (kind, repr(value), value.fold)
    if isinstance(value, random.Random):
        return (kind, value.getstate())
    if isinstance(value, np.random.Generator):
        return (kind, facts(value.bit_generator))
    if isinstance(value, np.random.BitGenerator):
        return (kind, facts(value.state), facts(value.seed_seq))
    if isinstance(value, np.random.SeedSequence):
        return (kind, repr(value), value.n_children_spawned)
    if isinstance(value, np.random.RandomState):
        return (kind, facts(value.get_state(legacy=False)))
    if isinstance(value, torch.Generator):
        return (kind, value.device, facts(value.get_state()))
    return (kind, value, repr(value))
