"""A program's tensors as boxes: what this rank holds of each, and the part of it that it writes.

Works for plain tensors and for whatever speaks torch DCP's protocol for sharded ones (DTensor's
``__create_chunk_list__``). Not collective.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.checkpoint.format.geometry import my_part
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpctrain.core.world import World

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex128: "C128", torch.complex32: "C32",
}  # fmt: skip
"""Torch's dtypes in safetensors' words, and in our own where safetensors has none."""
_BYTES = {
    vars(torch)[name]: word
    for name, word in {
        "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4_X2",
        **{f"int{bits}": f"INT{bits}" for bits in range(1, 8)},
        **{f"uint{bits}": f"UINT{bits}" for bits in range(1, 8)},
    }.items()
    if name in vars(torch)
}  # fmt: skip
DTYPES |= _BYTES
TORCH_DTYPES = {word: dtype for dtype, word in DTYPES.items()}
AS_STORED = {torch.complex32: torch.int32} | dict.fromkeys(_BYTES, torch.uint8)
"""Types that torch cannot copy, or warns of, and types of the same size in whose place it can."""
_BOXES: dict[tuple[Any, ...], tuple[ShardPiece, int, int]] = {}
"""Making one takes microseconds, which a stall of a hundred milliseconds would show."""
_PLACES: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...], int, int]] = {}
"""Torch takes milliseconds for one where two axes of a mesh cut a long dimension; a large model has
thousands of tensors, and moments, of a dozen shapes."""


@dataclass(frozen=True)
class Flat:
    """A range of a tensor's row-major elements: what a ZeRO rank holds of a parameter.

    Attributes:
        local: The elements, of one dimension; the program's own memory.
        first: Number of the first one in the whole tensor.
        shape: Of the whole tensor.
    """

    local: torch.Tensor
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """What a checkpoint holds, by full names.

    Attributes:
        shared: Plain tensors that several ranks hold alike, DTensors, or flat ranges.
        own: Plain tensors that only this rank has, under names that no other rank has.
        copies: Where not every rank holds a shared tensor, or more do than its own mesh knows of:
            which of the copies this rank has, and how many there are. Without an entry a plain
            tensor is on every rank, and a DTensor or a flat range on those of its mesh alone.
            A number beyond the last is that of a copy which is read, and never written.
        elsewhere: Names of the program's that other ranks hold and this one does not.
    """

    shared: dict[str, torch.Tensor | Flat] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Held:
    """What this rank holds of one tensor: one box of it.

    Attributes:
        piece: The box.
        local: Its elements; shares memory with the program's tensor.
        replica: Which of those that hold the same box this rank is.
        replicas: How many hold it.
    """

    piece: ShardPiece
    local: torch.Tensor
    replica: int
    replicas: int


@dataclass(frozen=True)
class Part:
    """A piece of a box that this rank writes."""

    piece: ShardPiece
    box: Held

    @functools.cached_property
    def view(self) -> torch.Tensor:
        """Its elements, contiguous; a copy only where the box is not."""
        return view_of(self.box, self.piece).contiguous()


def held(state: State, world: World) -> list[Held]:
    """Every box that this rank holds, in the state's order.

    Raises:
        CheckpointError: a tensor is of a kind that cannot be stored.
    """
    everywhere = (world.rank, world.world_size)
    shared = [
        _held(name, tensor, state.copies.get(name), everywhere)
        for name, tensor in state.shared.items()
    ]
    return shared + [_whole(name, tensor, 0, 1) for name, tensor in state.own.items()]


def _held(
    name: str,
    tensor: torch.Tensor | Flat,
    copies: tuple[int, int] | None,
    everywhere: tuple[int, int],
) -> Held:
    if isinstance(tensor, Flat):
        return _flat(name, tensor, *(copies or (0, 1)))
    if not hasattr(tensor, "__create_chunk_list__"):
        return _whole(name, tensor, *(copies or everywhere))
    box = _sharded(name, tensor)
    if copies is None:
        return box
    copy, count = copies
    return replace(box, replica=copy * box.replicas + box.replica, replicas=count * box.replicas)


def sharers(tensor: torch.Tensor | Flat) -> Any:
    """The process group whose ranks all hold this rank's box of a tensor; None without one.

    Of a DTensor that is copied along several axes of its mesh, the group of the longest: torch has
    made one for each axis, and none for two together.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    copied = [
        axis
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate) and mesh.size(axis) > 1
    ]
    if not copied or mesh.get_coordinate() is None:
        return None
    return mesh.get_group(max(copied, key=mesh.size))


