"""A rank's heartbeat: where in its program it is, readable from outside.

Five words of the board's row, written by the rank at each change of phase and read by the agent
without its help: its process, its step, its phase, since when, and how long it has waited for its
data in all. tests/unit/control/test_heartbeat.py holds the promises.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from hpctrain.core.base import clock
from hpctrain.core.base.files import read_plain, replace_text
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.node.control.board import (
    BOARD,
    HEARTBEAT_IN_DATA,
    HEARTBEAT_PHASE,
    HEARTBEAT_PROCESS,
    HEARTBEAT_SINCE,
    HEARTBEAT_STEP,
    Board,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

P = ParamSpec("P")
T = TypeVar("T")

PHASES = (
    "",
    "start",
    "restore",
    "step",
    "data",
    "forward_backward",
    "optimizer",
    "validate",
    "save",
    "end",
)
"""What hpctrain knows of by itself; "" where a program says nothing about itself."""
START, RESTORE, STEP, DATA, FORWARD_BACKWARD, OPTIMIZER, VALIDATE, SAVE, END = range(1, 10)
SECTION_LETTERS = 80
"""So long may the name of a program's own section be."""
_FIRST_SECTION = 64
_MOST_SECTIONS = 4096
_IS_FIRST = 1 << 15
"""In the word of a phase: the rank has not done a step yet."""
_LIMIT_AT = 16
_MOST_LIMIT_MS = 2**46 - 1
_CODE = _IS_FIRST - 1


class HeartbeatSeen(NamedTuple):
    """A rank's heartbeat as it was read.

    Attributes:
        process: Its process; 0 for one that has not begun.
        phase: The name of its phase, in `PHASES` or a section's; "" for not known.
        is_first: It has not done a step yet.
        limit_s: What the program has said the phase may take; None for nothing.
        since_ns: When it came there, on the clock of its node; another after each change.
        in_data_s: How long it has waited for its data in all; what it waits just now is not in it.
    """

    rank: int
    process: int
    step: int
    phase: str
    is_first: bool
    limit_s: float | None
    since_ns: int
    in_data_s: float


class HeartbeatWriter:
    """This process's. From one thread: that of the program's loop."""

    def __init__(self, words: memoryview[int], at: int, names: Path | None = None) -> None:
        """Begin in no phase: a program that reports nothing must not count as standing still.

        The row begins in `words` at `at`; the names of sections go into the file `names`.
        """
        self._words, self._names = words, names
        self._at_step, self._at_phase, self._at_since, self._at_in_data = (
            at + HEARTBEAT_STEP,
            at + HEARTBEAT_PHASE,
            at + HEARTBEAT_SINCE,
            at + HEARTBEAT_IN_DATA,
        )
        self._first = _IS_FIRST
        self._word = 0
        self._is_in_data = False
        self._sections: dict[str, int] = {}
        self._words[at + HEARTBEAT_PROCESS] = os.getpid()
        self._put(0)

    @classmethod
    def of_rank(cls, folder: Path, rank: int) -> HeartbeatWriter:
        """Write on the board in a round's `folder` (`HPCTRAIN_CONTROL`).

        Raises:
            OSError: there is no board.
            HpctrainError: it is another version's, or this rank is not on it.
        """
        board = Board.open(folder / BOARD)
        return cls(board.words, board.at(rank - board.first_rank), _names_path(folder, rank))

    def enter(self, phase: int, limit_ms: int = 0) -> int:
        """Go into a phase. Returns what `back` takes to come back to the one before."""
        before, self._word = self._word, phase | limit_ms << _LIMIT_AT
        self._put(self._word)
        return before

    def back(self, before: int) -> None:
        """Come back to an earlier phase."""
        self._word = before
        self._put(before)

    def at_step(self, step: int, phase: int) -> None:
        """Begin a step, in a phase."""
        self._words[self._at_step] = step
        self._word = phase
        self._put(phase)

    def beat(self) -> None:
        """Continue in the same phase."""
        self._put(self._word)

    def stepped(self) -> None:
        """A step was done: from now on steps take what steps take."""
        self._first = 0

    def section(self, name: str) -> int:
        """The phase of a section of the program's own, known by its name from now on."""
        number = self._sections.get(name)
        if number is None:
            if len(self._sections) >= _MOST_SECTIONS:
                return STEP
            number = self._sections[name] = _FIRST_SECTION + len(self._sections)
            if self._names is not None:
                with contextlib.suppress(OSError):  # a full memory costs the name, no training
                    replace_text(self._names, json.dumps(list(self._sections)))
        return number

    def _put(self, word: int) -> None:
        now_ns = clock.monotonic_ns()
        if self._is_in_data:
            self._words[self._at_in_data] += now_ns - self._words[self._at_since]
        self._is_in_data = word & _CODE == DATA
        self._words[self._at_phase] = word | self._first
        self._words[self._at_since] = now_ns


