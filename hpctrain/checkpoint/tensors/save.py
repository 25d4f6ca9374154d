"""One checkpoint from all ranks' tensors: all ranks succeed, or none does.

`save` does it while training waits. `Saver` does it behind training, which waits for a copy into
host memory alone:

    training:   copy | step | step | step | ...
    thread:          | wait for the copies, stage, wait for the writer, gather, commit, prune |
    process:                                     | digest, write, flush |

At most one save is in flight; the arena belongs to it until it is over. How it ended is the same on
every rank, and is noted where all ranks meet anyway: before the next save, and at a stop.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import xxhash

from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.layout import NO_KEY, RankPart, part_of, placed
from hpctrain.checkpoint.format.manifest import step_name
from hpctrain.checkpoint.store import commit
from hpctrain.checkpoint.tensors.arena import Arena, aligned
from hpctrain.checkpoint.tensors.boxes import bytes_of, held, parts_to_write
from hpctrain.checkpoint.tensors.device_copy import PageLocked, copy_to_host
from hpctrain.checkpoint.tensors.writer import ShardWriter
from hpctrain.checkpoint.tensors.writer_process import WriteRequest
from hpctrain.core.base import clock
from hpctrain.core.testing import points
from hpctrain.core.world import apart, gather_on_0, on_rank_0, one_line
from hpctrain.errors import CheckpointError, ControlLost, HpctrainError, NotWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

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
        path: Its directory's name.
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
    # What lies on a device is copied part by part.
    sources = shard.OneAtATime(lambda index: bytes_of(parts[index].view.cpu()))

    def write(path: Path) -> ShardReport:
        return shard.write(
            path,
            pieces,
            sources,
            block_bytes=manifest.block_bytes,
            threads=place.settings.write_threads,
            step=manifest.step,
        )

    return commit_together(place, world, manifest, pieces=pieces, write=write, started=started)


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


GRACE_S = 120.0
"""Beyond `checkpoint.timeout_s`, by which every rank's writer has answered or is given up."""


@dataclass(frozen=True)
class Outcome:
    """How a save behind training ended; the same on every rank."""

    step: int
    saved: Saved | None
    error: HpctrainError | None = None


class _Flight:
    """One save on its way; its thread fills in the outcome."""

    def __init__(self, step: int, began: float) -> None:
        self.step = step
        self.began = began
        self.stall_s = 0.0
        self.is_given_up = False
        self.landed = threading.Event()
        self.outcome: Outcome | None = None


