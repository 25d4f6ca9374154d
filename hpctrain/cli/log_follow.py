"""Prints a run's logs as they grow, each line once, across attempts, until the run ends.

It polls: inotify is blind to what other nodes write over NFS.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from hpctrain.cli.log_sections import sections
from hpctrain.rundir.logs import LogFile, tail_offset

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.cli.log_sections import Section
    from hpctrain.ledger.events import Event, Tail
    from hpctrain.ledger.status import Answer
    from hpctrain.rundir.layout import RunDir

POLL_S = 0.5
ASK_S = 5.0
"""How often a scheduler is asked whether a run that has no end on record is still alive."""


@dataclass
class Printer:
    """Prints what is new, section by section, each line once."""

    run: RunDir
    out: BinaryIO
    wanted: frozenset[int] | str
    only: int | None = None
    lines: int = 0
    _logs: dict[Path, LogFile] = field(default_factory=dict)
    _titled: set[int | str] = field(default_factory=set)
    _ending: set[int | str] = field(default_factory=set)
    _closed: set[int | str] = field(default_factory=set)

    def begin_at_tail(self, events: Sequence[Event], count: int) -> None:
        """Pass over all but the last `count` lines of each rank."""
        left: dict[str, int] = {}
        for section in reversed(self._sections(events)):
            for label, path in section.files():
                offset, seen = tail_offset(path, left.get(label, count))
                left[label] = left.get(label, count) - seen
                self._logs[path] = LogFile(path, offset)
            if left and all(lines <= 0 for lines in left.values()):
                self._pass_over(section, events)
                return

    def show(self, events: Sequence[Event], *, over: bool) -> None:
        """Print what is new; `over` when nobody writes any more.

        The end of an attempt is in the ledger before its last lines can be seen over NFS: a section
        is closed only when it is shown for the second time after its end.
        """
        known = self._sections(events)
        for position, section in enumerate(known):
            if section.key in self._closed:
                continue
            ending = bool(section.end) or position + 1 < len(known)
            self._show(section, last=over or (ending and section.key in self._ending))
            if ending:
                self._ending.add(section.key)
        self.out.flush()

    def note(self, text: str) -> None:
        """A line of ours among those of the ranks."""
        self.out.write(f"--- {text} ---\n".encode())
        self.out.flush()

    def _sections(self, events: Sequence[Event]) -> list[Section]:
        found = sections(self.run, events, self.wanted)
        return [one for one in found if self.only is None or one.key == self.only]

    def _pass_over(self, last: Section, events: Sequence[Event]) -> None:
        """Sections before the one that the tail begins in are not printed at all."""
        for section in self._sections(events):
            if section.key == last.key:
                return
            self._closed.add(section.key)

    def _show(self, section: Section, *, last: bool) -> None:
        if section.key not in self._titled:
            self._titled.add(section.key)
            self.note(section.title)
        files = section.files()
        for label, path in files:
            log = self._logs.setdefault(path, LogFile(path))
            prefix = f"[{label}] ".encode() if len(files) > 1 or self.wanted == "all" else b""
            for line in log.lines():
                self._line(prefix + line)
            for line in log.rest() if last else ():
                self._line(prefix + line)
        if last:
            self._closed.add(section.key)
            if section.end:
                self.note(section.end)

    def _line(self, line: bytes) -> None:
        self.out.write(line + b"\n")
        self.lines += 1


@dataclass
class Follower:
    """Prints until the run ends."""

    run: RunDir
    printer: Printer
    ledger: Tail
    events: list[Event]
    _cluster: str = ""
    _asked: float = -ASK_S
    _answer: Answer | None = None
    _lost: int = 0

    def follow(self) -> None:
        """Return when the run, or the one attempt that is wanted, is over."""
        from hpctrain.errors import NotFound
        from hpctrain.ledger.derive import run_state
        from hpctrain.settings.spec import load_spec

        with contextlib.suppress(NotFound):  # then the ledger alone must do
            self._cluster = load_spec(self.run.spec).cluster
        self.events = _turns(self.events)
        while not self._is_over():
            self._show_and_wait()
        self._show_and_wait()
        self.printer.show(self.events, over=True)
        if self.printer.only is None:
            answer = self._answer
            job, asked = (answer.job, answer.asked) if answer else (None, False)
            self.printer.note(f"{self.run.name}: {run_state(self.events, job, asked=asked).value}")

    def _show_and_wait(self) -> None:
        self.printer.show(self.events, over=False)
        time.sleep(POLL_S)
        self.events += _turns(self.ledger.new())

    def _is_over(self) -> bool:
        """Whether nobody will write any more; without an end on record, asks the scheduler."""
        from hpctrain.ledger.derive import OVER, RunState, run_state, standing

        now = standing(self.events)
        only = self.printer.only
        if _has_ended(self.events, only or now.attempt) and (only or now.phase in OVER):
            return True
        if only is not None and now.attempt is not None and now.attempt > only:
            return True
        if time.monotonic() - self._asked < ASK_S:
            return False
        answer = self._ask()
        if now.phase in OVER:  # done, and its last words are still to come
            return answer.job is None or not answer.job.alive
        state = run_state(self.events, answer.job, asked=answer.asked)
        self._lost = self._lost + 1 if state is RunState.LOST else 0
        # Between two starts of a job a scheduler may not know it for a moment: lost is asked twice.
        return state in OVER or state is RunState.CREATED or self._lost > 1

    def _ask(self) -> Answer:
        from hpctrain.cli.job import ask

        before, self._answer = self._answer, ask(self._cluster, self.events)
        self._asked = time.monotonic()
        if self._answer.problem and (before is None or before.problem != self._answer.problem):
            self.printer.note(f"no answer from the cluster: {self._answer.problem}")
        return self._answer


def _has_ended(events: Sequence[Event], attempt: int | None) -> bool:
    if attempt is None:
        return True
    return any(e.kind == "attempt_ended" and e.attempt == attempt for e in events)


def _turns(events: Sequence[Event]) -> list[Event]:
    """Without the many events that say only how far the run is."""
    return [event for event in events if event.kind not in {"steps", "phase", "saved"}]
