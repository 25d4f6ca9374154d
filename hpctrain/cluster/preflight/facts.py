"""The facts of one node: how they are read, which nodes differ, the preset lines drafted from them.

None is unknown, not "none there". Every source comes in from outside (`FactSources`). Nothing is
changed, and nothing may hang: commands and file systems are asked with a time-out. Rehearsals put
faults in (`testing/faults.py`). Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.cluster.preflight.bounded import Unanswered, bounded
from hpctrain.core.base import VERSION

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from hpctrain.core.testing.faults import NodeFault

    V = TypeVar("V", bound=Hashable)
    from collections.abc import Callable, Sequence

    Command = Callable[[Sequence[str]], str]

NVIDIA_FIELDS = "index,name,driver_version,ecc.errors.uncorrected.volatile.total"
_CARD = re.compile(r"card(\d+)")
COMMAND_TIMEOUT_S = 10.0
DISK_TIMEOUT_S = 5.0
GIB = 1024**3
SIOCGIFADDR = 0x8915
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
UNLIMITED = "unlimited"
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
        set_values = {key: value for key, value in values.items() if value not in (None, [], "")}
        if set_values:
            lines += ["", f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in set_values.items())]
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


def read_gpus(root: Path, command: Command) -> list[Gpu]:
    """The GPUs of this node; none where there is neither a driver nor its tool.

    Raises:
        OSError: there is a driver, and its tool is missing: nobody can say how many there are.
        Unanswered: the tool failed, or took too long.
    """
    for read, tool, device in (
        (read_nvidia, "nvidia-smi", "dev/nvidiactl"),
        (read_rocm, "rocm-smi", "dev/kfd"),
    ):
        try:
            return read(command)
        except FileNotFoundError:
            if (root / device).exists():
                raise OSError(f"/{device} is there and {tool} is not") from None
    return []


def read_nvidia(command: Command) -> list[Gpu]:
    """GPUs by nvidia-smi."""
    text = command(["nvidia-smi", f"--query-gpu={NVIDIA_FIELDS}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
    links = parse_nvlinks(command(["nvidia-smi", "nvlink", "--status"])) if rows else {}
    return [
        Gpu(int(index), name, driver, int(errors) if errors.isdigit() else None,
            links.get(int(index)))
        for index, name, driver, errors in rows
    ]  # fmt: skip


def parse_nvlinks(text: str) -> dict[int, int]:
    """GPU to its NVLink connections that are up, from `nvidia-smi nvlink --status`."""
    links: dict[int, int] = {}
    gpu: int | None = None
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
            links[gpu] = 0
        elif gpu is not None and re.search(r"Link \d+: [\d.]+ GB/s", line):
            links[gpu] += 1
    return links


def read_rocm(command: Command) -> list[Gpu]:
    """GPUs by rocm-smi."""
    args = ["rocm-smi", "--showproductname", "--showdriverversion", "--json"]
    raw = json.loads(command(args))
    driver = str(raw.get("system", {}).get("Driver version", ""))
    cards = [(int(match[1]), value) for key, value in raw.items() if (match := _CARD.match(key))]
    return [
        Gpu(index, str(card.get("Card series") or card.get("Card Series") or ""), driver)
        for index, card in sorted(cards, key=lambda pair: pair[0])
    ]


def run_command(args: Sequence[str], timeout_s: float) -> str:
    """What a command prints on stdout.

    Raises:
        FileNotFoundError: there is no such command.
        Unanswered: it failed, or took too long.
    """
    if shutil.which(args[0]) is None:
        raise FileNotFoundError(args[0])

    def act() -> str:
        done = subprocess.run(
            list(args), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            errors="replace",
        )  # fmt: skip
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise OSError(f"exit {done.returncode}: {said[0] if said else 'no message'}")
        return done.stdout

    text: str = bounded(act, timeout_s)
    return text


def ipv4_of(name: str) -> str:
    """The interface's IPv4 address, empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = struct.pack("256s", name[:15].encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, packed)[20:24])
        except OSError:
            return ""


def resolves(name: str) -> bool:
    """Whether this host turns the name into an address."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def package_version(name: str) -> str:
    """Version of an installed package, empty where it is not; the package is not imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class FactSources:
    """Where facts come from.

    `root` stands in front of /sys, /proc, /dev and /etc; `command` runs a command with a time-out.
    """

    root: Path = Path("/")
    command: Callable[[Sequence[str], float], str] = run_command
    ipv4: Callable[[str], str] = ipv4_of
    version: Callable[[str], str] = package_version
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    host: Callable[[], str] = socket.gethostname
    resolves: Callable[[str], bool] = resolves


