"""What a run keeps of its state, on disk and in the nodes' memory, and how it gets it back.

`TrainingState` is there from the restore on, where the program runs under hpctrain. Before, and
outside hpctrain, `NothingKept` stands in its place. tests/engines/test_resume.py,
test_save_behind.py and test_memory.py hold the promises.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.tensors.restore import Restored, Wanted, restore
from hpctrain.core.base import clock
from hpctrain.core.base.records import Skipped
from hpctrain.core.world import on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.ledger.run.event_types import CheckpointRestored
from hpctrain.node.control import pulse
from hpctrain.train.runtime.memory import memory_copies
from hpctrain.train.runtime.saves import Saves, sweep_old

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.world import World
    from hpctrain.train.runtime.agreement import StopRequest
    from hpctrain.train.runtime.program import Program
    from hpctrain.train.runtime.rank_record import RankRecord
    from hpctrain.train.runtime.save_policy import JobClock
    from hpctrain.train.runtime.stops import Stops


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
    """One rank's side of saves, copies in memory, and the restore. Collective but for `settle`."""

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

        Args:
            place: Where checkpoints lie, and by which right this attempt writes there.
            settings: The run's.
            program: Whose state it is.
            world: The ranks.
            job_clock: Learns how long a save takes.
            stops: Know whether a stop is near.
            record: Takes the events.
            run_id: For the manifests; "" where the run has no spec.
            extra: What else a manifest of a step says.
            flush: Called before each save, so that a checkpoint is never ahead of the ledger or
                the curves.
            saving: Measures the time that training waits for saves.
        """
        self._place, self._program, self._world = place, program, world
        self._stops, self._record, self._run_id = stops, record, run_id
        self._extra, self._flush, self._saving = extra, flush, saving
        self._saves = Saves(place, world, job_clock, settings.evaluate, stops.near_stop_left_s)
        if settings.checkpoint.overlap_copy:
            program.call_before_update(self._before_update)
        self._copies = memory_copies(world, settings.alive, place.attempt.number, record.event)

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
            skipped=tuple(Skipped(**row) for row in restored.skipped),
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

    def follow(self, agreed: StopRequest, step: int) -> None:
        """See `NothingKept`."""
        snapshot = partial(self.snapshot, step)
        if agreed.save or self._saves.is_due(step):
            self._flush()
            with self._saving:
                self._saves.periodic(step, snapshot)
        if self._copies is not None and agreed.memory:
            with self._saving:
                self._copies.copy(step, snapshot)

    def save(self, step: int) -> None:
        """See `NothingKept`.

        Raises:
            CheckpointError: it was not committed; nothing is lost, the older ones stand.
        """
        self._flush()
        with self._saving:
            self._saves.now(step, partial(self.snapshot, step))

    def save_at_stop(self, step: int, left_s: float | None) -> None:
        """See `NothingKept`.

        Args:
            step: Updates applied.
            left_s: Until the processes are killed; None where nobody says. Rank 0's counts.
        """
        self._flush()
        pulse.here().enter(pulse.SAVE)
        self._saves.final(step, partial(self.snapshot, step), left_s)
        self._saves.close()

    def save_at_end(self, step: int) -> None:
        """See `NothingKept`."""
        self._flush()
        with self._saving:
            self._saves.patiently(step, partial(self.snapshot, step))
        self._saves.close()

    def warm_up(self, step: int) -> None:
        """See `NothingKept`."""
        snapshot = partial(self.snapshot, step)
        self._saves.warm_up(snapshot)
        if self._copies is not None:
            self._copies.warm_up(snapshot)

    def settle(self) -> None:
        """See `NothingKept`."""
        self._saves.settle()

    def _before_update(self) -> None:
        """What training waits here for a copy counts as what it waits for a save."""
        if self._saves.is_copying:
            with self._saving:
                self._saves.before_update()
