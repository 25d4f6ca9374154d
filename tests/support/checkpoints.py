"""Real checkpoints of a few small files, for tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.index import ChunkIndex
from hpctrain.checkpoint.format.layout import assemble, part_of
from hpctrain.checkpoint.format.manifest import (
    MANIFEST_NAME,
    TABLE_NAME,
    FileEntry,
    Manifest,
    bytes_digest,
)
from hpctrain.checkpoint.format.reader import open_chunks
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.store import commit, find
from hpctrain.ledger.run.fence import Attempt, take_attempt
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.format.layout import RankPart

SHARD_0, SHARD_1 = shard.file_name(0), shard.file_name(1)
BLOCK_BYTES = 512
PIECES = [
    [
        ShardPiece("model.w", "F32", (96, 16), (0, 0), (56, 16)),
        ShardPiece("model.b", "BF16", (100,), (0,), (100,)),
        ShardPiece("optim.step", "I64", (), (), ()),
    ],
    [
        ShardPiece("model.w", "F32", (96, 16), (56, 0), (40, 16)),
        ShardPiece("model.none", "U8", (0, 3), (0, 0), (0, 3)),
    ],
]
"""What two ranks write: a tensor of several blocks in both files, small ones, and an empty one."""


def new_run(tmp_path: Path, name: str = "gpt-a") -> RunDir:
    """The directory of a run that has not started."""
    run = RunDir(tmp_path / "runs" / name)
    run.root.mkdir(parents=True)
    return run


def next_attempt(run: RunDir) -> Attempt:
    """The next attempt; every older one is fenced from here on."""
    return take_attempt(run, job_id="4711", restarts=0)


def write_pieces(
    staged: Path,
    ranks: Sequence[Sequence[ShardPiece]],
    contents: Mapping[str, bytes],
    *,
    block_bytes: int = BLOCK_BYTES,
) -> list[RankPart]:
    """A shard for each rank that has pieces.

    Args:
        staged: Where to.
        ranks: The pieces of each.
        contents: The bytes of each whole tensor.
        block_bytes: Bytes that get a digest of their own.
    """
    parts = []
    for rank, pieces in enumerate(ranks):
        if not pieces:
            continue
        sources = [memoryview(bytes_of(piece, contents[piece.name])) for piece in pieces]
        report = shard.write(
            staged / shard.file_name(rank), pieces, sources, block_bytes=block_bytes
        )
        parts.append(part_of(pieces, report))
    return parts


def bytes_of(piece: ShardPiece, content: bytes) -> bytes:
    """The bytes of a piece, element by element: slow, and plainly right."""
    item = shard.DTYPES[piece.dtype]
    return b"".join(content[at * item : (at + 1) * item] for at in elements_of(piece))


def elements_of(piece: ShardPiece) -> Iterable[int]:
    """The numbers of a piece's elements in its whole tensor, in their order."""
    if piece.flat:
        return range(piece.begin[0], piece.begin[0] + piece.extent[0])
    numbers = [0]
    for size, begin, extent in zip(piece.shape, piece.begin, piece.extent, strict=True):
        numbers = [n * size + at for n in numbers for at in range(begin, begin + extent)]
    return numbers


def contents(seed: int, ranks: Sequence[Sequence[ShardPiece]] = PIECES) -> dict[str, bytes]:
    """Random bytes for every tensor, the same for the same seed."""
    dice = random.Random(seed)
    whole: dict[str, bytes] = {}
    for piece in (piece for pieces in ranks for piece in pieces):
        if piece.name not in whole:
            everything = ShardPiece(
                piece.name, piece.dtype, piece.shape, (0,) * len(piece.shape), piece.shape
            )
            whole[piece.name] = dice.randbytes(everything.nbytes)
    return whole


def _sizes() -> dict[str, int]:
    sizes = {}
    for rank, pieces in enumerate(PIECES):
        sizes[shard.file_name(rank)] = unwritten(rank, pieces, BLOCK_BYTES).size
    parts = [
        part_of(pieces, unwritten(rank, pieces, BLOCK_BYTES)) for rank, pieces in enumerate(PIECES)
    ]
    sizes[TABLE_NAME] = len(assemble(parts, BLOCK_BYTES)[2].dump())
    return sizes


def unwritten(rank: int, pieces: Sequence[ShardPiece], block_bytes: int) -> shard.ShardReport:
    """What would be said of a file, with digests made up."""
    name = shard.file_name(rank)
    head = len(shard.header(pieces, name, block_bytes))
    offsets = head + np.cumsum([0, *(piece.nbytes for piece in pieces)], dtype=np.int64)
    blocks = sum(shard.blocks_of(piece.nbytes, block_bytes) for piece in pieces)
    digests = np.random.default_rng(rank).integers(0, 2**64, blocks, np.uint64)
    size = int(offsets[-1]) + shard.proof_bytes(blocks)
    return shard.ShardReport(name, size, "xxh3_64-blocks:0", head, offsets[:-1], digests)


SHARDS = _sizes()
"""Names and bytes of all files that the manifest names."""
PROOF_0, PROOF_1 = (shard.proof_bytes(blocks) for blocks in (9, 5))
"""How long the digests at the end of each shard are."""


def entries(directory: Path) -> list[FileEntry]:
    """What a manifest could say of the files that are there."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME)
    return [
        FileEntry(path.name, path.stat().st_size, bytes_digest(path.read_bytes())) for path in files
    ]


def manifest(step: int, files: list[FileEntry], *, block_bytes: int = BLOCK_BYTES) -> Manifest:
    """A manifest with something in every field."""
    return Manifest(
        run_id="r-1",
        name="gpt-a",
        step=step,
        created=1_700_000_000.5,
        world_size=2,
        mesh={"dp_shard": 2},
        engine="fsdp2",
        files=files,
        block_bytes=block_bytes,
        data={"samples_consumed": step * 32, "seed": 1234},
        rng={"python": [3, [1, 2, 3], None]},
        versions={"hpctrain": "0.1.0"},
        extra={"scheduler": {"best": 0.1, "history": [1.0, 0.5]}},
    )


def stage(run: RunDir, attempt: Attempt, step: int) -> tuple[Path, Manifest]:
    """A staged checkpoint that is ready to be published."""
    staged = commit.stage(run, step, attempt)
    listed = manifest(step, [])
    commit.write_table(staged, listed, write_pieces(staged, PIECES, contents(step)))
    return staged, listed


def save(run: RunDir, attempt: Attempt, *steps: int) -> list[Path]:
    """Committed checkpoints of these steps."""
    paths = []
    for step in steps:
        staged, listed = stage(run, attempt, step)
        paths.append(commit.publish(run, staged, listed, attempt))
    return paths


def bare(
    directory: Path,
    ranks: Sequence[Sequence[ShardPiece]],
    whole: Mapping[str, bytes],
    *,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Manifest, ChunkIndex]:
    """Shards, chunk index and manifest of a directory that belongs to no run."""
    listed = manifest(1000, [], block_bytes=block_bytes)
    parts = write_pieces(directory, ranks, whole, block_bytes=block_bytes)
    commit.write_table(directory, listed, parts)
    chunks = open_chunks(directory, listed)
    assert isinstance(chunks, ChunkIndex)
    return listed, chunks


def chosen(run: RunDir) -> int | None:
    """The step that would be loaded."""
    found = find.choose(run).checkpoint
    return None if found is None else found.step


def names_in(run: RunDir) -> list[str]:
    """Everything that lies in the directory of checkpoints."""
    return sorted(path.name for path in run.checkpoints.iterdir())


def flip_bit(path: Path, bit: int) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
