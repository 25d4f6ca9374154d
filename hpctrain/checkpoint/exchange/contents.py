"""Named tensors and the state beside them, as every source of an import or an export gives them.

`committed` and `tensors` are the same for a committed checkpoint of ours, each tensor verified
while it is read.

Everything here goes tensor by tensor, so that memory holds the largest tensor, not the checkpoint.
No torch: weights can be exported where there is none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import DTYPES, ShardPiece
from hpctrain.checkpoint.store import find
from hpctrain.errors import CheckpointError, TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.manifest import Manifest, TensorEntry
    from hpctrain.ledger.run.layout import RunDir

    Bytes = NDArray[np.uint8]

MODEL, OPTIM, TRACKED, RNG = "model.", "optim.", "tracked.", "rng."
PREFIXES = (MODEL, OPTIM, TRACKED, RNG)
"""Of the names of all tensors in a checkpoint of ours."""
NUMBERS, OBJECT = frozenset({"bool", "int", "float"}), "json"
"""Ends of names, behind a colon: what is no tensor in the state of an optimizer or a module."""
CARRIED = ("data", "rng", "extra", "world_size", "mesh")
"""Fields of a manifest that go with a checkpoint of our own."""
NUMPY: dict[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "C128": "<c16",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""Those dtypes that numpy has."""
TARGETS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
CONVERTED = frozenset({"F64", "F32", "F16", "BF16"})
COMPARED = 4 << 20
AT_ONCE = 1 << 18
"""Values that are rounded together: what is made in between stays in the processor's cache."""
_ROUND = np.uint32(0x7FFF)
_QUIET = np.uint32(0x0040_0000)


def parts_of_objects(names: Iterable[str]) -> frozenset[str]:
    """Of a checkpoint's names those of objects that are no tensors, and of tensors within these."""
    all_names = list(names)
    stems = {name.removesuffix(f":{OBJECT}") for name in all_names if name.endswith(f":{OBJECT}")}
    within = tuple(f"{stem}." for stem in stems)
    return frozenset(
        name
        for name in all_names
        if name.removesuffix(f":{OBJECT}") in stems or (within and name.startswith(within))
    )


@dataclass(frozen=True)
class NestedValue:
    """One value in nested dictionaries: a tensor, or something else.

    Attributes:
        path: The keys that lead to it.
        tensor: Set where it is one.
        load: Gives the value where it is none; refuses what is no plain data.
    """

    path: tuple[str | int, ...]
    tensor: Tensor | None = None
    load: Callable[[], Any] = lambda: None


@dataclass
class Contents:
    """A source that was opened.

    Attributes:
        kind: As `--from` calls it.
        full_names: Whether the names are ours already (``model.``, ``optim.``, ...).
        step: The step that the source says it is of.
        state: Of a checkpoint of our own: fields of its manifest, see CARRIED.
        notes: What the user should know.
        shared: Names of tensors that share their memory with one before them.
    """

    kind: str
    source: Path
    leaves: list[NestedValue]
    full_names: bool = False
    step: int | None = None
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shared: frozenset[str] = frozenset()


