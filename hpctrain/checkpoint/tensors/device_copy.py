"""Copies of tensors into host memory, beside what is computed next: of a device, or the host.

    own stream:   update | ................ forward, backward | (waits) | update | ...
    side stream:         | copies ........................... |
    save's thread:                                            | the writer process reads them

The side stream begins behind what the own stream was given so far, else a copy would be older than
the last update. The own stream waits for the copies before the next change (`HostCopies.hold`),
else a copy would be half of it. Written against `torch.accelerator`; only page-locked memory is
CUDA's own. For tensors in host memory a thread takes the place of the side stream (`CopyThread`).

What is copied may not change before `hold` returns. Torch counts changes in place (`Watch`). A
change of whole tensors through `.data` shows in a word of each PROBE_BYTES, compared with the copy;
one of a few elements is not seen. The promises are held by test_device_copy.py and
test_host_copy.py in tests/unit/checkpoint, and tests/engines/test_hidden_copies.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.core.base import clock
from hpctrain.core.testing import points
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    _Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    """Target, source, and what is watched where it is steady."""


SMALL_BYTES = 64 << 10
"""Less is copied at once: looking after a tensor in a thread costs training as much."""
PROBE_BYTES = 256 << 10
"""From word to word: reading them takes less than a hundredth of the time that the copy takes."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""


class Watch:
    """Tensors that are not to change in place until the watch ends.

    Attributes:
        is_open: Whether it has not ended.
        is_torn: Whether one had changed when it ended.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watch from here on."""
        self._counts = [(tensor, _changes(tensor)) for tensor in tensors]
        self.is_open = bool(self._counts)
        self.is_torn = False

    def end(self) -> None:
        """Look once, by the thread that may have changed them, or after it; then no more."""
        if self.is_open:
            self.is_torn = any(_changes(tensor) != count for tensor, count in self._counts)
            self._counts = []
            self.is_open = False


def _changes(tensor: torch.Tensor) -> int:
    """How often it was changed in place so far; a change through `.data` is not counted."""
    return tensor._version  # noqa: SLF001 - torch has no other name for it


class CopyThread:
    """A thread that copies tensors; one thread holds for it, another waits for it.

    Attributes:
        held_s: How long `hold` has waited for the copies, seconds; final when they are made.
        is_torn: Whether a copy is not of the moment at which the thread began; the same.
    """

    def __init__(
        self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], *, step: int | None
    ) -> None:
        """Begin to copy.

        `rows` are targets and sources: of one dimension, contiguous, in host memory, without a
        graph. `step` is for faults that a test puts in.
        """
        self.held_s = 0.0
        self.is_torn = False
        self._rows = [(target, _words_of(source)) for target, source in rows]
        self._probes = _probes(source for _, source in self._rows)
        self._held_from: float | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._made = threading.Event()
        threading.Thread(target=self._run, args=(step,), name="hpctrain-copy", daemon=True).start()

    def hold(self) -> None:
        """Wait until the copies are made, or have failed, which `wait` tells."""
        with self._lock:
            if not self._made.is_set() and self._held_from is None:
                self._held_from = clock.monotonic()
        self._made.wait()

    def wait(self) -> None:
        """The same.

        Raises:
            Exception: whatever kept them from being made.
        """
        self._made.wait()
        if self._error is not None:
            raise self._error

    def _run(self, step: int | None) -> None:
        try:
            points.reach("arena.behind", step=step)
            copies = []
            for target, source in self._rows:
                copy = target.view(torch.uint8).numpy().view(source.dtype)
                np.copyto(copy, source)
                copies.append(copy)
            self.is_torn = not np.array_equal(_probes(copies), self._probes)
        except Exception as error:  # noqa: BLE001 - the waiting thread must get it
            self._error = error
        self._rows = []  # a temporary's memory is free again
        with self._lock:
            if self._held_from is not None:
                self.held_s = clock.monotonic() - self._held_from
            self._made.set()


def _words_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The same memory as whole numbers, for numpy does not know all of torch's dtypes."""
    array: NDArray[Any] = tensor.view(WORDS.get(tensor.element_size(), torch.uint8)).numpy()
    return array


