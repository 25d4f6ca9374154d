"""What a run keeps of its state, on disk and in the nodes' memory, and how it gets it back.

`TrainingState` is there from the restore on, where the program runs under hpctrain. Before, and
outside hpctrain, `NothingKept` stands in its place. tests/engines/test_resume.py,
test_save_behind.py and test_memory.py hold the promises.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.tensors.restore import Restored, Wanted, restore
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.world import on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run.event_types import CheckpointRestored, MemoryCopiesSet
from hpctrain.node.control import heartbeat
from hpctrain.node.control.client import TreeExchange
from hpctrain.node.memory.copies import Pace, RankCopies
from hpctrain.node.memory.replica_client import ReplicaClient, ReplicaServerLost
from hpctrain.node.memory.restore import NodesCopies
from hpctrain.train.runtime.saves import Saves, sweep_old

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.train.runtime.agreement import StopRequest
    from hpctrain.train.runtime.program import Program
    from hpctrain.train.runtime.stops import JobClock, Stops
    from hpctrain.train.runtime.trackers import RankRecord

    Snapshot = Callable[[], tuple[State, Manifest]]

log = logging.getLogger("hpctrain.runtime")


class NothingKept:
    """The part that saves nothing."""

    def wishes_save(self) -> bool:
        """Rank 0: whether a save is due by the clock."""
        return False

    def wishes_copy(self, step: int) -> bool:  # noqa: ARG002 - nothing is kept
        """Rank 0: whether a copy in memory should be made soon."""
        return False

    def follow(self, agreed: StopRequest, step: int) -> None:
        """Save or copy what the ranks agreed on, and what is due by the step's number."""

    def save(self, step: int) -> None:
        """Commit this step while training waits."""

    def save_at_stop(self, step: int, left_s: float | None) -> None:
        """Save before a stop in the time that is left, and end the saving processes."""

    def save_at_end(self, step: int) -> None:
        """Save the last step, patiently, and end the saving processes."""

    def warm_up(self, step: int) -> None:
        """Take the memory for copies, after the first step."""

    def settle(self) -> None:
        """Let a save in flight end. Not collective."""


