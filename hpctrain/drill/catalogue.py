"""The faults of a drill, and the promise that each of them tests. Pure.

tests/unit/drill/test_catalogue.py and test_judging.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

README = "README.md#what-it-promises"


@dataclass(frozen=True)
class DrillFault:
    """One fault.

    Attributes:
        name: As `--faults` has it.
        does: What is done.
        promise: What must come of it.
        anchor: Where that is promised.
        on_live: A run that matters can take it: it costs steps at most, and never data.
        armed: By which words of docs/development/testing-faults.md it is armed when the run
        starts; "" where
            it is done from outside.
    """

    name: str
    does: str
    promise: str
    anchor: str = README
    on_live: bool = True
    armed: str = ""

    @property
    def point(self) -> str:
        """Where an armed fault fires."""
        return self.armed.partition(":")[2].partition(",")[0]


DELAY_S = 5.0
FREEZE_S = 3.0
FAULTS = {
    one.name: one
    for one in (
        DrillFault(
            "power_cut",
            "looks whether the newest committed checkpoint lies on the disk, not in memory alone",
            "a committed checkpoint outlives a power cut: every byte of it is flushed before",
        ),
        DrillFault(
            "kill_rank",
            "SIGKILL to one rank",
            "the run goes on by itself; steps since the last committed checkpoint are lost at most",
        ),
        DrillFault(
            "kill_agent",
            "SIGKILL to the agent of a node",
            "the run goes on by itself; steps since the last committed checkpoint are lost at most",
        ),
        DrillFault(
            "preempt",
            "sends the notice of a preemption",
            "the run saves, leaves, and comes back; no step is lost",
        ),
        DrillFault(
            "tear_checkpoint",
            "cuts a file of the newest checkpoint in half, then kills a rank",
            "a torn checkpoint is never loaded; the next older whole one is, and it is told why",
            on_live=False,
        ),
        DrillFault(
            "flip_bit",
            "turns one bit in a file of the newest checkpoint, then kills a rank",
            "a bit-flipped checkpoint is never loaded; the next older whole one is, and it is told "
            "why",
            on_live=False,
        ),
        DrillFault(
            "freeze_rank",
            f"stops a rank (SIGSTOP) for {FREEZE_S:g} s and continues it",
            "it costs time: the run goes on, and no step since the last committed checkpoint is "
            "lost",
        ),
        DrillFault(
            "fill_disk",
            "a write of a save is refused for want of space (ENOSPC)",
            "no such checkpoint is committed, it is told, training goes on, and the next save is "
            "whole",
            on_live=False,
            armed="fail:shard.write,error=ENOSPC",
        ),
        DrillFault(
            "delay_files",
            f"a flush of a save takes {DELAY_S:g} s",
            "it costs time: the save is committed, in the same attempt",
            on_live=False,
            armed=f"delay:shard.flush,seconds={DELAY_S:g}",
        ),
        DrillFault(
            "second_writer",
            "another attempt takes the run over while its ranks go on (a node thought dead)",
            "two attempts never write into one run: the older one commits nothing more, and leaves",
            on_live=False,
        ),
    )
}
"""By name, in the order in which they are planted. The last one ends the run."""


def chosen(names: Sequence[str]) -> list[DrillFault]:
    """The faults that were named, in the drill's order; all of them where none was.

    Raises:
        UsageError: there is no such fault.
    """
    from difflib import get_close_matches

    for name in names:
        if name not in FAULTS:
            near = get_close_matches(name, FAULTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FAULTS)}"
            raise UsageError(f"--faults: {name!r} is no fault of the drill; {hint}")
    return [fault for fault in FAULTS.values() if not names or fault.name in names]
