"""A committed checkpoint of a run from named tensors: written, read back, compared, published.

An import takes an attempt of the run, as training does: should the run be started meanwhile, the
import is the older attempt and may not publish any more. The promises are held by
tests/unit/checkpoint/exchange/test_exchange_import.py.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange import contents as source_contents
from hpctrain.checkpoint.exchange.export import compare
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import part_of
from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import commit, find
from hpctrain.core.base import VERSION
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointImported
from hpctrain.ledger.run.fence import IMPORT, take_attempt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.exchange.contents import Bytes, Contents, Tensor
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
            f"step, or delete it with `hpctrain checkpoints rm {run.name} {step}`"
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
            got = {
                written_tensor.name: written_tensor
                for written_tensor in source_contents.tensors(staged, manifest)
            }
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
    sources = _OneAtATime(tensors, on_bytes)
    path = staged / shard.file_name(0)
    report = shard.write(
        path,
        pieces,
        sources,
        block_bytes=manifest.block_bytes,
        step=manifest.step,
    )
    commit.write_table(staged, manifest, [part_of(pieces, report)])


class _OneAtATime:
    """The tensors' bytes, each made when it is asked for and forgotten with the next."""

    def __init__(self, tensors: Sequence[Tensor], on_bytes: OnBytes) -> None:
        self._tensors = tensors
        self._on_bytes = on_bytes
        self._last = -1
        self._content: Bytes | None = None

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: int) -> memoryview:
        if number != self._last or self._content is None:
            self._content = self._tensors[number].read()
            self._last = number
            self._on_bytes(self._tensors[number].nbytes)
        return self._content.data if len(self._content) else memoryview(b"")


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