class TrainingState(NothingKept):
    """One rank's side of saves, copies in memory, and the restore. Collective but for `settle`.

    What has no description is as in `NothingKept`.
    """

    def __init__(
        self,
        place: SavePlace,
        settings: Settings,
        program: Program,
        *,
        world: World,
        job_clock: JobClock,
        stops: Stops,
        record: RankRecord,
        run_id: str,
        extra: Callable[[int], dict[str, Any]],
        flush: Callable[[], None],
        saving: AbstractContextManager[None],
    ) -> None:
        """Start the processes that save.

        `run_id` is for the manifests, "" where the run has no spec; `extra` returns what else a
        manifest of a step says. `flush` is called before each save, so that a checkpoint is never
        ahead of the ledger or the curves. `saving` measures the time that training waits for saves.
        """
        self._place, self._program, self._world = place, program, world
        self._stops, self._record, self._run_id = stops, record, run_id
        self._extra, self._flush, self._saving = extra, flush, saving
        self._saves = Saves(place, world, job_clock, settings.evaluate, stops.near_stop_left_s)
        folder, alive = os.environ.get(HPCTRAIN_CONTROL), settings.alive
        self._copies: MemoryCopies | None = None  # or there; the same on every rank
        if alive.memory != "no" and folder and isinstance(world.control, TreeExchange):
            line = None
            try:
                line = ReplicaClient(Path(folder), world.rank, place.attempt.number)
            except ReplicaServerLost as error:
                log.warning("no copies in memory: %s", error)
            steps = alive.memory_steps
            self._copies = MemoryCopies(world, line, steps, job_clock, record.event)

    def restore(self) -> Restored:
        """Load the newest complete checkpoint, or the copies in memory where these are newer.

        Raises:
            CheckpointError: what there is cannot be loaded into this program.
        """
        started, place = clock.monotonic(), self._place
        saver = self._saves.saver
        restored = restore(
            place,
            self._world,
            self._wanted,
            arena=saver.arena if saver is not None else None,
            copies=self._copies.held if self._copies is not None else None,
        )
        if self._copies is not None:
            self._copies.begin(restored)
        on_rank_0(self._world, lambda: sweep_old(place))
        if restored.manifest is None and self._program.awaits_weights:
            raise CheckpointError(f"{place.run.name} had checkpoints, and has none now")
        if restored.manifest is not None:
            self._program.take_over(restored.manifest)
        step = restored.manifest.step if restored.manifest else 0
        fact = CheckpointRestored(
            step=step,
            checkpoint=restored.path.name if restored.path else None,
            from_world_size=restored.manifest.world_size if restored.manifest else None,
            world_size=self._world.world_size,
            seconds=round(clock.monotonic() - started, 3),
            bytes_read=restored.bytes_read,
            skipped=tuple(restored.skipped),
            read_from=restored.kept_by,
        )
        self._record.event(fact)
        self._record.start_trackers(step)
        self._saves.start(step if restored.is_saved else 0)
        return restored

    def _wanted(self, manifest: Manifest) -> Wanted:
        wanted = self._program.wanted(manifest)
        if self._saves.saver is not None:
            # also what weights are read into before all agree
            self._saves.saver.prepare(wanted.state)
        return wanted

    def snapshot(self, step: int) -> tuple[State, Manifest]:
        """Return the state after `step` updates, and its manifest."""
        state, extra, data = self._program.snapshot()
        manifest = Manifest(
            run_id=self._run_id,
            name=self._place.run.name,
            step=step,
            attempt=self._place.attempt.number,
            attempt_token=self._place.attempt.token,
            created=clock.now(),
            world_size=self._world.world_size,
            mesh=self._program.mesh,
            engine=self._program.kind,
            data=data,
            rng={"ranks": self._world.world_size},
            versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
            extra=extra | self._extra(step),
            metrics=dict(self._record.metrics),
        )
        return state, manifest

    def wishes_save(self) -> bool:
        """See `NothingKept`. Also reports a save that has ended."""
        return self._world.rank == 0 and self._saves.wishes()

    def wishes_copy(self, step: int) -> bool:
        """See `NothingKept`. Also reports how copies do."""
        return self._copies is not None and self._copies.wishes(step, self._stops.steps_ahead)

    def follow(self, agreed: StopRequest, step: int) -> None:  # noqa: D102
        if agreed.save or self._saves.is_due(step):
            self._flush()
            with self._saving:
                self._saves.periodic(step, partial(self.snapshot, step))
        if self._copies is not None and agreed.memory:
            with self._saving:
                self._copies.copy(step, partial(self.snapshot, step))

    def save(self, step: int) -> None:
        """See `NothingKept`.

        Raises:
            CheckpointError: it was not committed; nothing is lost, the older ones stand.
        """
        self._flush()
        with self._saving:
            self._saves.now(step, partial(self.snapshot, step))

    def save_at_stop(self, step: int, left_s: float | None) -> None:
        """See `NothingKept`; rank 0's `left_s` counts."""
        self._flush()
        heartbeat.here().enter(heartbeat.SAVE)
        self._saves.final(step, partial(self.snapshot, step), left_s)
        self._saves.close()

    def save_at_end(self, step: int) -> None:  # noqa: D102
        self._flush()
        with self._saving:
            self._saves.patiently(step, partial(self.snapshot, step))
        self._saves.close()

    def warm_up(self, step: int) -> None:  # noqa: D102
        snapshot = partial(self.snapshot, step)
        self._saves.warm_up(snapshot)
        if self._copies is not None:
            self._copies.warm_up(snapshot)

    def settle(self) -> None:  # noqa: D102
        self._saves.settle()


# ---- copies in memory

FEW = 2
"""Copies left out before that is logged: at a start some ranks have no memory yet."""


