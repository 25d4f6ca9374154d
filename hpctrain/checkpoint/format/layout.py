"""What each rank says of its file, and what rank 0 makes of it: files, tensors and chunk index.

A rank's chunks are described in two parts. The `FileLayout` (names, shapes, sizes) is the same on
most ranks, and one of them sends it; the numbers that say where this rank's chunks begin are few.
So rank 0 gathers some hundred bytes of each rank, and the work that it does grows with layouts and
ranks, not with their product: see `index.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hpctrain.checkpoint.format.index import ChunkIndex
from hpctrain.checkpoint.format.manifest import FileEntry, TensorEntry
from hpctrain.checkpoint.format.shard import rank_of
from hpctrain.checkpoint.format.table import ITEMSIZES, KINDS, starts
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpctrain.checkpoint.format.shard import ShardPiece, ShardReport

NO_KEY = b""


@dataclass(frozen=True)
class FileLayout:
    """The chunks of a file but for where they begin; see `ChunkIndex` for most of it.

    Attributes:
        names: The tensors' names; of a rank's own ones, with a `*` for the rank's number.
        own: 1 for tensors that only this rank has, under a name with its number. [chunks]
        dtype: Number in KINDS, of each chunk. [chunks]
        ranks: Dimensions of each chunk's tensor. [chunks]
        shape: The chunks' tensors' shapes, one behind the other. [sum of ranks]
        dims: [chunks]
        flat: [chunks]
        extent: [sum of dims]
        unit: [sum of dims]
        source: [sum of dims]
    """

    names: tuple[str, ...]
    own: NDArray[np.uint8]
    dtype: NDArray[np.uint8]
    ranks: NDArray[np.uint8]
    shape: NDArray[np.int64]
    dims: NDArray[np.uint8]
    flat: NDArray[np.uint8]
    extent: NDArray[np.int64]
    unit: NDArray[np.uint8]
    source: NDArray[np.int64]

    @cached_property
    def key(self) -> bytes:
        """The same for files of the same layout."""
        hasher = xxhash.xxh3_128(json.dumps(self.names).encode())
        for column in (
            self.own, self.dtype, self.ranks, self.shape, self.dims, self.flat, self.extent,
            self.unit, self.source,
        ):  # fmt: skip
            hasher.update(np.int64(len(column)).tobytes() + column.tobytes())
        return hasher.digest()


@dataclass(frozen=True)
class RankPart:
    """One rank's file, or nothing of one, in a form that is small and quick to send.

    Attributes:
        file: Its entry in the manifest; None if the rank had nothing to write.
        head: Bytes of the file before its first chunk.
        key: Of its layout; NO_KEY where it writes nothing.
        numbers: See `ChunkIndex`: int64 of shape [numbers].
        layout: Its layout; None where another rank of the same sends it.
        state: Digest of all its blocks' digests but those of random generators.
    """

    file: FileEntry | None
    head: int = 0
    key: bytes = NO_KEY
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layout: FileLayout | None = None
    state: int = 0


def placed(pieces: Sequence[ShardPiece], rank: int) -> RankPart:
    """Where the chunks of a rank's file lie in their tensors, before a byte of it is written.

    It has no file yet; see `part_of`.
    """
    if not pieces:
        return RankPart(None)
    begin = np.array([at for piece in pieces for at in piece.begin], np.int64)
    extent = np.array([size for piece in pieces for size in piece.extent], np.int64)
    # A multiple of the extent says which part it is: the same number for all of a rank's tensors.
    unit = (extent > 0) & (begin % np.maximum(extent, 1) == 0)
    number = np.where(unit, begin // np.maximum(extent, 1), begin)
    kept, source = _numbered(number)
    own_name = f"rng.rank-{rank:05d}."
    own = np.array([piece.name.startswith(own_name) and _is_whole(piece) for piece in pieces], bool)
    layout = FileLayout(
        names=tuple(
            piece.name.replace(own_name, "rng.rank-*.", 1) if is_own else piece.name
            for piece, is_own in zip(pieces, own.tolist(), strict=True)
        ),
        own=own.astype(np.uint8),
        dtype=np.array([KINDS.index(piece.dtype) for piece in pieces], np.uint8),
        ranks=np.array([len(piece.shape) for piece in pieces], np.uint8),
        shape=np.array([size for piece in pieces for size in piece.shape], np.int64),
        dims=np.array([len(piece.begin) for piece in pieces], np.uint8),
        flat=np.array([piece.flat for piece in pieces], np.uint8),
        extent=extent,
        unit=unit.astype(np.uint8),
        source=source,
    )
    return RankPart(None, key=layout.key, numbers=kept, layout=layout)


def _is_whole(piece: ShardPiece) -> bool:
    return not piece.flat and piece.extent == piece.shape


def _numbered(number: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers other than 0 as they first appear, and which of them each is, from 1."""
    values, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    order = np.argsort(first)
    order = order[values[order] != 0]
    place = np.zeros(len(values), np.int64)
    place[order] = np.arange(1, len(order) + 1)
    return values[order], place[inverse]


