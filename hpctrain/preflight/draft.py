"""The lines of a preset that speak of nodes, drafted from one node's facts. Pure.

tests/unit/preflight/test_probe.py holds the promises.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpctrain.preflight.checks import ACTIVE, VIRTUAL

if TYPE_CHECKING:
    from hpctrain.preflight.facts import NodeFacts

EFA, CXI, ROCE, IB, TCP = "efa", "slingshot", "roce", "ib", "tcp"


def draft(facts: NodeFacts) -> str:
    """TOML of [network], [expect] and [storage] as this node has them, to be read and corrected.

    What could not be read is left out, and said so in a comment.
    """
    lines = [f"# As found on {facts.node}; hold it against a second node and the site's pages."]
    lines += [f"# unknown: {name} ({why})" for name, why in facts.unreadable.items()]
    for table, values in (("network", _network(facts)), ("expect", _expect(facts))):
        told_values = {key: value for key, value in values.items() if value not in (None, [], "")}
        if told_values:
            lines += ["", f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in told_values.items())]
    return "\n".join(lines) + "\n"


def _network(facts: NodeFacts) -> dict[str, Any]:
    usable = [
        one.name
        for one in facts.interfaces or []
        if one.up and one.addresses and not one.name.startswith(VIRTUAL)
    ]
    fast = [name for name in usable if name.startswith(("ib", "hsn", "rdma"))]
    ports = [port for port in facts.ports or [] if port.state == ACTIVE]
    hcas = list(dict.fromkeys(port.hca for port in ports if port.hca not in (facts.efa or [])))
    layers = {port.link_layer for port in ports}
    rates = {port.rate_gbps for port in ports}
    return {
        "kind": _kind(facts, layers),
        "socket_ifnames": fast or usable,
        "hcas": hcas,
        "rate_gbps": int(min(r for r in rates if r)) if any(rates) and len(rates) == 1 else None,
        "nics_per_node": len(hcas) or len(facts.efa or []) or len(facts.cxi or []) or None,
        "link_layer": next(iter(layers)) if len(layers) == 1 and hcas else "",
    }


def _kind(facts: NodeFacts, layers: set[str]) -> str:
    """The fabric, "" where several could be meant or nothing could be read."""
    if facts.efa:
        return EFA
    if facts.cxi:
        return CXI
    if facts.ports is None or len(layers) > 1:
        return ""
    return {"InfiniBand": IB, "Ethernet": ROCE}.get(next(iter(layers), ""), TCP)


def _expect(facts: NodeFacts) -> dict[str, Any]:
    gpus = facts.gpus or []
    links = {gpu.nvlinks for gpu in gpus if gpu.nvlinks}
    return {
        "driver_min": gpus[0].driver if gpus else "",
        "nvlinks": next(iter(links)) if len(links) == 1 else None,
        "memlock": facts.memlock,
        "shm_gib_min": round(facts.shm_gib * 0.9, 1) if facts.shm_gib else None,
        "nccl_conf": None if facts.nccl_conf is None else bool(facts.nccl_conf),
    }