class Phase:
    """A ``with`` block in a phase; around it the rank is where it was. May stand inside others."""

    def __init__(self, phase: int | str, limit_s: float | None = None) -> None:
        """Nothing happens before the block.

        Args:
            phase: One of `PHASES`, or the name of a section of the program's own.
            limit_s: What it may take at most, in seconds; None for what such phases take.
        """
        self._phase = phase
        self._limit_ms = 0 if limit_s is None else max(1, round(min(limit_s, 2e9) * 1000))
        self._before: list[int] = []

    def __enter__(self) -> Self:
        heartbeat = _here
        number = self._phase if isinstance(self._phase, int) else heartbeat.section(self._phase)
        self._before.append(heartbeat.enter(number, min(self._limit_ms, _MOST_LIMIT_MS)))
        return self

    def __exit__(self, *_: object) -> None:
        _here.back(self._before.pop())


def section(name: object, limit_s: float | None) -> Phase:
    """A section of the program's own, as a program has named it.

    Raises:
        UsageError: no name, or no number of seconds above 0.
    """
    if not isinstance(name, str) or not 0 < len(name) <= SECTION_LETTERS or not name.isprintable():
        raise UsageError(
            f"run.section({name!r}): a section has a name of 1 to {SECTION_LETTERS} letters"
        )
    if limit_s is not None and not limit_s > 0:
        raise UsageError(f"run.section({name!r}, limit_s={limit_s!r}): seconds above 0")
    return Phase(name, limit_s)


def _unread() -> HeartbeatWriter:
    """The heartbeat of a process that no agent looks at."""
    return HeartbeatWriter(memoryview(bytearray(8 * (HEARTBEAT_IN_DATA + 1))).cast("q"), 0)


_here = _unread()


def here() -> HeartbeatWriter:
    """This process's heartbeat."""
    return _here


def begin(folder: Path, rank: int) -> None:
    """Have this process's heartbeat read from now on; see `HeartbeatWriter.of_rank`."""
    _set(HeartbeatWriter.of_rank(folder, rank))
    os.register_at_fork(after_in_child=lambda: _set(_unread()))


def _set(heartbeat: HeartbeatWriter) -> None:
    global _here  # noqa: PLW0603 - a process has one, and its phases lie in many rooms
    _here = heartbeat


def in_phase(phase: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that is in a phase while it runs."""

    def made(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            heartbeat = _here
            before = heartbeat.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                heartbeat.back(before)

        return inside

    return made


def read(board: Board) -> list[HeartbeatSeen]:
    """Return the heartbeats of a node's ranks; what is just being written may come half."""
    seen = []
    for local_rank in range(board.ranks):
        at = board.at(local_rank)
        process, step, word, since_ns = board.words[
            at + HEARTBEAT_PROCESS : at + HEARTBEAT_SINCE + 1
        ]
        limit_ms = word >> _LIMIT_AT
        seen.append(
            HeartbeatSeen(
                board.first_rank + local_rank,
                process,
                step,
                phase_name(board.folder, board.first_rank + local_rank, word & _CODE),
                bool(word & _IS_FIRST),
                limit_ms / 1000 if limit_ms else None,
                since_ns,
                board.words[at + HEARTBEAT_IN_DATA] / 1e9,
            )
        )
    return seen


def highest_step(folder: Path) -> int | None:
    """Return how many steps ranks of this node have done; None if none has, or none reports."""
    try:
        board = Board.open(folder / BOARD)
    except (OSError, HpctrainError):
        return None
    try:
        begun = [seen for seen in read(board) if seen.process and not seen.is_first]
        return max((seen.step for seen in begun), default=None)
    finally:
        board.close()


def phase_name(folder: Path, rank: int, phase: int) -> str:
    """Return what a rank's phase is called; "" for not known."""
    if phase < len(PHASES):
        return PHASES[phase]
    try:
        names = json.loads(read_plain(_names_path(folder, rank)))
        return str(names[phase - _FIRST_SECTION])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _names_path(folder: Path, rank: int) -> Path:
    return folder / f"sections-{rank}"
