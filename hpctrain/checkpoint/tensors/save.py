"""One checkpoint from all ranks' tensors: write, gather, commit. All ranks succeed, or none does.

`save` does it while training waits; `saver.py` does the same behind training. Collective: every
rank calls it. The promises are held by tests/engines/test_save_and_restore.py and
test_checkpoint_faults.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import NO_KEY, RankPart, part_of, placed
from hpctrain.checkpoint.format.manifest import step_name
from hpctrain.checkpoint.store import commit
from hpctrain.checkpoint.tensors.boxes import bytes_of, held, parts_to_write
from hpctrain.core.base import clock
from hpctrain.core.testing import points
from hpctrain.core.world import gather_on_0, on_rank_0, one_line
from hpctrain.errors import CheckpointError, HpctrainError, NotWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece, ShardReport
    from hpctrain.checkpoint.tensors.boxes import Part, State
    from hpctrain.core.settings.schema import CheckpointSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        step: Optimizer updates in it.
        path: Its directory's name.
        bytes: Of all its files.
        seconds: From the copy or the first byte to the commit.
        stall_s: How long training waited for it.
        state_digest: Of all tensors but the random generators: equal only if the state is.
    """

    step: int
    path: str
    bytes: int
    seconds: float
    stall_s: float
    state_digest: str


@dataclass(frozen=True)
class SavePlace:
    """Where a save goes, and by which right: an older attempt's save is refused."""

    run: RunDir
    attempt: Attempt
    settings: CheckpointSettings


def save(place: SavePlace, world: World, state: State, manifest: Manifest) -> Saved:
    """Write and commit one checkpoint while training waits. Collective.

    Either it is committed on return, or an error is raised on every rank and nothing is left that
    could be loaded. Tensors in host memory are written from where they lie. `manifest` has
    everything but files and tensors.

    Raises:
        CheckpointError: some rank could not write; the message is the first one's. It is
            NotWritten where a file system refused, which it may not do the next time.
        Fenced: a newer attempt has taken the run over.
    """
    started = clock.monotonic()
    parts = parts_to_write(held(state, world))
    pieces = [part.piece for part in parts]
    options = write_options(place.settings, manifest)

    def write(path: Path) -> ShardReport:
        return shard.write(path, pieces, _Sources(parts), step=manifest.step, **options)

    return commit_together(place, world, manifest, pieces=pieces, write=write, started=started)


def write_options(settings: CheckpointSettings, manifest: Manifest) -> dict[str, int]:
    """How shards are written, by the site's settings and by the manifest."""
    return {
        "block_bytes": manifest.block_bytes,
        "threads": settings.write_threads,
    }


def commit_together(
    place: SavePlace,
    world: World,
    manifest: Manifest,
    *,
    pieces: Sequence[ShardPiece],
    write: Callable[[Path], ShardReport],
    started: float,
) -> Saved:
    """Stage, write on every rank, gather, publish. Collective on `world.control`.

    `write` writes this rank's `pieces` to a path. The save began at `started` (`time.monotonic()`).

    Raises:
        CheckpointError: see `save`.
        Fenced: see `save`.
    """
    where = placed(pieces, world.rank)
    needs = gather_on_0(world, (sum(piece.nbytes for piece in pieces), where.key))
    staged, senders = on_rank_0(world, lambda: _stage(place, manifest.step, needs))

    def report(path: Path) -> RankPart:
        return part_of(
            pieces,
            write(path) if pieces else None,
            where=where,
            with_layout=world.rank in senders,
            block_bytes=manifest.block_bytes,
        )

    answers = gather_on_0(world, _write(staged, world, manifest.step, report))
    size, digest = on_rank_0(world, lambda: _publish(place, staged, manifest, answers))
    seconds = clock.monotonic() - started
    return Saved(manifest.step, step_name(manifest.step), size, seconds, seconds, digest)


def _stage(
    place: SavePlace, step: int, needs: Sequence[tuple[int, bytes]]
) -> tuple[Path, frozenset[int]]:
    """Rank 0: where to write, and who tells its layout: of those that have the same, one does."""
    need, need_files = sum(size for size, _ in needs), sum(size > 0 for size, _ in needs) + 3
    first = {key: rank for rank, (_, key) in reversed(list(enumerate(needs))) if key != NO_KEY}
    try:
        place.run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = commit.describe(error, place.run.checkpoints)
        raise NotWritten(f"step {step} was not saved: {why}") from error
    problem = commit.forecast(place.run.checkpoints, need, need_files)
    if problem:
        raise NotWritten(f"step {step} was not saved: {problem}")
    return commit.stage(place.run, step, place.attempt), frozenset(first.values())


def _write(
    staged: Path,
    world: World,
    step: int,
    report: Callable[[Path], RankPart],
) -> tuple[RankPart, str, bool]:
    """Write this rank's part; return an error, and whether it is the file system's.

    It is not raised, so that all ranks abort together.
    """
    path = staged / shard.file_name(world.rank)
    try:
        part = report(path)
        points.reach("report.gather", path=path, step=step, rank=world.rank)
    except OSError as error:
        return RankPart(None), f"rank {world.rank}: {commit.describe(error, path)}", True
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it
        text = str(error) if isinstance(error, HpctrainError) else one_line(error)
        return RankPart(None), f"rank {world.rank}: {text}", False
    return part, "", False


def _publish(
    place: SavePlace,
    staged: Path,
    manifest: Manifest,
    answers: Sequence[tuple[RankPart, str, bool]],
) -> tuple[int, str]:
    """Rank 0: commit if every rank has written, else free what was staged."""
    try:
        problems = [(problem, of_disk) for _, problem, of_disk in answers if problem]
        if problems:
            error = NotWritten if all(of_disk for _, of_disk in problems) else CheckpointError
            raise error(f"step {manifest.step} was not committed: {problems[0][0]}")
        parts = [part for part, _, _ in answers]
        commit.write_table(staged, manifest, parts)
        commit.publish(place.run, staged, manifest, place.attempt)
    except HpctrainError:
        commit.discard(staged)
        raise
    return manifest.size, _state_digest(parts)


def _state_digest(parts: Sequence[RankPart]) -> str:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part.state.to_bytes(8))
    return hasher.hexdigest()


class _Sources:
    """The bytes of each part, made when asked for: what lies on a device is copied then."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._last: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> memoryview:
        view = self._parts[index].view
        if view.device.type == "cpu":
            return bytes_of(view)
        last = self._last  # once: several threads ask where a shard is written by several
        if last is None or last[0] != index:
            self._last = last = (index, view.cpu())
        return bytes_of(last[1])
