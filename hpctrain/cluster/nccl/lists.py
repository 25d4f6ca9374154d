"""Rules for lists: names that the node lacks, adapters, and options of torch's allocator.

How NCCL and Gloo split lists of interfaces is in variables.toml (`alone`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.cluster.nccl.names import TABLE, Context, Problem, error, warning
from hpctrain.core.settings.layers import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_NETDEV = 15
"""Characters that Linux gives an interface's name."""
MOST_NETDEVS = 16
MOST_HCAS = 32

_NETDEV = re.compile(r"(?:hsn|eth|ib|bond|docker|virbr)\d+|en[opsx]\d\w*|lo|hsn|eth|en|eno|enp|ens")
_AMBIGUOUS = re.compile(r".*[a-z_][1-9]")


@dataclass(frozen=True)
class InterfaceFilter:
    """A list of NCCL's that chooses interfaces or adapters."""

    excludes: bool
    exact: bool
    entries: tuple[str, ...]

    def takes(self, name: str, entry: str) -> bool:
        """Whether the entry means that name (both with or without a port)."""
        entry = entry.partition(":")[0]
        return name == entry if self.exact else name.startswith(entry)


def read_filter(value: str) -> InterfaceFilter:
    """The list as NCCL splits it: one `^`, one `=`, then entries between commas."""
    excludes = value.startswith("^")
    rest = value[excludes:]
    exact = rest.startswith("=")
    entries = rest[exact:].split(",")
    return InterfaceFilter(excludes, exact, tuple(entry for entry in entries if entry))


def socket_ifname(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_SOCKET_IFNAME: beginnings of interface names, or whole ones after =."""
    parsed = read_filter(value)
    if not parsed.excludes:
        yield from _missing(parsed, context.netdevs, "interface")


def _missing(
    interfaces: InterfaceFilter, there: frozenset[str] | None, kind: str
) -> Iterator[Problem]:
    """Entries that fit nothing on the node, where it is known what the node has."""
    if there is None:
        return
    for entry in interfaces.entries:
        if not any(interfaces.takes(one, entry) for one in there):
            how = "is" if interfaces.exact else "begins with"
            yield error(
                f'no {kind} of the node {how} "{entry.partition(":")[0]}", and NCCL then stops '
                f"with a message about something else; there are {', '.join(sorted(there))}"
            )


def gloo_ifname(name: str, value: str, context: Context) -> Iterator[Problem]:
    """GLOO_SOCKET_IFNAME: whole names of interfaces, between commas, nothing else."""
    names = [entry.strip().lstrip("^=") for entry in value.split(",")]
    exact = InterfaceFilter(excludes=False, exact=True, entries=tuple(filter(None, names)))
    yield from _missing(exact, None if value.startswith("^") else context.netdevs, "interface")


def ib_hca(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_IB_HCA: beginnings of adapter names, or whole ones after =, each with its port."""
    parsed = read_filter(value)
    for entry in parsed.entries:
        yield from _adapter(entry, parsed, context)
    hcas = [entry.partition(":")[0] for entry in parsed.entries]
    longer = {hca: [one for one in context.hcas or () if one[:-1] == hca] for hca in hcas}
    wide = [hca for hca in hcas if longer[hca] and _AMBIGUOUS.fullmatch(hca)]
    if wide and not parsed.exact:
        others = ", ".join(longer[wide[0]])
        yield warning(
            f'without = each is a beginning, so "{wide[0]}" takes {others} too; '
            f'write "{"^" * parsed.excludes}={",".join(parsed.entries)}"'
        )


def _adapter(entry: str, interfaces: InterfaceFilter, context: Context) -> Iterator[Problem]:
    hca, *places = entry.split(":")
    fits = context.hcas and any(interfaces.takes(one, hca) for one in context.hcas)
    netdev = hca in (context.netdevs or ()) or _NETDEV.fullmatch(hca.lstrip("^="))
    if netdev and not fits:
        yield error(
            f'"{hca}" is a network interface, not an adapter, so NCCL finds no InfiniBand and '
            "falls back to sockets; write names of /sys/class/infiniband, e.g. "
            '"=mlx5_0", and interfaces into network.socket_ifnames'
        )
    elif context.hcas is not None and not fits and not interfaces.excludes:
        alone = InterfaceFilter(excludes=False, exact=interfaces.exact, entries=(hca,))
        yield from _missing(alone, context.hcas, "adapter")
    if len(places) > 3 or any(place and not place.lstrip("-").isdigit() for place in places):  # noqa: PLR2004
        yield error(
            f'NCCL reads "{entry}" as adapter:port:rail:plane, each a number, and takes 0 for '
            f'others; write "{hca}:1"'
        )


_ALLOCATOR_OPTIONS: list[str] = TABLE["lists"]["allocator_options"].split()


def alloc_conf(name: str, value: str, context: Context) -> Iterator[Problem]:
    """PYTORCH_ALLOC_CONF: `option:value,...`; torch stops the program at an option it lacks."""
    plain = re.sub(r"\[[^\[\]]*\]", "", value)
    for entry in filter(None, (part.strip() for part in plain.split(","))):
        option, colon, _ = entry.partition(":")
        if not colon:
            yield error(f'torch stops at "{entry}"; write option:value')
        elif option not in _ALLOCATOR_OPTIONS:
            if near := nearest(option, _ALLOCATOR_OPTIONS, cutoff=0.8):
                yield error(f'torch stops at "{option}", which is no option; write {near[0]}')
            else:
                yield warning(
                    f'hpctrain knows no option "{option}", and torch stops at one that it lacks'
                )
