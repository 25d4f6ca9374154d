"""This rank's place among the ranks, and the exchanges by which they agree.

Flags and plans never go through the program's own process group, whose collectives must keep their
order: `joining_ranks` makes what carries them. tests/engines/test_world.py holds the promises.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hpctrain.errors import CheckpointError, FileSystemFault, HpctrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

T = TypeVar("T")

_ANSWERS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT}
)
"""What a file system says that works: nothing is there, something is, there is no room."""


class Pending(Protocol):
    """Rows of numbers on their way to rank 0."""

    def is_done(self) -> bool:
        """Whether `values` would not wait."""

    def values(self) -> list[list[float]]:
        """Every rank's in rank order, on rank 0; an empty list elsewhere."""


class Exchange(Protocol):
    """How plain values go between the ranks. Every call is collective, in one order on all ranks.

    One thread uses it; another one that works beside takes `apart`.
    """

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank, in rank order."""

    def gather_on_0(self, value: Any) -> list[Any]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""

    def send_to_0(self, row: Sequence[float]) -> Pending:
        """Equally many numbers of each rank to rank 0, in the background; one row at a time."""

    def apart(self, timeout_s: float) -> Exchange:
        """The same ranks' values, independent of this one's."""


@dataclass(frozen=True)
class World:
    """This rank's place.

    Attributes:
        rank: Its number among all ranks.
        local_rank: Its number among the ranks of its node.
        world_size: How many ranks there are.
        device: The GPU of this rank, or the CPU.
        control: Carries flags and plans, apart from the gradients' group, so that a flag in flight
            never changes the order of the program's own collectives. None in a single process.
        ranks_per_node: How many ranks each node has.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: Exchange | None = None
    ranks_per_node: int = 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.control is not None


def broadcast(world: World, value: Any) -> Any:
    """Rank 0's value on every rank. Collective; values must be plain data."""
    return value if world.control is None else world.control.broadcast(value)


def gather(world: World, value: Any) -> list[Any]:
    """Every rank's value on every rank, in rank order. Collective; values must be plain data."""
    return [value] if world.control is None else world.control.gather(value)


def gather_on_0(world: World, value: Any) -> list[Any]:
    """Every rank's value in rank order, on rank 0; an empty list elsewhere. Collective."""
    return [value] if world.control is None else world.control.gather_on_0(value)


def on_rank_0(world: World, act: Callable[[], T]) -> T:
    """What rank 0's action returns, on every rank; its error is raised on every rank too.

    Collective. An error on rank 0 alone would leave the others waiting in the next collective.

    Raises:
        HpctrainError: rank 0's own; an OSError becomes a FileSystemFault, or a CheckpointError
            where trying again cannot help; any other error becomes one that names it.
    """
    result: Any = None
    error: HpctrainError | None = None
    cause: Exception | None = None
    if world.rank == 0:
        try:
            result = act()
        except HpctrainError as problem:
            error = problem
        except OSError as problem:
            kind = CheckpointError if problem.errno in _ANSWERS else FileSystemFault
            error, cause = kind(one_line(problem)), problem
        except Exception as problem:  # noqa: BLE001 - whatever it is, every rank must hear of it
            error, cause = HpctrainError(f"rank 0: {one_line(problem)}"), problem
    result, error = broadcast(world, (result, error))
    if error is not None:
        raise error from cause
    answer: T = result
    return answer


def one_line(error: BaseException) -> str:
    """An error in one line, its kind in front."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def apart(world: World, timeout_s: float) -> World:
    """The same ranks with an exchange of their own, for a thread that works beside training.

    Collective. Two threads must not share one: what they say would meet in any order.
    """
    if world.control is None:
        return world
    return replace(world, control=world.control.apart(timeout_s))
