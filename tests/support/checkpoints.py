"""Real checkpoints of a few small files, for tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hpctrain.checkpoint import commit, find
from hpctrain.checkpoint.digest import file_digest
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hpctrain.rundir.fence import Attempt, take_attempt
from hpctrain.rundir.layout import RunDir

if TYPE_CHECKING:
    from pathlib import Path

SHARDS = {"__0_0.distcp": 4096, "__1_0.distcp": 3000, ".metadata": 257}
"""Names and bytes, as two ranks of DCP leave them."""


def new_run(tmp_path: Path, name: str = "gpt-a") -> RunDir:
    """The directory of a run that has not started."""
    run = RunDir(tmp_path / "runs" / name)
    run.root.mkdir(parents=True)
    return run


def next_attempt(run: RunDir) -> Attempt:
    """The next attempt; every older one is fenced from here on."""
    return take_attempt(run, job_id="4711", restarts=0)


def write_shards(staged: Path, seed: int) -> list[FileEntry]:
    """Shards of random bytes, each with its entry."""
    content = random.Random(seed)
    for name, size in SHARDS.items():
        (staged / name).write_bytes(content.randbytes(size))
    return entries(staged)


def entries(directory: Path) -> list[FileEntry]:
    """What a manifest should say of the files that are there."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST_NAME)
    return [FileEntry(path.name, path.stat().st_size, file_digest(path)) for path in files]


def manifest(step: int, files: list[FileEntry]) -> Manifest:
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
        data={"samples_consumed": step * 32, "seed": 1234},
        rng={"python": [3, [1, 2, 3], None]},
        versions={"hpctrain": "0.1.0"},
        extra={"scheduler": {"best": 0.1, "history": [1.0, 0.5]}},
    )


def stage(run: RunDir, attempt: Attempt, step: int) -> tuple[Path, Manifest]:
    """A staged checkpoint that is ready to be published."""
    staged = commit.stage(run, step, attempt)
    return staged, manifest(step, write_shards(staged, seed=step))


def save(run: RunDir, attempt: Attempt, *steps: int) -> list[Path]:
    """Committed checkpoints of these steps."""
    paths = []
    for step in steps:
        staged, listed = stage(run, attempt, step)
        paths.append(commit.publish(run, staged, listed, attempt))
    return paths


def chosen(run: RunDir) -> int | None:
    """The step that would be loaded."""
    found = find.choose(run).found
    return None if found is None else found.step


def names_in(run: RunDir) -> list[str]:
    """Everything that lies in the directory of checkpoints."""
    return sorted(path.name for path in run.checkpoints.iterdir())


def flip_bit(path: Path, bit: int) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
