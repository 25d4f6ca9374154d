"""Import from safetensors: one file, or a directory as Hugging Face writes it. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpctrain.checkpoint.exchange import headers
from hpctrain.checkpoint.exchange.contents import Contents, Leaf, carried
from hpctrain.checkpoint.exchange.safetensors import STATE_KEY
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.checkpoint.exchange.tensors import Tensor

INDEX_SUFFIX = ".safetensors.index.json"


def read(source: Path) -> Contents:
    """What the files hold.

    Raises:
        CheckpointError: they are cut, do not belong together, or are none.
    """
    contents = Contents("safetensors", source, [])
    found: dict[str, Tensor] = {}
    for path in _files(source):
        header = headers.read(path)
        if "DCP_SHARDING_INFO" in header.metadata:
            raise CheckpointError(
                f"{path} is one rank's part of a sharded checkpoint, not a whole one; put them "
                "together first (torch's consolidate_safetensors_files), or import the whole "
                "directory of a run's checkpoint"
            )
        if STATE_KEY in header.metadata:
            _take_state(contents, header.metadata[STATE_KEY])
        for tensor in header.tensors:
            if found.setdefault(tensor.name, tensor) is not tensor:
                raise CheckpointError(f"{path} holds {tensor.name}, as another file does")
    _require_indexed(source, set(found))
    contents.leaves = [Leaf((name,), tensor) for name, tensor in found.items()]
    return contents


def _take_state(contents: Contents, text: str) -> None:
    """Our own export of everything has the rest of the manifest in it."""
    try:
        state = json.loads(text)
        contents.step = int(state["step"])
        contents.state = carried(state, str(contents.source))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{contents.source}: its {STATE_KEY} is not ours: {error}") from None
    contents.full_names = True


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return _listed(source) if source.name.endswith(INDEX_SUFFIX) else [source]
    index = _index(source)
    if index is not None:
        return _listed(index)
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{source} has no *.safetensors in it")
    return found


def _index(source: Path) -> Path | None:
    if source.is_file():
        return source if source.name.endswith(INDEX_SUFFIX) else None
    found = sorted(source.glob(f"*{INDEX_SUFFIX}"))
    if len(found) > 1:
        raise CheckpointError(f"{source} has {len(found)} indices; name the one that is meant")
    return found[0] if found else None


def _listed(index: Path) -> list[Path]:
    names = dict.fromkeys(_weight_map(index).values())
    for name in names:
        # An index must not be able to name a file outside of its own directory.
        if "/" in name or name in {"", ".", ".."}:
            raise CheckpointError(f"{index} names {name!r}, which is no file of its directory")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing")
    return [index.parent / name for name in names]


def _require_indexed(source: Path, found: set[str]) -> None:
    """What the index names and what the files hold is the same."""
    index = _index(source)
    if index is None:
        return
    named = set(_weight_map(index))
    for name in sorted(named - found)[:1]:
        raise CheckpointError(f"{index} names {name}, which none of its files holds")
    for name in sorted(found - named)[:1]:
        raise CheckpointError(f"{index} does not name {name}, which one of its files holds")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text())["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error}") from None
