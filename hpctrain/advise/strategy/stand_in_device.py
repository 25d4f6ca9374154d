"""A device of which no machine has one: tensors that would lie on a GPU, told from the host's.

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
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.utils import backend_registration

from hpctrain.train.engines import experts

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class _Module:
    """What torch asks of `torch.<device>`."""

    Stream = Event = _NoStream

    def is_available(self) -> bool:
        """It stands in."""
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        """This rank's."""
        return 1

    def current_device(self) -> int:
        """The only one."""
        return 0

    def set_device(self, _device: object) -> None:
        """There is one."""

    def manual_seed_all(self, _seed: int) -> None:
        """No value is drawn."""

    def current_stream(self, _device: object = None) -> _NoStream:
        """There is one."""
        return _NoStream()

    def stream(self, _stream: object) -> Any:
        """Work goes nowhere else."""
        return contextlib.nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Of autocast."""
        return [torch.bfloat16, torch.float16]


def stand_in() -> torch.device:
    """Register the device, once in a process, and name it."""
    if not hasattr(torch, NAME):
        backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())  # noqa: SLF001 - what torch has for this
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


class _Exchange(torch.autograd.Function):
    """What travels comes as another tensor, forwards and backwards."""

    @staticmethod
    def forward(_context: Any, tokens: torch.Tensor) -> torch.Tensor:
        """As many as go."""
        return tokens.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The same of their gradients."""
        return gradients[0].clone()


@contextlib.contextmanager
def even_exchange() -> Iterator[None]:
    """Tokens of the other ranks come as this rank's go."""
    own: Any = experts
    counts, tokens = own.all_to_all, own.all_to_all_with_gradient

    def same(given: torch.Tensor, *_sizes: Any) -> torch.Tensor:
        return given.clone()

    def travelled(given: torch.Tensor, *_sizes: Any) -> torch.Tensor:
        out: torch.Tensor = _Exchange.apply(given)  # type: ignore[no-untyped-call]
        return out

    own.all_to_all, own.all_to_all_with_gradient = same, travelled
    try:
        yield
    finally:
        own.all_to_all, own.all_to_all_with_gradient = counts, tokens
