"""Checks of the network interfaces and adapters of all nodes. Pure.

tests/unit/preflight/test_checks.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.preflight.facts import by_value
from hpctrain.preflight.report import FAIL, OK, WARN, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.preflight.checks import Expected
    from hpctrain.preflight.facts import NodeFacts, Port

VIRTUAL = ("docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "tun", "tap", "ifb", "dummy")
"""Beginnings of names of interfaces that lead to no other node."""
ACTIVE = "ACTIVE"
CHECK_IFS, CHECK_HCAS = "interfaces", "adapters"


def check_interfaces(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Those that the site names are up with an address; else all nodes have the same ones."""
    if not expected.socket_ifnames:
        usable = {one.node: _usable(one) for one in facts}
        return _alike(CHECK_IFS, usable, "interface", "up with an address")
    results = []
    for name in expected.socket_ifnames:
        wrong = {one.node: why for one in facts if (why := _lacks(one, name))}
        results += [
            Result(
                CHECK_IFS, FAIL, f"{name} {why}", nodes,
                "ranks of this node cannot reach the others; tell your admins",
            )
            for why, nodes in by_value(wrong).items()
        ]  # fmt: skip
    wanted = ", ".join(expected.socket_ifnames)
    return results or [Result(CHECK_IFS, OK, f"{wanted}: up with an address on all nodes")]


def _lacks(facts: NodeFacts, name: str) -> str:
    """What is wrong with an interface, "" where nothing is."""
    interface = next((one for one in facts.interfaces or [] if one.name == name), None)
    if interface is None:
        return "is not there"
    if not interface.up:
        return "is down"
    return "" if interface.addresses else "has no address"


def _usable(facts: NodeFacts) -> frozenset[str]:
    return frozenset(
        one.name
        for one in facts.interfaces or []
        if one.up and one.addresses and not one.name.startswith(VIRTUAL)
    )


def check_ports(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Those that the site names are active, fast enough and of one kind; else all nodes alike."""
    if not expected.hcas:
        active = {
            node_facts.node: frozenset(_name(p) for p in _active(node_facts))
            for node_facts in facts
        }
        results = _alike(CHECK_HCAS, active, "adapter port", "active")
        mixed = [
            node_facts.node
            for node_facts in facts
            if len({p.link_layer for p in _active(node_facts)}) > 1
        ]
        hint = "NCCL cannot use both at once: name the ones it is to use in [network] hcas"
        text = "InfiniBand and Ethernet ports side by side"
        results += [Result(CHECK_HCAS, WARN, text, mixed, hint)] if mixed else []
        return results + _slow_ports(facts, expected, _active)
    wrong: dict[str, str] = {}
    for node_facts in facts:
        if why := _lacking_hcas(node_facts, expected):
            wrong[node_facts.node] = why
    results = [
        Result(CHECK_HCAS, FAIL, why, nodes, "tell your admins")
        for why, nodes in by_value(wrong).items()
    ]
    results += _slow_ports(facts, expected, lambda node_facts: _meant(node_facts, expected))
    wanted = ", ".join(expected.hcas)
    return results or [Result(CHECK_HCAS, OK, f"{wanted}: active on all nodes")]


def _lacking_hcas(facts: NodeFacts, expected: Expected) -> str:
    """What is wrong with the adapters that the site names, "" where nothing is."""
    ports = _meant(facts, expected)
    missing = [n for n in expected.hcas if not any(_is(port, n, expected) for port in ports)]
    if missing:
        return f"{', '.join(missing)} not there"
    for name in expected.hcas:
        own = [port for port in ports if _is(port, name, expected)]
        if not any(port.state == ACTIVE for port in own):
            return f"{name} is {own[0].state}"
    active = [port for port in ports if port.state == ACTIVE]
    count = len({port.hca for port in active})
    if expected.nics is not None and count < expected.nics:
        return f"{count} of {expected.nics} adapters are active"
    layers = sorted({port.link_layer for port in active})
    if len(layers) > 1:
        return f"{' and '.join(layers)} among its adapters, which NCCL cannot use together"
    if expected.link_layer and layers != [expected.link_layer]:
        return f"adapters run {layers[0]}, the site's run {expected.link_layer}"
    return ""


def _slow_ports(
    facts: Sequence[NodeFacts], expected: Expected, ports: Callable[[NodeFacts], list[Port]]
) -> list[Result]:
    if expected.rate_gbps is None:
        return []
    slow = {
        one.node: ", ".join(
            f"{_name(p)} at {p.rate_gbps:g}"
            for p in ports(one)
            if p.state == ACTIVE and (p.rate_gbps or 0) < expected.rate_gbps
        )
        for one in facts
    }
    return [
        Result(CHECK_HCAS, FAIL, f"{text} of {expected.rate_gbps:g} Gb/s", nodes, "a bad cable?")
        for text, nodes in by_value({n: t for n, t in slow.items() if t}).items()
    ]


def _alike(check: str, by_node: Mapping[str, frozenset[str]], what: str, how: str) -> list[Result]:
    """What most nodes have every node has; what only a few have is told."""
    every = sorted({name for names in by_node.values() for name in names})
    results = []
    for name in every:
        have = [node for node in by_node if name in by_node[node]]
        without = [node for node in by_node if name not in by_node[node]]
        if not without:
            continue
        if len(have) > len(without):
            text = f"{what} {name} is not {how}, it is on {len(have)} others"
            results.append(Result(check, FAIL, text, without, "tell your admins"))
        elif len(have) < len(without):
            text = f"{what} {name} is {how} only here"
            results.append(Result(check, WARN, text, have, "NCCL may choose it; name the others"))
        else:
            text = f"{what} {name} is {how} on {', '.join(have)} and not on {', '.join(without)}"
            results.append(Result(check, WARN, text))
    listed = ", ".join(every) or "none"
    return results or [Result(check, OK, f"the same on all nodes: {listed}")]


def _active(facts: NodeFacts) -> list[Port]:
    return [port for port in facts.ports or [] if port.state == ACTIVE]


def _meant(facts: NodeFacts, expected: Expected) -> list[Port]:
    ports = facts.ports or []
    return [p for p in ports if any(_is(p, name, expected) for name in expected.hcas)]


def _is(port: Port, name: str, expected: Expected) -> bool:
    """Whether the site's name, with or without a port's number, means this port."""
    device, _, number = name.partition(":")
    if number and int(number) != port.port:
        return False
    return port.hca.startswith(device) if expected.hca_prefix else port.hca == device


def _name(port: Port) -> str:
    return f"{port.hca}:{port.port}"
