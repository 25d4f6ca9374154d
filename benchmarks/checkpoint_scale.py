"""What grows with the number of ranks: choosing among checkpoints, and the table of all chunks.

Made up on disk, by one process: 20 checkpoints of 1,024 shards, and a table of half a million
chunks. No bytes of tensors are written; the files have their sizes all the same (they are sparse).
"""

from __future__ import annotations

import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _measure import Line

    from hpctrain.checkpoint.format.layout import RankPart
    from hpctrain.ledger.run.layout import RunDir

CHECKPOINTS = 20
RANKS = 1024
TENSORS = 512
ROWS, COLUMNS = 8192, 4096
"""Of each tensor: 128 MiB, so that each rank's chunk of it is one of 128 KiB."""
REPEATS = 5


def main() -> None:
    """Both measurements."""
    asked = measure.options(__doc__ or "")
    with measure.scratch(asked, 200 << 20) as folder:
        lines = [*_choose(folder / "run"), *_table(folder / "table")]
        measure.show(asked, lines, ranks=RANKS, tensors=TENSORS)


# ---- which of many checkpoints can be loaded?


def _choose(root: Path) -> list[Line]:
    from hpctrain.checkpoint.store import find
    from hpctrain.ledger.run.layout import RunDir

    run = RunDir(root)
    _checkpoints(run)
    chosen = find.choose(run)
    assert chosen.checkpoint is not None
    assert chosen.checkpoint.step == 1
    assert len(chosen.skipped) == CHECKPOINTS - 1
    seconds = _best(lambda: find.choose(run))
    listed = _best(lambda: _stat_all(run.checkpoints))
    return [
        measure.Line(
            f"newest whole one of {CHECKPOINTS}, {CHECKPOINTS - 1} torn",
            f"{seconds * 1e3:.0f} ms",
            seconds,
            1.0,
            f"s ({seconds / listed:.1f} x stat)",
        )
    ]


def _checkpoints(run: RunDir) -> None:
    """The oldest is whole, all newer ones are torn: each look must go as far as it can."""
    from hpctrain.checkpoint.format import manifest, shard
    from hpctrain.checkpoint.format import manifest as manifests
    from hpctrain.checkpoint.format.manifest import FileEntry, Manifest, TensorEntry

    run.checkpoints.mkdir(parents=True)
    size = TENSORS * ROWS * COLUMNS * 4 // RANKS
    digest = "xxh3_64-blocks:" + "0" * 16
    files = [FileEntry(shard.file_name(rank), size, digest) for rank in range(RANKS)]
    files.append(FileEntry(manifests.TABLE_NAME, 1 << 20, "xxh3_64:" + "0" * 16))
    tensors = [TensorEntry(name, "F32", (ROWS, COLUMNS)) for name in _names()]
    for step in range(1, CHECKPOINTS + 1):
        path = run.checkpoints / manifest.step_name(step)
        path.mkdir()
        for entry in files:
            _sparse(path / entry.name, entry.size)
        about = Manifest(
            run_id="bench",
            name=run.name,
            step=step,
            world_size=RANKS,
            mesh={"dp": RANKS},
            engine="fsdp2",
            files=files,
            tensors=tensors,
        )
        manifests.dump(about, path / manifests.MANIFEST_NAME)
        if step > 1:
            _tear(path, step)


def _tear(path: Path, step: int) -> None:
    """In turn: a shard is missing, cut, empty; a manifest is damaged at its end, cut, missing."""
    from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME
    from hpctrain.checkpoint.format.shard import file_name

    last, about = path / file_name(RANKS - 1), path / MANIFEST_NAME
    size = about.stat().st_size
    kinds: list[Callable[[], object]] = [
        last.unlink,
        lambda: os.truncate(last, last.stat().st_size - 1),
        lambda: os.truncate(last, 0),
        (path / TABLE_NAME).unlink,
        lambda: about.write_bytes(
            about.read_bytes().replace(b'"world_size": 1', b'"world_size": 2')
        ),
        lambda: about.write_bytes(about.read_bytes().replace(b'"engine": ', b'"engine" :')),
        lambda: os.truncate(about, size - 2),
        lambda: os.truncate(about, size // 2),
        about.unlink,
    ]
    kinds[step % len(kinds)]()


def _sparse(path: Path, size: int) -> None:
    with path.open("xb") as file:
        file.truncate(size)


def _stat_all(folder: Path) -> int:
    return sum(
        file.stat().st_size for checkpoint in os.scandir(folder) for file in os.scandir(checkpoint)
    )


# ---- half a million chunks


def _table(folder: Path) -> list[Line]:
    from hpctrain.checkpoint.format import layout, table
    from hpctrain.checkpoint.format import manifest as manifests
    from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, TABLE_NAME, Manifest
    from hpctrain.checkpoint.format.reader import open_chunks

    folder.mkdir()
    sent = [pickle.dumps(_part(rank)) for rank in range(RANKS)]
    about = Manifest(
        run_id="bench", name="bench", step=1, world_size=RANKS, mesh={"dp": RANKS}, engine="fsdp2"
    )
    content = b""

    def gathered() -> None:
        nonlocal content
        parts = [pickle.loads(one) for one in sent]  # noqa: S301 - our own bytes
        files, about.tensors, whole = layout.assemble(parts, about.block_bytes)
        content = whole.dump()
        about.files = [*files, table.entry_of(content)]

    gather_s = _best(gathered)
    (folder / TABLE_NAME).write_bytes(content)
    manifests.dump(about, folder / MANIFEST_NAME)

    def read() -> None:
        known = manifests.load(folder / MANIFEST_NAME)
        assert open_chunks(folder, known)

    read_s = _best(read)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    chunks = f"{RANKS * TENSORS // 1024} k chunks"
    return [
        measure.Line(
            f"manifest, table of {chunks}: read", f"{read_s * 1e3:.0f} ms", read_s, 0.2, "s"
        ),
        measure.Line(f"manifest, table of {chunks}: size", f"{size:.1f} MB", size, 20, "MB"),
        measure.Line(
            f"manifest, table of {chunks}: gather", f"{gather_s:.2f} s", gather_s, 2.0, "s"
        ),
    ]


def _part(rank: int) -> RankPart:
    """What one rank has to say of its rows of every tensor."""
    import numpy as np

    from hpctrain.checkpoint.format import shard
    from hpctrain.checkpoint.format.layout import part_of
    from hpctrain.checkpoint.format.shard import ShardPiece, ShardReport

    rows = ROWS // RANKS
    shape = (ROWS, COLUMNS)
    pieces = [
        ShardPiece(name, "F32", shape, (rank * rows, 0), (rows, COLUMNS)) for name in _names()
    ]
    sizes = [piece.nbytes for piece in pieces]
    offsets = 80_000 + np.cumsum([0, *sizes], dtype=np.int64)
    blocks = sum(shard.blocks_of(size) for size in sizes)
    dice = np.random.default_rng(rank)
    digests = dice.integers(0, 2**64 - 1, blocks, dtype=np.uint64)
    name = shard.file_name(rank)
    report = ShardReport(
        name,
        int(offsets[-1]) + shard.proof_bytes(blocks),
        "xxh3_64-blocks:" + "0" * 16,
        80_000,
        offsets[:-1],
        digests,
    )
    return part_of(pieces, report)


def _names() -> list[str]:
    return [
        f"model.blocks.{number // 8}.attention.weight_{number % 8}" for number in range(TENSORS)
    ]


def _best(act: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
