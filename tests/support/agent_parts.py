"""Parts of a node's agent for tests that are about other parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.rounds import RoundPart
from hpctrain.node.agent.stop_notice import StopNotice
from hpctrain.node.hangs.standing import HangLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.core.base.records import JobContext, StopCause
    from hpctrain.node.agent.stop_deadline import StopDeadline

NO_LOOKS = HangLimits(watches=False)
"""The agent looks at its ranks only where a user asks for it."""


class NoControl(RoundPart):
    """As `hpctrain.node.agent.control.NodeControl`: the ranks have nothing from their agents."""

    folder = Path("/nonexistent")
    pids: tuple[int, ...] = ()

    def begin(self, *_: Any, **__: Any) -> None:
        """See the real one; so below."""

    def join(self, *_: Any, **__: Any) -> None:
        """Nothing to join."""

    def failure(self) -> None:
        """It cannot fail."""


def notice_of(
    folder: Path, context: JobContext, deadline: StopDeadline
) -> Callable[[Callable[[], bool]], StopCause | None]:
    """Return what asks ranks to leave in this folder's run, of which nobody has asked a stop."""
    return StopNotice(RunDir(folder), context, deadline, lead_s=10.0).look