def carried(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a manifest that an import takes over, each of the kind it must have.

    Raises:
        CheckpointError: one of them is something else.
    """
    kinds: dict[str, Any] = {
        "data": dict, "rng": (dict, type(None)), "extra": dict,
        "world_size": int, "mesh": dict,
    }  # fmt: skip
    state = {name: raw[name] for name in CARRIED if name in raw}
    for name, value in state.items():
        if not isinstance(value, kinds[name]):
            raise CheckpointError(f"{where} has {name} = {json.dumps(value)[:80]}, not ours")
    return state


@dataclass(frozen=True)
class Tensor:
    """One whole tensor.

    Attributes:
        name: Its name where it is going; see `naming`.
        dtype: In safetensors' words.
        read: Its bytes, row-major and little-endian; may be asked more than once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def text(self) -> str:
        """Dtype and shape, e.g. ``F32[1024,512]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def scalar(name: str, value: float) -> Tensor:
    """A number as a tensor without dimensions, as optimizers count their steps."""
    content = np.array([value], "<f4").view(np.uint8)
    return Tensor(name, "F32", (), lambda: content)


def to_dtype(tensor: Tensor, target: str) -> Tensor:
    """Round a tensor's values to one of `TARGETS`' dtypes.

    Integers, booleans, complex numbers and 8-bit floats stay as they are.
    """
    if tensor.dtype not in CONVERTED or tensor.dtype == target:
        return tensor

    def read() -> Bytes:
        return _converted(tensor, target)

    return Tensor(tensor.name, target, tensor.shape, read)


def same(first: Bytes, other: Bytes) -> bool:
    """Whether two tensors' bytes are equal; compared in parts, so that it takes no memory."""
    if len(first) != len(other):
        return False
    parts = range(0, len(first), COMPARED)
    return all(np.array_equal(first[at : at + COMPARED], other[at : at + COMPARED]) for at in parts)


def _converted(tensor: Tensor, target: str) -> Bytes:
    """Part by part: whole, the values in between would take several times the tensor's memory."""
    content = tensor.read()
    step, size = AT_ONCE * DTYPES[tensor.dtype], AT_ONCE * DTYPES[target]
    rounded = np.empty(len(content) // DTYPES[tensor.dtype] * DTYPES[target], np.uint8)
    lost: list[NDArray[Any]] = []
    for number, at in enumerate(range(0, len(content), step)):
        values = _widened(content[at : at + step], tensor.dtype)
        part = rounded[number * size : (number + 1) * size]
        if target == "BF16":
            part[:] = _to_bf16(values.astype("<f4", copy=False))
            continue
        with np.errstate(over="ignore"):
            fitted = part.view(NUMPY[target])
            fitted[:] = values
        lost.append(values[np.isinf(fitted) & np.isfinite(values)])
    if count := sum(map(len, lost)):
        largest = max(float(np.abs(part).max()) for part in lost if len(part))
        raise CheckpointError(
            f"{tensor.name} has {count:,} values that {target} cannot hold (largest "
            f"{largest:.4g}); export with --dtype bf16 or keep"
        )
    return rounded


def _widened(content: Bytes, dtype: str) -> NDArray[Any]:
    """Values that numpy can calculate with: those of bf16 as float32."""
    if dtype == "BF16":
        return (content.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return content.view(NUMPY[dtype])


def _to_bf16(values: NDArray[Any]) -> Bytes:
    """To the nearest, ties to even, as torch does."""
    bits = values.view("<u4")
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + _ROUND)) >> np.uint32(16)
    # Rounding up could make an infinity, or zero, of a NaN whose payload is in the low bits.
    nan = (bits | _QUIET) >> np.uint32(16)
    return np.where(np.isnan(values), nan, rounded).astype("<u2").view(np.uint8)


def committed(run: RunDir, step: int) -> tuple[Path, Manifest]:
    """Where a step's checkpoint lies, and its manifest.

    Raises:
        NotFound: there is none of that step.
        TornCheckpoint: it is torn.
    """
    find.require_known(run, [step])
    checkpoint = find.look(run, step)
    if checkpoint.problem is not None or checkpoint.manifest is None:
        raise TornCheckpoint(f"step {step} of {run.name} is torn: {checkpoint.problem}")
    return checkpoint.path, checkpoint.manifest


def tensors(path: Path, manifest: Manifest) -> list[Tensor]:
    """All tensors of a checkpoint, in its order; also of a staged one whose files are written.

    Raises:
        TornCheckpoint: its chunk table is damaged.
    """
    source = CheckpointSource.open(path, manifest)
    return [_tensor(source, entry) for entry in manifest.tensors]


def _tensor(source: CheckpointSource, entry: TensorEntry) -> Tensor:
    def read() -> Bytes:
        content = np.empty(math.prod(entry.shape) * DTYPES[entry.dtype], np.uint8)
        whole = (0,) * len(entry.shape)
        piece = ShardPiece(entry.name, entry.dtype, entry.shape, whole, entry.shape)
        source.read([Target(piece, content.data)])
        return content

    return Tensor(entry.name, entry.dtype, entry.shape, read)