def part_of(
    pieces: Sequence[ShardPiece],
    report: ShardReport | None,
    *,
    where: RankPart | None = None,
    with_layout: bool = True,
    block_bytes: int | None = None,
) -> RankPart:
    """Return what one rank reports of its file; `report` is None if it wrote none.

    `where` is `placed` of the pieces, if known already. `with_layout` is set on the rank that sends
    the layout. Without `block_bytes` there is no digest of the state.
    """
    if report is None:
        return RankPart(None)
    where = where or placed(pieces, rank_of(report.name))
    state = 0 if block_bytes is None else _state_digest(pieces, report, block_bytes)
    return replace(
        where,
        file=FileEntry(report.name, report.size, report.digest),
        head=report.head,
        layout=where.layout if with_layout else None,
        state=state,
    )


def _state_digest(pieces: Sequence[ShardPiece], report: ShardReport, block_bytes: int) -> int:
    kept = np.array([not piece.name.startswith("rng.") for piece in pieces], bool)
    blocks = [-(-piece.nbytes // block_bytes) for piece in pieces]
    value: int = xxhash.xxh3_64_intdigest(report.digests[np.repeat(kept, blocks)].tobytes())
    return value


def assemble(
    parts: Sequence[RankPart], block_bytes: int
) -> tuple[list[FileEntry], list[TensorEntry], ChunkIndex]:
    """Files, tensors and chunks of a checkpoint from all ranks' parts.

    Raises:
        CheckpointError: ranks disagree on a tensor, or some element of one is written twice or by
            nobody.
    """
    files = [part.file for part in parts if part.file is not None]
    parts = [part for part in parts if part.file is not None]
    by_key: dict[bytes, list[int]] = {}
    for at, part in enumerate(parts):
        by_key.setdefault(part.key, []).append(at)
    layouts = _layouts(parts, by_key)
    slots = [at for members in by_key.values() for at in members]
    members = [[files[at].name for at in group] for group in by_key.values()]
    tensors, numbers, own = _number(layouts, members)
    dtype = _joined([layout.dtype for layout in layouts])
    index = ChunkIndex(
        pieces=np.array([len(layout.names) for layout in layouts], np.int64),
        files=np.array([len(group) for group in members], np.int64),
        numbers=np.array([len(parts[group[0]].numbers) for group in by_key.values()], np.int64),
        tensor=numbers,
        own=own,
        dims=_joined([layout.dims for layout in layouts]),
        flat=_joined([layout.flat for layout in layouts]),
        extent=_joined([layout.extent for layout in layouts]),
        unit=_joined([layout.unit for layout in layouts]),
        source=_joined([layout.source for layout in layouts]),
        file=np.array(slots, np.int64),
        head=np.array([parts[at].head for at in slots], np.int64),
        number=_joined([parts[at].numbers for at in slots]),
        itemsize=ITEMSIZES[dtype],
        block_bytes=block_bytes,
    )
    index.require_cover(tensors)
    return files, tensors, index


def _layouts(parts: Sequence[RankPart], by_key: dict[bytes, list[int]]) -> list[FileLayout]:
    sent = {part.key: part.layout for part in parts if part.layout is not None}
    for key, group in by_key.items():
        if key not in sent:
            name = parts[group[0]].file
            raise CheckpointError(f"no rank has said what lies in {name.name if name else key!r}")
    return [sent[key] for key in by_key]


def _joined(columns: Sequence[NDArray[np.int64] | NDArray[np.uint8]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *columns]).astype(np.int64)


def _number(
    layouts: Sequence[FileLayout], members: Sequence[Sequence[str]]
) -> tuple[list[TensorEntry], NDArray[np.int64], NDArray[np.int64]]:
    """Number the tensors; return of each piece its tensor, and how that grows from file to file.

    Shared tensors come first, then those that each rank has for itself, file after file.
    """
    own = _joined([layout.own for layout in layouts])
    names = [name for layout in layouts for name in layout.names]
    numbers: dict[str, int] = {}
    tensor = np.zeros(len(names), np.int64)
    shared = np.flatnonzero(own == 0)
    tensor[shared] = [numbers.setdefault(names[at], len(numbers)) for at in shared.tolist()]
    tensors = _agreed(layouts, list(numbers), tensor, shared)
    first = starts(np.array([len(layout.names) for layout in layouts], np.int64))
    entry = _Entries(layouts)
    for at, files in enumerate(members):
        pieces = (np.flatnonzero(own[first[at] : first[at + 1]]) + first[at]).tolist()
        tensor[pieces] = len(tensors) + np.arange(len(pieces))
        own[pieces] = len(pieces)
        for file in files:
            for piece in pieces:
                name = names[piece].replace("*", f"{rank_of(file):05d}", 1)
                if name in numbers:
                    raise CheckpointError(f"{name} is written twice")
                tensors.append(entry(name, piece))
    return tensors, tensor, own


class _Entries:
    """The tensors that pieces are of."""

    def __init__(self, layouts: Sequence[FileLayout]) -> None:
        self.dtype = _joined([layout.dtype for layout in layouts])
        self.ranks = _joined([layout.ranks for layout in layouts])
        self.shape = _joined([layout.shape for layout in layouts])
        self.start = starts(self.ranks)

    def __call__(self, name: str, piece: int) -> TensorEntry:
        sizes = self.shape[self.start[piece] : self.start[piece + 1]].tolist()
        return TensorEntry(name, KINDS[self.dtype[piece]], tuple(sizes))


def _agreed(
    layouts: Sequence[FileLayout],
    names: Sequence[str],
    tensor: NDArray[np.int64],
    shared: NDArray[np.int64],
) -> list[TensorEntry]:
    """The tensors of these names, on whose dtype and shape all ranks agree."""
    entry = _Entries(layouts)
    first = np.zeros(len(names), np.int64)
    first[tensor[shared[::-1]]] = shared[::-1]
    tensors = [entry(name, piece) for name, piece in zip(names, first.tolist(), strict=True)]
    like = np.arange(len(tensor))
    like[shared] = first[tensor[shared]]
    odd = np.flatnonzero((entry.dtype != entry.dtype[like]) | (entry.ranks != entry.ranks[like]))
    if not len(odd):
        apart = np.repeat(entry.start[like] - entry.start[:-1], entry.ranks)
        across = np.arange(len(entry.shape)) + apart
        wrong = np.flatnonzero(entry.shape != entry.shape[across])
        odd = np.searchsorted(entry.start, wrong, "right") - 1
    if len(odd):
        said = tensors[tensor[odd[0]]]
        other = entry(said.name, int(odd[0]))
        raise CheckpointError(f"ranks disagree on {said.name}: {said.text} and {other.text}")
    return tensors
