"""Rules for lists: interfaces and adapters, as NCCL and Gloo split them, and torch's allocator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.cluster.nccl.names import LISTS, Context, Problem, error, warning
from hpctrain.core.settings.layers import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONGEST_NETDEV = 15
"""Characters that Linux gives an interface's name."""
MOST_NETDEVS = 16
MOST_HCAS = 32
_LONGEST_ENTRY = 63

_STEMS = frozenset(LISTS["interface_stems"])
_NETDEV = re.compile(r"(?:hsn|eth|ib|bond|docker|virbr)\d+|en[opsx]\d\w*|lo|hsn|eth|en|eno|enp|ens")
_AMBIGUOUS = re.compile(r".*[a-z_][1-9]")
_MODEL = re.compile(r"mlx[45]")


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


def _grammar(value: str, kind: str, example: str) -> Iterator[Problem]:
    """What is wrong with the list itself, the same for interfaces and adapters."""
    parsed = read_filter(value)
    if any(character.isspace() for character in value):
        bare = "".join(value.split())
        yield error(f'a blank becomes part of the name, which then fits none; write "{bare}"')
    if not parsed.entries:
        yield error(f'names no {kind}; write e.g. "{example}", or leave it out')
        return
    first = parsed.entries[0]
    if first.startswith("^"):
        bare = ",".join(entry.lstrip("^=") for entry in parsed.entries)
        yield error(f'NCCL looks for {kind}s named "{first}": ^ comes before =; write "^={bare}"')
    elif any(entry[0] in "^=" for entry in parsed.entries):
        sign = "^" if parsed.excludes else ""
        bare = ",".join(entry.lstrip("^=") for entry in parsed.entries)
        wrong = next(entry for entry in parsed.entries if entry[0] in "^=")
        yield error(
            f'one ^ and one = hold for the whole list, so "{wrong}" fits no {kind}; write '
            f'"{sign}={bare}"'
        )
    globs = [entry for entry in parsed.entries if set(entry) & set("*?[]")]
    if globs:
        bare = re.split(r"[*?\[]", globs[0])[0]
        yield error(
            f'NCCL takes "{globs[0]}" literally, and it fits no {kind}; a beginning is enough: '
            f'"{bare}"'
        )
    if ",," in value or value.endswith(","):
        yield warning(f'has an empty entry; write "{",".join(parsed.entries)}"')


def socket_ifname(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_SOCKET_IFNAME: beginnings of interface names, or whole ones after =."""
    if len(value) < 2:  # noqa: PLR2004 - NCCL's own condition
        yield error(
            "NCCL ignores a value of one character and chooses interfaces by itself; write at "
            'least two, e.g. "=eth0"'
        )
        return
    yield from _grammar(value, "interface", "=eth0")
    parsed = read_filter(value)
    for entry in parsed.entries:
        yield from _interface(entry)
    if len(parsed.entries) > MOST_NETDEVS:
        yield error(
            f"NCCL reads {MOST_NETDEVS} names and drops the other "
            f"{len(parsed.entries) - MOST_NETDEVS}; write {MOST_NETDEVS} at most, or a beginning"
        )
    if not parsed.excludes:
        yield from _loopback(parsed.entries, context)
        yield from _missing(parsed, context.netdevs, "interface")


def _interface(entry: str) -> Iterator[Problem]:
    if re.fullmatch(r"[0-9.]+(/\d+)?", entry) and "." in entry:
        yield error(
            f'"{entry}" is an address; NCCL compares names of interfaces, and this fits none: '
            'write the name that `ip -br address` shows for it, e.g. "=eth0"'
        )
    elif ":" in entry:
        yield error(
            f'NCCL drops what follows the colon in "{entry}"; write "{entry.partition(":")[0]}"'
        )
    elif len(entry) > LONGEST_NETDEV and entry[0] not in "^=" and " " not in entry:
        yield error(
            f'"{entry}" has {len(entry)} characters and no interface has more than '
            f"{LONGEST_NETDEV}, so it fits none; write a name that `ip -br link` shows"
        )


def _loopback(entries: Sequence[str], context: Context) -> Iterator[Problem]:
    if context.multi_node and "lo" in entries:
        yield error(
            "lo reaches the node itself only, so ranks of several nodes never meet; write the "
            'interface between the nodes, e.g. "=eth0", or move it to env.single_node'
        )


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
    names = value.split(",")
    plain = [entry.strip().lstrip("^=") for entry in names]
    good = ",".join(entry for entry in plain if entry)
    if value.startswith("^"):
        yield error(
            'Gloo cannot leave interfaces out: it looks for one that is named "'
            f'{names[0]}" and stops; write the names to use, e.g. "eth0"'
        )
    elif any(entry.startswith("=") for entry in names):
        yield error(
            f'= is NCCL\'s way: Gloo looks for an interface named "{names[0]}" and stops with '
            f'"Unable to find address for"; write "{good}"'
        )
    elif any(entry != entry.strip() for entry in names) or "" in names:
        yield error(
            "Gloo takes each text between commas as it stands, blanks and empty ones too, and "
            f'stops with "Unable to find address for"; write "{good}"'
        )
    for entry in plain:
        if not value.startswith("^"):
            yield from _gloo_name(entry)
    yield from _loopback(names, context)
    exact = InterfaceFilter(excludes=False, exact=True, entries=tuple(filter(None, plain)))
    there = None if value.startswith("^") else context.netdevs
    yield from _missing(exact, there, "interface")


def _gloo_name(entry: str) -> Iterator[Problem]:
    if entry in _STEMS:
        yield error(
            f'Gloo takes whole names and "{entry}" is the beginning of one: it stops with "Unable '
            f'to find address for: {entry}"; write e.g. "{entry}0"'
        )
    elif set(entry) & set("*?[]"):
        yield error(f'Gloo takes "{entry}" literally and finds none; write whole names')
    elif len(entry) > LONGEST_NETDEV:
        yield error(
            f'"{entry}" has {len(entry)} characters and no interface has more than '
            f"{LONGEST_NETDEV}; write a name that `ip -br link` shows"
        )


def ib_hca(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_IB_HCA: beginnings of adapter names, or whole ones after =, each with its port."""
    yield from _grammar(value, "adapter", "=mlx5_0")
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
    if len(parsed.entries) > MOST_HCAS:
        yield error(
            f"NCCL reads {MOST_HCAS} adapters and drops the other "
            f'{len(parsed.entries) - MOST_HCAS}; write {MOST_HCAS} at most, or a beginning: "mlx5"'
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
    if len(hca) > _LONGEST_ENTRY:
        yield error(f"NCCL cuts names after {_LONGEST_ENTRY} characters; write it so")


def alloc_conf(name: str, value: str, context: Context) -> Iterator[Problem]:
    """PYTORCH_ALLOC_CONF: `option:value,...`; torch stops the program at an option it lacks."""
    plain = re.sub(r"\[[^\[\]]*\]", "", value)
    for entry in filter(None, (part.strip() for part in plain.split(","))):
        option, colon, _ = entry.partition(":")
        if not colon:
            yield error(f'torch stops at "{entry}"; write option:value')
        elif option not in LISTS["allocator_options"]:
            near = nearest(option, LISTS["allocator_options"], cutoff=0.8)
            if near:
                yield error(f'torch stops at "{option}", which is no option; write {near[0]}')
            else:
                yield warning(
                    f'hpctrain knows no option "{option}", and torch stops at one that it lacks'
                )
