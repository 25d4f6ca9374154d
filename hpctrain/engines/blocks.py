"""Which submodules are a model's repeated blocks? They are sharded and recomputed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The children of the model's largest list of modules of one class; empty without one."""
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        children = list(module.children())
        if len({type(child) for child in children}) == 1 and len(children) > len(best):
            best = children
    return best
