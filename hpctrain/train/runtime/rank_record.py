"""What a rank leaves of its run beside checkpoints: events, scalars, and how the program ended.

Rank 0 of a run writes. Any other rank, and a program outside hpctrain, has a record that writes
nothing. tests/unit/runtime/test_rank_record.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.ledger.run import events as ledger
from hpctrain.train.runtime.attempt import write_outcome
from hpctrain.train.runtime.trackers import NoTrackers, Trackers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.core.base.records import StopCause
    from hpctrain.core.settings.spec import Spec
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir


class RankRecord:
    """The events, scalars and outcome of one rank.

    Attributes:
        metrics: The newest value of each scalar that the program has logged.
    """

    def __init__(
        self, world: World, run: RunDir | None, attempt: Attempt | None, spec: Spec | None
    ) -> None:
        """Begin without trackers.

        Args:
            world: This rank's place.
            run: None outside hpctrain.
            attempt: None outside hpctrain.
            spec: None for a program that runs without one.
        """
        self.metrics: dict[str, float] = {}
        is_writer = world.rank == 0 and run is not None and attempt is not None
        self._place = (run, attempt) if is_writer and run and attempt else None
        self._spec = spec
        self._world_size = world.world_size
        self._trackers: Trackers | NoTrackers = NoTrackers()

    def start_trackers(self, step: int) -> None:
        """Start TensorBoard and what `track.loggers` names; `step` updates are applied."""
        if self._place is None:
            return
        run, attempt = self._place
        self._trackers = Trackers(
            run,
            self._spec,
            attempt=attempt.number,
            resumed_step=step,
            world_size=self._world_size,
        )

    def event(self, fact: LedgerFact) -> None:
        """Append to the ledger. A full disk costs the fact, never the training."""
        if self._place is not None:
            run, attempt = self._place
            ledger.record(run, fact, attempt=attempt.number)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take scalars of a step; never waits."""
        self.metrics.update(values)
        self._trackers.log(step, values)

    def outcome(self, outcome: str, step: int | None, cause: StopCause | None) -> None:
        """Leave word for the agent how the program ended, see `attempt.write_outcome`."""
        if self._place is not None:
            write_outcome(*self._place, outcome, step=step, cause=cause)

    def flush(self) -> None:
        """Hand the scalars over, so that a kill after the next save leaves no hole before it."""
        self._trackers.flush()

    def close(self, left_s: float | None = None) -> None:
        """End the trackers.

        Args:
            left_s: Until the processes are killed; None where nobody says.
        """
        self._trackers.close(left_s)
