"""A sick node, in words: `no-interface:n2,name=eth0; skew:n3,seconds=5`.

HPCTRAIN_NODE_FAULTS makes a preflight see on one node what is not there, so that what it does about
it can be tried on machines that are well. Faults are separated by `;`. docs/preflight.md is the
user's page, tests/unit/preflight/test_node_faults.py the promises.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.base.env import HPCTRAIN_NODE_FAULTS
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


ACTIONS: dict[str, tuple[str, Mapping[str, Callable[[str], object]]]] = {
    "no-interface": ("one network interface is not there", {"name": str}),
    "interface-down": ("one network interface is there and down", {"name": str}),
    "no-shared": ("the shared directory is not mounted", {}),
    "skew": ("the clock is ahead by so much", {"seconds": float}),
    "version": ("another version of something", {"of": str, "is": str}),
    "slow": ("every collective takes so much longer", {"seconds": float}),
    "gemm": ("a matrix product comes out different", {}),
    "gpus": ("so many GPUs are there", {"count": int}),
    "silent": ("the node never says a word", {}),
}
"""Word to what it does and the keys that it takes, all of which must be given."""


@dataclass(frozen=True)
class NodeFault:
    """One item of the list."""

    action: str
    node: str
    keys: dict[str, object] = field(default_factory=dict)


def parse(text: str, *, origin: str = HPCTRAIN_NODE_FAULTS) -> list[NodeFault]:
    """Read a list of faults.

    Raises:
        UsageError: a word that there is not, or a key that is missing, not known or cannot be read.
    """
    items = [item.strip() for item in text.split(";")]
    return [_read(item, f"{origin}: {item}") for item in items if item]


def of_node(text: str, node: str) -> dict[str, NodeFault]:
    """The faults of one node by their action.

    Raises:
        UsageError: see `parse`.
    """
    return {fault.action: fault for fault in parse(text) if fault.node == node}


def _read(item: str, where: str) -> NodeFault:
    words = [word.strip() for word in item.split(",")]
    action, sign, node = words[0].partition(":")
    if action not in ACTIONS:
        near = difflib.get_close_matches(action, ACTIONS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ACTIONS)}"
        raise UsageError(f"{where}: {action} is not a fault of a node; {hint}")
    if not sign or not node:
        raise UsageError(f"{where}: the node is missing; write {action}:NODE")
    takes = ACTIONS[action][1]
    keys: dict[str, object] = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in takes:
            raise UsageError(f"{where}: {action} has no {name}=; it takes {', '.join(takes)}")
        try:
            keys[name] = takes[name](value)
        except ValueError:
            raise UsageError(f"{where}: {name}={value} is not a number") from None
    if missing := [name for name in takes if name not in keys]:
        raise UsageError(f"{where}: {action} needs {missing[0]}=")
    return NodeFault(action, node, keys)
