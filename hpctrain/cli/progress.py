"""Progress of long work on stderr, and `--wait`: follow a run until its first step or its end.

Stdout belongs to the command's answer and is never written. Work of some seconds leaves nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from hpctrain.core.base import clock
from hpctrain.core.base.text import SPARSE_S, Meter, duration
from hpctrain.core.terminal import can_redraw, clean, echo_json, echo_note
from hpctrain.ledger.run.layout import RunDir, runs_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.progress import Progress

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run.events import Tail
    from hpctrain.observe.status.status import RunStatus


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
def line(sparse_s: float = SPARSE_S) -> Iterator[ProgressLine]:
    """A line on stderr that is gone at the end, where stderr is a terminal that can erase.

    Where it is not, each news is a new line, at most one in `sparse_s`.
    """
    one_line = ProgressLine(sys.stderr, sparse_s)
    try:
        yield one_line
    finally:
        one_line.erase()


@dataclass
class ProgressLine:
    """One line that changes; where it cannot be drawn anew, new text becomes a new line."""

    out: TextIO
    sparse_s: float
    _shown: str = ""
    _result_text: float | None = None
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
        if self._result_text is not None and now - self._result_text < self.sparse_s:
            return
        self._shown, self._result_text = text, now
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


POLL_S = 0.5
ASK_S, ASK_SELDOM_S = 5.0, 30.0
"""Between two questions to the scheduler: at first, and after ten minutes in the queue."""
INTERRUPTED = 130
LOG_S = 60.0
"""Between two lines in a log: the time to the expected start is always news."""


def wait_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--wait`: look on until the first step."""
    return click.option(
        "--wait",
        is_flag=True,
        help="Show why the job waits and when it should start, until its first step is done. "
        "Ctrl-C ends only the display.",
    )(function)


@dataclass(frozen=True)
class Waited:
    """What became of a job that was waited for.

    `queued_s` is from the submission to the start of the job, `seconds` to the end of the step or
    of the waiting.
    """

    first_step: bool
    state: str
    attempt: int | None
    queued_s: float | None
    seconds: float
    interrupted: bool = False
    exit_code: int = 0

    def as_json(self) -> dict[str, Any]:
        """All of it but the exit code."""
        facts = asdict(self)
        del facts["exit_code"]
        return facts


def _wait_for_first_step(run: RunDir, runs: Path) -> Waited:
    """Return when the job that was submitted last has done a step, or is over. Reads only."""
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.events import Tail

    tail, history = Tail(run.events), RunHistory()
    try:
        with line(LOG_S) as one_line:
            return _look_on(run, runs, tail, history, one_line)
    except KeyboardInterrupt:
        shown = f"`hpctrain status {run.name}{runs_flag(runs)}` shows it"
        echo_note(f"the job of {run.name} continues; {shown}")
        return _waited(history, "waiting", INTERRUPTED, interrupted=True)


def conclude(run: RunDir, runs: Path, facts: dict[str, Any] | None, *, wait: bool) -> int:
    """End a command that has submitted a job; returns its exit code.

    `facts` are what it prints as JSON, None where it has printed text.
    """
    waited = _wait_for_first_step(run, runs) if wait else None
    if facts is not None:
        echo_json(facts | ({"waited": waited.as_json()} if waited else {}))
    elif waited is not None and not waited.interrupted:
        click.echo(_result_text(waited, run.name + runs_flag(runs)))
    return waited.exit_code if waited else 0


def _result_text(waited: Waited, name: str) -> str:
    if not waited.first_step:
        return f"no step      the run is {waited.state}; `hpctrain status {name}` shows why"
    queued = "" if waited.queued_s is None else f", {duration(waited.queued_s)} in the queue"
    return (
        f"first step   {duration(waited.seconds)} after the submission{queued} "
        f"(attempt {waited.attempt})"
    )


def _look_on(
    run: RunDir, runs: Path, tail: Tail, history: RunHistory, one_line: ProgressLine
) -> Waited:
    from hpctrain.ledger.history.run_state import OVER, RunState
    from hpctrain.observe.status.reader import StatusReader
    from hpctrain.observe.status.status import exit_status

    reader = StatusReader(runs)
    began, ask_at, lost = clock.monotonic(), 0.0, 0
    while True:
        history.extend(tail.new())
        if first_step(history) is not None:
            return _waited(history, "running", 0)
        now = clock.monotonic()
        if now >= ask_at:
            ask_at = now + min(ASK_SELDOM_S, max(ASK_S, (now - began) / 20))
            status = reader.look(run, thorough=False)
            # Between two starts of a job a scheduler may not know it for a moment.
            lost = lost + 1 if status.state is RunState.LOST else 0
            if status.state in OVER or lost > 1:
                history.extend(tail.new())
                return _waited(history, status.state.value, exit_status(status))
        one_line.show(_words(status, now - began if one_line.in_place else None))
        clock.sleep(POLL_S)


def _words(status: RunStatus, seconds: float | None) -> str:
    """Why it waits; how long so far only where the line is drawn anew, else each would be news."""
    from hpctrain.observe.status.text import in_words

    silent = (
        f"; no answer from the cluster: {status.answer.problem}" if status.answer.problem else ""
    )
    waited = "" if seconds is None else f"{duration(seconds)}: "
    return f"{waited}{in_words(status)}{silent}"


def first_step(history: RunHistory) -> AttemptRecord | None:
    """The attempt that did the first step since the newest submission; None if there is none."""
    return next((a for a in _since_submission(history) if a.first_step is not None), None)


def _since_submission(history: RunHistory) -> list[AttemptRecord]:
    return [a for a in history.attempts if a.submission == len(history.submissions)]


def _waited(history: RunHistory, state: str, code: int, *, interrupted: bool = False) -> Waited:
    stepped, now = first_step(history), clock.now()
    submitted = history.submissions[-1].asked if history.submissions else now
    # An attempt is written down after its imports: when its job began is what counts.
    begun = [a.began if a.begun is None else a.begun for a in _since_submission(history)]
    done = now if stepped is None or stepped.first_step is None else stepped.first_step
    return Waited(
        first_step=stepped is not None,
        state="running" if stepped is not None else state,
        attempt=None if stepped is None else stepped.number,
        queued_s=max(0.0, begun[0] - submitted) if begun else None,
        seconds=max(0.0, done - submitted),
        interrupted=interrupted,
        exit_code=0 if stepped is not None else code,
    )
