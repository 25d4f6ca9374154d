"""Rules for words, levels, files and names of networks.

tests/unit/nccl/test_nccl_rules.py holds the promises.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.cluster.nccl.names import LISTS, TABLE
from hpctrain.cluster.nccl.rule import Context, Problem, Rule, error, listed, reason, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES = {"AF_INET": "ipv4", "AF_INET6": "ipv6"}
_DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "TRACE", "ABORT")
_SUBSYSTEMS = frozenset(LISTS["debug_subsystems"])
_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
_UNDOCUMENTED_LEVELS = ("NVB", "C2C", "P2C", "PXN")
LIBFABRIC_NETS = frozenset({"libfabric", "aws libfabric", "ofi"})
_NETS = {"ib": "IB", "socket": "Socket", "gib": "gIB", "fastrak": "FasTrak", "spcx": "spcx"} | {
    name: name for name in LIBFABRIC_NETS
}
_NET_HINTS = {word: meant for meant, words in TABLE["network_hints"].items() for word in words}
_PROVIDERS = frozenset(LISTS["providers"])


@dataclass(frozen=True)
class Words:
    """A closed set of words."""

    words: tuple[str, ...]
    reader: str = "NCCL"
    otherwise: str = "ignores the value without a message"
    """What the reader does with another word."""
    exact: bool = False
    """Whether case counts."""
    also: tuple[str, ...] = ()
    """Words that are taken too and need not be recommended."""

    def __call__(self, name: str, value: str, context: Context) -> Iterator[Problem]:
        """The rule."""
        del context
        folded = {word.lower(): word for word in self.words}
        if value in self.words + self.also or (not self.exact and value.lower() in folded):
            return
        near = folded.get(value.strip().lower())
        case = ", since case counts" if near and near != value.strip() else ""
        write = f'"{near}"' if near else listed(self.words)
        yield error(name, value, f"{self.reader} {self.otherwise}{case}; write {write}")


def family(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_SOCKET_FAMILY, NCCL_IB_ADDR_FAMILY."""
    del context
    if value in FAMILIES:
        return
    meant = "AF_INET6" if "6" in value else "AF_INET"
    yield error(
        name,
        value,
        "NCCL ignores it without a message and takes whatever it finds first; write "
        f'"{meant}", in upper case',
    )


