"""This rank's place among the ranks, and the collectives by which they agree.

Flags and plans go through a gloo group of their own, so that they never change the order of the
program's own collectives. tests/engines/test_world.py holds the promises.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hpctrain.base import process
from hpctrain.device import device_of_rank, group_backend
from hpctrain.errors import CheckpointError, FileSystemFault, HpctrainError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 600.0

_ANSWERS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT}
)
"""What a file system says that works: nothing is there, something is, there is no room."""


@dataclass(frozen=True)
class World:
    """This rank's place.

    Attributes:
        rank: Its number among all ranks.
        local_rank: Its number among the ranks of its node.
        world_size: How many ranks there are.
        device: The GPU of this rank, or the CPU.
        control: A gloo group for flags and plans, apart from the gradients' group, so that a flag
            in flight never changes the order of the program's own collectives. None in a single
            process.
        ranks_per_node: How many ranks each node has.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    ranks_per_node: int = 1

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group."""
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
        dist.init_process_group(group_backend(device), timeout=timedelta(seconds=timeout_s))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    ranks, size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), dist.get_world_size()
    return World(dist.get_rank(), local_rank, size, device, control, ranks or size)


def broadcast(world: World, value: Any) -> Any:
    """Rank 0's value on every rank. Collective; values must be plain data."""
    if world.control is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.control)
    return box[0]


def gather(world: World, value: Any) -> list[Any]:
    """Every rank's value on every rank, in rank order. Collective; values must be plain data."""
    if world.control is None:
        return [value]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, value, group=world.control)
    return values


def gather_numbers(world: World, numbers: list[int]) -> list[list[int]]:
    """Equally many numbers of every rank, in rank order, without pickling. Collective."""
    if world.control is None:
        return [numbers]
    own = torch.tensor(numbers)
    rows = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(rows, own, group=world.control)
    return [row.tolist() for row in rows]


def gather_on_0(world: World, value: Any) -> list[Any]:
    """Every rank's value in rank order, on rank 0; an empty list elsewhere. Collective."""
    if world.control is None:
        return [value]
    values: list[Any] | None = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(value, values, dst=0, group=world.control)
    return values or []


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


def with_own_group(world: World, timeout_s: float) -> World:
    """The same ranks with a control group of their own, for a thread that works beside training.

    Collective. Two threads must not share a group: their collectives would meet in any order.
    """
    if world.control is None:
        return world
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return replace(world, control=group)
