"""The places of a step, a save and a restore where a fault can be put in. Nothing unless armed.

Product code says `points.reach("shard.write", path=path, bytes=size)` just before it does what the
point's name says. `faults.py` knows what can happen there; docs/development/testing-faults.md
shows its use,
tests/unit/testing/test_faults.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


POINTS = {
    "step.begin": "a step is about to begin, with so many steps done",
    "memory.copy": "a rank's state is about to be copied into its node's memory",
    "memory.copied": "it is copied, and the replica server is about to be informed",
    "memory.digest": "the replica server is about to take the digests of a copy",
    "memory.proved": "it has taken them, and the copy is about to count",
    "memory.publish": "all nodes have reported a step, and are about to be informed",
    "memory.send": "a copy is about to be sent to the node's replica peer",
    "memory.received": "the replica peer has all its bytes, and is about to verify them",
    "memory.acknowledge": "they are verified, and the sender is about to be informed",
    "memory.open": "a copy is about to be read",
    "memory.fetch": "the replica server is about to bring a copy from another node",
    "stage.made": "the staged directory is there, and empty",
    "arena.copy": "a tensor's bytes are about to be copied into the arena",
    "writer.request": "the writer process has been asked for a shard, and is about to begin",
    "shard.open": "a shard is about to be created",
    "shard.write": "bytes are about to be written into a shard",
    "shard.flush": "a shard has all its bytes and is about to be flushed",
    "shard.done": "a shard is flushed and closed",
    "report.gather": "a rank is about to report to rank 0 what it wrote",
    "table.write": "the chunk table is about to be written",
    "manifest.write": "the manifest is about to be written",
    "manifest.flush": "the manifest has all its bytes and is about to be flushed",
    "publish.rename": "the staged directory is about to get its committed name",
    "publish.flush": "it has that name, which is about to be flushed",
    "prune.rename": "a checkpoint that may go is about to lose its name",
    "prune.delete": "it has lost its name, and its files are about to be deleted",
    "choose.list": "the folder of checkpoints is about to be listed",
    "read.manifest": "a manifest is about to be read",
    "read.table": "a chunk table is about to be read",
    "read.block": "bytes of a shard are about to be read",
    "read.done": "everything asked for has been read and checked",
}
"""Each point and what is so when it is reached."""


class Reached(NamedTuple):
    """A point that has been reached, with what is known there; see `reach`."""

    point: str
    path: str | Path | None
    fd: int | None
    step: int | None
    bytes: int | None
    rank: int | None
    attempt: int | None


handler: Callable[[Reached], None] | None = None
"""What `faults` has armed in this process."""


def reach(
    point: str,
    *,
    path: str | Path | None = None,
    fd: int | None = None,
    step: int | None = None,
    bytes: int | None = None,  # noqa: A002 - the call reads as it is meant
    rank: int | None = None,
    attempt: int | None = None,
) -> None:
    """Say that a point is reached; whatever fault is armed for it happens now.

    `path` is what it is about (`fd` where it is open), `step` the checkpoint's, `bytes` how many
    are about to be written or read. The rank and the attempt are by default the environment's.

    Raises:
        OSError: a `fail` is armed here.
        UsageError: what is armed here cannot be done here.
    """
    if handler is not None:
        handler(Reached(point, path, fd, step, bytes, rank, attempt))
