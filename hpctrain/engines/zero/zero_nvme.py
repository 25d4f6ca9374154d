"""Optimizer state on a disk of the node, under ZeRO-3: what DeepSpeed keeps in files of its own.

DeepSpeed reads a row of masters, moments and gradients into host memory, updates it, and writes it
back; between steps its tensors are empty. Here the files are mapped into memory instead: a save
reads them page by page, a restore writes them, and neither needs memory for the state.
The folder is `zero_room.py`'s, reads and writes are `zero_files.py`'s.
tests/engines/test_zero.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.engines.zero.nvme import Files
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Disk:
    """The rows of fp32 that DeepSpeed keeps in files; rows below 1 MiB it keeps in memory."""

    def __init__(self, zero: Any) -> None:
        """Look which rows they are.

        Args:
            zero: DeepSpeed's optimizer of stage 3, made with `offload_optimizer.device` "nvme".

        Raises:
            UsageError: this DeepSpeed does not read and write by `Files`.
        """
        self._swapper = zero.optimizer_swapper
        if not isinstance(self._swapper.aio_handle, Files):
            raise UsageError(
                "engine.offload nvme: this version of DeepSpeed reads and writes its files in a "
                "way that hpctrain does not know; use deepspeed 0.19.8, or engine.offload cpu"
            )
        self._rows = {
            id(row): self._swapper.swap_params_info[row.ds_id]
            for row in zero.fp32_partitioned_groups_flat
            if row.ds_id in self._swapper.swap_params_info
        }

    def holds(self, row: torch.Tensor) -> bool:
        """Whether a row of masters lies in files, with its moments."""
        return id(row) in self._rows

    def mapped(self, row: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The file of a row, or of one of its moments, as a tensor; for now, not for long.

        What is written there is the file's when the row is `here` the next time.

        Args:
            row: Masters that lie in files.
            value: These masters, or a moment of theirs.
        """
        held = self._rows[id(row)]
        path = next(one.swap_path for one in held.tensors if one.compute_tensor is value)
        # DeepSpeed writes past the page cache: pages from before must not be read for the file's.
        _each_file([path], lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
        return torch.from_file(path, shared=True, size=held.numel(), dtype=row.dtype)

    @contextlib.contextmanager
    def here(self, row: torch.Tensor, *, changes: bool) -> Iterator[None]:
        """Around work on a row and its moments that needs them in memory.

        Args:
            row: Masters that lie in files.
            changes: Write them back, with moments that have been made meanwhile.
        """
        # DeepSpeed reads past the page cache: what was written to a mapping must be on the disk.
        _each_file([one.swap_path for one in self._rows[id(row)].tensors], os.fsync)
        self._swapper.swap_in_optimizer_state(row)
        try:
            yield
        finally:
            if changes:
                self._swapper.swap_out_optimizer_state(row)
            else:
                self._swapper.release_swap_buffers(row)
            row.grad = None

    def fill_gradients(self) -> None:
        """Give zeros to what got no gradient, before a step.

        DeepSpeed reads gradients into memory that it has used before: a parameter without one would
        be updated by whatever lies there.
        """
        for held in self._rows.values():
            found = [(gap.offset, gap.length) for gap in held.swapped_gradients.values()]
            found += [(offset, part.numel()) for offset, part in held.unswapped_gradients.items()]
            for first, count in gaps(found, held.numel()):
                held.unswapped_gradients[first] = torch.zeros((), dtype=held.dtype()).expand(count)

    def forget_gradients(self) -> None:
        """After a step, whether it was taken or left out: else the next one reads these files."""
        for held in self._rows.values():
            held.swapped_gradients.clear()
            held.release_unswapped_gradients()


def gaps(ranges: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What of [0, size) lies in no range; ranges and answer are (first, count). Pure."""
    found, at = [], 0
    for first, count in [*sorted(ranges), (size, 0)]:
        if first > at:
            found.append((at, first - at))
        at = max(at, first + count)
    return found


def _each_file(paths: Iterable[str], do: Any) -> None:
    for path in paths:
        file = os.open(path, os.O_RDWR)
        try:
            do(file)
        finally:
            os.close(file)
