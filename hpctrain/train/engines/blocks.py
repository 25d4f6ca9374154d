"""A model's repeated blocks, and what is done block by block: compiling and recomputation.

tests/engines/test_recompute_compile.py holds the promises.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpctrain.core.torch_private import checkpoint_wrapped
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


INSTEAD = "or set engine.compile = aot_eager or no"
KEPT = frozenset(
    (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten._grouped_mm",
        "aten._scaled_mm",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
        "flash_attn._flash_attn_forward",
        "flash_attn._flash_attn_varlen_forward",
        "aten.topk",
        "aten.sort",
        "aten.bincount",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.all_reduce",
        "_c10d_functional.reduce_scatter_tensor",
    )
)
"""What selective recomputation keeps, by torch's names: what costs the most (matrix products,
attention, sums over the ranks of `tp`, tokens on their way), and which expert a token goes to: a
rank that decided it again and otherwise would send what the others do not expect."""
CACHES = frozenset({"past_key_values", "past_key_value", "layer_past"})
"""What Hugging Face's blocks call the cache that they are given; since transformers 5.24 also
`cache`, but that name may mean anything in a block of somebody else's."""
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The blocks of the list that holds most parameters: a decoder's layers; or none.

    A list inside another (a block's experts) holds less than what it is in, however long it is.
    Wrappers around each block (recomputation, sharding) are the blocks then.
    """
    best: Sequence[nn.Module] = []
    most = 0
    for module in model.modules():
        size = _size(module) if isinstance(module, _LISTS) else 0
        if size > most and (blocks := _blocks_of(module)):
            best, most = blocks, size
    return best


def every_block(model: nn.Module) -> list[nn.Module]:
    """The blocks of all lists, as of an encoder and a decoder; a block's own lists do not count."""
    return list(_outermost(model))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if blocks := _blocks_of(module):
        yield from blocks
        return
    for child in module.children():
        yield from _outermost(child)


def _blocks_of(module: nn.Module) -> Sequence[nn.Module]:
    """Return the blocks that a list of modules holds; none if it is no list of blocks.

    Modules of one class are blocks. Those of several are a hybrid model's layers in a ModuleList
    only: a Sequential may be a whole network, a ModuleDict its parts by name.
    """
    if not isinstance(module, _LISTS):
        return []
    # what a pipeline has taken out of a list does not count
    children = [child for child in module.children() if not isinstance(child, nn.Identity)]
    size = _size(module)
    if not children or not size or (isinstance(module, nn.Sequential) and len(module) == 1):
        return []
    if len({type(child) for child in children}) == 1:
        return children
    if not isinstance(module, nn.ModuleList):
        return []
    # An encoder and a decoder in one list are no layers: what repeats lies further inside.
    inner = (
        _size(part)
        for child in children
        for part in child.modules()
        if isinstance(part, nn.ModuleList)
    )
    return children if max(inner, default=0) * 2 < size else []


def find_ends(model: nn.Module) -> tuple[nn.Module | None, list[nn.Module]]:
    """The input embedding and what is behind the blocks, as far as each can be gathered by itself.

    Not so what shares a parameter with another part of the model, as a tied head does. Nor an
    embedding without a matrix of its own length behind the blocks: a model that has no such head
    may take the embedding's weights for it, outside of the embedding's own forward pass.

    Returns:
        The embedding or None, and what follows the blocks: a final norm and a head, or nothing
        where that has no matrix.
    """
    blocks = {id(block) for block in every_block(model)}
    parts = list(_parts(model, blocks))
    places = [place for place, part in enumerate(parts) if id(part) in blocks]
    if not places:
        return None, []
    uses = _uses(model)
    last = [part for part in parts[places[-1] + 1 :] if _uses(part).items() <= uses.items()]
    last = [part for part in last if _size(part)]
    lengths = {
        parameter.shape[0] for part in last for parameter in part.parameters() if parameter.ndim > 1
    }
    if not lengths:
        return None, []
    for part in parts[: places[0]]:
        tables = (table for table in part.modules() if isinstance(table, nn.Embedding))
        if _uses(part).items() <= uses.items() and any(t.num_embeddings in lengths for t in tables):
            return part, last
    return None, last


def _parts(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """The blocks and the largest modules without any, in the order of registration."""
    for child in module.children():
        if id(child) in blocks or blocks.isdisjoint(map(id, child.modules())):
            yield child
        else:
            yield from _parts(child, blocks)


def _uses(module: nn.Module) -> Counter[int]:
    """In how many places of a module each parameter is."""
    return Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def compile_blocks(
    blocks: Iterable[nn.Module],
    backend: str,
    device: torch.device,
    *,
    inside_hooks: bool = False,
) -> None:
    """Have blocks compiled when they are first called. In place; not collective.

    Blocks of one class share what is compiled. With `inside_hooks`, a block's own hooks are left
    out of it.

    Raises:
        UsageError: this machine lacks what the backend builds with.
    """
    if backend == "inductor" and device.type == "cpu":
        _need_compiler()
    for block in blocks:
        if inside_hooks:
            block.forward = torch.compile(block.forward, backend=backend)
        else:
            # A graph for each shape: with sizes left open, parts of Hugging Face's attention under
            # tensor parallelism end in torch's RecursionError.
            is_cut = any(isinstance(weight, DTensor) for weight in block.parameters())
            block.compile(backend=backend, dynamic=False if is_cut else None)


def _need_compiler() -> None:
    """Torch would say so in the first step, at the end of a long stack trace, on every rank."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise UsageError(
            f"engine.compile inductor builds its kernels with {compiler} (CXX, or else g++), which "
            f"is not on this node's PATH; load a compiler module in slurm.setup, {INSTEAD}"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise UsageError(
            f"engine.compile inductor builds its kernels with Python's headers, and {header} is "
            f"not there; use a Python that was installed with them, {INSTEAD}"
        )


def recompute_blocks(model: nn.Module, how: str) -> None:
    """Have each block of a model compute its forward pass again in the backward pass. In place.

    Each block is wrapped, before it is compiled and sharded; parameters stay the same ones. Random
    numbers are drawn again as they were. `how` is "full" (keep a block's inputs alone) or
    "selective" (also the results in `KEPT`).
    """
    every = every_block(model)
    for block in every:
        block.register_forward_pre_hook(_without_cache, with_kwargs=True)
    blocks = {id(block) for block in every}
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = _contexts
    checkpoint_wrapped(model, lambda module: id(module) in blocks, **options)


def _without_cache(_block: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A cache of keys and values would be filled a second time as a block is recomputed."""
    if not torch.is_grad_enabled():
        return args, kwargs
    return args, {
        name: None if name in CACHES or _is_cache(value) else value
        for name, value in kwargs.items()
    }


def _is_cache(value: object) -> bool:
    """Whether it is one of transformers' caches, told without an import of it."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def is_kept(operator: Any) -> bool:
    """Whether an operator is one of `KEPT`, in any of its overloads."""
    name = str(operator)
    return name in KEPT or name.rpartition(".")[0] in KEPT
