"""The proof that a checkpoint holds the bytes that its manifest names; torn ones are quarantined.

`verify` reads every byte and lists what is wrong; `set_aside` moves a damaged checkpoint out of the
way of the loads, with its reason inside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpctrain.checkpoint.format.manifest import TABLE_NAME, block_digest
from hpctrain.checkpoint.format.reader import (
    ChunkFiles,
    Proofs,
    damage,
    in_threads,
    open_chunks,
    window_blocks,
)
from hpctrain.checkpoint.format.shard import proof, proof_bytes, proof_digest
from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.store.commit import errors_named, set_aside_locked
from hpctrain.errors import CheckpointError, FileSystemFault, TornCheckpoint
from hpctrain.ledger.run.event_types import CheckpointSetAside
from hpctrain.ledger.run.fence import publishing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.index import ChunkIndex
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.table import ChunkTable
    from hpctrain.checkpoint.store.find import FoundCheckpoint
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

SHOWN = 3


def verify(
    checkpoint: FoundCheckpoint,
    *,
    threads: int = 1,
    on_bytes: Callable[[int], object] | None = None,
    deep: bool = True,
    unreadable: list[str] | None = None,
) -> list[str]:
    """Return what is wrong with a checkpoint: one line per damage, with file, tensor and place.

    Without `deep`, check what is small: manifest, chunk table, cover of every tensor, sizes of all
    files. `threads` read at a time, a large file together, and call `on_bytes`. `unreadable` takes
    a line for each place that the file system refused, which is no damage.

    Raises:
        FileSystemFault: such a place, where no list takes it.
    """
    refused: list[str] = []
    try:
        problems, chunks = _small(checkpoint, deep=deep)
    except FileSystemFault as error:
        problems, chunks = [], None
        refused.append(str(error))
    if deep and chunks is not None and checkpoint.manifest is not None:
        files = checkpoint.manifest.files
        # All but the chunk table, which is read and proved by now.
        numbers = [n for n in sorted(chunks.file.tolist()) if not _names(problems, files[n].name)]
        if on_bytes is not None:
            on_bytes(sum(entry.size for entry in files if entry.name == TABLE_NAME))
        scrub = _Scrub(checkpoint.path, checkpoint.manifest, chunks, on_bytes, {}, {})
        in_threads(scrub.tasks(numbers), threads, scrub.work)
        problems += scrub.lines()
        refused += [line for _, line in sorted(scrub.refused.items())]
    if unreadable is not None:
        unreadable += refused
    elif refused:
        raise FileSystemFault(f"{checkpoint.name}: {refused[0]}")
    return problems


def _small(checkpoint: FoundCheckpoint, *, deep: bool) -> tuple[list[str], ChunkIndex | None]:
    """Return what is wrong with all that is small; and the chunk table, if it is right."""
    if checkpoint.doubt is not None:
        raise FileSystemFault(checkpoint.problem)
    manifest = checkpoint.manifest
    if manifest is None:
        return [checkpoint.problem or "manifest is missing"], None
    sizes = find.size_problems(checkpoint.path, manifest.files)
    problems = list(sizes)
    if checkpoint.problem is not None and not sizes:
        problems.append(checkpoint.problem)  # e.g. it lies under another step's name
    try:
        chunks = open_chunks(checkpoint.path, manifest)
        chunks.require_cover(manifest.tensors)
    except FileSystemFault:
        raise
    except CheckpointError as error:  # where the blocks lie is not known then
        left = "; no shard was read" if deep else ""
        return problems + ([] if _names(sizes, TABLE_NAME) else [f"{error}{left}"]), None
    return problems, chunks


def set_aside(run: RunDir, step: int, reason: str, attempt: Attempt) -> Path:
    """Move a damaged checkpoint away; return where it lies then.

    `reason` is one line, kept in its `SET-ASIDE.txt`.

    Raises:
        Fenced: a newer attempt has taken the run over.
        CheckpointError: it is gone, or cannot be renamed.
    """
    path = find.step_path(run, step)
    with errors_named(f"{path} cannot be set aside"), publishing(run, attempt):
        return set_aside_locked(path, step, reason)


def set_newer_aside(
    run: RunDir, limit: int, reason: str, attempt: Attempt, record: Callable[[LedgerFact], object]
) -> None:
    """Move checkpoints with more updates away, so that their steps can be saved anew.

    `record` takes the event of each. Nothing is deleted.

    Raises:
        HpctrainError: see `set_aside`.
    """
    for step in find.steps(run):
        if step > limit:
            set_aside(run, step, reason, attempt)
            name = find.step_path(run, step).name
            record(CheckpointSetAside(step=step, name=name, reason=reason))


class _Task(NamedTuple):
    """Neighbouring blocks of a file; none of them for what is before the first."""

    file: int
    table: ChunkTable
    """The file's chunks."""
    edges: NDArray[np.int64]
    """Where each block begins, and where the last one ends."""
    rows: NDArray[np.int64]
    """Of each block, its chunk."""
    blocks: NDArray[np.int64]
    """Of each block, its number in its chunk."""


