"""Rules for numbers, switches, words and addresses, as their readers parse them.

NCCL reads a number with C's strtoll in base 0 and keeps what it got: `true` is 0, `010` is 8,
`1abc` is 1, all without a word. torch reads decimal numbers and its own words for yes and no, and
stops the program at others. libfabric reads numbers as NCCL does, and switches by words.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.cluster.nccl.names import (
    NCCL,
    TABLE,
    TORCH,
    Context,
    Problem,
    Rule,
    cut,
    error,
    listed,
    names_of,
    warning,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = re.compile(r"-?[1-9][0-9]*|0|0x[0-9a-fA-F]+", re.ASCII)
_C_PREFIX = re.compile(
    r"[ \t\n\v\f\r]*(?P<sign>[+-]?)"
    r"(?:(?P<hex>0[xX][0-9a-fA-F]+)|(?P<octal>0[0-7]*)|(?P<decimal>[1-9][0-9]*))?",
    re.ASCII,
)
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}
_MOST = 2**63 - 1
_MOST_OF_TORCH = 2**31 - 1
_ENOUGH_DIGITS = 64  # the largest number has fewer; Python refuses to read thousands
_TRUE = frozenset({"true", "yes", "on", "t", "y", "enable", "enabled"})
_FALSE = frozenset({"false", "no", "off", "f", "n", "disable", "disabled"})
_WORDY = frozenset({"NCCL_PARAM_DUMP_ALL", "NCCL_SET_THREAD_NAME", "NCCL_WARN_ENABLE_DEBUG_INFO"})
_FI_WORDS = frozenset({"true", "yes", "on", "false", "no", "off"})


@dataclass(frozen=True)
class Range:
    """The numbers that a variable takes."""

    least: int | None = None
    most: int | None = None
    among: tuple[int, ...] = ()
    note: str = ""
    """What happens to a number outside, and what it may have been meant for."""

    def holds(self, number: int) -> bool:
        """Whether the number is among them."""
        if self.among:
            return number in self.among
        above = self.least is None or number >= self.least
        return above and (self.most is None or number <= self.most)

    def __str__(self) -> str:
        if self.among:
            return listed([str(number) for number in self.among])
        if self.most is None:
            return "any whole number" if self.least is None else f"{self.least} or more"
        return f"{self.least} to {self.most}"


RANGES: dict[str, Range] = {
    name: Range(row.get("least"), row.get("most"), tuple(row.get("among", ())), row.get("note", ""))
    for row in TABLE["range"]
    for name in row["names"]
}
TEXTS = names_of("nccl_texts")
_TORCH_TEXTS = names_of("torch_texts")
_FI_NUMBERS = names_of("fi_cxi", "fi_efa") - names_of("fi_texts")
_FI_SWITCHES = names_of("fi_switches")


def c_number(text: str) -> tuple[int, str]:
    """The number that C's strtoll in base 0 takes from a text, and what it leaves unread.

    A number that does not fit into 64 bits is the nearest that does.
    """
    match = _C_PREFIX.match(text)
    digits = match and (match["hex"] or match["octal"] or match["decimal"])
    if not match or not digits:
        return 0, text
    base = 16 if match["hex"] else 8 if match["octal"] else 10
    read = int(digits.lstrip("0xX")[:_ENOUGH_DIGITS] or "0", base)
    signed = -read if match["sign"] == "-" else read
    return max(-_MOST - 1, min(signed, _MOST)), text[match.end() :]


def number(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A number that C reads in base 0: NCCL's and libfabric's."""
    reader = "libfabric" if name.startswith("FI_") else "NCCL"
    if name in _WORDY and value.upper() in {"T", "TRUE", "F", "FALSE"}:
        digit = "1" if value.upper().startswith("T") else "0"
        yield warning(f'NCCL knows words here since 2.30 and reads 0 before; write "{digit}"')
    elif _PLAIN.fullmatch(value) is None:
        yield error(f"{reader} {_as_read(name, value)}")
    elif abs(c_number(value)[0]) >= _MOST:
        yield error(
            f"{reader} takes its default: the number does not fit into 64 bits; write "
            f"{RANGES.get(name, Range())}"
        )
    else:
        yield from _outside(name, c_number(value)[0])