def level(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_NET_GDR_LEVEL, NCCL_P2P_LEVEL: how far apart two devices may be."""
    del context
    levels = (*_LEVELS, "NVL") if name == "NCCL_P2P_LEVEL" else _LEVELS
    if value in levels:
        return
    if value in _UNDOCUMENTED_LEVELS or value == "NVL":
        yield warning(
            name,
            value,
            f"this level is NCCL's own and not in its guide; write one of {listed(levels)}",
        )
    elif value[:1].isdigit() and value.isascii():
        digits = re.match(r"\d+", value)
        read = min(int(digits.group()) if digits else 0, len(_LEVELS) - 1)
        yield warning(
            name,
            value,
            f"is the old numbering, whose meaning NVIDIA does not promise to keep; NCCL reads "
            f'{_LEVELS[read]} from it: write "{_LEVELS[read]}"',
        )
    elif value.strip().upper() in levels:
        yield error(
            name,
            value,
            "NCCL compares upper case letter by letter, ignores this without a message and keeps "
            f'its default; write "{value.strip().upper()}"',
        )
    else:
        yield error(
            name,
            value,
            f"NCCL ignores it without a message and keeps its default; write {listed(levels)}",
        )


def net(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_NET: the name of a network, as its module or plugin calls itself."""
    del context
    folded = value.strip().lower()
    hint = _NET_HINTS.get(folded)
    if hint:
        yield error(
            name,
            value,
            f'no network calls itself so, and NCCL stops without one; write "{hint}"',
        )
    elif folded not in _NETS and not folded.startswith(
        ("ibext", "ucx", "sharp", "gpudirecttcpx", "fastrak")
    ):
        yield warning(
            name,
            value,
            "NCCL needs a network of exactly this name and stops without one; it has IB and "
            'Socket, the plugin for libfabric answers to "Libfabric", "AWS Libfabric" and "OFI"',
        )


def net_plugin(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_NET_PLUGIN: a library or the end of its name, not a network."""
    del context
    if value.lower() in {"ib", "socket"}:
        yield error(
            name,
            value,
            f'NCCL looks for a library libnccl-net-{value}.so; a network is chosen by NCCL_NET: "'
            f'{_NETS[value.lower()]}"',
        )


def debug_level(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_DEBUG."""
    yield from Words(_DEBUG_LEVELS)(name, value, context)
    if value.upper() == "TRACE":
        yield reason(
            name,
            value,
            "prints every call of every rank, in builds that can, and slows training; write "
            '"WARN" or "INFO", or say why',
        )


def subsystems(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_DEBUG_SUBSYS."""
    del context
    for word in value.removeprefix("^").split(","):
        if word.upper() not in _SUBSYSTEMS:
            bare = word.strip(" ^").upper()
            what = (
                f'write "{bare}" there, and one ^ before the whole list at most'
                if bare in _SUBSYSTEMS
                else f"there are {', '.join(sorted(_SUBSYSTEMS))}"
            )
            yield error(name, value, f'NCCL does not know the subsystem "{word}"; {what}')


def debug_file(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_DEBUG_FILE: one file for each process, or the ranks overwrite each other's."""
    yield from path(name, value, context)
    if value.startswith("/dev/std"):
        return
    if "%p" not in value:
        yield error(
            name,
            value,
            "all ranks of a node open this one file and overwrite each other's lines; write "
            f'"{value.rstrip(".") + "nccl" * value.endswith("/")}.%h.%p"',
        )
    elif "%h" not in value:
        yield warning(
            name,
            value,
            "on a shared file system, processes of two nodes can have the same number and one "
            f'file; write "{value.replace("%p", "%h.%p")}"',
        )


def path(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A file that a library opens by itself, with no shell to expand its name."""
    del context
    if value.startswith("~"):
        yield error(
            name, value, "nobody expands ~ here, so the file is not found; write the whole path"
        )
    elif not value.startswith("/") and "$" not in value:
        yield warning(
            name,
            value,
            "is looked for in the working directory of each rank; write the whole path, from / on",
        )


def dump_prefix(name: str, value: str, context: Context) -> Iterator[Problem]:
    """Where torch's flight recorder writes: a path to which each rank's number is added."""
    yield from path(name, value, context)
    if value.startswith(("/tmp/", "/dev/shm/", "/var/tmp/")):  # noqa: S108 - told of, not used
        yield warning(
            name,
            value,
            "lies on the node itself and is lost with it; leave it out, hpctrain puts the dump "
            "into the run's directory",
        )


def library(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A plugin's file or the end of its name."""
    if value.startswith("~"):
        yield from path(name, value, context)


def addr_range(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_IB_ADDR_RANGE: a network in CIDR form."""
    del context
    try:
        ipaddress.ip_network(value, strict=False)
        what = "" if "/" in value else "has no /"
    except ValueError:
        what = "is no address and length"
    if what:
        yield error(
            name,
            value,
            f"{what}, so NCCL ignores it and takes any address; write a network, e.g. "
            '"10.0.0.0/8" or "fd02::/16"',
        )


def netdevs_policy(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_NETDEVS_POLICY: AUTO, ALL or MAX:N."""
    if not re.fullmatch(r"MAX:[1-9]\d*", value, re.IGNORECASE):
        yield from Words(("AUTO", "ALL", "MAX:2"), otherwise="falls back to AUTO")(
            name, value, context
        )


def provider(name: str, value: str, context: Context) -> Iterator[Problem]:
    """FI_PROVIDER: libfabric's providers, the ones to take or, after ^, to leave out."""
    del context
    words = re.split(r"[,;]", value.removeprefix("^"))
    for word in words:
        if word.strip().lower() in _PROVIDERS and word != word.strip():
            bare = "".join(value.split())
            yield error(name, value, f'a blank becomes part of the name; write "{bare}"')
        elif word.startswith("^"):
            bare = value.replace("^", "")
            yield error(name, value, f'^ stands once, before the whole list; write "^{bare}"')
        elif word.lower() not in _PROVIDERS:
            yield warning(
                name,
                value,
                f'hpctrain knows no provider "{word}", and without one libfabric finds no '
                "network; `fi_info -l` shows what there is (cxi for Slingshot, efa for AWS)",
            )


def per_job(name: str, value: str, context: Context) -> Iterator[Problem]:
    """Variables that must differ from job to job or from node to node."""
    del context
    yield error(name, value, f"{TABLE['per_job'][name]}; leave it out")


def cta_policy(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_CTA_POLICY: an old number, or words that may be joined by |."""
    if value in {"0", "1", "2"}:
        return
    words = Words(("DEFAULT", "EFFICIENCY", "ZERO"), otherwise="leaves out words that it lacks")
    for word in value.split("|"):
        yield from words(name, word, context)


def merge_level(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_NET_MERGE_LEVEL: how far apart two ports may be that are used as one adapter."""
    if value != "PORT":
        yield from level(name, value, context)


_FIELDS = ("reader", "otherwise", "exact")
RULES: dict[str, Rule] = {
    **{
        row["name"]: Words(
            tuple(row["words"]),
            also=tuple(row.get("also", ())),
            **{key: row[key] for key in _FIELDS if key in row},
        )
        for row in TABLE["words"]
    },
    **dict.fromkeys(TABLE["per_job"], per_job),
    "FI_PROVIDER": provider,
    "NCCL_CONF_FILE": path,
    "NCCL_CTA_POLICY": cta_policy,
    "NCCL_DEBUG": debug_level,
    "NCCL_DEBUG_FILE": debug_file,
    "NCCL_DEBUG_SUBSYS": subsystems,
    "NCCL_GRAPH_FILE": path,
    "NCCL_IB_ADDR_FAMILY": family,
    "NCCL_IB_ADDR_RANGE": addr_range,
    "NCCL_NET": net,
    "NCCL_NETDEVS_POLICY": netdevs_policy,
    "NCCL_NET_GDR_LEVEL": level,
    "NCCL_NET_MERGE_LEVEL": merge_level,
    "NCCL_NET_PLUGIN": net_plugin,
    "NCCL_P2P_LEVEL": level,
    "NCCL_PROFILER_PLUGIN": library,
    "NCCL_SOCKET_FAMILY": family,
    "NCCL_TOPO_FILE": path,
    "NCCL_TUNER_PLUGIN": library,
    "TORCH_FR_DUMP_TEMP_FILE": dump_prefix,
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dump_prefix,
}
