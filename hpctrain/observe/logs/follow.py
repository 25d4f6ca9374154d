"""Followers of a run: its logs as they grow, until it is over, and its ledger as lines.

They poll: inotify is blind to what other nodes write over NFS.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.text import count, time_of_day
from hpctrain.errors import HpctrainError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState, run_state
from hpctrain.ledger.run.attempt_files import LogFile
from hpctrain.ledger.run.event_fields import as_number
from hpctrain.ledger.run.events import LONGEST_BYTES, Event, parse
from hpctrain.observe.status.event_lines import folded, line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpctrain.ledger.run.events import Tail
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.logs.sections import Printer
    from hpctrain.observe.status.status import Answer

POLL_S = 0.5
ASK_S = 5.0
"""How often a scheduler is asked whether a run that has no end on record is still alive."""
OPENS_PER_S = 200
"""A file server must not suffer from somebody who follows a thousand ranks."""
_WAITING = frozenset({RunState.PENDING, RunState.REQUEUED})


@dataclass
class EndWatch:
    """Knows when a run, or one attempt of it, is over, so that following it can end.

    Args:
        run: The run.
        only: The attempt that is followed; None for the run.
        tell: Told once that the scheduler gives no answer, and why.

    Attributes:
        waiting: What it waits for in the queue, in words; "" while it does not.
    """

    run: RunDir
    only: int | None
    tell: Callable[[str], None]
    history: RunHistory = field(default_factory=RunHistory)
    waiting: str = ""
    _cluster: str | None = None
    _asked: float = -1e9
    _answer: Answer | None = None
    _lost: int = 0
    _why: str | None = None

    def add(self, events: Iterable[Event]) -> None:
        """New facts."""
        self.history.extend(events)

    def is_over(self, *, heard: bool = False) -> bool:
        """Whether nobody will write any more; without an end on record, asks the scheduler.

        With `heard` somebody wrote just now, and no scheduler is asked whether the job lives.
        """
        now, only = self.history.state, self.only
        if self._has_ended(only or now.attempt) and (only or now.phase in OVER):
            return True
        if only is not None and now.attempt is not None and now.attempt > only:
            return True
        if clock.monotonic() - self._asked < ASK_S or (heard and now.phase is RunState.RUNNING):
            return False
        answer = self._ask()
        if now.phase in OVER:  # done, and its last words are still to come
            return answer.job is None or not answer.job.alive
        state = run_state(self.history.state, answer.job, asked=answer.asked)
        self._note_waiting(state, answer)
        self._lost = self._lost + 1 if state is RunState.LOST else 0
        # Between two starts of a job a scheduler may not know it for a moment: lost is asked twice.
        return state in OVER or state is RunState.CREATED or self._lost > 1

    @property
    def state(self) -> RunState:
        """Where the run stands, as far as was asked."""
        answer = self._answer
        job, asked = (answer.job, answer.asked) if answer else (None, False)
        return run_state(self.history.state, job, asked=asked)

    def _has_ended(self, attempt: int | None) -> bool:
        record = self.history.attempt(attempt)
        return attempt is None or (record is not None and record.is_over)

    def _ask(self) -> Answer:
        from hpctrain.core.settings.spec import load_spec
        from hpctrain.observe.status.reader import ask

        if self._cluster is None:
            self._cluster = ""
            with contextlib.suppress(HpctrainError):  # then the ledger alone must do
                self._cluster = load_spec(self.run.spec).cluster
        before, self._answer = self._answer, ask(self.run, self._cluster, self.history)
        self._asked = clock.monotonic()
        if self._answer.problem and (before is None or before.problem != self._answer.problem):
            self.tell(f"no answer from the cluster: {self._answer.problem}")
        return self._answer

    def _note_waiting(self, state: RunState, answer: Answer) -> None:
        """New words for each new reason: an expected start that moves is no news."""
        job = answer.job
        if state is RunState.SUSPENDED and job is not None:
            if self._why != job.shown:
                self.tell(f"job {job.job_id} is suspended, and stands still")
            self.waiting, self._why = "", job.shown
            return
        if state not in _WAITING or job is None:
            self.waiting, self._why = "", None
            return
        if self._why == (job.reason or ""):
            return
        self._why = job.reason or ""
        reason = f" ({job.reason})" if job.reason else ""
        now, start = clock.now(), job.start_time
        expected = f", expected start {time_of_day(start, now)}" if start and start > now else ""
        words = f": {job.explained}" if job.explained else ""
        self.waiting = f"job {job.job_id} waits in the queue{reason}{expected}{words}"


@dataclass
class Follower:
    """Prints a run's logs until it is over."""

    printer: Printer
    ledger: Tail
    watch: EndWatch
    _shown: str = ""

    def follow(self) -> None:
        """Return when the run, or the one attempt that is wanted, is over."""
        seen = self.printer.lines
        while not self.watch.is_over(heard=self.printer.lines > seen):
            seen = self.printer.lines
            self._show_and_wait()
        self._show_and_wait()
        self.printer.show(self.watch.history, over=True)
        if self.watch.only is None:
            self.printer.note(f"{self.watch.run.name}: {self.watch.state.value}")
        self.printer.out.flush()

    def _show_and_wait(self) -> None:
        self.printer.show(self.watch.history, over=False)
        self._note_what_is_awaited()
        clock.sleep(pause(self.printer.open_logs))
        self.watch.add(self.ledger.new())

    def _note_what_is_awaited(self) -> None:
        """Below the end of the attempt before, not above it."""
        waiting = self.watch.waiting
        if waiting and not self.printer.is_between:
            return
        if waiting and waiting != self._shown:
            self.printer.note(waiting)
            self.printer.out.flush()
        self._shown = waiting


