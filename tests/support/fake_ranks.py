"""One process that stands for any rank of many: collectives return at once and move nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.core.world import World


@contextmanager
def rank_of(rank: int, world_size: int, *, ranks_per_node: int = 8) -> Iterator[World]:
    """The world as this rank sees it, in torch's process group "fake"."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpctrain.core.world import World

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield World(
            rank, rank % ranks_per_node, world_size, torch.device("cpu"),
            dist.group.WORLD, ranks_per_node,
        )  # fmt: skip
    finally:
        dist.destroy_process_group()
