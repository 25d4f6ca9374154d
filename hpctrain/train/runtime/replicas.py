"""Compares the weights of ranks that should hold the same, a slice at each step.

What a rank has digested in a turn through all slices goes to rank 0 as one number, in the
background and beside the gradients' group: nobody waits, and no collective of the program's has
another order. tests/engines/test_replicas.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.world import COLLECTIVE_TIMEOUT_S, apart
from hpctrain.train.engines.norm import local
from hpctrain.train.guards import replicas
from hpctrain.train.runtime.telemetry import Gathering

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.core.world import World
    from hpctrain.train.guards.replicas import Divergence
    from hpctrain.train.runtime.program import Program

EXACT_BITS = 53
"""Of a digest that a row of fp64 numbers carries whole."""


@dataclass(frozen=True)
class Comparison:
    """Copies that differ.

    Attributes:
        step: After which they were compared.
        clean: The last one whose weights were surely right.
        wrong: Whose differ.
        were_same: All of them were the same before in this attempt: else it may be the program's
            own doing, or that of devices that round otherwise.
    """

    step: int
    clean: int
    wrong: list[Divergence]
    were_same: bool


class ReplicaWatch:
    """One rank's side."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        groups: Sequence[Sequence[int]],
        world: World,
        *,
        count: int,
        differ: Callable[[Comparison], None],
    ) -> None:
        """Prepare the comparison. Collective.

        Ranks in one of `groups` hold the same `weights`; `count` is the number of slices. On rank 0
        `differ` is called with what differs.
        """
        self._groups = groups
        self._differ = differ
        self._gathering = Gathering(apart(world, COLLECTIVE_TIMEOUT_S))
        self._is_first = world.rank == 0
        sizes = [local(weight).nbytes for weight in weights]
        self._slices = [[weights[n] for n in part] for part in replicas.slices(sizes, count)]
        self._window = replicas.window_of(count, world.world_size)
        self._looks = 0
        self._digest = xxhash.xxh3_64()
        self._on_device: list[torch.Tensor] = []
        self._said_at = 0
        self._were_same = False

    def look(self, step: int) -> None:
        """After a step's update. Collective by its count: every rank calls it equally often."""
        self._take_in(self._slices[self._looks % len(self._slices)])
        self._looks += 1
        if self._is_first:
            self._compare(wait=False)
        if self._looks % self._window == 0:
            self._compare(wait=True)
            self._said_at = step
            self._gathering.launch([float(self._number())])

    def close(self, step: int) -> None:
        """Look at all of the weights at once, and hear of them. Collective."""
        self._compare(wait=True)
        self._number()
        for weights in self._slices:
            self._take_in(weights)
        self._said_at = step
        self._gathering.launch([float(self._number())])
        self._compare(wait=True)

    def _take_in(self, weights: Sequence[torch.Tensor]) -> None:
        for weight in weights:
            part = local(weight).detach()
            if part.device.type == "cpu":
                self._digest.update(bytes_of(part))
            else:  # read at the end of the turn: no step waits for the device
                self._on_device.append(sum_of(part))

    def _number(self) -> int:
        if self._on_device:
            sums = torch.stack(self._on_device).tolist()
            self._digest.update(b"".join(s.to_bytes(8, "little", signed=True) for s in sums))
        number = self._digest.intdigest() >> (64 - EXACT_BITS)
        self._on_device.clear()
        self._digest.reset()
        return number

    def _compare(self, *, wait: bool) -> None:
        if not self._is_first:
            return
        rows = self._gathering.landed(wait=wait)
        if rows is None:
            return
        wrong = replicas.differing([row[0] for row in rows], self._groups)
        if wrong:
            clean = replicas.clean_step(self._said_at, self._window)
            self._differ(Comparison(self._said_at, clean, wrong, self._were_same))
        self._were_same |= not wrong


def groups_of(program: Program, world: World) -> list[list[int]]:
    """Ranks that hold the same weights; none where that is not so, or nobody knows.

    Copies that DeepSpeed makes anew from their owners at each step say nothing of flipped bits.
    """
    ranks = range(world.world_size)
    if world.world_size == 1:
        return []
    engine = program.engine
    if engine is None:
        return [list(ranks)] if isinstance(program.model, DistributedDataParallel) else []
    if engine.kind not in {"ddp", "fsdp2"} or engine.mesh.dp_replicate == 1:
        return []
    by_part: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        place = engine.mesh.place(rank)
        by_part.setdefault((place["pp"], place["dp_shard"], place["tp"]), []).append(rank)
    return list(by_part.values())


def bytes_of(part: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory; not copied where it is contiguous."""
    flat = part.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def sum_of(part: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, on its device: one flipped bit changes it."""
    flat = part.contiguous().reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(whole).sum(dtype=torch.int64)
