"""Import from a file of torch.save: a state dict, or one beside an optimizer's.

The promises are held by tests/unit/checkpoint/exchange/test_exchange_import.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.exchange.contents import Contents, carried
from hpctrain.checkpoint.exchange.to_torch import LAYOUT, LAYOUT_KEY
from hpctrain.checkpoint.exchange.untrusted import leaves_of, load
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

STEPS = ("step", "global_step", "iteration")


def read(source: Path) -> Contents:
    """What the file holds; its tensors stay on disk until they are asked for.

    Raises:
        CheckpointError: it is not such a file, or wants to run something.
    """
    tree = load(source)
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{source} holds a {type(tree).__name__}, not a dictionary of tensors by name"
        )
    contents = Contents("torch", source, leaves_of(tree, source))
    contents.shared = _shared(tree)
    step = next((tree[key] for key in STEPS if isinstance(tree.get(key), int)), None)
    contents.step = None if isinstance(step, bool) else step
    if tree.get(LAYOUT_KEY) == LAYOUT:
        try:
            contents.leaves = leaves_of(_flat(tree), source)
            contents.state = carried(tree.get("state", {}), str(source))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{source} is not hpctrain's own export: {error}") from error
        contents.full_names = True
    return contents


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Our own export by full names. What is no tensor is in `others` once more, as it was saved."""
    flat = {f"model.{name}": tensor for name, tensor in tree["model"].items()}
    for name, values in tree["optimizer"].items():
        flat |= {
            f"optim.{name}.{key}": value
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
    flat |= tree.get("others", {})
    return flat


def _shared(tree: dict[str, Any]) -> frozenset[str]:
    """Tensors that lie where an earlier one lies, as tied weights do."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    again = set()
    for leaf, tensor in _tensors(tree, ()):
        has_memory = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not has_memory or not tensor.numel():
            continue
        first = seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), leaf)
        if first != leaf:
            again.add(leaf)
    return frozenset(again)


def _tensors(value: Any, path: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(".".join(path), value)]
    if isinstance(value, dict):
        return [one for k, inner in value.items() for one in _tensors(inner, (*path, str(k)))]
    return []
