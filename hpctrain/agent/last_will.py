"""The agent's part in last wills: asks for them before ranks are ended, and has them count or not.

Ranks that are left when another one is killed leave the newest step in their node's memory
(`hpctrain.memory.will_stock`). Each agent asks its keeper for that as the first of its ranks has
ended, and before it ends those that are left. They count where ranks are started again after one
was killed: what a rank has raised it may have computed, too, and a lost node has taken its ranks'
random generators with it. tests/unit/agent/test_last_will.py and tests/engines/test_last_will.py
hold the promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpctrain.agent.ranks import is_echo
from hpctrain.base import clock
from hpctrain.errors import ControlLost
from hpctrain.memory.protocol import KeeperLost
from hpctrain.memory.will_line import WillLine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.agent.rounds import RoundEnd

log = logging.getLogger("hpctrain.agent")


class NodeWills:
    """Those of one node, round after round."""

    def __init__(self, tell_keeper: Callable[[dict[str, object]], object]) -> None:
        """Nothing is asked for.

        Args:
            tell_keeper: Has the node's keeper do an order.
        """
        self._tell_keeper = tell_keeper
        self._has_asked = False

    def begin(self) -> None:
        """Ranks are about to be started."""
        self._has_asked = False

    def gather(self, folder: Path, rank: int, attempt: int) -> None:
        """Have the ranks that are left write their wills, once in a round; waits for them.

        Args:
            folder: Of the round.
            rank: The first one of this node.
            attempt: The round's number.
        """
        if self._has_asked:
            return
        self._has_asked, began = True, clock.monotonic()
        try:
            line = WillLine(folder, rank, attempt)
            try:
                said = line.gather()
            finally:
                line.close()
        except KeeperLost as error:
            log.warning("no last will: %s", error)
            return
        if said["step"] is not None or said["why"]:
            whys = "; ".join(f"rank {rank + int(n)}: {why}" for n, why in said["why"].items())
            step = "none" if said["step"] is None else f"of step {said['step']}"
            took_s = clock.monotonic() - began
            log.info(
                "last will of this node: %s, %.3f s%s", step, took_s, f" ({whys})" * bool(whys)
            )

    def settle(self, end: RoundEnd | None, attempt: int) -> None:
        """The round's ranks are gone: say whether what they have left counts.

        Args:
            end: How it ended; None where only the first node knows. Without the parts of that
                node's ranks there is no will, so its word counts for all.
            attempt: The round's number.
        """
        counts = end is None or may_count(end)
        try:
            self._tell_keeper({"wills": {"attempt": attempt, "counts": counts}})
        except ControlLost as error:
            log.warning("no last will: %s", error)


def may_count(end: RoundEnd) -> bool:
    """Whether ranks may go on from what was left at such an end."""
    failure = end.failure
    # Where all that is known is that a peer went away, no rank has raised anything of its own.
    was_killed = failure is not None and (failure.kind == "signal" or is_echo(failure))
    return end.restart and was_killed and not end.silent_nodes
