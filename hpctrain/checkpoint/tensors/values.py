"""Python objects as JSON and tensors, and back with the same types, values and bits.

The set of types is closed, so that nothing is pickled and nothing that a checkpoint names is run:
docs/development/checkpoint-format.md has the list and the form of each. Tensors, arrays and long
bytes become tensors of the checkpoint, all else is JSON. What is not in the list is refused with
its path.

An object that stands in two places comes back as one object in two places; cycles are refused.
Lists, dictionaries, tensors and all else that can change are numbered in the order in which a
reader meets them, and the second place holds the number of the first. Not collective.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import pairwise
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.format.manifest import KIND
from hpctrain.checkpoint.tensors.value_types import (
    FACTORIES,
    FACTORY_OF,
    SIMPLE_OF,
    class_path,
    descr_of,
    member_of,
)
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

TENSOR, TUPLE, ITEMS = "__tensor__", "__tuple__", "__items__"
RESERVED = frozenset({TENSOR, TUPLE, ITEMS, KIND})
MOST_DEPTH = 100
"""Python's JSON and our reader call themselves for each level."""
INLINE_BYTES = 64
"""Longer bytes become a tensor: a manifest is read by every command."""
INT_BITS = 63
"""Longer whole numbers are written in hexadecimal digits: Python limits decimal ones."""
PLAIN_KEYS = (str, int, float, bool, type(None))
SEE = "`hpctrain help checkpoints.md` lists the types that are saved"


