"""A device of which no machine has one, and the exact peak of the memory that tensors take.

Offload moves tensors between a GPU and its host, and a build of torch without GPUs knows one place
alone. Torch lets Python register a device of its own (PrivateUse1); under FakeTensorMode it needs
no kernels, so FSDP2 runs on it as on a GPU: shards wait on the host, are copied over, gathered, and
gradients are copied back. Streams do nothing: nothing overlaps, and nothing is freed late. Where a
GPU has one kernel and torch takes several operators without it, the device gets one too
(`ONE_KERNEL`): what is between these operators was counted else.
tests/engines/test_strategy_measured.py holds it against the same step without offload.
"""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Iterator


class PeakTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Between entering and leaving it.

    Attributes:
        live_bytes: What tensors take now.
        peak_bytes: The most since `restart`.
        device: Type of the device whose tensors count; empty for all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.device = ""
        self._live: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def restart(self) -> None:
        """Forget the peak so far: the most from now on counts."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return made

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local() if tensor.requires_grad is False else tensor._local_tensor  # noqa: SLF001 - to_local is recorded by autograd
        if tensor.device.type == "meta" or self.device not in {"", tensor.device.type}:
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._live:
            return
        self._live[id(storage)] = 0
        weakref.finalize(storage, self._drop, id(storage))
        self._change(id(storage), storage.nbytes())

    def _change(self, key: int, nbytes: int) -> None:
        self.live_bytes += nbytes - self._live[key]
        self._live[key] = nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key)

    def __enter__(self) -> Self:
        """Begin; a storage that FSDP2 empties and fills again is followed too."""
        original, tracker = self._resize, self

        def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
            done = original(storage, nbytes)
            if id(storage) in tracker._live:
                tracker._change(id(storage), nbytes)
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]


NAME = "standin"
"""Of the device's type."""
ONE_KERNEL = ("silu_backward", "mish_backward")
"""Operators that torch puts together from others on a device without a kernel for them; a GPU and a
CPU have one. Put together, SiLU's takes four tensors of an MLP's width that no GPU takes."""
_KERNELS: list[torch.library.Library] = []
"""Torch keeps what is registered as long as this."""


class _NoStream:
    """A stream or an event of a device that computes nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Of any priority."""

    def _nothing(self, *_args: object) -> Self:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


_MODULE = SimpleNamespace(
    Stream=_NoStream,
    Event=_NoStream,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda _device: None,
    manual_seed_all=lambda _seed: None,
    current_stream=lambda _device=None: _NoStream(),
    stream=lambda _stream: contextlib.nullcontext(),
    _is_in_bad_fork=lambda: False,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)
"""What torch asks of `torch.<device>`: there is one, this rank's."""


def stand_in() -> torch.device:
    """Register the device, once in a process, and name it."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME, _MODULE)  # noqa: SLF001 - what torch has for this
        kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name in ONE_KERNEL:
            kernels.impl(name, _like_the_gradient, "PrivateUse1")
        _KERNELS.append(kernels)
    return torch.device(NAME, 0)


def _like_the_gradient(gradient: torch.Tensor, _input: torch.Tensor) -> torch.Tensor:
    """By its shape alone; FakeTensorMode asks for no more than that it is there."""
    return torch.empty_like(gradient)


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Attention without a square of the sequence, as a GPU's kernel has it; torch would take one.

    It is the CPU's operator, by shapes alone: inputs, output and a number for each position.
    """
    original = torch.nn.functional.scaled_dot_product_attention

    def attend(query: Any, key: Any, value: Any, *_mask: Any, **given: Any) -> torch.Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
        out: torch.Tensor = flash(query, key, value, 0.0, bool(given.get("is_causal")))[0]
        return out

    torch.nn.functional.scaled_dot_product_attention = attend
    # Pinned memory is the host's, and no fake tensor can be pinned.
    available = torch.accelerator.is_available
    torch.accelerator.is_available = lambda: False
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
        torch.accelerator.is_available = available


def fill(model: nn.Module, device: torch.device) -> None:
    """Give a model of the meta device its memory: weights on the host, tables on `device`."""
    made = dict[int, nn.Parameter]()
    for module in model.modules():
        for name, weight in list(module._parameters.items()):  # noqa: SLF001 - as to_empty does it
            if weight is not None and weight.is_meta:
                if id(weight) not in made:  # a tied one stays one
                    own = torch.empty_like(weight, device="cpu")
                    made[id(weight)] = nn.Parameter(own, requires_grad=weight.requires_grad)
                module._parameters[name] = made[id(weight)]  # noqa: SLF001
        for name, table in list(module._buffers.items()):  # noqa: SLF001
            if table is not None and table.is_meta:
                module._buffers[name] = torch.empty_like(table, device=device)  # noqa: SLF001
