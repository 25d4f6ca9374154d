"""Checks of all nodes' facts, against the site and against each other, and what is expected. Pure.

What a node lacks that others have is its fault; where there is no majority nobody is named. What
could not be read is unknown. `Expected` is what healthy nodes of this site have, `Order` what
travels from the login node to the nodes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.preflight.facts import (
    ACTIVE,
    UNLIMITED,
    VIRTUAL,
    NodeFacts,
    Port,
    by_value,
    outliers,
)
from hpctrain.cluster.preflight.report import FAIL, OK, UNKNOWN, WARN, Result, names
from hpctrain.cluster.preflight.slow_nodes import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.cluster.site.schema import Site

CHECK_IFS, CHECK_HCAS = "interfaces", "adapters"
NOFILE_MIN = 4096
SHM_GIB_MIN = 1.0
LOCAL_GIB_MIN = 1.0
MEMLOCK_KIB_MIN = 16 * 1024 * 1024
"""Below 16 GiB RDMA runs out of pinned memory (AWS's health checks)."""
RELEASE = re.compile(r"\d+")
LABELS = {"ports": "adapters", "shm_gib": "shm", "local": "disk", "resolves_itself": "names"}


@dataclass(frozen=True)
class Expected:
    """What the site says; None and empty mean that it says nothing.

    docs/site-presets.md says what the keys of [network], [expect] and [baseline] mean, whose names
    these are.

    Attributes:
        hca_prefix: Whether `hcas` are only the beginnings of names.
        nics: Adapters of a node.
        gpus: GPUs of a node.
        memlock: "unlimited" or the fewest KiB.
        env: The environment that ranks will have.
        baseline: Nodes to bus bandwidth, GB/s.
        local: Folders on the node's own disk.
    """

    socket_ifnames: list[str] = field(default_factory=list)
    hcas: list[str] = field(default_factory=list)
    hca_prefix: bool = False
    rate_gbps: float | None = None
    nics: int | None = None
    link_layer: str = ""
    gpus: int | None = None
    driver_min: str = ""
    nvlinks: int | None = None
    memlock: str = ""
    shm_gib_min: float | None = None
    nccl_conf: bool | None = None
    env: dict[str, str] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    tolerance: float = 0.8
    size_mib: int | None = None
    local: list[str] = field(default_factory=list)

    def limits(self) -> Limits:
        """What counts as a slow collective."""
        baseline = {int(nodes): value for nodes, value in self.baseline.items()}
        return Limits(baseline, self.tolerance)

    def has_yardstick(self, nodes: int) -> bool:
        """Whether the baseline says what so many nodes together do; one node's number does not."""
        return self.limits().floor(nodes) is not None

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Order:
    """What the nodes are to do, as the login node or an agent has written it down.

    `nonce` is the content of the file that its writer left in the directory; `ranks` are processes
    of a node in the collective; `timeout_s` bounds one try of a group, `meet_s` the nodes' coming.
    """

    expected: Expected
    nonce: str = ""
    bandwidth: bool = True
    ranks: int = 1
    timeout_s: float = 120.0
    meet_s: float = 60.0

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def to_others(self) -> dict[str, Any]:
        """What the other nodes get: without an environment, which they find by themselves."""
        return replace(self, expected=replace(self.expected, env={})).plain()

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> Order:
        """Back from `plain`."""
        return Order(**{**raw, "expected": Expected(**raw["expected"])})


_OF_EXPECT = ("driver_min", "nvlinks", "memlock", "shm_gib_min", "nccl_conf")


def expected_of(site: Site | None, *, gpus: int, env: dict[str, str]) -> Expected:
    """What a site expects of its nodes."""
    if site is None:
        return Expected(gpus=gpus or None, env=env)
    net, expect, base = site.network, site.expect, site.baseline
    return Expected(
        **{name: getattr(net, name) for name in ("rate_gbps", "link_layer")},
        **{name: getattr(expect, name) for name in _OF_EXPECT},
        **{name: getattr(base, name) for name in ("tolerance", "size_mib")},
        socket_ifnames=list(net.socket_ifnames),
        hcas=list(net.hcas),
        hca_prefix=net.hca_mode == "prefix",
        nics=net.nics_per_node,
        gpus=gpus or None,
        env=env,
        baseline=dict(base.allreduce_busbw_gbs),
        local=[site.storage.local] if site.storage.local.startswith("/") else [],
    )


def check_facts(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Every check that needs nothing but the nodes' facts."""
    checks: list[tuple[str, Callable[[Sequence[NodeFacts], Expected], list[Result]]]] = [
        ("interfaces", check_interfaces),
        ("ports", check_ports),
        ("gpus", check_gpus),
        ("memlock", check_memlock),
        ("nofile", check_nofile),
        ("shm_gib", check_shm),
        ("local", check_local),
        ("versions", check_versions),
        ("nccl_conf", check_nccl_conf),
        ("resolves_itself", check_own_name),
    ]
    results: list[Result] = []
    for name, check in checks:
        readable = [one for one in facts if getattr(one, name) is not None]
        results += check(readable, expected) if readable else []
        results += _unreadable(name, facts)
    return results


def _unreadable(name: str, facts: Sequence[NodeFacts]) -> list[Result]:
    why = {one.node: one.unreadable.get(name, "") for one in facts if getattr(one, name) is None}
    label = LABELS.get(name, name)
    return [
        Result(label, UNKNOWN, f"could not be read: {reason or 'no reason given'}", nodes)
        for reason, nodes in by_value(why).items()
    ]


def check_gpus(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Their number, one driver, no uncorrected errors, all NVLinks."""
    counts = {one.node: len(one.gpus or []) for one in facts}
    results = _counted("gpus", counts, expected.gpus, "GPUs")
    if not any(counts.values()):
        return results
    every = [(one.node, gpu) for one in facts for gpu in one.gpus or []]
    results += _same("driver", {node: gpu.driver for node, gpu in every}, "driver")
    if expected.driver_min:
        old = {n: g.driver for n, g in every if _release(g.driver) < _release(expected.driver_min)}
        results += [
            Result("driver", FAIL, f"{driver} is older than {expected.driver_min}", nodes)
            for driver, nodes in by_value(old).items()
        ]
    for node, gpu in every:
        if gpu.uncorrected:
            text = f"GPU {gpu.index} has {gpu.uncorrected} uncorrected memory errors"
            results.append(Result("gpu memory", FAIL, text, [node], "tell your admins"))
    links = {f"{node}/{gpu.index}": gpu.nvlinks for node, gpu in every if gpu.nvlinks is not None}
    wanted = expected.nvlinks if expected.nvlinks is not None else outliers(links)[0]
    for key, count in links.items():
        if wanted is not None and count < wanted:
            node, _, index = key.partition("/")
            text = f"GPU {index} has {count} of {wanted} NVLink connections up"
            results.append(Result("nvlink", FAIL, text, [node], "tell your admins"))
    return results


def check_memlock(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """`ulimit -l`: adapters pin memory."""
    values = {one.node: one.memlock or "" for one in facts}
    if expected.memlock:
        low = {n: v for n, v in values.items() if not _enough_memlock(v, expected.memlock)}
        text = f"KiB may be locked, the site's nodes have {expected.memlock}"
        return _low("memlock", FAIL, low, text) or [_fine("memlock", expected.memlock, facts)]
    pins = {one.node for one in facts if one.ports or one.efa or one.cxi}
    low = {n: v for n, v in values.items() if n in pins and not _enough_memlock(v, MEMLOCK_KIB_MIN)}
    hint = "ask your admins for `ulimit -l unlimited` in jobs (LimitMEMLOCK of slurmd)"
    text = "KiB may be locked, which RDMA soon uses up"
    if low:
        return _low("memlock", WARN, low, text, hint)
    return [_fine("memlock", ", ".join(by_value(values)), facts)]


def _enough_memlock(value: str, wanted: str | int) -> bool:
    if value == UNLIMITED:
        return True
    return wanted != UNLIMITED and int(value) >= int(wanted)


def check_nofile(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Files that a process may have open: each connection is one."""
    del expected
    low = {one.node: one.nofile for one in facts if 0 <= (one.nofile or 0) < NOFILE_MIN}
    text = f"files may be open; large jobs need more than {NOFILE_MIN}"
    return _low("nofile", WARN, low, text, "raise `ulimit -n`") or [
        _fine("nofile", f"at least {NOFILE_MIN}", facts)
    ]


def check_shm(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Shared memory: NCCL, DataLoader workers and our own saves use it."""
    wanted = expected.shm_gib_min
    least = SHM_GIB_MIN if wanted is None else wanted
    low = {one.node: one.shm_gib for one in facts if (one.shm_gib or 0.0) < least}
    status, whose = (WARN, "is little") if wanted is None else (FAIL, f"the site has {least:g}")
    return _low("shm", status, low, f"GiB of /dev/shm, {whose}") or [
        _fine("shm", f"at least {least:g} GiB", facts)
    ]


def check_local(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """Room on the nodes' own disks."""
    del expected
    results = []
    for folder in {folder: None for one in facts for folder in one.local or {}}:
        free = {one.node: (one.local or {}).get(folder, 0.0) for one in facts}
        low = {node: value for node, value in free.items() if value < LOCAL_GIB_MIN}
        results += _low("disk", WARN, low, f"GiB free in {folder}")
    return results or [_fine("disk", f"at least {LOCAL_GIB_MIN:g} GiB free", facts)]


def check_versions(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """The same python, torch, NCCL, CUDA and hpctrain everywhere."""
    del expected
    results = []
    by_node = {one.node: one.versions or {} for one in facts}
    for what in {name: None for versions in by_node.values() for name in versions}:
        values = {node: versions.get(what, "") or "none" for node, versions in by_node.items()}
        results += [one for one in _same(f"version of {what}", values, what) if one.status != OK]
    if results:
        return results
    shown = [f"{name} {value}" for name, value in next(iter(by_node.values())).items() if value]
    return [_fine("versions", ", ".join(shown), facts)]


def check_nccl_conf(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """/etc/nccl.conf: there where it should be, and not at odds with the environment."""
    confs = {one.node: one.nccl_conf or {} for one in facts}
    results = []
    if expected.nccl_conf and (without := [node for node, conf in confs.items() if not conf]):
        text = "no /etc/nccl.conf, which this site's nodes have"
        results.append(Result("nccl.conf", FAIL, text, without))
    for name, value in expected.env.items():
        other = {node: conf[name] for node, conf in confs.items() if conf.get(name, value) != value}
        results += [
            Result(
                "nccl.conf",
                WARN,
                f"/etc/nccl.conf has {name}={theirs}, the ranks get {value}",
                nodes,
                "the environment wins; take the variable out of the preset to keep the file's",
            )
            for theirs, nodes in by_value(other).items()
        ]
    texts = {node: "; ".join(f"{k}={v}" for k, v in conf.items()) for node, conf in confs.items()}
    results += [one for one in _same("nccl.conf", texts, "nccl.conf") if one.status != OK]
    return results or [_fine("nccl.conf", "agrees with the environment", facts)]


def check_own_name(facts: Sequence[NodeFacts], expected: Expected) -> list[Result]:
    """A node that does not know its own name: gloo asks for it where no interface is named."""
    lost = [one.node for one in facts if not one.resolves_itself]
    status = WARN if expected.socket_ifnames else FAIL
    hint = "add the name to DNS or /etc/hosts, or name the interfaces in [network] socket_ifnames"
    if lost:
        return [Result("names", status, "the node's own name has no address there", lost, hint)]
    return [_fine("names", "every node knows itself", facts)]


def _counted(check: str, counts: dict[str, int], wanted: int | None, what: str) -> list[Result]:
    """So many are there, as asked for or as on most nodes."""
    if wanted is None:
        return _same(check, counts, what)
    other = {node: count for node, count in counts.items() if count < wanted}
    results = [
        Result(check, FAIL, f"{count} of {wanted} {what}", nodes, "tell your admins")
        for count, nodes in by_value(other).items()
    ]
    return results or [Result(check, OK, f"{wanted} {what} on each node")]


def _same(check: str, values: dict[str, Any], what: str) -> list[Result]:
    """One value everywhere; the odd ones out are named, if most nodes agree."""
    usual, odd = outliers(values)
    if usual is None and values:
        by_node = "; ".join(f"{value} on {names(n)}" for value, n in by_value(values).items())
        return [Result(check, FAIL, f"{what} differs: {by_node}", [], "use the same everywhere")]
    results = [
        Result(check, FAIL, f"{what} is {value}, {usual} on the others", nodes)
        for value, nodes in by_value(odd).items()
    ]
    return results or [Result(check, OK, f"{what} {usual} on all nodes")]


def _low(check: str, status: str, low: dict[str, Any], text: str, hint: str = "") -> list[Result]:
    return [
        Result(check, status, f"{value} {text}", nodes, hint)
        for value, nodes in by_value(low).items()
    ]


def _fine(check: str, text: str, facts: Sequence[NodeFacts]) -> Result:
    return Result(check, OK, f"{text} on {len(facts)} node{'s' if len(facts) > 1 else ''}")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in RELEASE.findall(version))


# Interfaces and adapters.


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
    """What most nodes have every node has; what only a few have is reported."""
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
