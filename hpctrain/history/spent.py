"""What time can go to: the closed set of classes, and a stretch of time in one of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Spent(StrEnum):
    """What time went to: a closed set. Only QUEUE lies outside of an allocation."""

    QUEUE = "queue"
    STARTUP = "startup"
    """From the beginning of the allocation until the ranks read a checkpoint."""
    RESTORE = "restore"
    WARM_UP = "warm_up"
    """From the restore to the end of the first step: compiling, first batches and collectives."""
    STEP = "step"
    """Training that counts: the one useful class."""
    DATA = "data"
    """Rank 0 waited for data."""
    SAVE = "save"
    """Training stood still for a checkpoint."""
    REDONE = "redone"
    """Training that had to be done again, or will have to be."""
    STALL = "stall"
    """After the last sign of life of an attempt that ended without a word."""
    TEARDOWN = "teardown"
    """From the last word of the training program to the end of the allocation, or the restart."""
    OTHER = "other"
    """What no rule explains; also all of a program's own time that tells hpctrain nothing."""


ALLOCATED = tuple(kind for kind in Spent if kind is not Spent.QUEUE)


@dataclass(frozen=True)
class Slice:
    """A stretch of time, [start, end), that went to one thing.

    Attributes:
        start: Seconds since the epoch.
        end: The same, after `start`.
        kind: What it went to.
        attempt: Whose; None in the queue, and where no agent came so far.
        nodes: Nodes that were allocated; 0 in the queue.
    """

    start: float
    end: float
    kind: Spent
    attempt: int | None
    nodes: int

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start
