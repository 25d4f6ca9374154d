"""Signatures that a user or a site adds to ours: where they lie, and what is wrong with signature.

tests/unit/doctor/test_own_signatures.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.advise.doctor.lines import plain
from hpctrain.advise.doctor.scan import LONGEST_LINE
from hpctrain.advise.doctor.signature import packaged, read
from hpctrain.cluster.scheduler.base import name_here
from hpctrain.cluster.site.detect import choose, look_around
from hpctrain.cluster.site.load import site_files, user_folder
from hpctrain.core.base.env import HPCTRAIN_SITE
from hpctrain.errors import HpctrainError, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from hpctrain.advise.doctor.signature import Signature, SignatureTable

FOLDER = "signatures"
"""In the folder of a user's own settings."""
MOST_S = 0.2
"""CPU time that a pattern may take for the longest line; ours take a thousandth of it."""


def paths_here(environ: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """The files that hold here, a user's before the site's, and what hinders the site's."""
    own = user_folder(environ)
    paths = sorted((own / FOLDER).glob("*.toml")) if own is not None else []
    try:
        if not _a_preset_has_some(environ):
            return paths, []
        here = look_around(environ, lambda: name_here(environ))
        site, _ = choose(environ.get(HPCTRAIN_SITE), environ, here)
        named = [Path(os.path.expandvars(text)) for text in site.doctor.signatures] if site else []
        return [*paths, *(path for place in named for path in files_in(place))], []
    except HpctrainError as error:
        return paths, [f"the site's signatures were left out: {error}"]


def _a_preset_has_some(environ: Mapping[str, str]) -> bool:
    """Whether any preset names signatures: else nobody has to know which site this is.

    To find that out may take SLURM's answer, and a diagnosis must not wait for a dead one.
    """
    files = [path for layers in site_files(environ).values() for _, path in layers]
    named = environ.get(HPCTRAIN_SITE, "")
    files += [Path(named)] if named.endswith(".toml") else []
    for path in files:
        with contextlib.suppress(OSError):  # choosing the site says what is wrong with it
            if FOLDER.encode() in path.read_bytes():
                return True
    return False


def files_in(path: Path) -> list[Path]:
    """A file itself, or all *.toml of a folder.

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
    """Ours and those that are found here; a file that is wrong is left out, which is said."""
    paths, notes = paths_here(environ)
    more: list[Signature] = []
    for path in paths:
        try:
            more += read(path)
        except HpctrainError:
            notes.append(f"{path.name} was left out: `hpctrain doctor --check-signatures` says why")
    return packaged().with_more(more) if more else packaged(), notes


def faults_of(signatures: Iterable[Signature]) -> list[str]:
    """What their own examples say against them, in a line each."""
    faults: list[str] = []
    for signature in signatures:
        if (slow := _slow_on(signature)) is not None:
            faults.append(
                f"{signature.name}: its pattern takes too long on lines like {slow[:60]!r}..."
            )
            continue
        faults += [
            f"{signature.name}: does not fit its example {line!r}: {_why(signature, line)}"
            for line in signature.matches
            if signature.fits(plain(line).text) is None
        ]
        faults += [
            f"{signature.name}: fits its near miss {line!r}"
            for line in signature.near_misses
            if signature.fits(plain(line).text) is not None
        ]
    return faults


def _why(signature: Signature, line: str) -> str:
    text = plain(line).text
    if not any(word in text for word in signature.words):
        return "none of its words stands there"
    if signature.compiled.search(text) is None:
        return "its pattern does not"
    return f"it does not stand where it should ({signature.where})"


class _TooSlow(Exception):
    """A pattern's time is up."""


def _slow_on(signature: Signature) -> str | None:
    """A line on which the pattern takes too long; None where it takes none long."""
    pieces = ["a", "0", " ", "\t", "/", "a.", "a ", "0,", "a=", *signature.matches]
    texts = [piece * (LONGEST_LINE // len(piece)) for piece in pieces]
    texts += [
        line + piece * (LONGEST_LINE // len(piece))
        for line in signature.matches
        for piece in pieces
    ]

    def up(_number: int, _frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, up)
    try:
        for text in texts:
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
            try:
                signature.compiled.search(text[:LONGEST_LINE])
            except _TooSlow:
                return text
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return None
