"""Copies of a rank's state into its node's memory, in the course of training, and how often.

Where a rank has no slot free, or something goes wrong, the step has no copy, and training
continues. tests/engines/test_memory.py and tests/unit/memory/test_pace.py hold the promises.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.format import manifest as manifests
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.tensors.boxes import held, parts_to_write
from hpctrain.checkpoint.tensors.device_copy import PageLocked, copy_to_host
from hpctrain.core.base import clock
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.node.memory.copy_plan import CopyPlan, part_facts
from hpctrain.node.memory.replica_client import ReplicaServerLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.checkpoint.format.manifest import Manifest
    from hpctrain.checkpoint.format.shard import ShardPiece
    from hpctrain.checkpoint.tensors.boxes import Part, State
    from hpctrain.core.world import World
    from hpctrain.node.memory.replica_client import ReplicaClient

log = logging.getLogger("hpctrain.checkpoint")


class RankCopies:
    """One rank's copies. Its calls are the training thread's."""

    def __init__(self, world: World, line: ReplicaClient) -> None:
        """Copy nothing, and take no memory."""
        self._world, self._line = world, line
        self._layout: _Layout | None = None
        self._taking: threading.Thread | None = None
        self._locked = [PageLocked(), PageLocked()]

    @property
    def is_ready(self) -> bool:
        """Whether there is memory for copies; it is taken behind training."""
        return self._taking is not None and not self._taking.is_alive() and bool(self._line.room)

    def take_room(self, state: State, manifest: Manifest) -> None:
        """Take memory for copies of this state, without waiting for it. Not collective."""
        parts = parts_to_write(held(state, self._world))
        plan = self._laid_out(parts, manifest)
        self._taking = threading.Thread(
            target=self._take, args=(plan.size,), name="hpctrain-memory", daemon=True
        )
        self._taking.start()

    def copy(self, state: State, manifest: Manifest) -> float:
        """Copy a state; returns how long training waited. Not collective.

        Args:
            state: This rank's tensors; they may change when this returns.
            manifest: Everything but files and tensors.
        """
        began, slot = clock.monotonic(), None
        try:
            if self.is_ready:
                slot = self._line.take_slot()
            if slot is None:
                self._line.left_out(manifest.step)
            else:
                self._fill(slot, state, manifest)
        except (HpctrainError, OSError, RuntimeError) as error:  # torch finds no memory, too
            why = str(error).partition("\n")[0]
            log.warning("step %d has no copy in memory: %s", manifest.step, why)
            with contextlib.suppress(ReplicaServerLost):  # then nobody waits for this rank's word
                self._line.left_out(manifest.step, slot)
        return clock.monotonic() - began

    def _take(self, nbytes: int) -> None:
        try:
            if self._line.take_room(nbytes):
                return
            for locked, slot in zip(self._locked, self._line.slots, strict=True):
                locked.lock(slot, self._world.device)
        except ReplicaServerLost as error:
            log.warning("no copies in memory: %s", error)

    def _fill(self, slot: int, state: State, manifest: Manifest) -> None:
        parts = parts_to_write(held(state, self._world))
        plan = self._laid_out(parts, manifest)
        if plan.size > self._line.room:
            raise CheckpointError(
                f"it needs {plan.size:,} bytes, and a slot has {self._line.room:,}"
            )
        points.reach("memory.copy", step=manifest.step, rank=self._world.rank)
        memory = self._line.slots[slot]
        layout = self._layout
        if layout is not None:
            memory[: plan.head] = layout.header
        copied = _copy(memory, parts, plan)
        points.reach("memory.copied", step=manifest.step, rank=self._world.rank)
        if copied is None:
            self._line.copied(slot, manifest.step, plan)
            return
        threading.Thread(
            target=self._send_behind, args=(copied, slot, manifest.step, plan), daemon=True
        ).start()

    def _send_behind(self, copied: torch.Event, slot: int, step: int, plan: CopyPlan) -> None:
        """A device's copies are made behind training; the host waits here."""
        try:
            copied.synchronize()
            self._line.copied(slot, step, plan)
        except Exception as error:  # noqa: BLE001 - also what a device says; training meets it too
            log.warning("step %d has no copy in memory: %s", step, error)
            with contextlib.suppress(ReplicaServerLost):
                self._line.left_out(step, slot)

    def _laid_out(self, parts: Sequence[Part], manifest: Manifest) -> CopyPlan:
        pieces = [part.piece for part in parts]
        layout = self._layout
        if layout is None or layout.pieces != pieces or layout.block_bytes != manifest.block_bytes:
            layout = self._layout = _Layout(pieces, self._world.rank, manifest.block_bytes)
        facts: dict[str, Any] = {"part": layout.facts}
        if self._world.rank == 0:
            facts["manifest"] = manifests.plain(manifest)
        return CopyPlan(
            world_size=self._world.world_size,
            rank=self._world.rank,
            head=len(layout.header),
            sizes=layout.sizes,
            block_bytes=manifest.block_bytes,
            facts=facts,
        )


