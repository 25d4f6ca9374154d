"""When a slow node changes places with a spare: once it has cost more than a new start would.

Nobody knows how long a node will stay slow. Whoever pays as long as the price of the change, and
then changes, pays at most twice what it would have been at best. The change comes right behind a
save, so that nothing but the steps beside that save is done again. Node 0's agent asks.
tests/unit/agent/test_swaps.py holds the promises.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.base import clock
from hpctrain.base.text import duration
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import AliveSettings

log = logging.getLogger("hpctrain.agent")

LOOK_S = 0.2
"""So often it is looked whether there is a new save, once a node is to be changed."""


class SlowNode(NamedTuple):
    """The slowest node of a round.

    Attributes:
        place: In the round.
        name: Its.
        lost_s: So long the others have waited for it in this round.
        restart_s: What a new start costs: from the ranks' start to the end of their first step.
        summary: Who is slow there, in one line.
    """

    place: int
    name: str
    lost_s: float
    restart_s: float
    summary: str


class Swaps:
    """Decides for one start of the job."""

    def __init__(
        self, newest_save: Callable[[], int | None], clock: Callable[[], float] = clock.monotonic
    ) -> None:
        """No node is to be changed yet.

        Args:
            newest_save: The step of the newest checkpoint.
            clock: Seconds on a clock that never jumps.
        """
        self._newest_save, self._clock = newest_save, clock
        self._waits = ""
        self._saved: int | None = None
        self._looked_s = 0.0
        self._told: set[str] = set()

    def due(self, slow: SlowNode | None, spares: Sequence[str]) -> str:
        """Why the node is to be left out now; "" while it is not. To be called all the time.

        Args:
            slow: The slowest one; None for none.
            spares: Nodes that wait, by name.
        """
        if slow is None or slow.lost_s <= slow.restart_s:
            self._waits = ""
            return ""
        if slow.place == 0 or not spares:
            self._tell(slow)
            return ""
        now_s = self._clock()
        if self._waits != slow.name:
            self._waits, self._saved, self._looked_s = slow.name, self._newest_save(), now_s
            log.warning("%s gives its place to a spare at the next save", slow.name)
            return ""
        if now_s < self._looked_s + LOOK_S:
            return ""
        self._looked_s = now_s
        newest = self._newest_save()
        if newest is None or newest == self._saved:
            return ""
        self._waits = ""
        return f"it gives its place to {spares[0]}: {_price(slow)}"

    def _tell(self, slow: SlowNode) -> None:
        """Once for each node."""
        if slow.name in self._told:
            return
        self._told.add(slow.name)
        why = "no spare waits" if slow.place else "its agent leads the others, so it stays"
        drain = f"scontrol update nodename={slow.name} state=drain reason='slow: hpctrain'"
        log.warning("%s; %s; for an administrator: %s", _price(slow), why, drain)


def swaps_of(run: RunDir, alive: AliveSettings) -> Swaps | None:
    """Those of a run; None where its settings want none.

    Args:
        run: The run.
        alive: Its.
    """
    return Swaps(partial(newest_save, run)) if alive.stragglers == "swap" else None


def newest_save(run: RunDir) -> int | None:
    """The step of the newest checkpoint on disk; None for none, and where it cannot be seen."""
    from hpctrain.checkpoint.store import find  # where nothing is ever changed it is not needed

    try:
        return next(iter(find.steps(run)), None)
    except HpctrainError as error:
        log.warning("%s", error)
        return None


def _price(slow: SlowNode) -> str:
    return (
        f"{slow.summary}, which has cost {duration(slow.lost_s)}, and a new start costs "
        f"{duration(slow.restart_s)}"
    )
