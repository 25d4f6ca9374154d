"""Copies of tensors in host memory, made by a thread beside what training computes next.

    training:   update | small ones | forward, backward | (waits) | update | ...
    thread:                         | copies .......... |
    save's thread:                                      | the writer process reads them

The copy must be of one moment, and is made over many: what is copied may not change before `hold`
has returned. That it has not is proved two ways. Torch counts changes in place, whoever makes them
(`Watch`). A change through `.data`, or of the bare memory, is not counted; one of whole tensors
shows in a word of each PROBE_BYTES, taken before and compared with the copy. One of a few elements
by such a way is not seen.

Copied by numpy, without Python's lock and by one thread: torch's copy would wake as many threads
of its own as training has. tests/unit/checkpoint/test_host_copy.py and
tests/engines/test_hidden_copies.py hold the promises.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.core.base import clock
from hpctrain.core.testing import points

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

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
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
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
