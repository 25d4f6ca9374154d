"""Which lines of a log are shown: all, those that match, those that tell of trouble. Pure.

A filter sees the lines of one log in order and remembers what it needs: a rank's traceback is whole
also where other ranks print in between. tests/unit/test_logs_cli.py holds the promises.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")

_TROUBLE = re.compile(
    rb"(?<!\bno )(?<!\b0 )(?:error|exception)s?\b(?!\s*[=:]\s*(?:0\b|none\b|nan\b))"
    rb"|nccl warn|\bkilled\b|out of memory|oom[-_ ]?kill|segmentation fault|bus error|core dumped"
    rb"|\bfatal\b|\babort(?:ed|ing)\b|\bpanic\b|during handling of the above|direct cause of the"
    rb"|\bnode \S+ failed\b",
    re.IGNORECASE,
)
_TRACEBACK = re.compile(rb"^(.*?)(?:[+] Exception Group )?Traceback \(most recent call last\)")


_HINTS = (
    b"error", b"exception", b"nccl warn", b"kill", b"out of memory", b"fault", b"core dumped",
    b"fatal", b"abort", b"panic", b"direct cause", b"failed",
)  # fmt: skip
"""One of them is in every line that `_TROUBLE` finds; looking for them is much cheaper."""


def is_trouble(line: bytes) -> bool:
    """Whether a line by itself tells of trouble."""
    low = line.lower()
    return any(hint in low for hint in _HINTS) and _TROUBLE.search(line) is not None


class Trouble:
    """Says of each line of one log whether it tells of trouble; tracebacks are whole."""

    def __init__(self) -> None:
        self._prefix: bytes | None = None

    def __call__(self, line: bytes) -> bool:
        """Whether the next line of the log is to be shown."""
        begin = _TRACEBACK.match(line) if b"Traceback (" in line else None
        if begin is not None:
            self._prefix = begin[1].rstrip()  # torch puts "[rank0]: " before each line of it
            return True
        if self._prefix is None:
            return is_trouble(line)
        rest = line.removeprefix(self._prefix)
        if len(rest) == len(line) and self._prefix:
            return is_trouble(line)  # another thread of this rank prints between
        if rest.removeprefix(b" ")[:1] not in {b" ", b"|", b"+"} and rest.strip():
            self._prefix = None  # "ValueError: ..." is its last line
        return bool(rest.strip())


class Filter(Generic[Item]):
    """Passes on the items whose lines are wanted, with their neighbours.

    Args:
        wanted: Whether a line is shown; called once for each line, in order.
        context: How many lines before and after it are shown too.
    """

    def __init__(self, wanted: Callable[[bytes], bool], context: int = 0) -> None:
        self._wanted = wanted
        self._context = context
        self._before: deque[Item] = deque(maxlen=context)
        self._after = 0

    def feed(self, line: bytes, item: Item) -> list[Item]:
        """What is to be shown by now, given the next line."""
        if self._wanted(line):
            found = [*self._before, item]
            self._before.clear()
            self._after = self._context
            return found
        if self._after > 0:
            self._after -= 1
            return [item]
        self._before.append(item)
        return []


def both(grep: re.Pattern[str] | None, *, err: bool) -> Callable[[], Callable[[bytes], bool]]:
    """Makes, for each log, what says whether a line is shown under `--grep` and `--err`."""

    def make() -> Callable[[bytes], bool]:
        trouble = Trouble() if err else None

        def wanted(line: bytes) -> bool:
            told = trouble is None or trouble(line)
            return told and (grep is None or grep.search(line.decode(errors="replace")) is not None)

        return wanted

    return make
