"""JSON and tensors of a checkpoint back to Python objects: what `values.encode` wrote.

A checkpoint is read with distrust: nothing in it is run and nothing is imported for it. A class
that it names must be one that the program has imported, and must have the fields that were saved.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.format.manifest import KIND
from hpctrain.checkpoint.tensors.boxes import AS_STORED
from hpctrain.checkpoint.tensors.value_types import (
    FACTORIES,
    SIMPLE,
    class_of,
    dtype_of,
    member_of,
    torch_dtype,
)
from hpctrain.checkpoint.tensors.values import ITEMS, TENSOR, TUPLE
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

CHANGEABLE = frozenset(
    {
        "set", "deque", "dict", "OrderedDict", "Counter", "defaultdict", "dataclass", "array",
        "bytearray",
    }
)  # fmt: skip
"""Words of types that are numbered; see `values`."""


def placeholders(
    form: Any,
    like: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Return a tensor to be loaded into for each one that a form names.

    Args:
        form: As `encode` gave it.
        like: Tensors of the same names that the program holds now. A sharded one is sharded the
            same way again.
        device: Where tensors go that were on an accelerator; without it they go to the CPU.

    Raises:
        CheckpointError: the form names a tensor that cannot be.
    """
    try:
        return {
            one[TENSOR]: _placeholder(one, (like or {}).get(one[TENSOR]), device)
            for one in _tensor_forms(form)
        }
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise _not_ours(error) from error


def has_sharded(form: Any) -> bool:
    """Whether a form names a tensor that was sharded over ranks when it was saved."""
    return any(one.get("sharded") for one in _tensor_forms(form))


