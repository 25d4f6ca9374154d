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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hpctrain.core.base import clock
from hpctrain.core.base.text import duration, time_of_day
from hpctrain.core.terminal import can_redraw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.status.reader import StatusReader
    from hpctrain.observe.status.status import RunStatus

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
        from hpctrain.core.drawing import colored, drawn, width

        return drawn(self.screen(), width(), color=colored())

    @property
    def news(self) -> Any:
        """What two looks have in common unless something happened: all but ages."""
        value = self.as_value()
        runs = value if isinstance(value, list) else [value]
        return [{key: run[key] for key in run if key not in _AGES} for run in runs]


def look_at(reader: StatusReader, run: RunDir, *, attempts: bool, ranks: bool) -> Shown:
    """Everything about one run."""
    from hpctrain.observe.status.reader import newest_ranks
    from hpctrain.observe.status.status import exit_status
    from hpctrain.observe.status.text import as_json, ranks_as_json

    status = reader.look(run)
    newest = status.attempts[-1].number if status.attempts else None
    sample = newest_ranks(run, newest) if ranks and newest is not None else None

    def screen() -> RenderableType:
        from hpctrain.observe.status.screen import StatusScreen

        return StatusScreen(status, attempts, ranks, sample)

    def value() -> dict[str, Any]:
        more = {"ranks": ranks_as_json(sample)} if ranks else {}
        return {**as_json(status), **more}

    over, sure = _over([status])
    return Shown(screen, value, over, sure, exit_status(status))


def look_at_all(
    reader: StatusReader, *, thorough: bool, named: Sequence[RunDir] = (), elsewhere: str = ""
) -> Shown:
    """The table of runs."""
    from hpctrain.observe.status.text import as_json

    runs = reader.look_at_all(thorough=thorough, named=named, elsewhere=elsewhere)

    def screen() -> RenderableType:
        from hpctrain.core.drawing import uncut
        from hpctrain.observe.status.screen import RunsScreen

        if not runs:
            from hpctrain.ledger.run.find_run import indexed

            older = elsewhere == "live" and indexed()
            more = "; `hpctrain status --all` lists those of other folders" if older else ""
            return uncut(f"no runs in {reader.runs}; `hpctrain submit` starts one{more}")
        return RunsScreen(runs)

    return Shown(screen, lambda: [as_json(one) for one in runs], *_over(runs))


def keep_looking(look: Callable[[], Shown], interval_s: float, *, as_json: bool = False) -> Shown:
    """Look again and again until all is over; returns the last look.

    With `as_json` it prints a line whenever something has happened.

    Raises:
        KeyboardInterrupt: the user had enough; the terminal is as it was, with the last look on it.
    """
    drawn_over = not as_json and can_redraw(sys.stdout)
    lost = False
    with _on_screen(interval_s) if drawn_over else nullcontext(_of_news(as_json=as_json)) as show:
        while True:
            shown = look()
            show(shown)
            if shown.over and (shown.sure or lost):
                return shown
            lost = shown.over
            clock.sleep(interval_s)


def _over(runs: Sequence[RunStatus]) -> tuple[bool, bool]:
    """Whether nothing is under way, and whether that is certain."""
    from hpctrain.ledger.history.run_state import RunState
    from hpctrain.observe.status.status import UNDER_WAY_STATES

    over = all(run.state not in UNDER_WAY_STATES for run in runs)
    return over, all(run.state is not RunState.LOST for run in runs)


def _of_news(*, as_json: bool) -> Callable[[Shown], None]:
    """Prints a look where it has news."""
    news: list[Any] = []

    def show(shown: Shown) -> None:
        if news and news[-1] == shown.news:
            return
        gap = "\n" if news else ""
        click.echo(shown.as_json() if as_json else gap + shown.as_text())
        news[:] = [shown.news]

    return show


@contextmanager
def _on_screen(interval_s: float) -> Iterator[Callable[[Shown], None]]:
    """Draws a look over the one before; the last one stays when the screen is given back."""
    from hpctrain.core.drawing import Framed, live_screen

    last: list[Shown] = []

    def framed() -> RenderableType:
        now = clock.now()
        footer = f"{time_of_day(now, now)}, again every {duration(interval_s)}; Ctrl-C ends"
        return Framed(last[-1].screen() if last else "", footer)

    def show(shown: Shown) -> None:
        last[:] = [shown]
        screen.refresh()

    def stop() -> None:
        """Ctrl-Z: give the terminal back until the shell continues us."""
        screen.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.start(refresh=True)

    screen = live_screen(framed)
    # Ended or stopped in another way than by Ctrl-C, it would leave a screen without a cursor.
    handlers: dict[int, Callable[[], object]] = {
        signal.SIGTERM: partial(sys.exit, TERMINATED),
        signal.SIGTSTP: stop,
        signal.SIGWINCH: screen.refresh,
    }
    before = {n: signal.signal(n, lambda n, _: handlers[n]() and None) for n in handlers}
    try:
        with screen:
            yield show
    except (Exception, SystemExit):
        last.clear()  # the error is shown in the screen's place
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if last:
            click.echo(last[-1].as_text())
