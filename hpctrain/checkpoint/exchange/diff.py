"""The differences between two checkpoints: tensors, and the state beside them.

Where both cut a tensor in the same way, the digests of its blocks say whether it is the same, and
nothing is read; only how far apart two values are takes reading them. The promises are held by
tests/unit/checkpoint/exchange/test_exchange_diff.py.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.checkpoint.exchange import contents
from hpctrain.checkpoint.exchange.contents import is_floating, same, widened
from hpctrain.checkpoint.format.reader import CheckpointSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from hpctrain.checkpoint.exchange.contents import Tensor
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.table import ChunkTable

    OnBytes = Callable[[int], object]

STATE = ("data", "rng", "extra")
SLICE = 16 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class Changed:
    """A tensor that is not the same in both.

    Attributes:
        elements: How many are not the same; None where that cannot be said.
        max_abs: The largest difference of two values; None for what are no fractions, and where
            shapes differ or the values were not read. Not a number if one of the two is none.
    """

    name: str
    before: str
    after: str
    elements: int | None = None
    max_abs: float | None = None


@dataclass
class Difference:
    """All of it; `same` where there is none."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)
    equal: int = 0
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or self.changed or self.state)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``; what is not finite as text, which strict JSON has no other form for."""
        rows = [asdict(one) for one in self.changed]
        for row in rows:
            if row["max_abs"] is not None and not math.isfinite(row["max_abs"]):
                row["max_abs"] = str(row["max_abs"])
        return {
            "same": self.same,
            "added": self.added,
            "removed": self.removed,
            "changed": rows,
            "state": self.state,
            "equal": self.equal,
            "bytes_read": self.bytes_read,
        }


@dataclass(frozen=True)
class _Side:
    manifest: Manifest
    table: ChunkTable
    tensors: dict[str, Tensor]
    numbers: dict[str, int]


def compare(
    first: tuple[Path, Manifest],
    other: tuple[Path, Manifest],
    *,
    values: bool = True,
    on_bytes: OnBytes = lambda _: None,
) -> Difference:
    """Compare two checkpoints, each given by its directory and manifest.

    With `values`, read what changed, to report by how much. `on_bytes` gets the number of bytes
    compared, read or not.

    Raises:
        TornCheckpoint: bytes that had to be read are damaged.
    """
    before, after = _side(*first), _side(*other)
    difference = Difference()
    difference.removed = [name for name in before.tensors if name not in after.tensors]
    difference.added = [name for name in after.tensors if name not in before.tensors]

    def count(nbytes: int) -> None:
        difference.bytes_read += nbytes

    for name, tensor in before.tensors.items():
        if name in after.tensors:
            change = _changed(before, after, name, values=values, on_bytes=count)
            if change is None:
                difference.equal += 1
            else:
                difference.changed.append(change)
        on_bytes(tensor.nbytes + (after.tensors[name].nbytes if name in after.tensors else 0))
    for key in STATE:
        difference.state += _differing(
            key, getattr(before.manifest, key), getattr(after.manifest, key)
        )
    return difference


def _side(path: Path, manifest: Manifest) -> _Side:
    tensors = {tensor.name: tensor for tensor in contents.tensors(path, manifest)}
    numbers = {entry.name: number for number, entry in enumerate(manifest.tensors)}
    return _Side(manifest, CheckpointSource.open(path, manifest).table, tensors, numbers)


def _changed(
    before: _Side, after: _Side, name: str, *, values: bool, on_bytes: OnBytes
) -> Changed | None:
    left_tensor, right_tensor = before.tensors[name], after.tensors[name]
    if (left_tensor.dtype, left_tensor.shape) != (right_tensor.dtype, right_tensor.shape):
        return Changed(name, left_tensor.text, right_tensor.text)
    is_same = _by_digests(before, after, name)
    if is_same is True:
        return None
    if is_same is False and not values:
        return Changed(name, left_tensor.text, right_tensor.text)
    left, right = left_tensor.read(), right_tensor.read()
    on_bytes(left_tensor.nbytes + right_tensor.nbytes)
    if same(left, right):
        return None
    elements, largest = _distance(
        left, right, left_tensor.dtype, max(1, math.prod(left_tensor.shape))
    )
    return Changed(name, left_tensor.text, right_tensor.text, elements, largest)


def _by_digests(before: _Side, after: _Side, name: str) -> bool | None:
    """Whether a tensor is the same, as the blocks' digests have it; None if they cannot say."""
    if before.table.block_bytes != after.table.block_bytes:
        return None
    left = _chunks(before.table, before.numbers[name])
    right = _chunks(after.table, after.numbers[name])
    if left.keys() != right.keys():
        return None
    return all(np.array_equal(digests, right[box]) for box, digests in left.items())


def _chunks(table: ChunkTable, number: int) -> dict[tuple[Any, ...], NDArray[np.uint64]]:
    """Each chunk of a tensor to its blocks' digests; which file it lies in does not matter."""
    chunks = {}
    for row in table.rows_of(number).tolist():
        pairs = slice(table.first_dim[row], table.first_dim[row + 1])
        box = (
            int(table.flat[row]),
            tuple(table.begin[pairs].tolist()),
            tuple(table.extent[pairs].tolist()),
        )
        chunks[box] = table.digests[table.first_block[row] : table.first_block[row + 1]]
    return chunks


def _distance(
    left: NDArray[np.uint8], right: NDArray[np.uint8], dtype: str, count: int
) -> tuple[int, float | None]:
    """How many elements differ in their bits, and by how much at most."""
    size = len(left) // count
    elements, largest = 0, 0.0
    for low in range(0, count, SLICE):
        part = slice(low * size, min(low + SLICE, count) * size)
        left_part, right_part = left[part], right[part]
        elements += int(
            (left_part.reshape(-1, size) != right_part.reshape(-1, size)).any(axis=1).sum()
        )
        if is_floating(dtype):
            largest = _largest(widened(left_part, dtype), widened(right_part, dtype), largest)
    return elements, largest if is_floating(dtype) else None


def _largest(first: NDArray[Any], other: NDArray[Any], so_far: float) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(first.astype(np.float64) - other.astype(np.float64))
    alike = (first == other) | (np.isnan(first) & np.isnan(other))  # inf - inf is no number
    apart[alike] = 0.0
    return float(np.maximum(so_far, apart.max()))


def _differing(key: str, first: Any, other: Any) -> list[dict[str, Any]]:
    """The innermost values that differ."""
    if isinstance(first, dict) and isinstance(other, dict):
        return [
            row
            for name in dict.fromkeys([*first, *other])
            for row in _differing(f"{key}.{name}", first.get(name), other.get(name))
        ]
    alike = first == other or (first != first and other != other)  # noqa: PLR0124 - NaN
    return [] if alike else [{"key": key, "before": _plain(first), "after": _plain(other)}]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value