def decode(form: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the object as it was, from its JSON form and the loaded tensors.

    Nothing is imported: a class that the form names must be one that the program has imported.

    Raises:
        CheckpointError: the form is not as `encode` gives it, or names a class that is not here.
    """
    try:
        return _Decoder(tensors).value(form)
    except CheckpointError:
        raise
    except Exception as error:
        raise _not_ours(error) from error


def _not_ours(error: Exception) -> CheckpointError:
    return CheckpointError(f"tracked state cannot be read back: {type(error).__name__}: {error}")


def _tensor_forms(form: Any) -> Iterator[dict[str, Any]]:
    if isinstance(form, dict):
        if TENSOR in form:
            yield form
            return
        form = list(form.values())
    if isinstance(form, list):
        for inner in form:
            yield from _tensor_forms(inner)


def _placeholder(
    form: dict[str, Any], like: torch.Tensor | None, device: torch.device | None
) -> torch.Tensor:
    dtype = torch_dtype(form["dtype"])
    shape = [int(size) for size in form["shape"]]
    if form.get("sharded") and isinstance(like, DTensor):
        if list(like.shape) != shape or like.dtype != dtype:
            raise ValueError(f"{form[TENSOR]} has another shape or type in this program")
        return torch.empty_like(like, requires_grad=False)
    at = torch.device("cpu")
    if device is not None and form.get("device") == device.type:
        at = device
    stored = AS_STORED.get(dtype, dtype)
    if "stride" in form:
        return torch.empty_strided(shape, form["stride"], dtype=stored, device=at).view(dtype)
    return torch.empty(shape, dtype=stored, device=at).view(dtype)


class _Decoder:
    """Reads one tree, and counts what can change as the encoder did."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[int, Any] = {}
        self._count = 0

    def value(self, form: Any) -> Any:
        if isinstance(form, list):
            return self._numbered(lambda: self._values(form))
        if not isinstance(form, dict):
            return form
        if KIND in form:
            return self._of_kind(form[KIND], form)
        if TUPLE in form:
            return tuple(self._values(form[TUPLE]))
        return self._numbered(lambda: self._of_old_kind(form))

    def _of_old_kind(self, form: dict[str, Any]) -> Any:
        """A tensor or a dictionary, which have no word."""
        if TENSOR in form:
            return self._tensor(form)
        return dict(self._items(form[ITEMS])) if ITEMS in form else self._fields(form)

    def _numbered(self, make: Any) -> Any:
        number = self._count
        self._count += 1
        made = self._made[number] = make()
        return made

    def _values(self, forms: list[Any]) -> list[Any]:
        return [self.value(form) for form in forms]

    def _items(self, items: list[Any]) -> Iterator[tuple[Any, Any]]:
        for key, item in items:
            yield self.value(key), self.value(item)

    def _of_kind(self, word: str, form: dict[str, Any]) -> Any:
        if word == "same":
            return self._made[form["number"]]
        if word in SIMPLE:
            kind = SIMPLE[word]
            if kind.is_mutable:
                return self._numbered(lambda: kind.build(*self._values(form["parts"])))
            return kind.build(*self._values(form["parts"]))
        read = getattr(self, f"_read_{word}", None)
        if read is None:
            raise CheckpointError(
                f"tracked state holds a {word!r}, which this hpctrain does not know; "
                "use the hpctrain that wrote it, or a newer one"
            )
        return self._numbered(lambda: read(form)) if word in CHANGEABLE else read(form)

    # ---- one for each word

    def _read_int(self, form: dict[str, Any]) -> int:
        return int(form["hex"], 16)

    def _read_float(self, form: dict[str, Any]) -> float:
        (value,) = struct.unpack(">d", bytes.fromhex(form["bits"]))
        return float(value)

    def _read_bytes(self, form: dict[str, Any]) -> bytes:
        return self._data(form["data"]).tobytes()

    def _read_bytearray(self, form: dict[str, Any]) -> bytearray:
        return bytearray(self._data(form["data"]).tobytes())

    def _read_frozenset(self, form: dict[str, Any]) -> frozenset[Any]:
        return frozenset(self._values(form["items"]))

    def _read_set(self, form: dict[str, Any]) -> set[Any]:
        return set(self._values(form["items"]))

    def _read_deque(self, form: dict[str, Any]) -> deque[Any]:
        return deque(self._values(form["items"]), form["maxlen"])

    def _read_dict(self, form: dict[str, Any]) -> dict[Any, Any]:
        return dict(self._items(form["items"]))

    def _read_OrderedDict(self, form: dict[str, Any]) -> OrderedDict[Any, Any]:  # noqa: N802
        made = OrderedDict(self._items(form["items"]))
        vars(made).update(self._fields(form.get("attributes", {})))
        return made

    def _read_Counter(self, form: dict[str, Any]) -> Counter[Any]:  # noqa: N802 - the type's name
        made: Counter[Any] = Counter()
        dict.update(made, self._items(form["items"]))
        vars(made).update(self._fields(form.get("attributes", {})))
        return made

    def _read_defaultdict(self, form: dict[str, Any]) -> defaultdict[Any, Any]:
        factory = None if form["factory"] is None else FACTORIES[form["factory"]]
        return defaultdict(factory, self._items(form["items"]))

    def _read_namedtuple(self, form: dict[str, Any]) -> Any:
        kind = class_of(form)
        fields = self._fields(form["fields"])
        if not issubclass(kind, tuple) or getattr(kind, "_fields", None) != tuple(fields):
            raise _other_fields(form)
        return tuple.__new__(kind, fields.values())

    def _read_dataclass(self, form: dict[str, Any]) -> Any:
        kind = class_of(form)
        fields = self._fields(form["fields"])
        if not dataclasses.is_dataclass(kind):
            raise _other_fields(form)
        names = {field.name for field in dataclasses.fields(kind)}
        # A field that the class has got since would not be there, and nobody would hear of it.
        if fields.keys() | set(form.get("unset", [])) != names:
            raise _other_fields(form)
        made = object.__new__(kind)  # its own __init__ is not run
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def _read_enum(self, form: dict[str, Any]) -> enum.Enum:
        kind = class_of(form)
        member = member_of(kind, form["names"]) if issubclass(kind, enum.Enum) else None
        if member is None:
            raise _other_fields(form)
        return member

    def _read_array(self, form: dict[str, Any]) -> NDArray[Any]:
        dtype = dtype_of(self.value(form["dtype"]))
        data = self._data(form["data"])
        shape = tuple(form["shape"])
        if not data.size and not math.prod(shape) * dtype.itemsize:
            return np.zeros(shape, dtype)
        order: Literal["C", "F"] = "F" if form["order"] == "F" else "C"
        array: NDArray[Any] = data.view(dtype).reshape(shape, order=order)
        return array

    def _read_scalar(self, form: dict[str, Any]) -> Any:
        dtype = dtype_of(self.value(form["dtype"]))
        data = self._data(form["data"]).tobytes()
        return np.frombuffer(data, dtype)[0]

    # ---- parts

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: self.value(value) for name, value in fields.items()}

    def _data(self, form: Any) -> NDArray[np.uint8]:
        """Bytes in memory of their own, which may be changed."""
        if isinstance(form, str):
            return np.frombuffer(bytearray(base64.b64decode(form, validate=True)), np.uint8)
        loaded: NDArray[np.uint8] = self._tensors[form[TENSOR]].cpu().numpy()
        return loaded

    def _tensor(self, form: dict[str, Any]) -> torch.Tensor:
        tensor = self._tensors[form[TENSOR]]
        wants_grad = bool(form.get("requires_grad"))
        if form.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=wants_grad)
        return tensor.requires_grad_() if wants_grad else tensor


def _other_fields(form: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds a {form['class']} of module {form['module']}, and the program's "
        "class of that name has other fields or members; keep the class as it was saved"
    )
