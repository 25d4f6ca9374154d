"""Progress of long work on stderr.

Stdout belongs to the command's answer and is never written. Work of some seconds leaves nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from hpctrain.core.base import clock
from hpctrain.core.base.text import SPARSE_S, Meter
from hpctrain.core.terminal import can_redraw, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress


DRAW_S = 0.2
"""Between two drawings on a terminal."""


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Around work on `total` bytes; call what it gives, from any thread, with bytes done.

    Nothing is shown for a total of 0.
    """
    meter = Meter(label, total, clock.monotonic())
    lock = threading.Lock()
    with line() as one_line:
        every_s = DRAW_S if one_line.in_place else SPARSE_S

        def advance(count: int) -> None:
            with lock:
                meter.done += count
                now = clock.monotonic()
                if total and meter.due(now, every_s):
                    one_line.show(meter.text(now), min(1.0, meter.done / total))

        yield advance


@contextlib.contextmanager
def line() -> Iterator[ProgressLine]:
    """A line on stderr that is gone at the end, where stderr is a terminal that can erase.

    Where it is not, each news is a new line, at most one in `SPARSE_S`.
    """
    one_line = ProgressLine(sys.stderr)
    try:
        yield one_line
    finally:
        one_line.erase()


@dataclass
class ProgressLine:
    """One line that changes; where it cannot be drawn anew, new text becomes a new line."""

    out: TextIO
    _shown: str = ""
    _shown_at: float | None = None
    _live: Progress | None = None

    @property
    def in_place(self) -> bool:
        """Whether it is drawn anew where it stands."""
        return can_redraw(self.out)

    def show(self, text: str, share: float | None = None) -> None:
        """Show this instead; in a log only what is new, and that seldom.

        `share` is for a bar beside it on a terminal.
        """
        if text == self._shown:
            return
        if self.in_place:
            self._shown = text
            self._draw(text, share)
            return
        now = clock.monotonic()
        if self._shown_at is not None and now - self._shown_at < SPARSE_S:
            return
        self._shown, self._shown_at = text, now
        self.out.write(f"hpctrain: {text}\n")
        self.out.flush()

    def _draw(self, text: str, share: float | None) -> None:
        from hpctrain.core.drawing import live_line

        if self._live is None:
            self._live = live_line(self.out, bar=share is not None)
        task = self._live.task_ids[0]
        self._live.update(task, description=clean(text), completed=share, refresh=True)

    def erase(self) -> None:
        """Leave the terminal as it was; lines of a log stay."""
        if self._live is not None:
            self._live.stop()
        self._live, self._shown = None, ""
