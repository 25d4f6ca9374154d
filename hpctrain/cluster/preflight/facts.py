"""The facts of one node, which nodes differ, and the preset lines drafted from them. Pure.

None is unknown, not "none there". Rehearsals put faults in (`testing/node_faults.py`).
tests/unit/preflight/test_checks.py, test_node_faults.py and test_probe.py hold the promises.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from hpctrain.core.testing.node_faults import NodeFault

    V = TypeVar("V", bound=Hashable)

VIRTUAL = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "tun", "tap", "ifb", "dummy")
"""Beginnings of names of interfaces that lead to no other node."""
ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    up: bool
    addresses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Port:
    """One port of an InfiniBand or RoCE adapter."""

    hca: str
    port: int
    state: str
    """"ACTIVE" where it works."""
    rate_gbps: float | None = None
    link_layer: str = ""
    """"InfiniBand" or "Ethernet"."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its vendor's tool tells it."""

    index: int
    name: str
    driver: str = ""
    uncorrected: int | None = None
    """Uncorrected memory errors since boot."""
    nvlinks: int | None = None
    """NVLink connections that are up."""


@dataclass(frozen=True)
class NodeFacts:
    """One node, as it was found.

    Attributes:
        node: Its name in the job.
        host: What the node calls itself.
        interfaces: Network interfaces but the loopback.
        ports: Ports of adapters under /sys/class/infiniband.
        efa: Names of EFA devices.
        cxi: Names of Slingshot devices.
        gpus: GPUs.
        shm_gib: Size of /dev/shm.
        memlock: "unlimited" or KiB, as `ulimit -l`.
        nofile: Files that a process may have open.
        local: Folders on the node's own disk to free GiB.
        versions: What must be the same everywhere: python, torch, nccl, cuda, hpctrain.
        nccl_conf: Variables of /etc/nccl.conf; empty where there is no such file.
        resolves_itself: Whether the node's own name turns into an address there.
        unreadable: What could not be read, to why.
    """

    node: str
    host: str = ""
    interfaces: list[Interface] | None = None
    ports: list[Port] | None = None
    efa: list[str] | None = None
    cxi: list[str] | None = None
    gpus: list[Gpu] | None = None
    shm_gib: float | None = None
    memlock: str | None = None
    nofile: int | None = None
    local: dict[str, float] | None = None
    versions: dict[str, str] | None = None
    nccl_conf: dict[str, str] | None = None
    resolves_itself: bool | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> NodeFacts:
        """Back from `plain`; a key that this version does not know is left out.

        Another version's node must be named for its version, not end the preflight.
        """
        fields = {k: v for k, v in raw.items() if k in NodeFacts.__dataclass_fields__}
        for name, kind in (("interfaces", Interface), ("ports", Port), ("gpus", Gpu)):
            if fields.get(name) is not None:
                fields[name] = [kind(**one) for one in fields[name]]
        return NodeFacts(**fields)


def by_value(values: Mapping[str, V]) -> dict[V, list[str]]:
    """Each value to the nodes that have it, the most frequent first."""
    nodes_of: dict[V, list[str]] = {}
    for node, value in values.items():
        nodes_of.setdefault(value, []).append(node)
    return dict(sorted(nodes_of.items(), key=lambda pair: -len(pair[1])))


def outliers(values: Mapping[str, V]) -> tuple[V | None, dict[str, V]]:
    """What more than half of the nodes have, and the nodes that have something else.

    Returns:
        The value and the others; (None, {}) where no value has the majority: of two nodes that
        differ, nobody can say which one is wrong.
    """
    groups = by_value(values)
    if not groups:
        return None, {}
    usual, nodes = next(iter(groups.items()))
    if len(nodes) * 2 <= len(values):
        return None, {}
    return usual, {node: value for node, value in values.items() if value != usual}


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