def encode(value: Any, name: str, *, inline: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the JSON form of an object, and its tensors by name.

    The tensors share memory with the object's own.

    Args:
        value: Of the closed set of types.
        name: How the tensors' names begin, e.g. ``tracked.scheduler``; also named in errors.
        inline: Put arrays and bytes into the JSON whatever their length. Tensors stay tensors.

    Raises:
        CheckpointError: it holds something that cannot be saved; the message has its path.
    """
    encoder = _Encoder(name, inline=inline)
    form = encoder.form(value)
    encoder.refuse_overlaps()
    return form, encoder.tensors


class _Encoder:
    """Writes one tree; `tensors` are those of the tree so far, by name."""

    def __init__(self, name: str, *, inline: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._name = name
        self._inline = inline
        self._path: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._open: set[int] = set()
        self._kept: list[Any] = []
        self._count = 0
        self._spans: list[tuple[str, int, int, str]] = []

    # ---- the walk

    def form(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        write = _FIXED.get(kind) or _of_subclass(value) or _Encoder.write_changeable
        return write(self, value)

    def write_int(self, value: int) -> Any:
        return value if value.bit_length() <= INT_BITS else {KIND: "int", "hex": hex(value)}

    def write_float(self, value: float) -> Any:
        bits = struct.pack(">d", value)
        is_plain = not math.isnan(value) or bits == struct.pack(">d", math.nan)
        return value if is_plain else {KIND: "float", "bits": bits.hex()}

    def write_tuple(self, value: tuple[Any, ...]) -> Any:
        return {TUPLE: self._inside(value, self.write_forms)}

    def write_frozenset(self, value: frozenset[Any]) -> Any:
        return {KIND: "frozenset", "items": self._inside(value, self.write_forms)}

    def write_bytes(self, value: bytes) -> Any:
        return {KIND: "bytes", "data": self._data(np.frombuffer(value, np.uint8))}

    def write_changeable(self, value: Any) -> Any:
        """The form of an object that may change, or the number of one that was met before."""
        key = self._identity(value)
        if key in self._numbers:
            if id(value) in self._open:
                self._refuse(
                    value, "it contains itself; keep one of the two places out of state_dict()"
                )
            return {KIND: "same", "number": self._numbers[key]}
        self._numbers[key] = self._count
        self._count += 1
        self._kept.append(value)  # or another object might get its identity
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return self._inside(value, self._container)

    def _inside(self, value: Any, write: Any) -> Any:
        if len(self._path) > MOST_DEPTH:
            self._refuse(value, f"it is nested deeper than {MOST_DEPTH} levels")
        self._open.add(id(value))
        form = write(value)
        self._open.discard(id(value))
        return form

    def _at(self, key: Any, value: Any) -> Any:
        self._path.append(key)
        form = self.form(value)
        self._path.pop()
        return form

    def write_forms(self, values: Any) -> list[Any]:
        return [self._at(index, value) for index, value in enumerate(values)]

    def _container(self, value: Any) -> Any:
        kind = type(value)
        write = _CONTAINERS.get(kind)
        if write is None and dataclasses.is_dataclass(kind):
            write = _Encoder.write_dataclass
        if write is None:
            self._refuse(value)
        return write(self, value)

    def write_mapping(self, value: OrderedDict[Any, Any] | Counter[Any]) -> Any:
        form: dict[str, Any] = {KIND: type(value).__name__, "items": self._items(value)}
        if vars(value):  # a module's state_dict() has its versions there
            form["attributes"] = self._fields(vars(value))
        return form

    def write_defaultdict(self, value: defaultdict[Any, Any]) -> Any:
        form = {KIND: "defaultdict", "factory": self._factory(value)}
        return {**form, "items": self._items(value)}

    def write_set(self, value: set[Any]) -> Any:
        return {KIND: "set", "items": self.write_forms(value)}

    def write_deque(self, value: deque[Any]) -> Any:
        return {KIND: "deque", "maxlen": value.maxlen, "items": self.write_forms(value)}

    def write_bytearray(self, value: bytearray) -> Any:
        return {KIND: "bytearray", "data": self._data(np.frombuffer(bytes(value), np.uint8))}

    # ---- dictionaries and objects

    def write_dictionary(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str for key in value) and not RESERVED & value.keys():
            return {key: self._at(key, item) for key, item in value.items()}
        items = self._items(value)
        is_plain = all(isinstance(key, PLAIN_KEYS) for key, _ in items)
        return {ITEMS: items} if is_plain else {KIND: "dict", "items": items}

    def _items(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        return [[self._key(key), self._at(key, item)] for key, item in value.items()]

    def _key(self, key: Any) -> Any:
        if type(key) is str:
            return key
        kind = type(key)
        is_changeable = isinstance(key, torch.Tensor) or (
            SIMPLE_OF[kind].is_mutable
            if kind in SIMPLE_OF
            else dataclasses.is_dataclass(kind) and kind.__hash__ is object.__hash__
        )
        if is_changeable:
            self._path.append(key)
            self._refuse(key, "it is a key by its identity, which ends with the process")
        return self._at(key, key)

    def _fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._at(name, value) for name, value in values.items()}

    def _factory(self, value: defaultdict[Any, Any]) -> str | None:
        factory = value.default_factory
        if factory is None:
            return None
        if factory not in FACTORY_OF:
            names = ", ".join(FACTORIES)
            self._refuse(value, f"its factory is none of {names}; use one of these, or a dict")
        return FACTORY_OF[factory]

    def write_named_tuple(self, value: Any) -> Any:
        if getattr(value, "__dict__", None):
            self._refuse(value, f"it has {min(vars(value))!r} beside its fields; make it a field")
        form = {KIND: "namedtuple", **self._class(value)}
        fields = dict(zip(value._fields, value, strict=True))
        return {**form, "fields": self._inside(value, lambda _: self._fields(fields))}

    def write_dataclass(self, value: Any) -> Any:
        if isinstance(value, dict | list | tuple | set | str | int | float | bytes):
            self._refuse(value, "it is a dataclass and a container in one; save a plain one")
        names = [field.name for field in dataclasses.fields(value)]
        beside = getattr(value, "__dict__", {}).keys() - set(names)
        if beside:
            self._refuse(value, f"it has {min(beside)!r} beside its fields; make it a field")
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        form = {KIND: "dataclass", **self._class(value), "fields": self._fields(fields)}
        unset = [name for name in names if name not in fields]
        return {**form, "unset": unset} if unset else form

    def write_member(self, value: enum.Enum) -> Any:
        path = self._class(value)
        members = list(value) if isinstance(value, enum.Flag) else [value]
        member_names = [str(member.name) for member in members]
        if member_of(type(value), member_names) is not value:
            self._refuse(value, "its value has no name; name it in the class")
        return {KIND: "enum", **path, "names": member_names}

    def _class(self, value: Any) -> dict[str, str]:
        path = class_path(type(value))
        if path is None:
            self._refuse(
                value,
                "its class cannot be found again by module and name; define it at the top of a "
                "module, and not inside a function",
            )
        return path

    def write_simple(self, value: Any) -> Any:
        kind = SIMPLE_OF[type(value)]
        parts = kind.parts(value)
        self._kept.append(parts)
        return {KIND: kind.word, "parts": self._inside(value, lambda _: self.write_forms(parts))}

    # ---- tensors and arrays

    def _tensor(self, tensor: torch.Tensor) -> Any:
        kind = type(tensor)
        if kind not in {torch.Tensor, torch.nn.Parameter} and not isinstance(tensor, DTensor):
            self._refuse(tensor, _of_tensor_class(tensor))
        if problem := _tensor_problem(tensor):
            self._refuse(tensor, problem)
        is_sharded = isinstance(tensor, DTensor)
        form: dict[str, Any] = {
            TENSOR: self._take_name(),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).split(".")[-1],
        }
        if is_sharded:
            form["sharded"] = True
        elif not tensor.is_contiguous() and _is_dense(tensor.shape, tensor.stride()):
            form["stride"] = list(tensor.stride())
        if tensor.device.type != "cpu":
            form["device"] = tensor.device.type
        if getattr(tensor, "_is_param", kind is torch.nn.Parameter):
            form["parameter"] = True
        if tensor.requires_grad and tensor.is_leaf:
            form["requires_grad"] = True
        self.tensors[form[TENSOR]] = tensor.resolve_conj().resolve_neg()
        self._claim(tensor)
        return form

    def write_array(self, array: NDArray[Any]) -> Any:
        descr = self._descr(array, array.dtype)
        if array.nbytes and _is_dense(array.shape, [s // array.itemsize for s in array.strides]):
            self._span("cpu", array.__array_interface__["data"][0], array.nbytes)
        is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        order: Literal["C", "F"] = "F" if is_fortran else "C"
        flat = np.ravel(array, order)
        return {
            KIND: "array",
            "dtype": descr,
            "shape": list(array.shape),
            "order": order,
            "data": self._data(flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)),
        }

    def write_numpy_scalar(self, value: np.generic) -> Any:
        if type(value) is not value.dtype.type:
            self._refuse(value)
        descr = self._descr(value, value.dtype)
        data = self._data(np.frombuffer(value.tobytes(), np.uint8))
        return {KIND: "scalar", "dtype": descr, "data": data}

    def write_numpy_dtype(self, value: np.dtype[Any]) -> Any:
        return {KIND: "numpy.dtype", "parts": [self._descr(value, value)]}

    def _descr(self, value: Any, dtype: np.dtype[Any]) -> Any:
        descr = descr_of(dtype)
        if descr is None:
            self._refuse(
                value, f"numpy's {dtype} is not saved; save a list, or an array of numbers"
            )
        return self._at("dtype", descr)

    def _data(self, data: NDArray[np.uint8]) -> Any:
        """Bytes: base64, or a tensor where they are many."""
        if self._inline or data.nbytes <= INLINE_BYTES:
            return base64.b64encode(data.tobytes()).decode("ascii")
        name = self._take_name()
        self.tensors[name] = torch.from_numpy(data if data.flags.writeable else data.copy())
        return {TENSOR: name, "shape": [data.nbytes], "dtype": "uint8"}

    def _take_name(self) -> str:
        """A name for the tensor at this place that no other has: keys may hold dots."""
        name = ".".join([self._name, *map(str, self._path)])
        number, free = 1, name
        while free in self.tensors:
            number += 1
            free = f"{name}~{number}"
        return free

    # ---- memory that is shared

    def _identity(self, value: Any) -> Any:
        """What two places that hold one object, or one tensor's memory, have in common."""
        if isinstance(value, torch.Tensor) and type(value) in {torch.Tensor, torch.nn.Parameter}:
            if value.layout == torch.strided and value.device.type != "meta" and value.numel():
                memory = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
                return (*memory, value.requires_grad, type(value))
        elif type(value) is np.ndarray and value.size:
            where = value.__array_interface__["data"][0]
            return (where, value.dtype.str, value.shape, value.strides)
        return id(value)

    def _claim(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() and _is_dense(local.shape, local.stride()):
            self._span(str(local.device), local.data_ptr(), local.nbytes)

    def _span(self, device: str, low: int, nbytes: int) -> None:
        self._spans.append((device, low, low + nbytes, self.where))

    def refuse_overlaps(self) -> None:
        """Refuse two tensors that share a part of their memory: they would come back apart."""
        spans = sorted(self._spans)
        for (device, _, end, first), (other_device, low, _, second) in pairwise(spans):
            if device == other_device and low < end:
                raise CheckpointError(
                    f"tracked state {second} shares a part of its memory with {first}, and the two "
                    "would come back apart; clone() one of them in state_dict()"
                )

    # ---- what cannot be saved

    @property
    def where(self) -> str:
        path = "".join(
            f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
            for part in self._path
        )
        return self._name.removeprefix("tracked.") + path

    def _refuse(self, value: Any, why: str = "") -> NoReturn:
        kind = type(value).__name__
        article = "an" if kind[:1].lower() in "aeio" else "a"
        raise CheckpointError(
            f"tracked state {self.where} holds {article} {kind}: {why or _advice(value)}; {SEE}"
        )


def _is_dense(shape: Any, strides: Any) -> bool:
    """Whether the elements fill a range of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _tensor_problem(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be saved, and what to do; "" where it can."""
    if tensor.is_quantized:
        return "quantized tensors are not saved; save int_repr() with scale and zero point"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout} is not saved; save to_dense(), or its parts"
    if tensor.device.type == "meta":
        return "it has no values yet (device meta); give it memory before it is tracked"
    return ""


def _of_tensor_class(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "it has no values yet; run one forward pass before run.track"
    return "a tensor class of a library is not saved; save the plain tensors in it"


def _advice(value: Any) -> str:
    """What to do with an object that is not of the closed set."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "put its state_dict() there, and give it back in load_state_dict()"
    if isinstance(value, GeneratorType) or hasattr(value, "__next__"):
        return "an iterator cannot be saved; save how far it is as a number"
    if isinstance(value, FunctionType | MethodType | ModuleType | type) or callable(value):
        return "code cannot be saved; keep it out of state_dict()"
    for base in (dict, list, tuple, set, str, int, float, np.ndarray):
        if isinstance(value, base):
            return f"its class would be lost; save a plain {base.__name__}, or keep it out"
    return "it is neither a tensor nor of a type that is saved; save its numbers, texts and tensors"


_Write = Callable[[_Encoder, Any], Any]
_FIXED: dict[type, _Write] = {
    int: _Encoder.write_int,
    float: _Encoder.write_float,
    tuple: _Encoder.write_tuple,
    frozenset: _Encoder.write_frozenset,
    bytes: _Encoder.write_bytes,
    **{kind: _Encoder.write_simple for kind, simple in SIMPLE_OF.items() if not simple.is_mutable},
}
"""Who writes objects that never change, by their type."""
_CONTAINERS: dict[type, _Write] = {
    dict: _Encoder.write_dictionary,
    list: _Encoder.write_forms,
    OrderedDict: _Encoder.write_mapping,
    Counter: _Encoder.write_mapping,
    defaultdict: _Encoder.write_defaultdict,
    set: _Encoder.write_set,
    deque: _Encoder.write_deque,
    bytearray: _Encoder.write_bytearray,
    np.ndarray: _Encoder.write_array,
    **{kind: _Encoder.write_simple for kind, simple in SIMPLE_OF.items() if simple.is_mutable},
}
"""Who writes objects that may change."""


def _of_subclass(value: Any) -> _Write | None:
    """Who writes an object of which only a base class is known; None if it may change."""
    if isinstance(value, enum.Enum):
        return _Encoder.write_member
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _Encoder.write_named_tuple
    if isinstance(value, np.dtype):
        return _Encoder.write_numpy_dtype
    return _Encoder.write_numpy_scalar if isinstance(value, np.generic) else None
