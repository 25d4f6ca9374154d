"""Which submodules are a model's repeated blocks? They are sharded and recomputed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The children of the list of modules of one class that holds most parameters; or none.

    A list inside another (a block's experts) holds less than what it is in, however long it is.
    Wrappers around each block (recomputation, sharding) are the blocks then.
    """
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        # what a pipeline has taken out of a list does not count
        children = [child for child in module.children() if not isinstance(child, nn.Identity)]
        size = sum(parameter.numel() for parameter in module.parameters())
        if len({type(child) for child in children}) == 1 and size > most:
            best, most = children, size
    return best
