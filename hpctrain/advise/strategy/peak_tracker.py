"""The exact peak of the memory that tensors take, byte by byte, on any device and on none.

Counts every storage that an operator makes from its birth to its end, also under torch's
FakeTensorMode, where nothing is computed and no memory taken. What an allocator adds to that (its
rounding, what it keeps, the workspaces of kernels) is not in it. A test holds it to tensors whose
sizes are known: tests/engines/test_strategy_measured.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between entering and leaving it.

    Attributes:
        live_bytes: What tensors take now.
        peak_bytes: The most since `restart`.
        device: Type of the device whose tensors count; empty for all.
        phase: What storages that are made now belong to.
        at_peak: Bytes of each phase's storages at the peak.
    """

    def __init__(self, *, detailed: bool = False) -> None:
        """With `detailed` also `kinds`: at the peak, count of storages by phase, operator, size."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.device = ""
        self.phase = "start"
        self.at_peak: Counter[str] = Counter()
        self.kinds: Counter[tuple[str, str, int]] = Counter()
        self._detailed = detailed
        self._live: dict[int, tuple[int, str, str]] = {}
        self._by_phase: Counter[str] = Counter()
        self._resize = torch.UntypedStorage.resize_

    def restart(self) -> None:
        """Forget the peak so far: the most from now on counts."""
        self.peak_bytes = 0
        self._look("")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor, str(func))
        return made

    def count(self, tensor: torch.Tensor, operator: str = "") -> None:
        """Count a tensor's storage, unless it is counted already."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local() if tensor.requires_grad is False else tensor._local_tensor  # noqa: SLF001 - to_local is recorded by autograd
        if tensor.device.type == "meta" or self.device not in {"", tensor.device.type}:
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._live:
            return
        self._live[id(storage)] = (0, self.phase, operator)
        weakref.finalize(storage, self._drop, id(storage))
        self._change(id(storage), storage.nbytes(), operator)

    def _change(self, key: int, nbytes: int, operator: str) -> None:
        before, phase, made_by = self._live[key]
        self._live[key] = (nbytes, phase, made_by)
        self._by_phase[phase] += nbytes - before
        self.live_bytes += nbytes - before
        self._look(operator)

    def _look(self, operator: str) -> None:
        if self.live_bytes <= self.peak_bytes:
            return
        self.peak_bytes = self.live_bytes
        self.at_peak = +self._by_phase
        if self._detailed:
            self.kinds = Counter((phase, op, n) for n, phase, op in self._live.values())
            self.kinds[("now", operator, 0)] += 1

    def _drop(self, key: int) -> None:
        nbytes, phase, _ = self._live.pop(key)
        self._by_phase[phase] -= nbytes
        self.live_bytes -= nbytes

    def __enter__(self) -> Self:
        """Begin; a storage that FSDP2 empties and fills again is followed too."""
        original, tracker = self._resize, self

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            done = original(storage, nbytes)
            if id(storage) in tracker._live:
                tracker._change(id(storage), nbytes, "resize_")
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
