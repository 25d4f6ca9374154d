"""Signatures: what a line of a log looks like that speaks of a fault. Read from TOML files.

A signature is tried on a line only where one of its words stands in it: plain words are found fast.
tests/unit/doctor/test_own_signatures.py and test_corpus.py hold the promises.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import tomllib
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.advise.doctor.faults import FAULTS, Certainty, Role
from hpctrain.advise.doctor.lines import FORMS, LINES, LONGEST_LINE, plain
from hpctrain.cluster.scheduler.base import name_here
from hpctrain.cluster.site.detect import choose, look_around
from hpctrain.cluster.site.load import site_files, user_folder
from hpctrain.core.base.env import HPCTRAIN_SITE
from hpctrain.core.settings.fields import Table, convert, field, keys_of
from hpctrain.errors import HpctrainError, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

FOLDER = "signatures"
"""Beside this module, and in the folder of a user's own settings."""
ORDER = (
    *("harmless", "accelerators", "memory", "storage", "program", "meeting", "training"),
    *("scheduler", "waits", "links", "deaths"),
)
"""Our own files in the order in which they are tried."""
FATAL = "fatal-python-error"
"""faulthandler's, of a crash in native code, whose place follows. An abort is none."""
COMMON: list[str] = LINES["common_words"]
_REQUIRED = ("name", "role", "words", "pattern", "matches", "near_misses")
SHORTEST_WORD = 3
LONGEST_S = 0.2
"""CPU time that a pattern may take for the longest line; ours take a thousandth of it."""
EXCEPTION = FORMS["error"]


class Signature(Table):
    """One kind of line: a `[[signature]]` table. docs/doctor.md describes the keys for users."""

    name: str = field("", "its own")
    fault: str = field(
        "", "a name of faults.toml; none for what is harmless", choices=("", *FAULTS)
    )
    role: str = field("", "what it can explain", choices=tuple(Role))
    words: list[str] = field([], "one of them stands in every line that fits", free=True)
    pattern: str = field("", "what fits; named groups become details", regex=True, free=True)
    where: str = field("anywhere", "in a line it may stand", choices=("anywhere", "start", "error"))
    certainty: str = field(
        "certain",
        "how sure its fault is where nothing comes before it; certain holds only where the line "
        "begins with an exception's name, or the system says so",
        choices=tuple(Certainty),
    )
    says_so: str = field("program", "who writes the line", choices=("program", "system"))
    is_late: bool = field(default=False, doc="printed when all is over")
    advice: list[str] = field([], "in place of what the fault's own row says", free=True)
    matches: list[str] = field([], "lines that fit", free=True)
    near_misses: list[str] = field([], "lines that look alike and do not fit", free=True)
    source: str = field("", "where such lines come from", free=True)

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """Its pattern."""
        return re.compile(self.pattern)

    def fits(self, text: str) -> re.Match[str] | None:
        """The pattern's match in a line without its prefixes; None where it does not fit."""
        if not any(word in text for word in self.words):
            return None
        if self.where == "start":
            return self.compiled.match(text)
        if self.where == "anywhere":
            return self.compiled.search(text)
        error = EXCEPTION.match(text)
        return self.compiled.search(text, error.start("text")) if error and error["text"] else None


class SignatureTable:
    """All signatures, in the order in which they are tried: the first that fits a line counts."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        every = tuple(signatures)
        self.faults = tuple(one for one in every if one.role != Role.HARMLESS)
        self.harmless = tuple(one for one in every if one.role == Role.HARMLESS)
        words = {word for one in self.faults for word in one.words}
        own = {word for word in words if not any(common in word for common in COMMON)}
        shortest = sorted(w for w in own if not any(o in w for o in own if o != w))
        # One of these, with its parts, stands in every line, without its digits, worth a look.
        self.words = {one: one.split() for one in map(_without_digits, (*COMMON, *shortest))}

    def with_more(self, more: Sequence[Signature]) -> SignatureTable:
        """Others before these, which may take the name of one of these and then replace it."""
        names = {one.name for one in more}
        rest = (one for one in (*self.harmless, *self.faults) if one.name not in names)
        return SignatureTable((*more, *rest))


def _without_digits(word: str) -> bytes:
    return word.encode().translate(None, b"0123456789")


@cache
def packaged() -> SignatureTable:
    """The signatures of this package."""
    folder = Path(__file__).with_name(FOLDER)
    return SignatureTable(one for name in ORDER for one in read(folder / f"{name}.toml"))


def read(path: Path) -> list[Signature]:
    """The signatures of a file.

    Raises:
        UsageError: it cannot be read, or a signature is wrong: which one, and what about it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} has no signatures that can be read: {why}") from None
    rows = table.pop("signature", [])
    if table or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        odd = f", not {next(iter(table))}" if table else ""
        raise UsageError(f"{path} may hold [[signature]] tables alone{odd}")
    return [_signature(row, f"{path}, signature {n}") for n, row in enumerate(rows, 1)]


