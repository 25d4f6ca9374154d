"""What `hpctrain status` shows of one run or of all, once or with `--watch` until it is over.

On a terminal the watch takes the alternate screen and draws each look over the one before, so that
what was there before comes back; the last screen is then printed below it. Elsewhere, and as JSON,
it prints only when something has happened. tests/e2e/test_terminal.py holds the promises.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from hpctrain.base.text import clock, duration
from hpctrain.terminal import can_redraw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType
    from typing import Self

    from rich.console import RenderableType

    from hpctrain.run.layout import RunDir
    from hpctrain.status.reader import StatusReader
    from hpctrain.status.status import RunStatus

TERMINATED = 128 + signal.SIGTERM
_AGES = frozenset({"words", "last_seen", "goodput", "last_24h", "disk_free_bytes"})
"""What changes as time goes by although nothing happens."""


@dataclass(frozen=True)
class Shown:
    """One look.

    Attributes:
        screen: Makes what is drawn; rich is imported only where somebody wants to see it.
        as_value: The same for programs; made when it is asked for, since it takes its time.
        over: Nothing of it is under way.
        sure: False where a run seems lost: between two starts of a job a scheduler may not know it.
        exit_status: The run's state for scripts; 0 for all runs.
    """

    screen: Callable[[], RenderableType]
    as_value: Callable[[], Any]
    over: bool
    sure: bool = True
    exit_status: int = 0

    def as_json(self, indent: int | None = None) -> str:
        """One JSON value."""
        return json.dumps(self.as_value(), indent=indent, allow_nan=False)

    def as_text(self) -> str:
        """The screen for stdout as it is."""
        from hpctrain.drawing import colored, drawn, width

        return drawn(self.screen(), width(), color=colored())

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
    from hpctrain.status.as_json import as_json, ranks_as_json
    from hpctrain.status.reader import newest_ranks
    from hpctrain.status.status import exit_status

    status = reader.look(run)
    newest = status.attempts[-1].number if status.attempts else None
    sample = newest_ranks(run, newest) if ranks and newest is not None else None

    def screen() -> RenderableType:
        from hpctrain.status.screen import StatusScreen

        return StatusScreen(status, attempts, ranks, sample)

    def value() -> dict[str, Any]:
        more = {"ranks": ranks_as_json(sample)} if ranks else {}
        return {**as_json(status), **more}

    over, sure = _over([status])
    return Shown(screen, value, over, sure, exit_status(status))


def look_at_all(reader: StatusReader, *, thorough: bool) -> Shown:
    """The table of runs.

    Args:
        reader: What reads it.
        thorough: See `StatusReader.look`; the table has nothing of what it costs.
    """
    from hpctrain.status.as_json import as_json

    runs = reader.look_at_all(thorough=thorough)

    def screen() -> RenderableType:
        from hpctrain.drawing import uncut
        from hpctrain.status.screen import RunsScreen

        if not runs:
            return uncut(f"no runs in {reader.runs}; `hpctrain submit` starts one")
        return RunsScreen(runs)

    return Shown(screen, lambda: [as_json(one) for one in runs], *_over(runs))


def keep_looking(look: Callable[[], Shown], interval_s: float, *, as_json: bool = False) -> Shown:
    """Look again and again until all is over; returns the last look.

    Args:
        look: Takes one look.
        interval_s: Seconds between two.
        as_json: Print a line of JSON whenever something has happened.

    Raises:
        KeyboardInterrupt: the user had enough; the terminal is as it was, with the last look on it.
    """
    paper = _LinePrinter(interval_s, as_json=as_json)
    if not as_json and can_redraw(sys.stdout):
        paper = _Screen(interval_s)
    lost = False
    with paper:
        while True:
            shown = look()
            paper.show(shown)
            if shown.over and (shown.sure or lost):
                return shown
            lost = shown.over
            paper.wait()


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
            click.echo(gap + shown.as_text())
        self._news = shown.news

    def wait(self) -> None:
        """Until the next look."""
        time.sleep(self._interval_s)


class _Screen(_LinePrinter):
    """Draws a look over the one before."""

    def __init__(self, interval_s: float) -> None:
        from hpctrain.drawing import live

        super().__init__(interval_s)
        self._last: Shown | None = None
        self._live = live(sys.stdout, self._framed, screen=True)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Ended or stopped in another way than by Ctrl-C, it would leave a screen without a cursor.
        handlers = {
            signal.SIGTERM: self._on_term,
            signal.SIGTSTP: self._on_stop,
            signal.SIGWINCH: self._on_resize,
        }
        self._before = {number: signal.signal(number, do) for number, do in handlers.items()}
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        for number, before in self._before.items():
            signal.signal(number, before)
        if self._last is not None and (kind is None or kind is KeyboardInterrupt):
            click.echo(self._last.as_text())

    def show(self, shown: Shown) -> None:
        """Draw it."""
        self._last = shown
        self._live.refresh()

    def _framed(self) -> RenderableType:
        from hpctrain.drawing import Framed

        now = time.time()
        footer = f"{clock(now, now)}, again every {duration(self._interval_s)}; Ctrl-C ends"
        return Framed(self._last.screen() if self._last else "", footer)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(TERMINATED)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back until the shell continues us."""
        del number, frame
        self._live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._live.start(refresh=True)

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._live.refresh()
