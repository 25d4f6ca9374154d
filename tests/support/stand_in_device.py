"""A device without hardware: does what it is told later, in any order that its streams allow.

Each operation goes into the queue of the thread's stream,
with addresses instead of tensors, as a kernel has them; some are done at once, some when somebody
waits. Memory whose last tensor is gone belongs to the next allocation of its stream: it is filled
with garbage there. So a missing wait, or a temporary that was not kept, is wrong bytes.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

DEVICE = torch.device("meta")
"""What its tensors say; a torch without CUDA runs its guards for this one, and not for a GPU."""
GARBAGE = 171
VIEWS = {torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default}


class StandInDevice:
    """See above; one for a test, put into torch's place by `install`."""

    def __init__(self, seed: int, eagerness: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._lock = threading.RLock()
        self._thread = threading.local()
        self.streams: list[StandInStream] = []
        self.own = StandInStream(self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "Stream", lambda device: StandInStream(self))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _=None: self.current)

    @property
    def current(self) -> StandInStream:
        return getattr(self._thread, "stream", self.own)

    @current.setter
    def current(self, stream: StandInStream) -> None:
        self._thread.stream = stream

    def put(self, tensor: torch.Tensor) -> OnDevice:
        """A copy of a host's tensor on this device."""
        return OnDevice(self, tensor.clone())

    def tell(self, act: Callable[[], Any], stream: StandInStream | None = None) -> None:
        with self._lock:
            (stream or self.current).queue.append((None, act))
            while self._random.random() < self._eagerness and self._advance():
                pass

    def run_until(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            while not is_done():
                if not self._advance():
                    raise AssertionError("the device waits for what nobody has told it")

    def run_alone(self, stream: StandInStream) -> bool:
        """Do what one stream can do while the others stand still; whether that is all it has."""
        with self._lock:
            while stream.queue and _is_ready(stream.queue[0][0]):
                stream.queue.popleft()[1]()
        return not stream.queue

    def _advance(self) -> bool:
        ready = [s for s in self.streams if s.queue and _is_ready(s.queue[0][0])]
        if not ready:
            return False
        self._random.choice(ready).queue.popleft()[1]()
        return True


def _is_ready(event: StandInEvent | None) -> bool:
    return event is None or event.is_done


class StandInEvent:
    def __init__(self, device: StandInDevice) -> None:
        self._stand_in = device
        self.device = DEVICE
        self.is_done = False

    def finish(self) -> None:
        self.is_done = True

    def synchronize(self) -> None:
        self._stand_in.run_until(lambda: self.is_done)


class StandInStream:
    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self.device = DEVICE
        self.queue: deque[tuple[StandInEvent | None, Callable[[], Any]]] = deque()
        device.streams.append(self)

    def record_event(self, event: StandInEvent | None = None) -> StandInEvent:
        event = event or StandInEvent(self._device)
        self._device.tell(event.finish, self)
        return event

    def wait_event(self, event: StandInEvent) -> None:
        self.queue.append((event, lambda: None))

    def __enter__(self) -> Self:
        self._before, self._device.current = self._device.current, self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before


class Block:
    """Memory of the device."""

    def __init__(self, device: StandInDevice, raw: torch.Tensor) -> None:
        self.stream = device.current
        weakref.finalize(self, _free, device, self.stream, raw)


def _free(device: StandInDevice, stream: StandInStream, raw: torch.Tensor) -> None:
    memory = raw.untyped_storage()
    device.tell(lambda: memory.fill_(GARBAGE), stream)


class OnDevice(torch.Tensor):
    """A tensor of a stand-in device."""

    @staticmethod
    def __new__(cls, device: StandInDevice, raw: torch.Tensor, block: Block | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device=DEVICE
        )

    def __init__(
        self, device: StandInDevice, raw: torch.Tensor, block: Block | None = None
    ) -> None:
        self.stand_in, self.raw = device, raw
        self.block = block or Block(device, raw)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        first = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, OnDevice))
        device = first.stand_in
        raw_args, raw_kwargs = tree_map_only(OnDevice, lambda x: x.raw, (args, kwargs or {}))
        if func.is_view or func in VIEWS:
            return cls(device, func(*raw_args, **raw_kwargs), first.block)
        name = func.name()
        if func._schema.is_mutable:
            device.tell(lambda: func(*raw_args, **raw_kwargs))
            if _awaits(name, args, kwargs or {}):
                device.run_until(lambda: not device.current.queue)
            return args[0] if func._schema.returns else None
        if name == "aten::_to_copy" and raw_kwargs.get("device") is not None:
            device.run_until(lambda: not device.current.queue)
            return func(*raw_args, **raw_kwargs)  # to the host
        out = func(*raw_args, **raw_kwargs)  # for its shape; the values may be too old
        if not isinstance(out, torch.Tensor):
            raise NotImplementedError(f"the stand-in device cannot do {name}")
        made = cls(device, torch.empty_like(out))
        target = made.raw
        device.tell(lambda: target.copy_(func(*raw_args, **raw_kwargs)))
        return made


def _awaits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the host waits: a copy from or to it that was not asked to go behind."""
    if "copy_" not in name or kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
        return False
    return not all(isinstance(tensor, OnDevice) for tensor in tree_flatten(args[:2])[0])
