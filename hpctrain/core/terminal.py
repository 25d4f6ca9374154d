"""The border of all that commands print: nothing that came from a file is obeyed by a terminal.

What a run's files, names, nodes and error messages hold may contain sequences that move the cursor,
hide lines or fill the clipboard. Whatever is printed, JSON for programs or aligned text for people,
goes through here; colours as our own pass, all other control characters become question marks.
tests/unit/base/test_escapes.py holds the promises.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_OUR_COLOURS = r"\x1b\[(?:[01234]|1;3[1-6]|3[1-6])m"
_CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
"""With those of the upper half, which some terminals obey, and those that turn text round."""
_TEXT = re.compile(f"{_OUR_COLOURS}|{_CONTROLS}")
_LOG = re.compile(rb"\x1b\[[0-9;:]*m|[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]")
_ASCII = "ascii"


def clean(text: str) -> str:
    """Text as it may be printed; colours as our own stay."""
    return _TEXT.sub(lambda found: found[0] if len(found[0]) > 1 else "?", text)


def clean_log(line: bytes) -> bytes:
    """A line of a rank's log as a terminal may show it: its colours stay.

    Of a progress bar, which goes back to the line's beginning again and again, the first state and
    the last.
    """
    first, *more = line.strip(b"\r").split(b"\r")
    shown = first + b" .. " + more[-1] if more else first
    return _LOG.sub(lambda found: found[0] if found[0].endswith(b"m") else b"?", shown)


class CleanedStream:
    """A text stream through which nothing goes that a terminal obeys, but for our colours."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.has_written = False

    def write(self, text: str) -> int:
        """Print text."""
        self.has_written = True
        self.stream.write(clean(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Print texts."""
        for line in lines:
            self.write(line)

    @property
    def encoding(self) -> str:
        """Never ASCII, for which click would look for a way round this stream."""
        name = str(self.stream.encoding or _ASCII)
        return "utf-8" if _ASCII in name.lower() else name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def can_redraw(stream: TextIO) -> bool:
    """Whether what was written can be drawn over."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _show_cleaned(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """The traceback of a bug: its message may quote a file too."""
    sys.stderr.write(clean("".join(traceback.format_exception(kind, error, where))))


@contextlib.contextmanager
def border() -> Iterator[None]:
    """Clean what is printed inside, and print what the terminal has no character for as '?'."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = (
        stream if isinstance(stream, CleanedStream) else cast("TextIO", CleanedStream(stream))
        for stream in before
    )
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_cleaned
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def echo_json(value: Any) -> None:
    """Print one JSON value, indented, and nothing else on stdout."""
    import json

    click.echo(json.dumps(value, indent=2, allow_nan=False))


def echo_note(text: str) -> None:
    """Tell something on stderr, where it does not mix with output that is read by a program."""
    click.echo(f"hpctrain: {text}", err=True)


def echo_warning(text: str) -> None:
    """The same for something that the user may want to change, in yellow on a terminal."""
    click.secho(f"hpctrain: note: {text}", err=True, fg="yellow")
