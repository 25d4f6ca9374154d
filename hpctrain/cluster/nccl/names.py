"""The variables that NCCL, its plugins, libfabric and torch read, and the rule for their names.

Also what all rules for environment values share: a problem, what is known of the site, the wording.
A message says the value, what its reader would make of it and why that is wrong, what to write.

`check_name` warns of misspelt and dead names, of NVIDIA's debugging class, and of what no preset
sets. A name that is missing in these tables is not wrong for certain: it is warned of, with the
nearest one that is known. variables.toml has them, and the releases whose source was read.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

ERROR = "error"
WARNING = "warning"
DEBUG = "debug"
"""Nothing is wrong with the value, but it should not stay without a reason (`why = "..."`)."""

_LONGEST = 80

Version = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is to be said of one variable."""

    level: str
    """error: it does not do what it says; warning: it may well not; debug: it needs a reason."""
    message: str


@dataclass(frozen=True)
class Context:
    """What is known of the place where the variables will hold. Empty or None is unknown."""

    kind: str = ""
    """The fabric, as in [network]."""
    required: Sequence[str] = ()
    """sbatch options that every job has."""
    netdevs: frozenset[str] | None = None
    """Every network interface of a node."""
    hcas: frozenset[str] | None = None
    """Every InfiniBand or RoCE adapter of a node."""
    nccl: str = ""
    """NCCL's version, or the oldest one that is meant."""
    old_plugin: bool = False
    """Whether the variables are for older versions of the network plugin only."""
    multi_node: bool = True
    """Whether the job has several nodes."""

    def older_than(self, version: Version) -> bool:
        """Whether NCCL is known to be older than that."""
        return bool(self.nccl) and as_version(self.nccl) < version


Rule = Callable[[str, str, Context], Iterator[Problem]]
"""Judges one variable: (name, value, context)."""


def as_version(text: str) -> Version:
    """`2.27.3` as (2, 27, 3); what is no number ends it."""
    parts: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    return tuple(parts)


def cut(text: str) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def error(message: str) -> Problem:
    """The value does not do what it says."""
    return Problem(ERROR, message)


def warning(message: str) -> Problem:
    """The value may well not do what it says."""
    return Problem(WARNING, message)


def reason(message: str) -> Problem:
    """The value should not stay without a reason."""
    return Problem(DEBUG, message)


def of_variable(name: str, value: str, problem: Problem) -> Problem:
    """The problem with `NAME=value` before its message, all on one line.

    The value is cut where it is long, and quoted where it must be.
    """
    plain = value.isprintable() and value and " " not in value and "'" not in value
    one_line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in problem.message)
    return Problem(problem.level, f"{name}={cut(value if plain else repr(value))}: {one_line}")


def listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


TABLE = tomllib.loads(Path(__file__).with_name("variables.toml").read_text("utf-8"))
"""variables.toml, whose comments say what each part is."""
_PATTERN = re.compile(r"<(\w+)>")


def _whole(pattern: str) -> str:
    """Return a pattern of a row with the lists of words that it names."""
    return _PATTERN.sub(lambda part: f"({_whole(TABLE['patterns'][part[1]])})", pattern)


for _row in (*TABLE["alone"], *TABLE["together"]):
    if isinstance(_row.get("value"), str):
        _row["value"] = _whole(_row["value"])


def names_of(*keys: str) -> frozenset[str]:
    """The variables of tables in `names`, with their prefix."""
    tables = [TABLE["names"][key] for key in keys]
    return frozenset(table["prefix"] + word for table in tables for word in table["names"].split())


NCCL = names_of("nccl")
NCCL_DEBUGGING = names_of("nccl_debugging")
TORCH = names_of("torch")
FI_CORE = names_of("fi_core")
_GLOO = names_of("gloo")
_FAMILIES = tuple(TABLE["families"])
_READERS: dict[str, tuple[str, frozenset[str]]] = {
    prefix: (row["reader"], names_of(*row["names"])) for prefix, row in TABLE["readers"].items()
}
"""Prefix to who reads the variables of that prefix, and their names."""
_DEAD: dict[str, tuple[str, str]] = {
    row["name"]: (row["what"], row.get("instead", "")) for row in TABLE["dead"]
}
_SLOW: dict[str, str] = TABLE["slow"]
PREFIXES = ("NCCL_", "RCCL_", "OFI_NCCL_", "TORCH_NCCL_", "TORCH_FR_", "FI_", "GLOO_")
"""Of the variables that are judged: an empty value, quotes and blanks around it never help them."""

