"""This rank's place among the ranks, and the exchanges by which they agree.

Flags and plans never go through the program's own process group, whose collectives must keep their
order. An agent's ranks have its control plane for them (`control.seat`); others make gloo groups of
their own. tests/engines/test_world.py holds the promises.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from hpctrain.core.base import process
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.device import device_of_rank, group_backend
from hpctrain.errors import CheckpointError, FileSystemFault, HpctrainError
from hpctrain.node.control.seat import Seat, why_none

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

log = logging.getLogger("hpctrain.runtime")

COLLECTIVE_TIMEOUT_S = 600.0
LAZY_ABOVE = 64
"""With more ranks gloo connects two of them when they first speak to each other: with all at once
each rank would have a connection to every other in each group."""

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


def join_world(timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
    """Join the other ranks as torchrun's environment says. Collective: every rank calls it once.

    Without that environment the world is this one process, and no process group is made.
    """
    if "RANK" not in os.environ:
        return World(0, 0, 1, device_of_rank(0))
    process.raise_limit()  # an agent has done so; torchrun has not
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of_rank(local_rank)
    if not dist.is_initialized():
        with _connecting(int(os.environ.get("WORLD_SIZE", "0"))):
            dist.init_process_group(group_backend(device), timeout=timedelta(seconds=timeout_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    control = _exchange(rank, size, timeout_s)
    return World(rank, local_rank, size, device, control, ranks or size)


def _exchange(rank: int, world_size: int, timeout_s: float) -> Exchange:
    """Through the agents' control plane where it is these ranks', else through gloo. Collective."""
    name = os.environ.get(HPCTRAIN_CONTROL)
    if not name:
        return GlooExchange(timeout_s)
    if why := why_none(Path(name), rank, world_size):
        if rank == 0:
            log.info("ranks agree through gloo groups: %s", why)
        return GlooExchange(timeout_s)
    return Seat.take(Path(name), rank).exchange(timeout_s)


@contextlib.contextmanager
def _connecting(world_size: int) -> Iterator[None]:
    """How gloo connects the ranks of a group that is made meanwhile."""
    name = "TORCH_GLOO_LAZY_INIT"
    if world_size <= LAZY_ABOVE or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


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


class GlooExchange:
    """Through a gloo group over all ranks, each of which holds a connection to every other."""

    def __init__(self, timeout_s: float) -> None:
        """Make the group. Collective.

        Args:
            timeout_s: Of each call.
        """
        with _connecting(dist.get_world_size()):
            self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def broadcast(self, value: Any) -> Any:
        """See `Exchange`; so below."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: D102
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_on_0(self, value: Any) -> list[Any]:  # noqa: D102
        first = dist.get_rank(self.group) == 0
        values: list[Any] | None = [None] * dist.get_world_size(self.group) if first else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def send_to_0(self, row: Sequence[float]) -> Pending:  # noqa: D102
        return _GlooRows(self.group, row)

    def apart(self, timeout_s: float) -> GlooExchange:  # noqa: D102
        return GlooExchange(timeout_s)


class _GlooRows:
    """Rows of numbers on their way: the one thing that gloo sends in the background."""

    def __init__(self, group: Any, row: Sequence[float]) -> None:
        own = torch.tensor(row, dtype=torch.float64)
        first = dist.get_rank(group) == 0
        self._rows = [
            torch.empty_like(own) for _ in range(dist.get_world_size(group) if first else 0)
        ]
        self._work: Any = dist.gather(
            own, self._rows if first else None, dst=0, group=group, async_op=True
        )

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def values(self) -> list[list[float]]:
        self._work.wait()
        return [row.tolist() for row in self._rows]
