"""Going back behind bad steps: from where, and which samples no later start takes.

Every rank comes here alike, since a guard's word is the same on all of them; rank 0 looks and
writes. The round ends by an error, and ranks that start again restore a checkpoint from before.
tests/engines/test_rewinds.py holds the promises.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from hpctrain.checkpoint.store import find, verify
from hpctrain.core.world import on_rank_0
from hpctrain.errors import HpctrainError, RewindNeeded, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSetAside, TrainingRewound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.checkpoint.tensors.save import SavePlace
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.train.runtime.program import Program

log = logging.getLogger("hpctrain.runtime")

STEPS_BEFORE = 20
"""So far before a bad step the checkpoint lies, and so many steps' samples are left out."""
MOST, WITHIN = 3, 200
"""After so many times among so many steps the data is not to blame, and nothing is gone back."""


class Rewinds:
    """One rank's side."""

    def __init__(
        self,
        program: Program,
        *,
        tell: Callable[[LedgerFact], None],
        stop: Callable[[str], None],
    ) -> None:
        """Prepare; `tell` writes to the ledger on rank 0, and `stop` is as in `Guarding`."""
        self._program = program
        self._tell = tell
        self._stop = stop
        self._world: World | None = None
        self._place: SavePlace | None = None
        self._earlier: list[int] = []
        self._begins: deque[int | None] = deque(maxlen=STEPS_BEFORE)

    @property
    def has_begun(self) -> bool:
        """Training has begun, in the loop of `Run.steps`."""
        return self._world is not None

    def begin(self, world: World, place: SavePlace | None, *, wanted: bool) -> None:
        """Begin training: what earlier starts left out is left out here too. Collective.

        `place` is None outside of a run. With `wanted`, the settings say that a guard may go back.

        Raises:
            UsageError: the program's data cannot leave anything out.
        """
        self._world, self._place = world, place
        earlier = on_rank_0(world, lambda: [] if place is None else _told(place))
        self._earlier = [step for step, _ in earlier]
        holes = [hole for _, hole in earlier]
        if not holes and not (wanted and place is not None):
            return
        leave_out = getattr(self._program.data, "leave_out", None)
        if leave_out is None:
            what = type(self._program.data).__name__ if self._program.data is not None else "data"
            why = (
                "the run's ledger names" if holes else "guard.spike or guard.nonfinite = rewind has"
            )
            raise UsageError(
                f"{why} samples to be left out, which {what} cannot; use run.loader, or "
                "hpctrain.GlobalBatches with run.track(data=...), or set skip"
            )
        leave_out(holes)

    def step_begins(self, consumed: int | None) -> None:
        """The program is about to read a step's samples; so many were consumed before."""
        self._begins.append(consumed)

    def go_back(self, step: int, why: str, said: str) -> None:
        """End the round, if there is something to go back to; return otherwise. Collective.

        The update of the bad `step` is not applied yet, or matters no more. `why` is as
        `TrainingRewound.why`, `said` describes what was seen.

        Raises:
            RewindNeeded: on every rank.
        """
        world, place, limit = self._world, self._place, step - STEPS_BEFORE
        if world is None or place is None:
            return
        why_not = on_rank_0(world, lambda: self._why_not(place, step, limit))
        if why_not:
            log.warning("%s; %s, so training goes on", said, why_not)
            return
        self._stop("")
        first, last = self._begins[0], self._program.consumed()

        def act() -> None:
            set_aside_newer(place, limit, said, self._tell)
            self._tell(TrainingRewound(step=step, to=limit, first=first, last=last, why=why))

        on_rank_0(world, act)
        raise RewindNeeded(f"{said}; training goes back to step {limit} or before")

    def _why_not(self, place: SavePlace, step: int, limit: int) -> str:
        if sum(step - WITHIN < earlier <= step for earlier in self._earlier) >= MOST:
            return f"training has gone back {MOST} times within {WITHIN} steps"
        if not self._begins or self._begins[0] is None:
            return "nobody knows which samples these are"
        try:
            steps = find.steps(place.run)
            if any(find.glance(place.run, s).problem is None for s in steps if s <= limit):
                return ""
        except HpctrainError as error:
            return str(error)
        return f"there is no checkpoint of step {limit} or before"


def set_aside_newer(
    place: SavePlace, limit: int, why: str, tell: Callable[[LedgerFact], None]
) -> None:
    """Set aside the checkpoints with more updates; nothing is deleted. On rank 0.

    Raises:
        CheckpointError: one cannot be.
    """
    for step in find.steps(place.run):
        if step <= limit:
            continue
        path = find.step_path(place.run, step)
        checkpoint = find.FoundCheckpoint(step, path, None, None)
        verify.set_aside(place.run, checkpoint, why, place.attempt)
        tell(CheckpointSetAside(step=step, name=path.name, reason=why))


def _told(place: SavePlace) -> Sequence[tuple[int, tuple[int, int]]]:
    """The steps at which guards went back, and what is left out since."""
    events = ledger.read_marked(place.run, b'"rewound"', b'"attempt_started"')
    rewinds = RunHistory.of(events).rewinds
    return [(one.fact.step or 0, one.hole) for one in rewinds if one.hole is not None]
