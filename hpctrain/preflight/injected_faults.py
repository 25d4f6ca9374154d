"""Faults put on purpose into a node's facts, for rehearsals (`testing/node_faults.py`).

tests/unit/preflight/test_node_faults.py holds the promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpctrain.preflight.facts import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.preflight.facts import NodeFacts
    from hpctrain.testing.node_faults import NodeFault


def changed(facts: NodeFacts, faults: Mapping[str, NodeFault]) -> NodeFacts:
    """The node's facts as the faults have them."""
    new_values: dict[str, Any] = {}
    interfaces = facts.interfaces or []
    if gone := faults.get("no-interface"):
        interfaces = [one for one in interfaces if one.name != gone.keys["name"]]
    if down := faults.get("interface-down"):
        interfaces = [
            replace(one, up=False) if one.name == down.keys["name"] else one for one in interfaces
        ]
    if interfaces != facts.interfaces:
        new_values["interfaces"] = interfaces
    if version := faults.get("version"):
        new_values["versions"] = {
            **(facts.versions or {}),
            str(version.keys["of"]): str(version.keys["is"]),
        }
    if gpus := faults.get("gpus"):
        count = int(str(gpus.keys["count"]))
        new_values["gpus"] = [Gpu(index, "rehearsed") for index in range(count)]
    return replace(facts, **new_values)


def seconds(faults: Mapping[str, NodeFault], action: str) -> float:
    """The `seconds=` of a fault; 0 without it."""
    fault = faults.get(action)
    return float(str(fault.keys["seconds"])) if fault else 0.0
