"""Which files are looked at, how they are read, and how a mended one is written.

What a folder holds is looked through without following links to folders, so that no circle of them
is walked. tests/unit/lint/test_files.py holds the promises.
"""

from __future__ import annotations

import codecs
import io
import os
import shutil
import tempfile
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain
from hpctrain.errors import NotFound
from hpctrain.lint.check import SETTINGS_NAME
from hpctrain.lint.deepspeed_config import is_deepspeed, parse_json
from hpctrain.lint.folder import LintFolder
from hpctrain.lint.syntax import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PASSED_OVER = frozenset(
    {"__pycache__", "build", "dist", "env", "node_modules", "site-packages", "venv", "virtualenv"}
)
_UTF8 = frozenset({"utf-8", "utf-8-sig"})
_OF_HOST_NAMES = frozenset({"idna", "punycode", "undefined"})
"""Codecs that Python takes in a first line: they raise, or take minutes for megabytes."""


class NotText(ValueError):
    """A file that cannot be read, in words."""


def files_to_check(
    paths: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[Path, LintFolder]]:
    """Yield each file that was named, and of each folder its programs and configurations, once.

    Each comes with the folder whose files are looked at for its imports.

    Args:
        paths: Files and folders.
        say: Is told of a folder that cannot be looked into.

    Raises:
        NotFound: there is no such file or folder.
    """
    seen: set[Path] = set()
    beside: dict[Path, LintFolder] = {}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            folder = LintFolder(path)
            candidates = _in_folder(path, folder, say)
        elif os.path.lexists(path):
            folder = beside.setdefault(path.parent, LintFolder(path.parent, is_whole=False))
            candidates = iter([path])
        else:
            raise NotFound(f"{name} is not there; check the path")
        for candidate in candidates:
            if candidate not in seen:
                seen.add(candidate)
                yield candidate, folder


def _in_folder(folder: Path, together: LintFolder, say: Callable[[str], None]) -> Iterator[Path]:
    def passed_over(error: OSError) -> None:
        say(f"{error.filename} is passed over: {error.strerror}")

    for root, folders, files in os.walk(folder, onerror=passed_over):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in PASSED_OVER
        )
        for name in sorted(files):
            path = Path(root, name)
            of_python = name.endswith(".py") or name == SETTINGS_NAME
            if of_python or (name.endswith(".json") and _is_configuration(path, together)):
                yield path


def _is_configuration(path: Path, folder: LintFolder) -> bool:
    """Whether a JSON file of a folder is DeepSpeed's; one that cannot be read is nobody's."""
    try:
        value = parse_json(read_source(path))
    except ValueError:  # NotText among them
        return False
    return is_deepspeed(value) or (is_deepspeed(value, is_named=True) and folder.names(path))


def read_source(path: Path) -> str:
    """The text of a file, in the encoding that its first lines name.

    Raises:
        NotText: it cannot be read, in words.
    """
    try:
        raw = read_plain(path, MOST_BYTES)
    except OSError as error:
        raise NotText(f"cannot be read: {error.strerror or error}") from None
    return decoded(raw)


def decoded(raw: bytes) -> str:
    """A source as text.

    Raises:
        NotText: it is in another encoding than it says.
    """
    if len(raw) > MOST_BYTES:
        raise NotText(f"has more than {MOST_BYTES} bytes")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        if codecs.lookup(encoding).name in _OF_HOST_NAMES:
            raise NotText(f"cannot be read: {encoding} is no encoding of a program")
        return raw.decode(encoding)
    except (SyntaxError, LookupError) as error:
        raise NotText(f"cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise NotText(
            f"is not {error.encoding} text at byte {error.start}; save it as UTF-8, or name its "
            "encoding in the first line"
        ) from None


def write_source(path: Path, text: str) -> None:
    """Put a mended text in a file's place, with its permissions; a link stays a link.

    Raises:
        OSError: it could not be written, in the name of the file, which is as it was.
        NotText: the file is not in UTF-8, or has changed meanwhile.
    """
    place = path.resolve()
    raw = place.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    if encoding not in _UTF8:
        raise NotText(f"is {encoding} text; --fix writes UTF-8 only")
    descriptor, staged = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode(encoding))
        shutil.copymode(place, staged)
        Path(staged).replace(place)
    except OSError as error:
        Path(staged).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