_SECRET = re.compile(r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)")
_BLANKS = frozenset({"NCCL_DEBUG_TIMESTAMP_FORMAT"})
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(|`")


def check_name(name: str, value: str, context: Context) -> Iterator[Problem]:
    """What is to be said of the name, and of any value that this name may have."""
    if name in _DEAD:
        yield from _dead(name)
    else:
        yield from _unknown(name)
    yield from _text(name, value)
    yield from _class(name, value)


def check_secret(name: str, value: str) -> Iterator[Problem]:
    """What is to be said of a variable with a secret, whose value is not repeated."""
    if _SECRET.fullmatch(name) and value:
        yield error(
            f"{name} looks like a secret: presets can be read by everybody, and spec.json and the "
            "logs record the environment; let each user set it in the job's own shell"
        )


def _text(name: str, value: str) -> Iterator[Problem]:
    """What a shell would have done to the value, and nobody does here."""
    expansion = _EXPANSION.search(value)
    if expansion:
        yield error(
            f"nobody expands {expansion.group()} here: ranks see this very text; write the value "
            "itself, or set the variable in slurm.setup"
        )
    if not name.startswith(PREFIXES):
        return
    if not value:
        yield error(
            "is empty, which is no value: most readers take it for not set, and NCCL no longer "
            "looks into /etc/nccl.conf; leave it out, or name the variable in env.unset"
        )
    elif value[0] in "\"'" and value[-1] == value[0]:
        yield error(
            "the quotes are part of the value, as a shell would not have it, and then it fits "
            f"nothing; write {value.strip(value[0])}"
        )
    elif value != value.strip() and name not in _BLANKS:
        yield error(f'the blank around it is part of the value; write "{value.strip()}"')


def _class(name: str, value: str) -> Iterator[Problem]:
    if name in NCCL_DEBUGGING:
        yield reason(
            "is one of NVIDIA's debugging variables, not to be kept in scripts: a newer NCCL may "
            'choose better; leave it out, or say why it stays: { value = "...", why = "..." }'
        )
    elif name in _SLOW and value.lower() not in {"0", "false", "f", "no", "n"}:
        yield reason(
            f"slows training: {_SLOW[name]}; leave it out, or say why it stays: "
            '{ value = "...", why = "..." }'
        )


def _dead(name: str) -> Iterator[Problem]:
    what, instead = _DEAD[name]
    write = f"use {instead}" if instead else "leave it out"
    yield warning(f"{what}; {write}")


def _unknown(name: str) -> Iterator[Problem]:
    for prefix, (reader, variables) in _READERS.items():
        if not name.startswith(prefix):
            continue
        if name not in variables and not name.startswith(_FAMILIES):
            yield warning(f"{reader} has no variable of this name; {_hint(name)}")
        return
    yield from _nearly_known(name)


def _hint(name: str) -> str:
    """The name that was meant, if one is near: its last part is compared, the prefix is common."""
    if f"TORCH_{name}" in TORCH:
        return f"did you mean TORCH_{name}?"
    if name.startswith("NCCL_OFI_"):
        return f"did you mean OFI_NCCL_{name.removeprefix('NCCL_OFI_')}?"
    prefix = next(prefix for prefix in _READERS if name.startswith(prefix))
    ends = [known.removeprefix(prefix) for known in _READERS[prefix][1]]
    near = get_close_matches(name.removeprefix(prefix), ends, 1, 0.7)
    return f"did you mean {prefix}{near[0]}?" if near else "leave it out if nothing else reads it"


def _nearly_known(name: str) -> Iterator[Problem]:
    """A name that only just misses: nccl_debug, NCCLDEBUG, NNCL_DEBUG, FI_MR_CACHE_MONITR."""
    every = NCCL | TORCH | FI_CORE | _GLOO
    if name in every:
        return
    near = [name.upper()] if name.upper() in every else get_close_matches(name, every, 1, 0.9)
    if near:
        yield warning(f"nothing reads this name; did you mean {near[0]}?")
