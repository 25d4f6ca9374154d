"""A run's copies in the nodes' memory: when, what the ledger hears, and what is gone on from.

Off where `alive.memory` says so, and where no agent's replica server is there. Rank 0 alone decides
when; all ranks agree on the step through `runtime.agreement`. tests/engines/test_memory.py holds
the promises.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.ledger.run.event_types import MemoryCopiesSet
from hpctrain.node.control.seat import TreeExchange
from hpctrain.node.memory.copies import RankCopies
from hpctrain.node.memory.pace import Pace
from hpctrain.node.memory.protocol import ReplicaServerLost
from hpctrain.node.memory.rank_line import ReplicaClient
from hpctrain.node.memory.restore import NodesCopies

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.checkpoint.tensors.restore import Restored
    from hpctrain.core.settings.schema import AliveSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.run.event_fields import LedgerFact

    Snapshot = Callable[[], tuple[State, Manifest]]

log = logging.getLogger("hpctrain.runtime")

FEW = 2
"""So many copies may be left out before that is told: at a start some ranks have no memory yet."""


def memory_copies(
    world: World, settings: AliveSettings, attempt: int, tell: Callable[[LedgerFact], None]
) -> MemoryCopies | None:
    """This rank's copies; None where there are none. The same on every rank."""
    folder = os.environ.get(HPCTRAIN_CONTROL)
    if settings.memory == "no" or not folder or not isinstance(world.control, TreeExchange):
        return None
    try:
        line = ReplicaClient(Path(folder), world.rank, attempt)
    except ReplicaServerLost as error:
        log.warning("no copies in memory: %s", error)
        line = None
    return MemoryCopies(world, line, settings.memory_steps, tell)


class MemoryCopies:
    """One rank's side of the copies; `held` is what there is to resume from."""

    def __init__(
        self,
        world: World,
        line: ReplicaClient | None,
        steps: int,
        tell: Callable[[LedgerFact], None],
    ) -> None:
        """Prepare; nothing is copied yet.

        `line` goes to this node's replica server, None if it is lost. `steps` is
        `alive.memory_steps`. `tell` writes to the ledger, on rank 0.
        """
        self.held = NodesCopies(world, line)
        self._world, self._line = world, line
        self._copies = RankCopies(world, line) if line is not None else None
        self._pace = Pace(steps)
        self._setting = steps
        self._tell = tell
        self._newest = 0
        self._wished = 0
        """The step at which a copy was wished last."""
        self._is_awaited = False
        """A copy was wished, and none was made since."""
        self._pending: int | None = None
        """A step whose copies are not settled."""
        self._began_ns = 0
        self._stall_s = 0.0
        self._left_out = self._told_left_out = 0
        self._is_late = False
        """The next copy is due, and left out, since the one before is still on its way."""
        self._is_told_off = False
        self._clock = _StepClock()

    def begin(self, restored: Restored) -> None:
        """Training goes on from here: what else is held is of no use. Not collective."""
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
        self._clock.at(step)
        if line.is_off:
            self._tell_off(line)
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
        self._clock.leave_out(self._stall_s)

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
        if is_news or self._left_out > max(FEW, 2 * self._told_left_out):
            self._tell_pace(line)
        self._pending = None
        return True

    def _tell_pace(self, line: ReplicaClient) -> None:
        pace = self._pace
        try:
            nbytes = line.held().nbytes
        except ReplicaServerLost:
            return
        self._told_left_out = self._left_out
        fact = MemoryCopiesSet(
            steps=self._setting or pace.steps,
            bytes=nbytes,
            stall_s=round(pace.stall_s, 4) if pace.covered_s else None,
            covered_s=round(pace.covered_s, 4) if pace.covered_s else None,
            left_out=self._left_out or None,
            why="alive.memory_steps" if self._setting else "chosen by what a copy costs",
        )
        self._tell(fact)

    def _tell_off(self, line: ReplicaClient) -> None:
        if self._is_told_off:
            return
        self._is_told_off = True
        try:
            why = line.why_off()
        except ReplicaServerLost as error:
            why = str(error)
        self._tell(MemoryCopiesSet(steps=0, why=why))
        log.warning("no copies in memory, checkpoints on disk alone: %s", why)


class _StepClock:
    """What a step takes, without what copies take."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._step = -1
        self._at = 0.0

    def at(self, step: int) -> None:
        """The loop has come to this step."""
        now = clock.monotonic()
        if self._step >= 0 and step > self._step:
            each = (now - self._at) / (step - self._step)
            self.step_s += 0.3 * (each - self.step_s) if self.step_s else each
        self._step, self._at = step, now

    def leave_out(self, seconds: float) -> None:
        """So much of the time since then is no step's."""
        self._at += seconds