def _as_read(name: str, value: str) -> str:
    """What becomes of a text that is no plain number, and what to write instead."""
    read, rest = c_number(value)
    word = value.strip().lower()
    if word in _TRUE | _FALSE:
        meant = "1" if word in _TRUE else "0"
        return f'knows no words here and reads {read}, without a message; write "{meant}"'
    unit = rest.strip().lower().removesuffix("b").removesuffix("i")
    if rest and read and unit in _UNITS:
        return (
            f'stops at the unit and reads {read}; write the whole number, "{read << _UNITS[unit]}"'
        )
    takes = RANGES.get(name, Range())
    if not rest and value.strip().lstrip("+-").startswith("0") and read:
        digits = value.strip().lstrip("+-0") or "0"
        return f'takes the leading 0 for octal and reads {read}; write "{digits}"'
    if not rest:
        return f'reads {read} from it; write "{read}"'
    return f"reads {read} and drops {cut(repr(rest))}, without a message; write {takes}"


def torch_number(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A number that torch reads: decimal; what follows is dropped, other texts stop the program."""
    begins = re.match(r"\s*([+-]?[0-9]+)", value, re.ASCII)
    read = int(begins[1][:_ENOUGH_DIGITS]) if begins else 0
    if begins is None:
        what = "torch stops the program: this is no number"
    elif abs(read) > _MOST_OF_TORCH:
        what = "torch stops the program: the number does not fit into 32 bits"
    elif begins.group() != value:
        what = f"torch reads {read} and drops the rest"
    else:
        yield from _outside(name, read, reader="torch")
        return
    yield error(f"{what}; write {RANGES[name]}")


def torch_switch(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A switch of torch's, which stops the program at words that it does not know."""
    if value.lower() not in {"y", "yes", "1", "t", "true", "n", "no", "0", "f", "false"}:
        meant = "0" if value.strip().lower() in _FALSE else "1"
        yield error(
            "torch stops the program: it takes 1, true, t, yes, y or 0, false, f, no, n; write "
            f'"{meant}"'
        )


def fi_switch(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A switch of libfabric's, which keeps its default at words that it does not know."""
    if value.lower() not in _FI_WORDS | {"0", "1"}:
        yield error(
            "libfabric keeps its default: it takes 1, true, yes, on or 0, false, no, off; write "
            '"1" or "0"'
        )


def _outside(name: str, read: int, *, reader: str = "NCCL") -> Iterator[Problem]:
    takes = RANGES.get(name)
    if takes is None or takes.holds(read):
        return
    note = f" ({takes.note})" if takes.note else ""
    yield error(f"{reader} has no meaning for {read}{note}; write {takes}")


def rule_for(name: str) -> Rule | None:
    """The rule of a variable that is a number or a switch, if it is one."""
    if name in NCCL:
        return None if name in TEXTS else number
    if name in TORCH - _TORCH_TEXTS:
        return torch_number if name in RANGES else torch_switch
    if name in _FI_SWITCHES:
        return fi_switch
    if name in _FI_NUMBERS:
        return fi_number
    return None


def fi_number(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A number or a switch of libfabric's whose kind is not listed here: both forms pass."""
    if value.lower() not in _FI_WORDS:
        yield from number(name, value, context)


FAMILIES = {"AF_INET": "ipv4", "AF_INET6": "ipv6"}


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
        folded = {word.lower(): word for word in self.words}
        if value in self.words + self.also or (not self.exact and value.lower() in folded):
            return
        near = folded.get(value.strip().lower())
        case = ", since case counts" if near and near != value.strip() else ""
        write = f'"{near}"' if near else listed(self.words)
        yield error(f"{self.reader} {self.otherwise}{case}; write {write}")


def addr_range(name: str, value: str, context: Context) -> Iterator[Problem]:
    """NCCL_IB_ADDR_RANGE: a network in CIDR form."""
    try:
        ipaddress.ip_network(value, strict=False)
        what = "" if "/" in value else "has no /"
    except ValueError:
        what = "is no address and length"
    if what:
        yield error(
            f"{what}, so NCCL ignores it and takes any address; write a network, e.g. "
            '"10.0.0.0/8" or "fd02::/16"'
        )


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
    "NCCL_IB_ADDR_RANGE": addr_range,
}
