"""Copies of tensors into host memory: of a device, asked once for all, or of the host.

A device copies in its own stream, behind what that stream was given so far and before what it is
given next: so a copy is of one moment, and the host waits for it only where it reads it. Written
against `torch.accelerator`; only page-locked memory is CUDA's own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("hpctrain.checkpoint")

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


def copy_to_host(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> torch.Event | None:
    """Copy tensors into host memory; at once from the host's, behind from a device's.

    Args:
        targets: On the CPU, of one dimension, of as many bytes as the sources.
        sources: Of the CPU and of one device. They may change when this returns.

    Returns:
        What to `synchronize` with before a target is read; None where nothing is on its way.
    """
    rows = list(zip(targets, sources, strict=True))
    _copy([row for row in rows if row[1].device.type == "cpu"], non_blocking=False)
    behind = [row for row in rows if row[1].device.type != "cpu"]
    if not behind:
        return None
    _copy(behind, non_blocking=True)
    return torch.accelerator.current_stream(behind[0][1].device).record_event()


def _copy(rows: Sequence[tuple[torch.Tensor, torch.Tensor]], *, non_blocking: bool) -> None:
    if not rows:
        return
    targets, sources = [row[0].view(row[1].dtype) for row in rows], [row[1] for row in rows]
    with torch.no_grad():
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)  # one call for all


class PageLocked:
    """Host memory that a device copies into by itself.

    Into other memory CUDA copies through a small buffer of its own, while the host waits. Where the
    driver refuses (a limit of locked memory), copies are slower and nothing else: said once.
    """

    def __init__(self) -> None:
        self._address: int | None = None
        self._nbytes = 0
        self._is_refused = False

    def lock(self, memory: memoryview, device: torch.device) -> None:
        """Lock this memory, and release what was locked before. Do nothing on other devices.

        `memory` must stay mapped until `unlock`. The calling thread uses `device` from here on.
        """
        if device.type != "cuda" or not memory.nbytes or self._is_refused:
            return
        # A thread of its own begins with device 0, and would make a context there for each rank.
        torch.accelerator.set_device_index(device)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        if (address, memory.nbytes) == (self._address, self._nbytes):
            return
        self.unlock()
        error = _cuda().cudaHostRegister(address, memory.nbytes, PORTABLE)
        if int(error) != 0:
            self._is_refused = True
            text = "saves copy through pageable memory, which is slower: cudaHostRegister said %s"
            log.warning(text, error)
            return
        self._address, self._nbytes = address, memory.nbytes

    def unlock(self) -> None:
        """Let go of the memory, which is still mapped."""
        if self._address is not None:
            _cuda().cudaHostUnregister(self._address)
            self._address, self._nbytes = None, 0


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
