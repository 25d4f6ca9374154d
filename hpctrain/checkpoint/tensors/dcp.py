"""Our storage under torch's own `dcp.save` and `dcp.load`, for programs that call those.

    dcp.save(state, storage_writer=Writer("checkpoints/step-0000000100", step=100))
    dcp.load(state, storage_reader=Reader("checkpoints/step-0000000100"))

Torch's planners stay; bytes, digests and the commit are ours: what is written this way is a
checkpoint of our format, and a load proves every byte that it uses. Without a run there is no
fence: two programs must not write to one path.
"""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import part_of
from hpctrain.checkpoint.format.reader import CheckpointSource, Target
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import commit, find
from hpctrain.checkpoint.tensors.boxes import DTYPES, TORCH_DTYPES, bytes_of
from hpctrain.core.base.files import flush_directory
from hpctrain.errors import CheckpointError, TornCheckpoint

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

PATHS, BYTES = "dcp_paths", "dcp_bytes"


class Writer(StorageWriter):
    """Writes one checkpoint to a path where nothing is; DCP calls its methods on every rank."""

    def __init__(self, path: str | os.PathLike[str], *, step: int = 0) -> None:
        """Name the checkpoint's directory; it is there only once it is whole.

        Args:
            path: Where; its parent must be there.
            step: Written into the manifest.
        """
        self.reset(path)
        self._step = step
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; DCP passes the `checkpoint_id` that it was called with."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
            self._staged = self._path.with_name(self._path.name + ".staged")

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Make the staged directory on the coordinating rank.

        Raises:
            CheckpointError: something is there already.
        """
        if not is_coordinator:
            return
        self._require_free()
        shutil.rmtree(self._staged, ignore_errors=True)
        self._staged.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add to a rank's plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks: each writes a file of its own."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items as one shard."""
        self._rank = int(plan.storage_data or 0)
        pieces, sources, opaque = [], [], []
        for item in plan.items:
            piece, source = _piece(item, planner.resolve_data(item))
            pieces.append(piece)
            sources.append(source)
            if item.type is WriteItemType.BYTE_IO:
                opaque.append(piece.name)
        report = None
        if pieces:
            name = shard.file_name(self._rank)
            report = shard.write(self._staged / name, pieces, sources, step=self._step)
        results = [
            WriteResult(item.index, piece.nbytes, None)
            for item, piece in zip(plan.items, pieces, strict=True)
        ]
        part_and_opaque = (part_of(pieces, report), opaque)
        results.append(WriteResult(MetadataIndex(f"rank {self._rank}"), 0, part_and_opaque))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit, on the coordinating rank, once every rank has written."""
        answers = [
            result.storage_data for part in results for result in part if result.storage_data
        ]
        opaque = sorted({name for _, names in answers for name in names})
        paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        manifest = manifests.Manifest(
            run_id="",
            name=self._path.parent.name,
            step=self._step,
            world_size=len(results),
            mesh={},
            engine="dcp",
            versions={"torch": str(torch.__version__)},
            extra={PATHS: paths, BYTES: opaque},
        )
        commit.write_table(self._staged, manifest, [part for part, _ in answers])
        manifests.dump(manifest, self._staged / manifests.MANIFEST_NAME)
        flush_directory(self._staged)
        self._require_free()
        self._staged.rename(self._path)
        flush_directory(self._path.parent)

    def _require_free(self) -> None:
        if self._path.exists():
            raise CheckpointError(
                f"{self._path} is there already; a checkpoint is never overwritten"
            )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be a path; DCP asks."""
        return "://" not in str(checkpoint_id)


class Reader(StorageReader):
    """Reads a checkpoint of our format; DCP calls its methods on every rank."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the checkpoint's directory."""
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; DCP passes the `checkpoint_id` that it was called with."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
            self._source: CheckpointSource | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the checkpoint holds, in DCP's words.

        Raises:
            TornCheckpoint: it is not whole by the cheap checks.
        """
        source = self._open()
        extra = source.manifest.extra
        opaque = set(extra.get(BYTES, []))
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for number, entry in enumerate(source.manifest.tensors):
            if entry.name in opaque:
                entries[entry.name] = BytesStorageMetadata()
                continue
            begin, extent = source.rows.boxes(source.rows.rows_of(number))
            entries[entry.name] = TensorStorageMetadata(
                TensorProperties(TORCH_DTYPES[entry.dtype]),
                torch.Size(entry.shape),
                [
                    ChunkStorageMetadata(torch.Size(at), torch.Size(size))
                    for at, size in zip(begin.tolist(), extent.tolist(), strict=True)
                ],
            )
        paths = {name: tuple(path) for name, path in extra.get(PATHS, {}).items()}
        return Metadata(entries, planner_data=paths or {name: (name,) for name in entries})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add to a rank's plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add to all ranks' plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and prove what this rank asks for.

        Raises:
            TornCheckpoint: some bytes are not what the manifest says.
        """
        source = self._open()
        done, targets = [], []
        for item in plan.items:
            host, finish = _destination(item, planner, source)
            targets.append(_target(item, source, host))
            done.append(finish)
        source.read(targets)
        for finish in done:
            finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a checkpoint of ours."""
        return (Path(checkpoint_id) / manifests.MANIFEST_NAME).exists()

    def _open(self) -> CheckpointSource:
        if self._source is None:
            manifest = manifests.load(self._path / manifests.MANIFEST_NAME)
            problems = find.size_problems(self._path, manifest.files)
            if problems:
                raise TornCheckpoint(f"{self._path}: {problems[0]}")
            self._source = CheckpointSource.open(self._path, manifest)
        return self._source


def _piece(item: WriteItem, data: torch.Tensor | io.BytesIO) -> tuple[ShardPiece, memoryview]:
    name = item.index.fqn
    if not isinstance(data, torch.Tensor):
        content = data.getbuffer()
        size = (len(content),)
        return ShardPiece(name, "U8", size, (0,), size), content
    if item.tensor_data is None:
        raise CheckpointError(f"{name} comes without its place in the whole tensor")
    chunk, dtype = item.tensor_data.chunk, DTYPES[data.dtype]
    piece = ShardPiece(
        name, dtype, tuple(item.tensor_data.size), tuple(chunk.offsets), tuple(chunk.sizes)
    )
    return piece, bytes_of(data.detach().cpu().contiguous())


def _destination(
    item: ReadItem, planner: LoadPlanner, source: CheckpointSource
) -> tuple[torch.Tensor, Any]:
    """Host memory to read into, and what to do once it is filled."""
    if item.type is LoadItemType.BYTE_IO:
        host = torch.empty(source.entry(item.storage_index.fqn).shape, dtype=torch.uint8)

        def hand_over() -> None:
            planner.load_bytes(item, io.BytesIO(bytes(bytes_of(host))))

        return host, hand_over
    target = planner.resolve_tensor(item).detach()
    if target.device.type == "cpu" and target.is_contiguous():
        return target, lambda: planner.commit_tensor(item, target)
    host = torch.empty(target.shape, dtype=target.dtype)

    def copy() -> None:
        target.copy_(host)
        planner.commit_tensor(item, target)

    return host, copy


def _target(item: ReadItem, source: CheckpointSource, host: torch.Tensor) -> Target:
    entry = source.entry(item.storage_index.fqn)
    begin = (0,) * len(entry.shape)
    if item.type is not LoadItemType.BYTE_IO:
        first = item.storage_index.offset or begin
        begin = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
    piece = ShardPiece(entry.name, DTYPES[host.dtype], entry.shape, begin, tuple(host.shape))
    return Target(piece, bytes_of(host))