@dataclass(frozen=True)
class _Scrub:
    """Every byte of a checkpoint read and compared; several threads do it."""

    path: Path
    manifest: Manifest
    chunks: ChunkIndex
    on_bytes: Callable[[int], object] | None
    damaged: dict[tuple[int, int], str]
    """File and place in it: what is wrong there."""
    refused: dict[int, str]
    """File: why the file system does not give it."""

    def tasks(self, numbers: Sequence[int]) -> Iterator[_Task]:
        """What is to be done, each about a window's bytes, in the order of the files."""
        none = np.zeros(0, np.int64)
        with ChunkFiles(self.path, self.manifest) as files:
            for number in numbers:
                table = self.chunks.of_file(number)
                proofs = Proofs(self.manifest, table)
                if self._noted(number, 0, partial(proofs.need, files, number)) is not None:
                    yield _Task(number, table, none, none, none)
                    yield from self._block_tasks(number, table)

    def _noted(self, file: int, place: int, read: Callable[[], int]) -> int | None:
        """Return how many bytes were read; note damage or a refusal, and return None."""
        try:
            return read()
        except FileSystemFault as error:
            self.refused[file] = str(error)
        except TornCheckpoint as error:
            self.damaged[file, place] = str(error)
        return None

    def work(self, tasks: Iterator[_Task]) -> int:
        """Do tasks as long as there are any; returns how many bytes were read."""
        total = 0
        with ChunkFiles(self.path, self.manifest) as files:
            for task in tasks:
                if task.file in self.refused:
                    continue
                place = int(task.edges[0]) if len(task.edges) else 0
                check = self._blocks if len(task.edges) else self._header
                count = self._noted(task.file, place, partial(check, files, task))
                if count is not None:
                    total += count
                    if self.on_bytes is not None:
                        self.on_bytes(count)
        return total

    def lines(self) -> list[str]:
        """What was found, in the order of the files; a file with much damage is cut short."""
        counts = Counter(file for file, _ in self.damaged)
        shown: Counter[int] = Counter()
        lines = []
        for file, place in sorted(self.damaged):
            shown[file] += 1
            if shown[file] <= SHOWN:
                lines.append(self.damaged[file, place])
            elif shown[file] == counts[file]:
                name = self.manifest.files[file].name
                lines.append(f"{name}: and {counts[file] - SHOWN:,} more damaged places")
        return lines

    def _block_tasks(self, number: int, table: ChunkTable) -> Iterator[_Task]:
        if not len(table):
            return
        size = table.block_bytes
        rows = np.repeat(np.arange(len(table)), np.diff(table.first_block))
        blocks = np.arange(len(rows)) - table.first_block[rows]
        end = table.offset[-1] + table.nbytes[-1]
        edges = np.append(table.offset[rows] + blocks * size, end)
        window, at = window_blocks(size) * size, 0
        while at < len(rows):
            to = int(np.searchsorted(edges, edges[at] + window, "right")) - 1
            yield _Task(number, table, edges[at : to + 1], rows[at:to], blocks[at:to])
            at = to

    def _header(self, files: ChunkFiles, task: _Task) -> int:
        """What stands before the first chunk, proved by the file's digest of it and all blocks."""
        entry, table = self.manifest.files[task.file], task.table
        end = int(table.offset[0]) if len(table) else entry.size
        head = bytearray(end)
        files.read(task.file, [memoryview(head)], 0)
        digest = proof_digest(proof(bytes(head), table.digests))
        if digest != entry.digest:
            raise TornCheckpoint(
                f"{entry.name}: header [0:{end}]: digest of the file {digest}, "
                f"manifest says {entry.digest} (damaged bytes)"
            )
        # The file's own digests were read and proved before any block of it.
        return end + proof_bytes(len(table.digests))

    def _blocks(self, files: ChunkFiles, task: _Task) -> int:
        begin = int(task.edges[0])
        content = files.scratch[: int(task.edges[-1]) - begin]
        count = files.read(task.file, [content], begin)
        for low, high, row, block in zip(
            (task.edges[:-1] - begin).tolist(),
            (task.edges[1:] - begin).tolist(),
            task.rows.tolist(),
            task.blocks.tolist(),
            strict=True,
        ):
            digest = block_digest(content[low:high])
            if digest != task.table.digests[task.table.first_block[row] + block]:
                place = (task.file, begin + low)
                self.damaged[place] = damage(self.manifest, task.table, row, block, digest)
        return count


def _names(problems: list[str], name: str) -> bool:
    return any(problem.startswith(f"shard {name} ") for problem in problems)