def _signature(row: Mapping[str, Any], place: str) -> Signature:
    keys = keys_of(Signature)
    name = row.get("name")
    place = f"{place} ({name})" if isinstance(name, str) else place
    if unknown := sorted(row.keys() - keys.keys()):
        raise UsageError(f"{place}: no field is called {unknown[0]}; there are {', '.join(keys)}")
    if missing := [key for key in _REQUIRED if not row.get(key)]:
        raise UsageError(f"{place}: {missing[0]} is missing")
    try:
        signature = Signature(**{key: convert(keys[key], row[key], key) for key in row})
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from None
    if short := [word for word in signature.words if len(_without_digits(word)) < SHORTEST_WORD]:
        raise UsageError(
            f"{place}: the word {short[0]!r} stands in too many lines: take a longer one"
        )
    if (signature.fault == "") != (signature.role == Role.HARMLESS):
        raise UsageError(f"{place}: a fault belongs to every role but harmless, which has none")
    return signature


def paths_here(environ: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """Return the files that hold here, a user's before the site's, and what hinders the site's."""
    own = user_folder(environ)
    paths = sorted((own / FOLDER).glob("*.toml")) if own is not None else []
    try:
        named = environ.get(HPCTRAIN_SITE, "")
        presets = [path for layers in site_files(environ).values() for _, path in layers]
        presets += [Path(named)] if named.endswith(".toml") else []
        # Which site this is may take SLURM's answer: a diagnosis must not wait for a dead one.
        if not any(FOLDER.encode() in one.read_bytes() for one in presets if one.is_file()):
            return paths, []
        here = look_around(environ, lambda: name_here(environ))
        site, _ = choose(environ.get(HPCTRAIN_SITE), environ, here)
        places = [Path(os.path.expandvars(text)) for text in site.doctor.signatures] if site else []
        return [*paths, *(path for place in places for path in files_in(place))], []
    except (HpctrainError, OSError) as error:
        return paths, [f"the site's signatures were left out: {error}"]


def files_in(path: Path) -> list[Path]:
    """Return a file itself, or all *.toml of a folder.

    Raises:
        NotFound: there is no such file or folder, or none in it.
    """
    if not path.exists():
        raise NotFound(f"{path}: there is no such file or folder of signatures")
    paths = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if not paths:
        raise NotFound(f"{path} has no file of signatures (*.toml)")
    return paths


def with_own(environ: Mapping[str, str]) -> tuple[SignatureTable, list[str]]:
    """Return ours and those that are found here, and a note for each file that is left out."""
    paths, notes = paths_here(environ)
    more: list[Signature] = []
    for path in paths:
        try:
            more += read(path)
        except HpctrainError:
            notes.append(f"{path.name} was left out: `hpctrain doctor --check-signatures` says why")
    return packaged().with_more(more) if more else packaged(), notes


def faults_of(signatures: Iterable[Signature]) -> list[str]:
    """Return what their own examples say against them, in a line each."""
    faults: list[str] = []
    for signature in signatures:
        if slow := _slow_on(signature):
            faults.append(
                f"{signature.name}: its pattern takes too long on lines like {slow[:60]!r}..."
            )
            continue
        for line in signature.matches:
            text = plain(line).text
            if signature.fits(text) is None:
                why = f"it does not stand where it should ({signature.where})"
                if signature.compiled.search(text) is None:
                    why = "its pattern does not"
                if not any(word in text for word in signature.words):
                    why = "none of its words stands there"
                faults.append(f"{signature.name}: does not fit its example {line!r}: {why}")
        misses = (
            line for line in signature.near_misses if signature.fits(plain(line).text) is not None
        )
        faults += [f"{signature.name}: fits its near miss {line!r}" for line in misses]
    return faults


def _slow_on(signature: Signature) -> str:
    """Return a line on which the pattern takes too long; "" where it takes long on none."""
    pieces, text = ["a", "0", " ", "\t", "/", "a.", "a ", "0,", "a=", *signature.matches], ""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        for begin, piece in itertools.product(("", *signature.matches), pieces):
            text = (begin + piece * (LONGEST_LINE // len(piece)))[:LONGEST_LINE]
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
            signature.compiled.search(text)
    except TimeoutError:
        return text
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return ""