class _Layout:
    """What is the same for all copies of the same pieces."""

    def __init__(self, pieces: list[ShardPiece], rank: int, block_bytes: int) -> None:
        self.pieces, self.block_bytes = pieces, block_bytes
        self.sizes = tuple(piece.nbytes for piece in pieces)
        self.header = shard.header(pieces, shard.file_name(rank), block_bytes)
        self.facts = part_facts(pieces, rank)


def _copy(memory: memoryview, parts: Sequence[Part], plan: CopyPlan) -> torch.Event | None:
    """Copy parts into memory, one behind the other, as in a file; see `copy_to_host`.

    The largest elements come first, so that each lies where its dtype asks for.
    """
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    targets, sources, low = [], [], plan.head
    for part, nbytes in zip(parts, plan.sizes, strict=True):
        if nbytes:
            targets.append(whole[low : low + nbytes].view(part.view.dtype))
            sources.append(part.view.reshape(-1))
        low += nbytes
    return copy_to_host(targets, sources)


MOST_STALL = 0.01
"""Of the time between two copies, that training may wait for them."""
MOST_BUSY = 0.8
"""Of the time between two copies, that one may take until it is covered."""
MOST_AHEAD = 0.5
"""And so much of it, of the slowest, where a copy is asked for before the one ahead is whole."""
COUNTED = 5
"""So many of the newest copies count."""
NEWS = 0.2
"""Fewer steps more or less, as a share, are not worth a change."""


class Pace:
    """Learns from copies.

    Attributes:
        steps: Between two copies from here on. The first copy of a start is made at once: after a
            lost node the others' copies lie on one node each, until there is a new one.
    """

    def __init__(self, setting: int) -> None:
        """Measure nothing yet; `setting` is `alive.memory_steps`, 0 to choose."""
        self._setting = setting
        self.steps = 1
        self._stalls: deque[float] = deque(maxlen=COUNTED)
        self._covers: deque[float] = deque(maxlen=COUNTED)

    @property
    def stall_s(self) -> float:
        """What training waits for a copy; 0 before the first."""
        return statistics.median(self._stalls) if self._stalls else 0.0

    @property
    def covered_s(self) -> float:
        """From the beginning of a copy until all nodes have it whole; 0 before the first."""
        return statistics.median(self._covers) if self._covers else 0.0

    def miss(self) -> None:
        """A copy was not whole on all nodes: what hinders it may not be over at the next step."""
        self.steps = self._setting or self.steps

    def is_quick(self, step_s: float) -> bool:
        """Return whether each copy is surely complete on all nodes before the next one is made."""
        return 0 < max(self._covers, default=0.0) <= MOST_AHEAD * self.steps * step_s

    def learn(self, stall_s: float, covered_s: float, step_s: float) -> bool:
        """Take in what a copy cost; return whether `steps` changed, or this was the first copy.

        Training waited `stall_s`; all nodes had the copy complete `covered_s` after it began.
        """
        is_first = not self._stalls
        self._stalls.append(stall_s)
        self._covers.append(covered_s)
        if self._setting or step_s <= 0:
            self.steps = self._setting or self.steps
            return is_first
        needed_s = max(self.stall_s / MOST_STALL, self.covered_s / MOST_BUSY)
        steps = max(1, math.ceil(needed_s / step_s - 1e-9))
        if not is_first and abs(steps - self.steps) <= NEWS * self.steps:
            return False
        self.steps = steps
        return True