def parts_to_write(boxes: Iterable[Held]) -> list[Part]:
    """This rank's part of all boxes: what several ranks hold is spread over them, once each.

    The largest elements come first, so that each tensor starts where its element size asks for.
    """
    groups: dict[tuple[int, int], list[Held]] = {}
    for box in boxes:
        written = box.replica < box.replicas
        if written and (box.piece.nbytes or not math.prod(box.piece.shape)):
            groups.setdefault((box.replica, box.replicas), []).append(box)
    parts = [
        Part(piece, group[number])
        for (replica, replicas), group in groups.items()
        for number, piece in my_part([box.piece for box in group], replica, replicas)
    ]
    return sorted(parts, key=lambda part: -part.box.local.element_size())


def view_of(box: Held, piece: ShardPiece) -> torch.Tensor:
    """The elements of a piece in the program's own memory, contiguous or not."""
    local = box.local
    if piece is box.piece:
        return local
    for dimension, (begin, extent) in enumerate(zip(piece.begin, piece.extent, strict=True)):
        if extent != box.piece.extent[dimension]:
            local = local.narrow(dimension, begin - box.piece.begin[dimension], extent)
    return local


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writable, not a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _whole(name: str, tensor: torch.Tensor, replica: int, replicas: int) -> Held:
    dtype = refuse_unsaveable(name, tensor)
    shape = tuple(tensor.shape)
    piece = ShardPiece(name, dtype, shape, (0,) * len(shape), shape)
    return Held(piece, _as_stored(tensor.detach()), replica, replicas)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(AS_STORED[tensor.dtype]) if tensor.dtype in AS_STORED else tensor


def _flat(name: str, tensor: Flat, replica: int, replicas: int) -> Held:
    extent = (tensor.local.numel(),)
    piece = ShardPiece(
        name, _dtype(name, tensor.local), tensor.shape, (tensor.first,), extent, flat=True
    )
    return Held(piece, _as_stored(tensor.local.detach()), replica, replicas)


def _sharded(name: str, tensor: Any) -> Held:
    if not isinstance(tensor, DTensor):
        raise CheckpointError(f"{name} is a {type(tensor).__name__}, known are tensors and DTensor")
    shape = (tensor.shape, tensor.device_mesh, tensor.placements)
    key = (name, tensor.dtype, *shape)
    if key not in _BOXES:
        if shape not in _PLACES:
            _PLACES[shape] = _place(name, tensor)
        begin, extent, replica, replicas = _PLACES[shape]
        piece = ShardPiece(name, _dtype(name, tensor), tuple(tensor.shape), begin, extent)
        _BOXES[key] = (piece, replica, replicas)
    piece, replica, replicas = _BOXES[key]
    local = tensor._local_tensor  # noqa: SLF001 - to_local() builds a node for autograd each time
    return Held(piece, _as_stored(local.detach()), replica, replicas)


def _place(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Begin and extent of this rank's box, its number among those that hold it, and how many do."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} is a sum that is still to be added up over ranks")
    boxes = tensor.__create_chunk_list__()
    if len(boxes) != 1:
        raise CheckpointError(f"{name} is held as {len(boxes)} boxes on one rank, known is one")
    mesh = tensor.device_mesh
    at = mesh.get_coordinate() or [0] * mesh.ndim
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(axis) + at[axis]
            replicas *= mesh.size(axis)
    return tuple(boxes[0].offsets), tuple(boxes[0].sizes), replica, replicas


def refuse_unsaveable(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor's dtype as a checkpoint has it; refuse one that has no form there.

    Raises:
        CheckpointError: which it is, and what to do.
    """
    if not isinstance(tensor, DTensor) and hasattr(tensor, "__tensor_flatten__"):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}, a tensor class of a library, which is not "
            "saved; use one that keeps plain tensors"
        )
    return _dtype(name, tensor)


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype}, {tensor.layout}, which is not saved; keep a "
            "plain tensor of its values, or register the buffer with persistent=False"
        )
    return DTYPES[tensor.dtype]
