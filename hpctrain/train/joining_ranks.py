"""How ranks join each other, and which exchange they agree through.

An agent's ranks have its control plane (`control.client`); others make gloo groups of their own.
tests/engines/test_world.py holds the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.core.base import process
from hpctrain.core.base.env import HPCTRAIN_CONTROL
from hpctrain.core.device import device_of_rank, group_backend
from hpctrain.core.world import World
from hpctrain.node.control.client import ControlClient, why_none

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.core.world import Exchange, Pending

log = logging.getLogger("hpctrain.runtime")

COLLECTIVE_TIMEOUT_S = 600.0
LAZY_ABOVE = 64
"""With more ranks gloo connects two of them when they first speak to each other: with all at once
each rank would have a connection to every other in each group."""


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
    return ControlClient.take(Path(name), rank).exchange(timeout_s)


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