def probe(node: str, sources: FactSources | None = None, *, local: Sequence[str] = ()) -> NodeFacts:
    """Everything that is known of this node."""
    at = sources or FactSources()
    host = at.host()
    folders = [at.environ.get("TMPDIR") or "/tmp", *local]  # noqa: S108 - looked at, not written
    reads: dict[str, Callable[[], Any]] = {
        "interfaces": lambda: read_interfaces(at),
        "ports": lambda: read_ports(at.root / "sys/class/infiniband"),
        "efa": lambda: read_efa(at.root / "sys/class/infiniband"),
        "cxi": lambda: _names(at.root / "sys/class/cxi"),
        "gpus": lambda: read_gpus(at.root, lambda args: at.command(args, COMMAND_TIMEOUT_S)),
        "shm_gib": lambda: _size_gib(at.root / "dev/shm"),
        "memlock": lambda: _limit_text(at.limit(resource.RLIMIT_MEMLOCK)[0], unit=1024),
        "nofile": lambda: at.limit(resource.RLIMIT_NOFILE)[0],
        "local": lambda: {folder: _free_gib(Path(folder)) for folder in folders},
        "versions": lambda: read_versions(at),
        "nccl_conf": lambda: read_nccl_conf(at.root / "etc/nccl.conf"),
        "resolves_itself": lambda: bounded(lambda: at.resolves(host), DISK_TIMEOUT_S),
    }
    facts: dict[str, Any] = {}
    unreadable: dict[str, str] = {}
    for name, read in reads.items():
        try:
            facts[name] = read()
        except (OSError, ValueError, Unanswered) as error:
            unreadable[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return NodeFacts(node=node, host=host, **facts, unreadable=unreadable)


def read_interfaces(at: FactSources) -> list[Interface]:
    """Network interfaces with their addresses, without the loopback."""
    ipv6 = _ipv6_addresses(at.root / "proc/net/if_inet6")
    interfaces = []
    for path in sorted((at.root / "sys/class/net").iterdir()):
        if not (path / "flags").is_file():
            continue  # bonding_masters is a file among the folders
        flags = int((path / "flags").read_text(), 16)
        if flags & IFF_LOOPBACK:
            continue
        state = (path / "operstate").read_text().strip()
        # Drivers that do not tell their state say "unknown" while they work.
        up = bool(flags & IFF_UP) and state in {"up", "unknown"}
        address = at.ipv4(path.name)
        interfaces.append(
            Interface(path.name, up, [*([address] if address else []), *ipv6.get(path.name, [])])
        )
    return interfaces


def _ipv6_addresses(table: Path) -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        for line in table.read_text().splitlines():
            packed, _, _, scope, _, name = line.split()
            if scope == "00":  # global: link-local ones are on every interface that is up
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
                addresses.setdefault(name, []).append(address)
    return addresses


def read_ports(folder: Path) -> list[Port]:
    """Ports of all adapters; none where the kernel has no InfiniBand."""
    ports = []
    for hca in _names(folder):
        for port in sorted((folder / hca / "ports").iterdir(), key=lambda path: int(path.name)):
            rate = (port / "rate").read_text().split()
            ports.append(
                Port(
                    hca=hca,
                    port=int(port.name),
                    state=(port / "state").read_text().partition(":")[2].strip(),
                    rate_gbps=float(rate[0]) if rate else None,
                    link_layer=(port / "link_layer").read_text().strip(),
                )
            )
    return ports


def read_efa(folder: Path) -> list[str]:
    """Names of the adapters whose driver is EFA's."""
    return [
        name for name in _names(folder) if (folder / name / "device/driver").resolve().name == "efa"
    ]


def read_versions(at: FactSources) -> dict[str, str]:
    """Versions that ranks must have in common, without importing torch; empty for "not there"."""
    nccl = next((v for name in NCCL_PACKAGES if (v := at.version(name))), "")
    torch = at.version("torch")
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "interpreter": sys.executable,
        "hpctrain": VERSION,
        "torch": torch,
        "cuda": torch.partition("+")[2],
        "nccl": nccl,
    }


def read_nccl_conf(path: Path) -> dict[str, str]:
    """Variables of an nccl.conf: `NAME=VALUE` lines, `#` begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("#")[0].partition("=") for line in lines)
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def _names(folder: Path) -> list[str]:
    """Entries of a folder of /sys; none where the kernel has no such devices."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def _size_gib(folder: Path) -> float:
    stat = os.statvfs(folder)
    return round(stat.f_frsize * stat.f_blocks / GIB, 3)


def _free_gib(folder: Path) -> float:
    def act() -> float:
        stat = os.statvfs(folder)
        return round(stat.f_frsize * stat.f_bavail / GIB, 3)

    free: float = bounded(act, DISK_TIMEOUT_S)
    return free


def _limit_text(value: int, *, unit: int) -> str:
    return UNLIMITED if value == resource.RLIM_INFINITY else str(value // unit)