def _probes(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """A word of each PROBE_BYTES, and the last one; a copy goes from the first to the last."""
    words = [
        part for array in arrays for part in (array[:: PROBE_BYTES // array.itemsize], array[-1:])
    ]
    return np.concatenate(words)


log = logging.getLogger("hpctrain.checkpoint")

PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""


class CopyTorn(CheckpointError):
    """A copy is not of one moment."""


class HostCopies:
    """Copies that may still be on their way; one thread holds for them, another waits for them."""

    def __init__(
        self,
        done: torch.Event | None = None,
        sources: Sequence[torch.Tensor] = (),
        thread: CopyThread | None = None,
        steady: Sequence[torch.Tensor] = (),
    ) -> None:
        """Collect copies of one device and of the host.

        `done` comes when the device's are made. `sources` are kept until then: the allocator knows
        nothing of the side stream and would hand out a temporary's memory again. `thread` makes the
        host's copies. `steady` must not change before `hold`.
        """
        self._done = done
        self._arrived: torch.Event | None = None
        self._device_s = 0.0
        self._sources = list(sources)
        self._thread = thread
        self._watch = Watch(steady)
        self._has_steady = self._watch.is_open
        self._lock = threading.Lock()

    @property
    def is_awaited(self) -> bool:
        """Whether `hold` is to be called before the next change."""
        return self._watch.is_open

    @property
    def held_s(self) -> float:
        """How long `hold` kept the host, or the device, from going on; final behind `wait`."""
        return self._device_s + (self._thread.held_s if self._thread is not None else 0.0)

    def hold(self) -> None:
        """What is steady may change when this returns.

        The host waits for its own copies. For the device's it does not: what the device is given
        from here on, by this thread, begins when they are made.
        """
        if not self._watch.is_open:
            return
        if self._thread is not None:
            self._thread.hold()
        with self._lock:
            self._watch.end()
            if self._done is not None:
                own = _own_stream(self._done.device)
                self._arrived = own.record_event(_moment(self._done.device))
                own.wait_event(self._done)

    def wait(self) -> bool:
        """Wait until they are made; only then does host memory hold what was copied.

        Returns:
            Whether the device waits as well, from the moment that it has nothing else to do.

        Raises:
            CheckpointError: what was to be steady has changed meanwhile.
        """
        if self._thread is not None:
            self._thread.wait()
        done = self._done
        if done is not None:
            done.synchronize()
            with self._lock:
                self._done, self._sources = None, []
                # One that is not there yet has nothing to wait for any more.
                if self._arrived is not None and self._arrived.query():
                    self._device_s = max(0.0, self._arrived.elapsed_time(done) / 1e3)
        self._refuse_torn()
        return done is not None and not self._has_steady

    def prove(self) -> None:
        """Once more before the copies are believed: a change may not have been counted until now.

        Raises:
            CheckpointError: as `wait`.
        """
        with self._lock:
            self._watch.end()
        self._refuse_torn()

    def _refuse_torn(self) -> None:
        if self._watch.is_torn or (self._thread is not None and self._thread.is_torn):
            raise CopyTorn(
                "weights were changed outside of the optimizer's step while they were copied; this "
                "rank copies them at once from now on; set checkpoint.overlap_copy = false for "
                "this program"
            )


def copy_to_host(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    steady: Sequence[torch.Tensor | None] = (),
    *,
    step: int | None = None,
) -> HostCopies:
    """Copy tensors into host memory; at once from the host's, behind from a device's.

    Args:
        targets: On the CPU, of one dimension, of as many bytes as the sources.
        sources: Of the CPU and of one device. They may change when this returns.
        steady: For each source None; or, where it does not change before `HostCopies.hold`, the
            program's tensor, by which a change would be noticed. Such are copied beside what is
            computed until then: a device's by the device, large ones of the host by a thread.
        step: The checkpoint's, for faults that a test puts in.

    Returns:
        What to wait for before a target is read.
    """
    rows = list(zip(targets, sources, steady or [None] * len(sources), strict=True))
    here = [row for row in rows if row[1].device.type == "cpu"]
    there = [row for row in rows if row[1].device.type != "cpu"]
    behind = [row for row in here if row[2] is not None and row[1].nbytes >= SMALL_BYTES]
    behind_ids = {id(target) for target, _, _ in behind}
    _copy([row for row in here if id(row[0]) not in behind_ids])
    done, resting = _copy_beside(there)
    # A DTensor counts its own changes, and its local tensor those that are made to it alone.
    watched = [tensor for _, source, tensor in behind for tensor in (tensor, source)]
    watched += [tensor for _, _, tensor in resting]
    return HostCopies(
        done,
        [source for _, source, _ in resting],
        CopyThread([row[:2] for row in behind], step=step) if behind else None,
        [tensor for tensor in watched if tensor is not None],
    )


def _copy_beside(rows: Sequence[_Row]) -> tuple[torch.Event | None, Sequence[_Row]]:
    """Have a device copy; when that will be done, and what must not change before."""
    if not rows:
        return None, []
    device = rows[0][1].device
    own, side = _own_stream(device), _side_stream(device)
    side.wait_event(own.record_event())
    if moving := [row for row in rows if row[2] is None]:
        _copy(moving, side)
        own.wait_event(side.record_event())
    resting = [row for row in rows if row[2] is not None]
    _copy(resting, side)
    return side.record_event(_moment(device)), resting


def _copy(rows: Sequence[_Row], stream: torch.Stream | None = None) -> None:
    if not rows:
        return
    targets, sources = [row[0].view(row[1].dtype) for row in rows], [row[1] for row in rows]
    with torch.no_grad(), stream or contextlib.nullcontext():
        torch._foreach_copy_(targets, sources, non_blocking=stream is not None)  # one call for all


def _own_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def _moment(device: torch.device) -> torch.Event:
    """To be recorded; `elapsed_time` tells the milliseconds from one to another."""
    return torch.Event(device, enable_timing=True)


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
