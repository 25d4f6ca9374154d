"""A checkpoint from a source of any known format: detected, opened, written, compared, published.

An import takes an attempt of the run, as training does: if the run starts meanwhile, the import is
the older attempt and may not publish.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange import contents as source_contents
from hpctrain.checkpoint.exchange.contents import Contents, NestedValue, carried
from hpctrain.checkpoint.exchange.export import compare
from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import part_of
from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import commit, find
from hpctrain.core.base import VERSION
from hpctrain.errors import CheckpointError, ChecksFailed, NotFound, TornCheckpoint
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointImported
from hpctrain.ledger.run.fence import IMPORT, take_attempt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Tensor
    from hpctrain.checkpoint.exchange.export import OnBytes
    from hpctrain.ledger.run.layout import RunDir


ENGINE = "import"
NO_RANKS = 0
"""No rank's random generators are in it: any number of ranks starts its own."""


@dataclass(frozen=True)
class Imported:
    """A committed checkpoint; `verified` counts tensors read back and compared with the source."""

    path: Path
    tensors: int
    nbytes: int
    verified: int


def refuse_taken(run: RunDir, step: int) -> None:
    """Say before anything is read that a step is there already.

    Raises:
        CheckpointError: it is.
    """
    if step in find.steps(run) and find.look(run, step).problem is None:
        raise CheckpointError(
            f"step {step} of {run.name} is there already and is left as it is; import to another "
            f"step, or delete it with `hpctrain checkpoints rm {run.typed} {step}`"
        )


def write(
    run: RunDir,
    run_id: str,
    step: int,
    contents: Contents,
    tensors: Sequence[Tensor],
    *,
    on_bytes: OnBytes = lambda _: None,
) -> Imported:
    """Make a committed checkpoint; on an error nothing of it is left.

    No job of `run` may be alive. `tensors` have our names. `on_bytes` gets the bytes written and
    the bytes compared.

    Raises:
        CheckpointError: there is no room, the disk refused, the step is taken, or what was read
            back is not the same.
        Fenced: the run was started meanwhile.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors)
    problem = commit.forecast(run.checkpoints, nbytes, 4)
    if problem:
        raise CheckpointError(problem)
    with _errors_named(run):
        attempt = take_attempt(run, job_id=f"{IMPORT}{os.getpid()}", restarts=0)
        staged = commit.stage(run, step, attempt)
    try:
        with _errors_named(run):
            manifest = _manifest(run, run_id, step, contents)
            _write(staged, manifest, tensors, on_bytes)
            got = {one.name: one for one in source_contents.tensors(staged, manifest)}
            verified = compare(tensors, got, on_bytes)
        path = commit.publish(run, staged, manifest, attempt)
    except BaseException:  # also Ctrl-C: nothing half is left
        commit.discard(staged)
        raise
    imported = CheckpointImported(
        step=step, bytes=nbytes, kind_of_source=contents.kind, source=str(contents.source)
    )
    ledger.append(run, imported)  # of no attempt: nothing was trained
    return Imported(path, len(tensors), nbytes, verified)


def _write(staged: Path, manifest: Manifest, tensors: Sequence[Tensor], on_bytes: OnBytes) -> None:
    pieces = [
        ShardPiece(tensor.name, tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor.shape)
        for tensor in tensors
    ]

    def content(number: int) -> memoryview:
        content = tensors[number].read()
        on_bytes(tensors[number].nbytes)
        return content.data if len(content) else memoryview(b"")

    report = shard.write(
        staged / shard.file_name(0),
        pieces,
        shard.OneAtATime(content),
        block_bytes=manifest.block_bytes,
        step=manifest.step,
    )
    commit.write_table(staged, manifest, [part_of(pieces, report)])


def _manifest(run: RunDir, run_id: str, step: int, contents: Contents) -> Manifest:
    fields: dict[str, Any] = {"world_size": NO_RANKS, "mesh": {}, "engine": ENGINE, "data": {}}
    return Manifest(
        run_id=run_id,
        name=run.name,
        step=step,
        versions={
            "hpctrain": VERSION,
            "python": platform.python_version(),
            "imported_from": contents.kind,
            "source": str(contents.source),
        },
        **(fields | contents.state),
    )


@contextlib.contextmanager
def _errors_named(run: RunDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(commit.describe(error, run.checkpoints)) from error


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
        from hpctrain.checkpoint.exchange import from_dcp, from_deepspeed, untrusted
    readers = {"dcp": from_dcp.read, "deepspeed": from_deepspeed.read, "torch": untrusted.read}
    return readers[kind](source)


def risk(source: Path, kind: str | None = None) -> str:
    """Return what reading a source risks with the installed torch; "" if nothing is known.

    Torch is not imported for it. `kind` is as in `read`.

    Raises:
        CheckpointError: see `detect`.
    """
    if not source.exists() or (kind or detect(source)) in {"hpctrain", "safetensors"}:
        return ""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:  # the reading says so
        return ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= SAFE_TORCH:
        return ""
    return (
        f"torch {version} reads pickles with a fault that a crafted file can use to run code "
        "(CVE-2026-24747, fixed in 2.10): import only files that you trust, or safetensors"
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
    if (source / "latest").is_file() or any(name.endswith("_model_states.pt") for name in there):
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
