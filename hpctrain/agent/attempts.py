"""A node's agent that prepares its node for each attempt before the ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.agent.node import NodeAgent

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import WorkerGroup


class AttemptAgent(NodeAgent):
    """Calls `before_ranks` with the attempt's number, on every node, once the number is known.

    Attributes:
        before_ranks: Must not take part in anything collective: nodes come here at their own pace.
    """

    before_ranks: Callable[[int], None]

    def _begin_attempt(self, group: WorkerGroup) -> dict[str, Any]:
        attempt = super()._begin_attempt(group)
        self.before_ranks(int(attempt["number"]))
        return attempt
