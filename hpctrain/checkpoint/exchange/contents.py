"""What was found in a source, before it has our names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.checkpoint.exchange.tensors import Tensor

CARRIED = ("data", "rng", "extra", "world_size", "mesh")
"""Fields of a manifest that go with a checkpoint of our own."""


@dataclass(frozen=True)
class Leaf:
    """One value in nested dictionaries: a tensor, or something else.

    Attributes:
        path: The keys that lead to it.
        tensor: Set where it is one.
        load: Gives the value where it is none; refuses what is no plain data.
    """

    path: tuple[str | int, ...]
    tensor: Tensor | None = None
    load: Callable[[], Any] = lambda: None


@dataclass
class Contents:
    """A source that was opened.

    Attributes:
        kind: As `--from` calls it.
        source: Where it lies.
        leaves: Every value in it.
        full_names: Whether the names are ours already (``model.``, ``optim.``, ...).
        step: The step that the source says it is of.
        state: Of a checkpoint of our own: fields of its manifest, see CARRIED.
        notes: What the user should know.
        shared: Names of tensors that share their memory with one before them.
    """

    kind: str
    source: Path
    leaves: list[Leaf]
    full_names: bool = False
    step: int | None = None
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    shared: frozenset[str] = frozenset()


def carried(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a manifest that an import takes over, each of the kind it must have.

    Raises:
        CheckpointError: one of them is something else.
    """
    kinds: dict[str, Any] = {
        "data": dict, "rng": (dict, type(None)), "extra": dict,
        "world_size": int, "mesh": dict,
    }  # fmt: skip
    state = {name: raw[name] for name in CARRIED if name in raw}
    for name, value in state.items():
        if not isinstance(value, kinds[name]):
            raise CheckpointError(f"{where} has {name} = {json.dumps(value)[:80]}, not ours")
    return state
