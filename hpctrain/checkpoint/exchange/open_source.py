"""The format of a source, told by what lies there and not by its name alone, and its reader.

The promises are held by tests/unit/checkpoint/exchange/test_exchange_import.py and
test_untrusted_sources.py.
"""

from __future__ import annotations

import contextlib
import re
from importlib import metadata
from typing import TYPE_CHECKING

from hpctrain.checkpoint.exchange.contents import Contents, NestedValue, carried
from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.store import find
from hpctrain.errors import CheckpointError, ChecksFailed, NotFound, TornCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpctrain.checkpoint.format.manifest import Manifest

SAFE_TORCH = (2, 10)
"""Older ones corrupt memory on a crafted file, `weights_only` or not."""
KINDS = ("dcp", "torch", "safetensors", "deepspeed", "hpctrain")


def read(source: Path, kind: str | None = None) -> Contents:
    """Open a file or directory as a source. `kind` is one of KINDS; None detects it.

    Raises:
        NotFound: there is nothing.
        CheckpointError: it is of no known format, or not whole, or wants to run something.
    """
    if not source.exists():
        raise NotFound(f"{source} is not there")
    kind = kind or detect(source)
    if kind == "hpctrain":
        return _ours(source)
    if kind == "safetensors":
        from hpctrain.checkpoint.exchange import safetensors

        return safetensors.read(source)
    with needs_torch(f"a source of {kind}"):
        from hpctrain.checkpoint.exchange import from_dcp, from_deepspeed, from_torch
    readers = {"dcp": from_dcp.read, "deepspeed": from_deepspeed.read, "torch": from_torch.read}
    return readers[kind](source)


def risk(source: Path, kind: str | None = None, *, version: str | None = None) -> str:
    """Return what reading a source risks with the installed torch; "" if nothing is known.

    Without `version`, look it up without importing torch. `kind` is as in `read`.

    Raises:
        CheckpointError: see `detect`.
    """
    if not source.exists() or (kind or detect(source)) in {"hpctrain", "safetensors"}:
        return ""
    try:
        version = metadata.version("torch") if version is None else version
    except metadata.PackageNotFoundError:  # the reading says so
        return ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= SAFE_TORCH:
        return ""
    return (
        f"torch {version} reads pickles with a fault that a crafted file can use to run code "
        "(CVE-2026-24747, mended in 2.10): import only files that you trust, or safetensors"
    )


@contextlib.contextmanager
def needs_torch(what: str) -> Iterator[None]:
    """Around imports of modules that import torch, which a login node may not have.

    Raises:
        ChecksFailed: it cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise ChecksFailed(
            f"{what} needs torch, which cannot be imported here ({error}); safetensors do not"
        ) from error


def detect(source: Path) -> str:
    """The format of a source.

    Raises:
        CheckpointError: it is none that is known.
    """
    try:
        return _of_directory(source) if source.is_dir() else _of_file(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or error}") from error


def _of_directory(source: Path) -> str:
    there = {path.name for path in source.iterdir()}
    if ".metadata" in there:
        return "dcp"
    if manifests.MANIFEST_NAME in there:
        return "hpctrain"
    if "latest" in there or any(name.endswith("_model_states.pt") for name in there):
        return "deepspeed"
    if any(name.endswith(".safetensors") for name in there):
        return "safetensors"
    raise CheckpointError(
        f"{source} is no checkpoint that is known here: it has no .metadata (torch DCP), no "
        "*_model_states.pt (DeepSpeed), no *.safetensors; of a torch.save file give the file"
    )


def _of_file(source: Path) -> str:
    with source.open("rb") as file:
        start = file.read(10)
    if source.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    # A zip archive (torch.save since 1.6), or a pickle (before it).
    if start.startswith((b"PK", b"\x80")):
        return "torch"
    if start[8:9] == b"{":
        return "safetensors"
    raise CheckpointError(
        f"{source} is no checkpoint that is known here: neither torch.save's nor safetensors; say "
        "which it is with --from"
    )


def _ours(source: Path) -> Contents:
    from hpctrain.checkpoint.exchange import contents as source_contents

    try:
        manifest = manifests.load(source / manifests.MANIFEST_NAME)
        _require_sizes(source, manifest)
        leaves = [
            NestedValue((tensor.name,), tensor)
            for tensor in source_contents.tensors(source, manifest)
        ]
    except TornCheckpoint as error:
        raise TornCheckpoint(f"{source} is torn: {error}") from error
    contents = Contents("hpctrain", source, leaves, full_names=True, step=manifest.step)
    contents.state = carried(vars(manifest), str(source))
    if manifests.parse_step(source.name) is None:
        contents.notes.append(f"{source.name} is not a committed checkpoint's name")
    return contents


def _require_sizes(source: Path, manifest: Manifest) -> None:
    problems = find.size_problems(source, manifest.files)
    if problems:
        raise TornCheckpoint(problems[0])
