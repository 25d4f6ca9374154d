"""A rank's memory for a profile: numbers always, and on CUDA what held it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.profile.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.world import World

MOST_ENTRIES = 200_000
"""Allocations that are remembered with their stacks; more would cost the host gigabytes."""


class MemoryHistory:
    """Remembers what allocates, from `start` to `stop`; nothing on a CPU."""

    def __init__(self, world: World) -> None:
        self._is_cuda = world.device.type == "cuda"
        self._recording = False

    def start(self) -> bool:
        """Begin to remember; False where there is nothing that could be remembered."""
        if self._is_cuda:
            # torch documents these two for users, under their private names.
            torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)  # noqa: SLF001
            self._recording = True
        return self._is_cuda

    def stop(self, path: Path) -> None:
        """Write what was remembered, for pytorch.org/memory_viz, and forget it."""
        if not self._recording:
            return
        self._recording = False
        try:
            dump: Callable[[str], None] = torch.cuda.memory._dump_snapshot  # noqa: SLF001
            dump(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


def measure(world: World) -> Memory:
    """This rank's memory now."""
    if world.device.type != "cuda":
        return Memory("cpu", allocated_peak_bytes=_peak_of_process())
    stats = torch.cuda.memory_stats(world.device)

    def told(key: str) -> int:
        return int(stats.get(key, 0))

    return Memory(
        device="cuda",
        allocated_bytes=told("allocated_bytes.all.current"),
        allocated_peak_bytes=told("allocated_bytes.all.peak"),
        reserved_bytes=told("reserved_bytes.all.current"),
        inactive_split_bytes=told("inactive_split_bytes.all.current"),
        alloc_retries=told("num_alloc_retries"),
        ooms=told("num_ooms"),
    )


def write(memory: Memory, path: Path) -> None:
    """Leave the numbers, whole or not at all."""
    staged = path.with_name(path.name + ".new")
    staged.write_text(json.dumps(asdict(memory)) + "\n")
    staged.replace(path)


def _peak_of_process() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
