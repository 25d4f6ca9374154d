"""What copies in memory will take of each node, as far as it is known before a run starts. Pure.

A run's state is as large as its checkpoints; before the first of them nobody knows how large it is.
tests/unit/memory/test_need.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.core.base.text import size
from hpctrain.node.memory.slots import SLOTS

if TYPE_CHECKING:
    from hpctrain.core.settings.schema import AliveSettings


def memory_notes(
    alive: AliveSettings, state_bytes: int | None, *, fewest_nodes: int, outlives: bool
) -> list[str]:
    """Return a line on what copies take of each node's memory; none if none are made.

    `state_bytes` is of all ranks together, None if not known. If only `fewest_nodes` train, each
    has the largest part. If the job `outlives` a node, copies lie on two nodes.
    """
    if alive.memory == "no":
        return []
    on_two = alive.memory_buddy == "auto" and alive.is_on() and outlives
    copies = SLOTS * (2 if on_two else 1)
    too = ", those for the next node included" if on_two else ""
    part = f"{copies} times its part of the"
    if state_bytes is None:
        amount = "what copies take of a node's memory is not known before the first checkpoint: "
        amount += f"{part} state"
    else:
        share = -(-state_bytes // fewest_nodes)
        amount = f"copies take about {size(copies * share)} of each node's memory, "
        amount += f"{part} newest checkpoint"
    return [f"alive.memory: {amount}{too}; where that does not fit, none are made"]
