"""What an export has in it, and how it is checked.

The promises are held by tests/unit/checkpoint/exchange/test_exchange_export.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange import contents
from hpctrain.checkpoint.exchange.contents import CARRIED, same, to_dtype
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Tensor
    from hpctrain.checkpoint.format.manifest import Manifest

    OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class Written:
    """What an export wrote; `verified` counts tensors that were read back and compared."""

    files: list[tuple[Path, int]]
    tensors: int
    nbytes: int
    verified: int


def chosen(
    path: Path, manifest: Manifest, *, everything: bool, dtype: str | None, strip: str
) -> list[Tensor]:
    """Return the tensors to export, under the names that they will have.

    Weights lose ``model.`` and the beginning `strip`; `dtype` converts floating weights only. With
    `everything`, the optimizer's state and all else come too, under full names.

    Raises:
        CheckpointError: there are no weights, or a name is not free after the stripping.
    """
    taken: list[Tensor] = []
    hits = 0
    objects = contents.parts_of_objects(entry.name for entry in manifest.tensors)
    for tensor in contents.tensors(path, manifest):
        is_weight = tensor.name.startswith(contents.MODEL) and tensor.name not in objects
        if not is_weight and not everything:
            continue
        name = tensor.name
        if is_weight:
            name = name.removeprefix(contents.MODEL)
            hits += bool(strip) and name.startswith(strip)
            name = name.removeprefix(strip)
            name = contents.MODEL + name if everything else name
        converted = to_dtype(tensor, dtype) if is_weight and dtype else tensor
        taken.append(replace(converted, name=name))
    if not taken:
        raise CheckpointError(f"{path} holds no weights, whose names start with {contents.MODEL}")
    if strip and not hits:
        raise UsageError(
            f"--strip-prefix {strip}: no weight's name starts so, e.g. {taken[0].name}"
        )
    names = [tensor.name for tensor in taken]
    for name in names:
        if not name or names.count(name) > 1:
            raise UsageError(f"--strip-prefix {strip}: several weights would be called {name!r}")
    return taken


def state_of(manifest: Manifest) -> dict[str, Any]:
    """The rest of a checkpoint, as JSON has it."""
    return {name: getattr(manifest, name) for name in CARRIED} | {"step": manifest.step}


def compare(wanted: Iterable[Tensor], got: Mapping[str, Tensor], on_bytes: OnBytes) -> int:
    """Read both and compare every bit; returns how many tensors.

    Raises:
        CheckpointError: which tensor is not the same.
    """
    count = 0
    for tensor in wanted:
        other = got.get(tensor.name)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            there = "missing" if other is None else other.text
            raise CheckpointError(
                f"{tensor.name} was written as {tensor.text} and is {there} when read back"
            )
        if not same(tensor.read(), other.read()):
            raise CheckpointError(
                f"{tensor.name} is not what it was when read back: the disk, or the source, has "
                "changed it"
            )
        on_bytes(tensor.nbytes)
        count += 1
    if count != len(got):
        raise CheckpointError(f"{count} tensors were written and {len(got)} are there")
    return count
