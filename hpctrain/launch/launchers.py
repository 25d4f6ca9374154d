"""Commands that start ranks themselves, torchrun or srun, taken off the program that they start.

hpctrain starts the ranks, so of such a command only what it starts is left, and what its options
mean to that: how many ranks it counts on, variables that it would set. launchers.toml has each
option of each launcher. One that is not there is refused, never guessed: whether it takes a value
decides what the program is. Pure.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.settings.layers import nearest
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpctrain.core.settings.schema import SlurmSettings

_NUMBER = re.compile(r"[1-9][0-9]{0,6}")
_BY_DEVICES = frozenset({"auto", "gpu", "cpu", "xpu"})
"""What torchrun takes for --nproc-per-node beside a number."""


@dataclass(frozen=True)
class Option:
    """One option of a launcher; launchers.toml describes the fields."""

    takes: bool | None
    meaning: str = "ignored"
    detail: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launcher:
    """A command that starts ranks.

    Attributes:
        options: By name, with dashes for underscores; short ones have one letter.
        local_rank: The option with which it gives each rank its number on the node; "" for none.
        any_command: What it starts is any command, and may be another launcher.
        unknown: What to say of an option that is not in the table.
    """

    options: Mapping[str, Option]
    local_rank: str = ""
    any_command: bool = False
    unknown: str = (
        "is not an option that hpctrain knows of it; leave it out, or name the script itself"
    )


@dataclass(frozen=True)
class AskedCount:
    """A number that a launcher was given, with the words that said so."""

    what: str
    value: str
    said: str


@dataclass(frozen=True)
class Unwrapped:
    """What is left of a launcher's command.

    `command` is as it would stand behind `--`; with `is_final` it is no launcher once more.
    `local_rank` is the option that each rank gets in front of the program's arguments.
    """

    command: list[str]
    is_final: bool = True
    env: dict[str, tuple[str, str]] = field(default_factory=dict)
    asked: list[AskedCount] = field(default_factory=list)
    local_rank: str = ""
    notes: list[str] = field(default_factory=list)


@functools.cache
def launchers() -> Mapping[str, Launcher]:
    """Return every launcher that launchers.toml beside this file names."""
    table = tomllib.loads(Path(__file__).with_name("launchers.toml").read_text())
    by_name: dict[str, Launcher] = {}
    for name, row in table.items():
        like = by_name[row.pop("like")].options if "like" in row else {}
        options = {key: option for one in row.pop("options") for key, option in _options(**one)}
        by_name[name] = Launcher({**like, **options}, **row)
    return by_name


def _options(
    names: str,
    *,
    value: bool | None = None,
    meaning: str = "ignored",
    detail: str = "",
    prefix: str = "",
    choices: Sequence[str] = (),
) -> Iterator[tuple[str, Option]]:
    """The options of one row of the table, by name."""
    for name in names.split():
        variable = prefix + name.upper().replace("-", "_") if prefix else detail
        yield name, Option(value, meaning, variable, tuple(choices))


MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_REFUSED = {
    **dict.fromkeys(
        ("mpirun", "mpiexec", "orterun"),
        "hpctrain starts the ranks; name the program itself, without it and its options",
    ),
    **dict.fromkeys(
        ("sbatch", "salloc"),
        "hpctrain asks for the job itself; name the program that its ranks run",
    ),
}
_INSIDE = re.compile(
    r"^(?:[^#\n]*(?:&&|\|\||;|\bthen|\bdo)[ \t])?[ \t]*"
    r"(?:(?:\w+=\S*|exec|nohup|time|env|(?:conda|pixi|poetry|uv)[ \t]+run)[ \t]+)*(?:\S*/)?"
    r"(torchrun|srun|mpirun|mpiexec|deepspeed|accelerate[ \t]+launch"
    rf"|python\S*[ \t]+(?:-u[ \t]+)?-m[ \t]+(?:{'|'.join(map(re.escape, MODULES))}))(?=[ \t]|$)",
    re.MULTILINE,
)


def unwrap(command: Sequence[str]) -> Unwrapped | None:
    """What a launcher is asked to start; None where the command is no launcher's.

    `command` stands behind `--`, without an interpreter in front; it is not empty.

    Raises:
        UsageError: it has an option that cannot be honoured or is not known, or starts nothing.
    """
    head, rest = Path(command[0]).name, list(command[1:])
    if head in _REFUSED:
        raise UsageError(f"-- {head}: {_REFUSED[head]}")
    if head == "-m":
        name = MODULES.get(rest[0], "") if rest else ""
        rest = rest[1:]
    elif head == "accelerate-launch":
        name = "accelerate launch"
    elif head == "accelerate":
        if rest[:1] != ["launch"]:
            raise UsageError(f"-- accelerate {' '.join(rest[:1])}: only `accelerate launch` trains")
        name, rest = "accelerate launch", rest[1:]
    else:
        name = head
    launcher = launchers().get(name)
    return None if launcher is None else _read(name, launcher, rest)


def disagreements(asked: Sequence[AskedCount], slurm: SlurmSettings) -> list[str]:
    """Where a launcher was given other numbers than the job will have, in words."""
    from hpctrain.core.settings.check import node_range

    fewest, most = node_range(slurm.nodes)
    ranks, notes = slurm.ranks(), []
    for count in asked:
        if count.what == "nodes":
            wanted = count.value.replace(":", "-")
            low, _, high = wanted.partition("-")
            if (int(low), int(high or low)) != (fewest, most):
                notes.append(f"{count.said}, and the job has {slurm.nodes}: say --nodes {wanted}")
        elif count.value in _BY_DEVICES:
            continue
        elif count.what == "ranks" and int(count.value) != ranks:
            way = f"say --ranks-per-node {count.value}"
            notes.append(f"{count.said}, and each node has {ranks} rank(s): {way}")
        elif count.what == "world" and not fewest * ranks <= int(count.value) <= most * ranks:
            notes.append(
                f"{count.said}, and the job has {slurm.nodes} node(s) of {ranks} rank(s): "
                "say --nodes and --ranks-per-node"
            )
    return notes


def inside(text: str) -> tuple[str, int] | None:
    """The first launcher that a shell script calls, with its line; None where it calls none."""
    match = _INSIDE.search(text)
    return (match[1], text.count("\n", 0, match.start(1)) + 1) if match else None


def _read(name: str, launcher: Launcher, words: list[str]) -> Unwrapped:
    left, ignored = list(words), list[str]()
    result = Unwrapped([], is_final=not launcher.any_command, local_rank=launcher.local_rank)
    form = ""
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        shown, option, value = _next(name, launcher, word, left)
        said = f"{name} {shown}" + ("" if value is None else f" {value}")
        match option.meaning:
            case "refused":
                raise UsageError(f"-- {name} {shown}: {option.detail}")
            case "nodes" | "ranks" | "world":
                _check_number(said, option.meaning, value or "")
                result.asked.append(AskedCount(option.meaning, value or "", said))
            case "variable":
                result.env[option.detail] = (_variable(said, option, value), f"{name} {shown}")
            case "module" | "program":
                form = _one_form(name, form, option.meaning)
            case "no local rank":
                result = replace(result, local_rank="")
            case _:
                ignored.append(f"{shown} ({option.detail})" if option.detail else shown)
    if not left:
        raise UsageError(f"-- {name}: names no program; e.g. -- {name} train.py, or -- train.py")
    result.command.extend(["-m", *left] if form == "module" else left)
    result.notes.append(_note(name, result, ignored))
    return result


def _next(
    name: str, launcher: Launcher, word: str, left: list[str]
) -> tuple[str, Option, str | None]:
    """An option as it was written, what it means, and its value, which is taken from the rest."""
    is_long = word.startswith("--")
    shown, _, behind = word.partition("=") if is_long else (word[:2], "", word[2:])
    key = shown.lstrip("-").replace("_", "-")
    option = launcher.options.get(key)
    if option is None or is_long == (len(key) == 1):
        names = [known for known in launcher.options if len(known) > 1]
        near = nearest(key, names) if is_long and not launcher.any_command else []
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise UsageError(f"-- {name} {shown}: {launcher.unknown.format(word)}{hint}")
    given = word != shown
    if option.takes is False and given:
        raise UsageError(f"-- {name} {word}: {shown} takes no value")
    if not option.takes:
        return shown, option, None
    if given:
        return shown, option, behind
    if not left:
        raise UsageError(f"-- {name} {shown}: its value is missing")
    return shown, option, left.pop(0)


def _check_number(said: str, what: str, value: str) -> None:
    parts = re.split("[:-]", value) if what == "nodes" else [value]
    by_devices = what == "ranks" and value in _BY_DEVICES
    if not by_devices and (
        value.count(":") + value.count("-") > 1 or not all(map(_NUMBER.fullmatch, parts))
    ):
        raise UsageError(f"-- {said}: {value!r} is no number of {what.replace('world', 'ranks')}")


def _variable(said: str, option: Option, value: str | None) -> str:
    if value is None:
        return "true"
    if option.choices and value.lower() not in option.choices:
        raise UsageError(f"-- {said}: it takes {', '.join(option.choices)} here")
    return value.lower() if option.choices else value


def _one_form(name: str, form: str, meaning: str) -> str:
    if form not in {"", meaning}:
        raise UsageError(f"-- {name}: its program cannot be a module and no Python at once")
    return meaning


def _note(name: str, result: Unwrapped, ignored: list[str]) -> str:
    command = result.command
    what = " ".join(command[:2]) if command[0] == "-m" else command[0]
    text = f"{name} is left out: hpctrain starts the ranks, and they run {what}"
    if result.env:
        text += f"; set: {', '.join(f'{n}={v}' for n, (v, _) in result.env.items())}"
    if result.local_rank:
        text += f"; each gets {result.local_rank}=N"
    return text + (f"; without effect: {', '.join(ignored)}" if ignored else "")