class Saver:
    """Saves of one rank behind training.

    The constructor, `begin` and `land` are collective: every rank calls them, in the same order.
    """

    def __init__(
        self, place: SavePlace, world: World, *, after: Callable[[Saved], None] | None = None
    ) -> None:
        """Make a group for the saves' own exchanges. Collective.

        The writer process is started with `prepare_behind`, or the first save. It takes 0.1 s of
        CPU for each rank, for which a restart would wait. On rank 0 the save's thread calls `after`
        once a save is committed, to prune.
        """
        self._place = place
        self._world = apart(world, place.settings.timeout_s + GRACE_S)
        self._after = after
        self._arena = Arena()
        self._locked = PageLocked()
        self._writer = ShardWriter()
        self._flight: _Flight | None = None
        self._preparing: threading.Thread | None = None

    @property
    def arena(self) -> Arena | None:
        """Host memory that is free for other use; None while a save is in flight."""
        return self._arena if self._flight is None else None

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun and its end has not been taken note of, or is not there yet."""
        return self._flight is not None and not self._flight.landed.is_set()

    @property
    def flying_s(self) -> float:
        """How long the save in flight has taken so far; 0 without one."""
        return clock.monotonic() - self._flight.began if self.in_flight and self._flight else 0.0

    def prepare(self, state: State) -> str:
        """Take the host memory for copies of this state; why it cannot be had, or "".

        Not collective.
        """
        if self._preparing is not None:
            self._preparing.join()
        return self._take(_layout(parts_to_write(held(state, self._world)))[1])

    def prepare_behind(self, state: State) -> None:
        """The same, without waiting for it: the pages are touched behind training.

        And start the writer process. One that cannot be started costs saves, which say why. While a
        save is in flight this does nothing: it has the process, and reads the memory.
        """
        if self._flight is not None:
            return
        with contextlib.suppress(CheckpointError):
            self._writer.ready()
        size = _layout(parts_to_write(held(state, self._world)))[1]
        self._preparing = threading.Thread(
            target=self._take, args=(size,), name="hpctrain-arena", daemon=True
        )
        self._preparing.start()

    def _take(self, size: int) -> str:
        try:
            self._reserve(size)
        except (CheckpointError, ValueError) as error:  # the latter where it was closed before
            return str(error)
        return ""

    def _reserve(self, size: int) -> None:
        if size > self._arena.size:
            self._locked.unlock()  # it is mapped anew
            self._arena.ensure(size)
        self._locked.lock(self._arena.view(0, self._arena.size), self._world.device)

    def begin(self, state: State, manifest: Manifest, *, started: float | None = None) -> float:
        """Copy the state and save it behind training; returns how long training waited.

        Collective. The save before must have been landed. What goes wrong on one rank alone, such
        as too little memory for the copy, fails the save on all of them: see `land`.

        Args:
            state: This rank's tensors; they may change when this returns.
            manifest: Everything but files and tensors, which are filled in later.
            started: `time.monotonic()` when training began to wait, if that was earlier.

        Raises:
            RuntimeError: the save before has not been landed.
        """
        if self._flight is not None:
            raise RuntimeError(f"step {self._flight.step} has not been landed")
        flight = _Flight(manifest.step, clock.monotonic() if started is None else started)
        parts = parts_to_write(held(state, self._world))
        if self._preparing is not None:
            self._preparing.join()
        try:
            self._writer.ready()
            offsets, copied = self._copy(parts, manifest.step)
            write = self._writing(flight, parts, offsets, copied, manifest)
        except (CheckpointError, OSError, RuntimeError) as error:  # torch finds no memory, too
            write = _failing(error)
        flight.stall_s = clock.monotonic() - flight.began
        pieces = [part.piece for part in parts]
        threading.Thread(
            target=self._behind,
            args=(flight, manifest, pieces, write),
            name="hpctrain-save",
            daemon=True,
        ).start()
        self._flight = flight
        return flight.stall_s

    def _writing(
        self,
        flight: _Flight,
        parts: Sequence[Part],
        offsets: Sequence[int],
        copied: torch.Event | None,
        manifest: Manifest,
    ) -> Callable[[Path], ShardReport]:
        """What has the writer process write the arena's copy of these parts."""

        def write(path: Path) -> ShardReport:
            if copied is not None:  # in the save's thread: then the stall is known
                copied.synchronize()
                flight.stall_s = clock.monotonic() - flight.began
            if flight.is_given_up:
                raise CheckpointError("the shard was not written: it was abandoned")
            request = WriteRequest(
                path=path,
                pieces=[part.piece for part in parts],
                offsets=offsets,
                step=manifest.step,
                rank=self._world.rank,
                block_bytes=manifest.block_bytes,
                threads=self._place.settings.write_threads,
            )
            self._writer.begin(request, self._arena)
            return self._writer.wait(self._place.settings.timeout_s)

        return write

    def _behind(
        self,
        flight: _Flight,
        manifest: Manifest,
        pieces: Sequence[ShardPiece],
        write: Callable[[Path], ShardReport],
    ) -> None:
        """The thread: everything after the copy."""
        step = flight.step
        try:
            saved = commit_together(
                self._place, self._world, manifest, pieces=pieces, write=write, started=flight.began
            )
            flight.outcome = Outcome(step, replace(saved, stall_s=flight.stall_s))
        except ControlLost as error:  # training will hear of it too
            text = f"step {step} was not committed: {error}"
            flight.outcome = Outcome(step, None, CheckpointError(text))
        except HpctrainError as error:
            flight.outcome = Outcome(step, None, error)
        except Exception as error:  # noqa: BLE001 - a lost peer; training will hear of it too
            text = f"step {step} was not committed: {one_line(error)}"
            flight.outcome = Outcome(step, None, CheckpointError(text))
        done = flight.outcome.saved
        flight.landed.set()
        if done is not None and self._after is not None and self._world.rank == 0:
            self._after(done)

    def _copy(self, parts: list[Part], step: int) -> tuple[tuple[int, ...], torch.Event | None]:
        """Where each part goes in the arena, and what to wait for before it is there."""
        offsets, size = _layout(parts)
        self._reserve(size)
        points.reach("arena.copy", step=step, rank=self._world.rank)
        if not size:
            return offsets, None
        whole = torch.frombuffer(self._arena.view(0, size), dtype=torch.uint8)
        lengths = [part.piece.nbytes for part in parts]
        # All in one call: one for each part takes milliseconds.
        cuts = [n for length in lengths for n in (length, aligned(length) - length)]
        pieces = torch.split(whole, cuts)[::2]
        filled = [
            (target, part.view.reshape(-1))
            for part, target in zip(parts, pieces, strict=True)
            if part.piece.nbytes
        ]
        return offsets, copy_to_host([row[0] for row in filled], [row[1] for row in filled])

    def peek(self) -> Outcome | None:
        """How the save in flight ended, if it has; it stays to be landed. Not collective."""
        return self._flight.outcome if self._flight and self._flight.landed.is_set() else None

    def settle(self, timeout_s: float | None = None) -> bool:
        """Let the save in flight end; returns whether it has, in this time. Not collective."""
        if self._flight is None:
            return True
        return self._flight.landed.wait(
            self._place.settings.timeout_s if timeout_s is None else timeout_s
        )

    def land(self) -> Outcome | None:
        """Wait for the save in flight and say how it ended; None if there was none. Collective."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        flight.landed.wait()
        if flight.outcome is None:
            raise CheckpointError(f"step {flight.step}: its save ended without an outcome")
        return flight.outcome

    def abandon(self) -> Outcome | None:
        """Give the save in flight up at once; what it staged is swept later. Collective."""
        if self.in_flight and self._flight is not None:
            self._flight.is_given_up = True
            self._writer.abandon()
        return self.land()

    def close(self) -> None:
        """End the writer process; a save in flight is lost. Not collective."""
        self._writer.close()
        self._locked.unlock()
        self._arena.close()


def _failing(error: Exception) -> Callable[[Path], ShardReport]:
    """A write that fails: the other ranks must hear of what went wrong before it."""

    def write(_: Path) -> ShardReport:
        raise error

    return write


def _layout(parts: list[Part]) -> tuple[tuple[int, ...], int]:
    """Where each part lies in the arena, and the arena's size."""
    offsets, position = [], 0
    for part in parts:
        offsets.append(position)
        position += aligned(part.piece.nbytes)
    return tuple(offsets), position
