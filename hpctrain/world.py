"""Who am I among the ranks, and how do we speak to each other?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class World:
    """This rank's place.

    Attributes:
        control: A gloo group for flags and plans, apart from the gradients' group, so that a flag
        in flight
            never changes the order of the program's own collectives. None in a single process.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group."""
        return self.control is not None


def join_world(timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
    """Join the other ranks as torchrun's environment says. Collective: every rank calls it once.

    Without that environment the world is this one process, and no process group is made.
    """
    if "RANK" not in os.environ:
        return World(0, 0, 1, _device(0))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local_rank)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return World(dist.get_rank(), local_rank, dist.get_world_size(), device, control)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


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
