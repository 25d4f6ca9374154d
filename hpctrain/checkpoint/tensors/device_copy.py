"""Copies of a device's tensors into host memory, beside what the device computes.

    own stream:   update | ................ forward, backward | (waits) | update | ...
    side stream:         | copies ........................... |
    save's thread:                                            | the writer process reads them

The side stream begins behind what the own stream was given so far: else a copy would be older than
the last update. The own stream waits for the copies before the next change (`HostCopies.hold`):
else a copy would be half of it. Written against `torch.accelerator`; only page-locked memory is
CUDA's own. tests/unit/checkpoint/test_device_copy.py runs it on a stand-in device that does things
as late, as early and in as odd an order as streams allow.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("hpctrain.checkpoint")

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


class HostCopies:
    """Copies that may still be on their way; one thread holds for them, another waits for them."""

    def __init__(
        self,
        done: torch.Event | None = None,
        sources: Sequence[torch.Tensor] = (),
        steady: Sequence[torch.Tensor] = (),
    ) -> None:
        """Of one device.

        Args:
            done: When they are made; None for copies that are made.
            sources: Kept until then: the memory of a temporary would be handed out again and
                overwritten, since the allocator knows nothing of the side stream.
            steady: What must not change before `hold`.
        """
        self._done = done
        self._sources = list(sources)
        self._steady = [(tensor, _changes(tensor)) for tensor in steady]
        self._is_beside = bool(steady)
        self._is_held = self._is_torn = False
        self._lock = threading.Lock()

    def hold(self) -> None:
        """What the device is given from here on, by this thread, begins when the copies are made.

        The host does not wait.
        """
        with self._lock:
            if self._done is not None and not self._is_held:
                self._end_watch()
                _own_stream(self._done.device).wait_event(self._done)

    def wait(self) -> bool:
        """Wait until they are made; only then does host memory hold what was copied.

        Returns:
            Whether the device waits as well, from the moment that it has nothing else to do.

        Raises:
            CheckpointError: what was to be steady has changed meanwhile.
        """
        if self._done is None:
            return False
        self._done.synchronize()
        with self._lock:
            if not self._is_held:  # what changes from here on is behind the copies all the same
                self._end_watch()
            self._done, self._sources = None, []
        if self._is_torn:
            raise CheckpointError(
                "weights were changed outside of the optimizer's step while they were copied; set "
                "checkpoint.overlap_copy = false for this program"
            )
        return not self._is_beside

    def _end_watch(self) -> None:
        self._is_held = True
        self._is_torn = any(_changes(tensor) != count for tensor, count in self._steady)
        self._steady = []


def copy_to_host(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    steady: Sequence[torch.Tensor | None] = (),
) -> HostCopies:
    """Copy tensors into host memory; at once from the host's, behind from a device's.

    Args:
        targets: On the CPU, of the sources' shapes and dtypes.
        sources: Of the CPU and of one device. They may change when this returns.
        steady: For each source None; or, where it does not change before `HostCopies.hold`, the
            program's tensor, by which a change would be noticed. Such are copied beside what the
            device does until then.

    Returns:
        What to wait for before a target is read.
    """
    rows = list(zip(targets, sources, steady or [None] * len(sources), strict=True))
    here = [row for row in rows if row[1].device.type == "cpu"]
    there = [row for row in rows if row[1].device.type != "cpu"]
    _copy(here)
    if not there:
        return HostCopies()
    device = there[0][1].device
    own, side = _own_stream(device), _side_stream(device)
    side.wait_event(own.record_event())
    if moving := [row for row in there if row[2] is None]:
        _copy(moving, side)
        own.wait_event(side.record_event())
    resting = [row for row in there if row[2] is not None]
    _copy(resting, side)
    return HostCopies(
        side.record_event(),
        [source for _, source, _ in resting],
        [tensor for _, _, tensor in resting if tensor is not None],
    )


def _copy(
    rows: Sequence[tuple[torch.Tensor, torch.Tensor, Any]], stream: torch.Stream | None = None
) -> None:
    if not rows:
        return
    targets, sources = [row[0] for row in rows], [row[1] for row in rows]
    with torch.no_grad(), stream or contextlib.nullcontext():
        torch._foreach_copy_(targets, sources, non_blocking=stream is not None)  # one call for all


def _changes(tensor: torch.Tensor) -> int:
    """How often it was changed in place so far; a change through `.data` is not counted."""
    return tensor._version  # noqa: SLF001 - torch has no other name for it


def _own_stream(device: torch.device) -> torch.Stream:
    """The one that this thread's work goes to."""
    return torch.accelerator.current_stream(device)


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    """One for all saves of the process: they follow each other."""
    return torch.Stream(device)


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
        """Lock this memory, and let go of what was locked before. Nothing on other devices.

        Args:
            memory: Mapped until `unlock`.
            device: Of this rank; the calling thread works with it from here on.
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
