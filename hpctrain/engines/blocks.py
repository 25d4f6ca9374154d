"""Which submodules are a model's repeated blocks? They are sharded and recomputed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if blocks := _blocks_of(module):
        yield from blocks
        return
    for child in module.children():
        yield from _outermost(child)


def _blocks_of(module: nn.Module) -> Sequence[nn.Module]:
    """The blocks that a list holds; none where it is no list of blocks.

    Modules of one class are. Those of several classes are layers of a hybrid model in a
    ModuleList; in a Sequential they may be a whole network, in a ModuleDict its parts by name.
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


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
