"""Real points of a checkpoint of 5.5 TB: all of it but the tensors' bytes, which are holes.

512 tensors are cut by rows among the ranks. What the ranks say is made up by the code that says it;
the table and the manifest are written, committed, chosen and read by the code that a run uses.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scale.tree import said_at_a_save

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.ledger.run.layout import RunDir

TENSORS = 512
BYTES = 5_500_000_000_000
KEPT = 20
REPEATS = 3


@dataclass(frozen=True)
class LargeCheckpoint:
    """What a checkpoint of so many ranks has shown, on this machine's disk."""

    ranks: int
    gather_bytes: int
    """That all ranks say to rank 0."""
    table_s: float
    """Rank 0 reads what they said, puts it together, and writes the table."""
    publish_s: float
    """Names are checked, the manifest is written, all is flushed and renamed."""
    table_bytes: int
    manifest_bytes: int
    read_s: float
    """A rank reads the manifest and the table."""
    read_table_s: float
    """Of that, the table."""
    choose_s: float
    """Rank 0, among 20 of which the newest is whole."""
    choose_torn_s: float
    """Where only the oldest is, and each other one lacks a file."""
    list_s: float
    """`hpctrain checkpoints` of them."""


def large_checkpoint(ranks: int, folder: str | None = None) -> LargeCheckpoint:
    """Commit one of so many ranks, read it, and choose among 20 like it."""
    from hpctrain.checkpoint.format import manifest as manifests
    from hpctrain.checkpoint.format.reader import open_chunks
    from hpctrain.checkpoint.store import find
    from hpctrain.ledger.run.layout import RunDir

    with tempfile.TemporaryDirectory(prefix="hpctrain-scale-", dir=folder) as name:
        run = RunDir(Path(name) / "runs" / "large")
        about, sent, table_s, publish_s = _committed(run, ranks)
        path = find.step_path(run, KEPT)
        table, manifest = path / manifests.TABLE_NAME, path / manifests.MANIFEST_NAME
        read_s = _best(lambda: open_chunks(path, manifests.load(manifest)))
        known = manifests.load(manifest)
        read_table_s = _best(lambda: open_chunks(path, known))
        for step in range(1, KEPT):
            _like(run, about, step)
        choose_s = _best(lambda: _chosen(run, KEPT))
        list_s = _best(lambda: _list(run))
        last = about.files[ranks - 1].name
        for step in range(2, KEPT + 1):
            (find.step_path(run, step) / last).unlink()
        choose_torn_s = _best(lambda: _chosen(run, 1))
        return LargeCheckpoint(
            ranks=ranks,
            gather_bytes=sent,
            table_s=table_s,
            publish_s=publish_s,
            table_bytes=table.stat().st_size,
            manifest_bytes=manifest.stat().st_size,
            read_s=read_s,
            read_table_s=read_table_s,
            choose_s=choose_s,
            choose_torn_s=choose_torn_s,
            list_s=list_s,
        )


def _committed(run: RunDir, ranks: int) -> tuple[Manifest, int, float, float]:
    """The manifest; bytes of what ranks said; seconds of the table and of publishing."""
    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.store import commit
    from hpctrain.ledger.run.fence import take_attempt

    run.checkpoints.mkdir(parents=True)
    run.events.touch()
    attempt = take_attempt(run, job_id="1", restarts=0)
    about = Manifest(
        run_id="scale",
        name=run.name,
        step=KEPT,
        world_size=ranks,
        mesh={"dp": ranks},
        engine="fsdp2",
    )
    said = [pickle.dumps((_part(rank, ranks), "", False)) for rank in range(ranks)]
    staged = commit.stage(run, KEPT, attempt)
    _sparse(staged, [_part(rank, ranks).file for rank in range(ranks)])
    began = time.perf_counter()
    commit.write_table(staged, about, [pickle.loads(one)[0] for one in said])  # noqa: S301 - ours
    written = time.perf_counter()
    commit.publish(run, staged, about, attempt)
    return about, sum(map(len, said)), written - began, time.perf_counter() - written


def _part(rank: int, ranks: int) -> Any:
    rows = BYTES // TENSORS // 4 // ranks // 4096 * ranks
    return said_at_a_save(rank, ranks=ranks, rows=rows, columns=4096, tensors=TENSORS)


def _like(run: RunDir, about: Manifest, step: int) -> None:
    """Another of the same files."""
    from dataclasses import replace

    from hpctrain.checkpoint.format import manifest as manifests
    from hpctrain.checkpoint.store import find

    path = find.step_path(run, step)
    path.mkdir()
    _sparse(path, about.files)
    manifests.dump(replace(about, step=step, self_digest=""), path / manifests.MANIFEST_NAME)


def _sparse(folder: Path, files: list[Any]) -> None:
    for entry in files:
        with (folder / entry.name).open("xb") as file:
            file.truncate(entry.size)


def _chosen(run: RunDir, step: int) -> None:
    from hpctrain.checkpoint.store import find

    chosen = find.choose(run).checkpoint
    assert chosen is not None
    assert chosen.step == step


def _list(run: RunDir) -> None:
    command = [sys.executable, "-m", "hpctrain", "checkpoints", "list", str(run.root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _best(act: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
