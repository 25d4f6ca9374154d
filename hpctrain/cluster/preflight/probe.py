"""The probe of one node: interfaces, adapters, GPUs, limits, versions. Standard library only.

Every source comes in from outside (`FactSources`), so that a test can show a node that it has not
got. Nothing is changed, and nothing may hang: commands and file systems are asked with a time-out.
tests/unit/preflight/test_probe.py holds the promises.
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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.preflight.bounded import Unanswered, bounded
from hpctrain.cluster.preflight.facts import Gpu, Interface, NodeFacts, Port
from hpctrain.core.base import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


def read_gpus(root: Path, command: Command) -> list[Gpu]:
    """The GPUs of this node; none where there is neither a driver nor its tool.

    Args:
        root: In front of /dev.
        command: Runs a command within a time-out.

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

    Attributes:
        root: In front of /sys, /proc, /dev and /etc.
        command: Runs a command with a time-out; see `run_command`.
        ipv4: Interface to its address.
        version: Package to its version.
        limit: `resource.getrlimit`.
        environ: The environment.
        host: What the node calls itself.
        resolves: Whether a name turns into an address here.
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
    """Everything that is known of this node.

    Args:
        node: Its name in the job.
        sources: Where to look; the machine itself by default.
        local: More folders on its own disk, beside TMPDIR.
    """
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
