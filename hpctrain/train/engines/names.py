"""Names of a model's parameters and buffers as they are without wrappers around its modules.

A wrapper (DDP, `torch.compile`, recomputation) holds the module in an attribute of its own. Which
module is a wrapper is known from its class, never from its name: a submodule that the program calls
`module` keeps its name. tests/engines/test_names_of_state.py holds the promises.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
}
"""Classes of wrappers, and the attribute that holds the module. Subclasses are wrappers too."""
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


class Place(NamedTuple):
    """Where a model holds a tensor.

    Attributes:
        name: The tensor's full name.
        module: The module that holds it.
        key: Its name in the module.
    """

    name: str
    module: nn.Module
    key: str


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module and the stem of its tensors' names, such as `blocks.0.`; a shared one each time.

    Raises:
        CheckpointError: FSDP1 has made flat parameters of the program's own.
    """
    pending = [("", model)]
    while pending:
        stem, module = pending.pop()
        kind: Any = type(module)
        held = _wrapped(kind)
        yield stem, module
        children = [
            (stem if name == held else f"{stem}{name}.", child)
            for name, child in module._modules.items()  # noqa: SLF001 - as torch's own walks
            if child is not None
        ]
        pending.extend(reversed(children))


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter by its name; one that is tied comes under each of its names."""
    for stem, module in modules(model):
        for key, parameter in module._parameters.items():  # noqa: SLF001 - the same
            if parameter is not None:
                yield stem + key, parameter


def buffers(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor | None]]:
    """Each buffer that belongs to the state, None where the program has not made it yet."""
    for stem, module in modules(model):
        for key, buffer in module._buffers.items():  # noqa: SLF001 - the same
            if key not in module._non_persistent_buffers_set:  # noqa: SLF001 - the same
                yield Place(stem + key, module, key), buffer


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is a wrapper of a library, whose attributes are that library's."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" in WRAPPERS


@functools.cache
def _wrapped(kind: type) -> str:
    """The attribute in which a wrapper's class holds the module; "" where it is no wrapper."""
    for base in kind.__mro__:
        path = f"{base.__module__}.{base.__qualname__}"
        if path == FSDP1:
            raise CheckpointError(
                "the model is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters "
                "have no names of their own; use torch's fully_shard or run.parallelize"
            )
        if path in WRAPPERS:
            return WRAPPERS[path]
    return ""
