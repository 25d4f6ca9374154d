"""What `hpctrain status` shows of one run or of all, once or with `--watch` until it is over.

On a terminal the watch takes the alternate screen and draws each look over the one before, so that
what was there before comes back; the last screen is then printed below it. Elsewhere, and as JSON,
it prints only when something has happened. tests/e2e/test_terminal.py holds the promises.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hpctrain.base.text import clock, crop, duration, paint
from hpctrain.terminal import clean, draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType
    from typing import Self

    from hpctrain.run.layout import RunDir
    from hpctrain.status.reader import StatusReader
    from hpctrain.status.status import RunStatus

NARROWEST = 40
_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
"""Alternate screen without a cursor, and back."""
_HOME, _TO_END_OF_LINE, _TO_END = "\033[H", "\033[K", "\033[J"
_DIM = "2"
SLICE_S = 0.2
"""How soon a change of the terminal's size is seen."""
TERMINATED = 128 + signal.SIGTERM
_AGES = frozenset({"words", "last_seen", "goodput", "last_24h", "disk_free_bytes"})
"""What changes as time goes by although nothing happens."""


@dataclass(frozen=True)
class Shown:
    """One look.

    Attributes:
        as_text: The screen; takes the width and whether it may have colours.
        as_value: The same for programs; made when it is asked for, since it takes its time.
        over: Nothing of it is under way.
        sure: False where a run seems lost: between two starts of a job a scheduler may not know it.
        exit_status: The run's state for scripts; 0 for all runs.
    """

    as_text: Callable[[int, bool], str]
    as_value: Callable[[], Any]
    over: bool
    sure: bool = True
    exit_status: int = 0

    def as_json(self, indent: int | None = None) -> str:
        """One JSON value."""
        return json.dumps(self.as_value(), indent=indent, allow_nan=False)

    @property
    def news(self) -> Any:
        """What two looks have in common unless something happened: all but ages."""
        value = self.as_value()
        runs = value if isinstance(value, list) else [value]
        return [{key: run[key] for key in run if key not in _AGES} for run in runs]


def look_at(reader: StatusReader, run: RunDir, *, attempts: bool, ranks: bool) -> Shown:
    """Everything about one run.

    Args:
        reader: What reads it.
        run: The run.
        attempts: Show all attempts.
        ranks: Add the newest attempt's ranks.
    """
    from hpctrain.status.as_json import as_json
    from hpctrain.status.reader import newest_ranks
    from hpctrain.status.screen import as_text
    from hpctrain.status.status import exit_status
    from hpctrain.status.tables import ranks_as_json, ranks_as_text

    status = reader.look(run)
    newest = status.attempts[-1].number if status.attempts else None
    sample = newest_ranks(run, newest) if ranks and newest is not None else None

    def text(width: int, color: bool) -> str:
        table = ranks_as_text(status, sample, width) if ranks else ""
        return as_text(status, width=width, color=color, all_attempts=attempts, ranks=table)

    def value() -> dict[str, Any]:
        more = {"ranks": ranks_as_json(sample)} if ranks else {}
        return {**as_json(status), **more}

    over, sure = _over([status])
    return Shown(text, value, over, sure, exit_status(status))


def look_at_all(reader: StatusReader, *, thorough: bool) -> Shown:
    """The table of runs.

    Args:
        reader: What reads it.
        thorough: See `StatusReader.look`; the table has nothing of what it costs.
    """
    from hpctrain.status.as_json import as_json
    from hpctrain.status.screen import runs_as_text

    runs = reader.look_at_all(thorough=thorough)

    def text(width: int, color: bool) -> str:
        if not runs:
            return f"no runs in {reader.runs}; `hpctrain submit` starts one"
        return runs_as_text(runs, width=width, color=color)

    return Shown(text, lambda: [as_json(one) for one in runs], *_over(runs))