class MemoryCopies:
    """One rank's side of the copies; `held` is what there is to resume from."""

    def __init__(
        self,
        world: World,
        line: ReplicaClient | None,
        steps: int,
        job_clock: JobClock,
        record: Callable[[LedgerFact], None],
    ) -> None:
        """Prepare; nothing is copied yet.

        `line` goes to this node's replica server, None if it is lost. `steps` is
        `alive.memory_steps`. `job_clock` knows what a step takes. `record` writes to the ledger, on
        rank 0.
        """
        self.held = NodesCopies(world, line)
        self._world, self._line = world, line
        self._copies = RankCopies(world, line) if line is not None else None
        self._pace, self._setting = Pace(steps), steps
        self._clock = job_clock
        self._record_fact = record
        self._newest = 0
        self._wished = 0
        """The step at which a copy was wished last."""
        self._is_awaited = False
        """A copy was wished, and none was made since."""
        self._pending: int | None = None
        """A step whose copies are not settled."""
        self._began_ns = 0
        self._stall_s = 0.0
        self._left_out = self._reported_left_out = 0
        self._is_late = False
        """The next copy is due, and left out, since the one before is still on its way."""
        self._is_off_reported = False

    def begin(self, restored: Restored) -> None:
        """Training resumes from here: what else is held is of no use. Not collective."""
        self._newest = restored.step
        mark = self.held.mark if restored.kept_by else None
        try:
            if self._line is not None:
                self._line.chosen(mark)
        except ReplicaServerLost as error:
            log.warning("no copies in memory: %s", error)

    def warm_up(self, snapshot: Snapshot) -> None:
        """After the first step, when there is an optimizer's state: take memory for copies."""
        state, manifest = snapshot()  # collective where the engine shards
        if self._copies is not None:
            self._copies.take_room(state, manifest)

    def wishes(self, step: int, steps_ahead: int) -> bool:
        """Return, on rank 0, whether a copy should be made soon; record in the ledger how they do.

        What is wished now is done at most `steps_ahead` steps later.
        """
        line = self._line
        if line is None or self._copies is None or self._world.rank != 0:
            return False
        if line.is_off:
            self._record_off(line)
            return False
        if not self._copies.is_ready:
            return False
        if not self._is_settled(line):
            is_due = self._pace.covered_s > 0 and step >= self._newest + self._pace.steps
            if is_due and not self._is_late:
                self._is_late = True
                self._left_out += 1
            return False
        if not self._is_time(step, steps_ahead):
            return False
        self._wished, self._is_awaited = step, True
        return True

    def _is_time(self, step: int, steps_ahead: int) -> bool:
        """Return whether to wish for the next copy at this step.

        A number that was set limits the loss; a chosen one is what copies cost. All copies come
        equally late after their wishes, so their distances are equal.
        """
        if self._setting and self._pace.is_quick(self._clock.step_s):
            return step >= self._wished + self._pace.steps
        early = min(steps_ahead, self._pace.steps) if self._setting else 0
        return not self._is_awaited and step + early >= self._newest + self._pace.steps

    def copy(self, step: int, snapshot: Snapshot) -> None:
        """Copy the state of this step. Every rank calls it."""
        self._is_awaited = False
        if step in {0, self._newest}:
            return
        self._began_ns = clock.monotonic_ns()
        state, manifest = snapshot()
        if self._copies is not None:
            self._copies.copy(state, manifest)
        self._newest = self._pending = step
        self._is_late = False
        self._stall_s = (clock.monotonic_ns() - self._began_ns) / 1e9

    def _is_settled(self, line: ReplicaClient) -> bool:
        """Whether all nodes have spoken of the last copy; learns from it once they have."""
        if self._pending is None:
            return True
        if line.settled < self._pending:
            return False
        is_news = False
        if line.covered == self._pending:
            covered_s = (line.covered_ns - self._began_ns) / 1e9
            is_news = self._pace.learn(self._stall_s, covered_s, self._clock.step_s)
        else:
            self._pace.miss()
            self._left_out += 1
        if is_news or self._left_out > max(FEW, 2 * self._reported_left_out):
            self._record_pace(line)
        self._pending = None
        return True

    def _record_pace(self, line: ReplicaClient) -> None:
        pace = self._pace
        try:
            nbytes = line.held().nbytes
        except ReplicaServerLost:
            return
        self._reported_left_out = self._left_out
        fact = MemoryCopiesSet(
            steps=self._setting or pace.steps,
            bytes=nbytes,
            stall_s=round(pace.stall_s, 4) if pace.covered_s else None,
            covered_s=round(pace.covered_s, 4) if pace.covered_s else None,
            left_out=self._left_out or None,
            why="alive.memory_steps" if self._setting else "chosen by what a copy costs",
        )
        self._record_fact(fact)

    def _record_off(self, line: ReplicaClient) -> None:
        if self._is_off_reported:
            return
        self._is_off_reported = True
        try:
            why = line.why_off()
        except ReplicaServerLost as error:
            why = str(error)
        self._record_fact(MemoryCopiesSet(steps=0, why=why))
        log.warning("no copies in memory, checkpoints on disk alone: %s", why)
