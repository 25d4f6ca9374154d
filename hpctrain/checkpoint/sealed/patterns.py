"""`checkpoint.sealed`: which of a program's files are its checkpoints, by name.

A pattern is absolute, or relative to the program's working directory and to the run's `output`.
Without a wildcard each save writes over the same path; with one each has a name of its own, and the
step is among the digits that the wildcards stand for.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WILD = re.compile(r"(?:\*|\?|\[[^\]]{1,255}\])+")
_TOKEN = re.compile(r"\*|\?|\[!")
_MEANT = {"*": ".*", "?": ".", "[!": "[^"}
_ASIDE = re.compile(r"\.torn-[0-9]+(?:\.[0-9]+)?$")
_STEP = re.compile(r"step[ =_-]?([0-9]{1,10})(?![0-9])", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+")
MOST_DIGITS = 10
SETTING = "checkpoint.sealed"


@dataclass(frozen=True)
class NamedPath:
    """A path that one of the patterns stands for.

    Attributes:
        step: From the digits of its name, else None.
        is_written_over: Each save writes over the same path.
    """

    path: Path
    step: int | None
    is_written_over: bool


@dataclass(frozen=True)
class Pattern:
    """One pattern; `is_absolute` patterns begin at the root of the file system."""

    text: str
    parts: tuple[str, ...]
    is_absolute: bool = False

    def matches(self, root: Path) -> Iterator[NamedPath]:
        """What lies below a folder; nothing where it cannot be listed."""
        root = self.root(root)
        is_written_over = not any(_WILD.search(part) for part in self.parts)
        for path in _below(root, self.parts):
            step = self.step_of(path.relative_to(root).parts)
            yield NamedPath(path, step, is_written_over)

    def root(self, folder: Path) -> Path:
        """The folder that the parts begin in, where a relative pattern is asked about this one."""
        return Path("/") if self.is_absolute else folder

    def step_of(self, names: Sequence[str]) -> int | None:
        """The step in what the wildcards stand for; None where that is not plain."""
        stood_for: list[str] = []
        for part, name in zip(self.parts, names, strict=True):
            match = re.fullmatch(_groups(part), name)
            stood_for += match.groups() if match else ()
        named = [found for text in stood_for for found in _STEP.findall(text)]
        # The word may stand outside: global_step* and checkpoint-* alike.
        numbers = named or [n for text in stood_for for n in _NUMBER.findall(text)]
        fitting = [int(number) for number in numbers if len(number) <= MOST_DIGITS]
        return fitting[0] if len(fitting) == 1 == len(numbers) else None


def parse(patterns: Sequence[str]) -> list[Pattern]:
    """The patterns of the setting; one text may hold several, with commas.

    Raises:
        UsageError: one of them cannot be a pattern.
    """
    texts = [text.strip() for entry in patterns for text in entry.split(",")]
    return [_parsed(text) for text in texts]


def refuse_wrong(patterns: Sequence[str], cwd: Path | None, run: Path) -> None:
    """Refuse what would seal nothing, or the run's own files; called at submit.

    `cwd` is the program's working directory, None if it has none of its own.

    Raises:
        UsageError: one of them is wrong.
    """
    for pattern in parse(patterns):
        for root in filter(None, (cwd, run / "output")):
            if _meets(pattern.parts, pattern.root(root), run):
                raise UsageError(
                    f"{SETTING} {pattern.text!r} takes in the run's own files in {run}; name the "
                    "program's checkpoints alone"
                )


def places(pattern: Pattern, folders: Sequence[Path]) -> set[tuple[str, ...]]:
    """The absolute forms of a pattern in these folders, with links in them followed, as parts."""
    forms = set()
    for folder in folders:
        root = pattern.root(folder)
        plain = [*itertools.takewhile(lambda part: not _WILD.search(part), pattern.parts)]
        head = Path(os.path.realpath(root.joinpath(*plain)))
        forms.add((*head.parts[1:], *pattern.parts[len(plain) :]))
    return forms


def may_meet(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two forms can stand for one path, or for a folder and something in it."""
    return all(itertools.starmap(_may_be_alike, zip(first, second, strict=False)))


def _may_be_alike(first: str, second: str) -> bool:
    wild_first, wild_second = _WILD.search(first), _WILD.search(second)
    if not (wild_first and wild_second):
        literal, pattern = (second, first) if wild_first else (first, second)
        return literal == pattern or fnmatch.fnmatchcase(literal, pattern)
    heads = first[: wild_first.start()], second[: wild_second.start()]
    tails = (one[[*_WILD.finditer(one)][-1].end() :] for one in (first, second))
    return _fits(*heads) and _fits(*(tail[::-1] for tail in tails))


def _fits(first: str, second: str) -> bool:
    return first.startswith(second) or second.startswith(first)


def _parsed(text: str) -> Pattern:
    why = ""
    place = os.path.expanduser(text)  # noqa: PTH111 - a pattern
    parts = tuple(part for part in place.split("/") if part not in {"", "."})
    if not parts:
        why = "is empty"
    elif place.startswith("~"):
        why = "names the home of a user whom nobody knows here"
    elif ".." in parts:
        why = "leaves its folder by '..'"
    elif "**" in parts or "\0" in text:
        why = "has '**', which would look through whole trees; name each folder on the way"
    if why:
        raise UsageError(f"{SETTING}: pattern {text!r} {why}")
    return Pattern(text, parts, is_absolute=place.startswith("/"))


def _meets(parts: Sequence[str], root: Path, run: Path) -> bool:
    """Whether a match could be the run's folder, one above it, or one of its own files in it."""
    try:
        own = run.relative_to(root).parts
    except ValueError:
        return False
    if not own:
        return False
    heads = all(fnmatch.fnmatchcase(n, p) for n, p in zip(own, parts, strict=False))
    if not heads or len(parts) <= len(own):
        return heads
    return not (parts[len(own)] == "output" and len(parts) > len(own) + 1)


def _below(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    part, rest = parts[0], parts[1:]
    for name in _names(folder, part):
        if _ASIDE.search(name):
            continue
        path = folder / name
        if not rest:
            if not path.is_symlink():
                yield path
        else:
            yield from _below(path, rest)


def _names(folder: Path, part: str) -> list[str]:
    if not _WILD.search(part):
        return [part] if os.path.lexists(folder / part) else []
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:  # not made yet, or no folder: nothing matches there
        return []
    hidden = part.startswith(".")
    return [n for n in names if fnmatch.fnmatchcase(n, part) and (hidden or n[0] != ".")]


def _groups(part: str) -> str:
    """A regular expression for a part of a pattern, a group for each stretch of wildcards."""
    text, at = "", 0
    for wild in _WILD.finditer(part):
        inner = _TOKEN.sub(lambda token: _MEANT.get(token[0][:2], token[0]), wild[0])
        text += re.escape(part[at : wild.start()]) + f"({inner})"
        at = wild.end()
    return text + re.escape(part[at:])