def keep_looking(look: Callable[[], Shown], interval_s: float, *, as_json: bool = False) -> Shown:
    """Look again and again until all is over; returns the last look.

    Args:
        look: Takes one look.
        interval_s: Seconds between two.
        as_json: Print a line of JSON whenever something has happened.

    Raises:
        KeyboardInterrupt: the user had enough; the terminal is as it was, with the last look on it.
    """
    in_place = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not as_json
    paper = _Screen(interval_s) if in_place else _LinePrinter(interval_s, as_json=as_json)
    lost = False
    with paper:
        while True:
            shown = look()
            paper.show(shown)
            if shown.over and (shown.sure or lost):
                return shown
            lost = shown.over
            paper.wait()


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def colored() -> bool:
    """Whether colours are wanted."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _over(runs: Sequence[RunStatus]) -> tuple[bool, bool]:
    """Whether nothing is under way, and whether that is certain."""
    from hpctrain.history.run_state import RunState
    from hpctrain.status.status import ALIVE

    under_way = ALIVE | {RunState.SUBMITTING}
    over = all(run.state not in under_way for run in runs)
    return over, all(run.state is not RunState.LOST for run in runs)


class _LinePrinter:
    """Prints a look where it has news."""

    def __init__(self, interval_s: float, *, as_json: bool = False) -> None:
        self._interval_s = interval_s
        self._as_json = as_json
        self._news: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """There is nothing to put back."""

    def show(self, shown: Shown) -> None:
        """Print it if anything but ages has changed."""
        if shown.news == self._news:
            return
        if self._as_json:
            click.echo(shown.as_json())
        else:
            gap = "" if self._news is None else "\n"
            click.echo(gap + shown.as_text(width(), colored()))
        self._news = shown.news

    def wait(self) -> None:
        """Until the next look."""
        time.sleep(self._interval_s)


class _Screen(_LinePrinter):
    """Draws a look over the one before."""

    def __init__(self, interval_s: float) -> None:
        super().__init__(interval_s)
        self._last: Shown | None = None
        self._size: tuple[int, int] | None = None
        """For which it was drawn last."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Ended or stopped in another way than by Ctrl-C, it would leave a screen without a cursor.
        handlers = {signal.SIGTERM: self._on_term, signal.SIGTSTP: self._on_stop}
        self._before = {number: signal.signal(number, do) for number, do in handlers.items()}
        _write(_ENTER)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _write(_LEAVE)
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._last is not None and (kind is None or kind is KeyboardInterrupt):
            click.echo(self._last.as_text(width(), colored()))

    def show(self, shown: Shown) -> None:
        """Draw it."""
        self._last = shown
        self._draw()

    def wait(self) -> None:
        """Until the next look; a terminal of another size is drawn anew at once."""
        end = time.monotonic() + self._interval_s
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(SLICE_S, left))
            if shutil.get_terminal_size((80, 24)) != self._size:
                self._draw()

    def _draw(self) -> None:
        if self._last is None:
            return
        self._size = columns, rows = shutil.get_terminal_size((80, 24))
        lines = clean(self._last.as_text(width(), colored())).splitlines()
        hidden = len(lines) - (rows - 2)
        if hidden > 0:
            lines = [*lines[: rows - 3], f"... {hidden + 1} more lines in a taller terminal"]
        now = time.time()
        every = duration(self._interval_s)
        footer = paint(f"{clock(now, now)}, again every {every}; Ctrl-C ends", _DIM, on=colored())
        drawn = [_padded(crop(line, columns), columns) for line in [*lines, "", footer]]
        # Nothing is wiped first and all is one write, so that nothing flickers.
        _write(_HOME + "\r\n".join(drawn) + _TO_END)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(TERMINATED)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back until the shell continues us."""
        del number, frame
        _write(_LEAVE)
        os.kill(os.getpid(), signal.SIGSTOP)
        _write(_ENTER)
        self._draw()


def _padded(line: str, columns: int) -> str:
    # In the last column a terminal's cursor stands on the last character, which this would erase.
    return line if len(line) >= columns else line + _TO_END_OF_LINE


def _write(text: str) -> None:
    draw(sys.stdout, text)
    sys.stdout.flush()
