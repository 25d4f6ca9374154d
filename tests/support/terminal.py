"""A command on a real pseudo-terminal, and the screen that a person would see there."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyte

from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FIXED = frozenset({"NO_COLOR", "COLUMNS", "LINES"})
"""What would make a command blind to the terminal that it runs on."""
HOME = "\x1b[H"
"""Begins a screen that is drawn over the last."""
_LEADER = (
    "import os, signal, sys; os.close(os.open(os.ttyname(0), os.O_RDWR));"
    "signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.executable, [sys.executable, '-m', 'hpctrain', *sys.argv[1:]])"
)
"""A session leader gets the first terminal that it opens: keys such as Ctrl-C then reach it.

It hears them as from a shell at a terminal, also where the tests themselves are deaf to Ctrl-C: a
shell without job control starts its background jobs so.
"""


class Keyboard(io.StringIO):
    """Stands for stdin: a terminal at which somebody types."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class Terminal:
    """Runs `hpctrain ARGS` on a terminal of so many columns and rows.

    Attributes:
        raw: All that came out.
        screen: How it looks; `screen.history.top` has the lines that were scrolled away.
    """

    def __init__(self, *args: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self.raw = b""
        self.screen = pyte.HistoryScreen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = os.openpty()
        self._resize(columns, rows)
        source = str(Path(__file__).parents[2])
        inherited = {k: v for k, v in os.environ.items() if k not in FIXED}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LEADER, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**inherited, "PYTHONPATH": source, "TERM": "xterm", **env},
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def until(self, seen: Callable[[], bool]) -> None:
        """Read until something is seen."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert self._read(deadline - time.monotonic()), f"never seen:\n{self.text}"

    def wait(self) -> int:
        """Read to the end; returns the exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline - time.monotonic()):
            pass
        return self._process.wait(PATIENCE_S)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def until_stopped(self) -> None:
        """Wait until it has stopped, as after Ctrl-Z."""
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def resize(self, columns: int, rows: int) -> None:
        """Pull the window to another size."""
        self.screen.resize(rows, columns)
        self._resize(columns, rows)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def lines(self) -> list[str]:
        """All lines that were ever written, without what is not seen of them."""
        text = self.raw.decode().replace(HOME, "\n")
        return ESCAPES.sub("", text).replace("\r", "").split("\n")

    def _resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self, left_s: float) -> bool:
        """Take in what comes next; False at the end, or when nothing comes in time."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, left_s))
        block = b""
        # At the end of a pseudo-terminal Linux gives an error, not an end of file.
        with contextlib.suppress(OSError):
            block = os.read(self._ours, 65536) if ready else b""
        self.raw += block
        self._stream.feed(block)
        return bool(block)