def pause(logs: int) -> float:
    """Seconds between two looks at so many files."""
    return max(POLL_S, logs / OPENS_PER_S)


def notes_to(printer: Printer) -> Callable[[str], None]:
    """What an `EndWatch` tells, as a marker in the stream, at once."""

    def tell(text: str) -> None:
        printer.note(text)
        printer.out.flush()

    return tell


CALM_S = 10.0
"""So long are step marks gathered while one follows."""
_MARK = re.compile(rb'\{"t": [\d.]+, "kind": "steps", "attempt": (\d+|null),')
"""A step mark as `run.events.append` writes it; of a row only the ends are parsed."""


class Reading:
    """A ledger that is read as it grows."""

    def __init__(self, run: RunDir, lines: EventLines) -> None:
        self.turns: list[Event] = []
        self.printed = 0
        self._file = LogFile(run.events, longest_bytes=LONGEST_BYTES)
        self._lines = lines
        self._left_out = 0
        self._torn_end = False

    def new(self, *, last: bool) -> Iterator[str]:
        """What is to be printed of the events since the last call.

        With `last` nobody writes any more: a last line without its end counts too.
        """
        for text in self._new(last=last):
            self.printed += 1
            yield text

    def _new(self, *, last: bool) -> Iterator[str]:
        for raw in self._file.lines():
            yield from self._one(raw)
        for raw in self._file.rest() if last else ():
            before = self._left_out
            yield from self._one(raw)
            self._torn_end = self._left_out > before
        yield from self._lines.end() if last else self._lines.pause()

    @property
    def left_out(self) -> list[str]:
        """What was no event, in words."""
        missing = []
        others = self._left_out - self._torn_end
        if others:
            missing.append(f"{count(others, 'line')} of its ledger left out: no complete event")
        if self._torn_end:
            missing.append("the last line of its ledger is torn; it is left out")
        return missing

    def nothing(self, kinds: str | None) -> list[str]:
        """Why nothing was printed, where nothing was."""
        if self.printed:
            return []
        there = ", ".join(sorted({event.kind for event in self.turns}))
        if kinds is not None:
            return [f"no event of kind {kinds} that is wanted; beside steps there are {there}"]
        return ["no event that is wanted is on record"]

    def _one(self, raw: bytes) -> Iterator[str]:
        if _MARK.match(raw) and raw.endswith(b"}"):
            yield from self._lines.mark(raw)
            return
        event = parse(raw)
        if event is None:
            self._left_out += bool(raw.strip(b"\0\r\n\t "))
            return
        if event.kind != "steps":
            self.turns.append(event)
        yield from self._lines.event(raw, event)


class EventLines:
    """Chooses events and makes lines of them; step marks in a row become one.

    `since` is in seconds since the epoch.
    """

    def __init__(
        self,
        kinds: frozenset[str] | None,
        attempt: int | None,
        since: float | None,
        *,
        fold: bool,
        as_json: bool,
    ) -> None:
        self._kinds, self._attempt, self._since = kinds, attempt, since
        self._fold, self._as_json = fold, as_json
        self._row: list[bytes] = []
        self._marks = 0
        self._of = b""
        self._since_when = 0.0

    def mark(self, raw: bytes) -> Iterator[str]:
        """A step mark, as a line of the ledger; it is parsed only where it is shown."""
        if self._kinds is not None and "steps" not in self._kinds:
            yield from self.end()
            return
        if not self._fold:
            yield from self._parsed(raw)
            return
        match = _MARK.match(raw)
        of = match[1] if match else b""
        if self._row and (of != self._of or self._is_new_window(raw)):
            yield from self.end()
        if not self._row:
            self._since_when = clock.monotonic()
        self._of, self._marks = of, self._marks + 1
        self._row = [self._row[0], raw] if self._row else [raw]

    def event(self, raw: bytes, event: Event) -> Iterator[str]:
        """Any other event."""
        yield from self.end()
        if self._kinds is not None and event.kind not in self._kinds:
            return
        if self._is_wanted(event):
            yield from self._as_text(raw, event)

    def end(self) -> Iterator[str]:
        """The row of step marks so far."""
        row, marks, self._row, self._marks = self._row, self._marks, [], 0
        if len(row) == 1:
            yield from self._parsed(row[0])
        elif row:
            yield from self._folded(row[0], row[1], marks)

    def pause(self) -> Iterator[str]:
        """The row so far, where it has been held for a while: a line for each look is too much."""
        if self._row and clock.monotonic() - self._since_when >= CALM_S:
            yield from self.end()

    def _is_new_window(self, raw: bytes) -> bool:
        """Whether the row so far is older than `since` and this mark is not."""
        return self._since is not None and _time(self._row[-1]) < self._since <= _time(raw)

    def _parsed(self, raw: bytes) -> Iterator[str]:
        event = parse(raw)
        if event is not None and self._is_wanted(event):
            yield from self._as_text(raw, event)

    def _folded(self, first: bytes, last: bytes, marks: int) -> Iterator[str]:
        begin, end = parse(first), parse(last)
        if begin is not None and end is not None and self._is_wanted(end):
            yield folded(begin, end, marks)

    def _is_wanted(self, event: Event) -> bool:
        """Whether it is of the attempt and of the time that were asked for."""
        return (self._attempt is None or event.attempt == self._attempt) and (
            self._since is None or event.t >= self._since
        )

    def _as_text(self, raw: bytes, event: Event) -> Iterable[str]:
        return [raw.strip(b"\0\r\n\t ").decode(errors="replace") if self._as_json else line(event)]


def _time(raw: bytes) -> float:
    return as_number(raw[6 : raw.index(b",")].decode()) or 0.0
