"""The sections of a run's output by attempt or job, filters of lines, and their printer.

A filter sees one log's lines in order, so a rank's traceback stays whole while others print. The
printer gives each line once, in the order of writing: by the agents' times
(`run/attempt_files.py`), else by its place between the attempt's start and the file's last change.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Generic, TypeAlias, TypeVar

import click

from hpctrain.core.base import clock
from hpctrain.core.base.records import EndReason, Next
from hpctrain.core.base.text import count, duration, fold_nodes, step_time
from hpctrain.core.terminal import clean, clean_log, echo_note
from hpctrain.ledger.run.attempt_files import (
    LATE_S,
    Guess,
    LogFile,
    LogMark,
    LogTimes,
    first_offset,
    line_start,
    tail_offset,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run.layout import RunDir


BATCH = "batch"
ALL = "all"
TROUBLE = "trouble"
"""All ranks, and what the batch side printed."""
_RANK_LOG = re.compile(r"rank-(\d+)\.log")
_DOT = " \N{MIDDLE DOT} "
_ARROW = "\N{RIGHTWARDS ARROW}"
_LONGEST_WHY = 100
_FOLLOWS = {
    Next.REQUEUE: "requeued",
    Next.LEAVE: "requeued",
    Next.RESTART: "restarts in this allocation",
    Next.ASK_BATCH: "the batch script decides",
}
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


@dataclass(frozen=True)
class LogSource:
    """One log file.

    `label` stands before its lines where several are shown; `rank` is None for what the batch side
    printed.
    """

    label: str
    path: Path
    rank: int | None = None
    node: str = ""


@dataclass
class Section:
    """The logs of one attempt, or of one submission's batch script.

    `key` is the attempt's number or the submission's token; `title`, `news` and `end` are lines
    above, in and below it. `ended` is None while it continues or where that is not known; `timed`
    where the agents wrote down when its lines came; `files` looks for its logs.
    """

    key: int | str
    title: str
    news: str
    end: str
    begun: float
    ended: float | None
    followed: bool
    timed: bool
    attempts: frozenset[int]
    files: Callable[[], list[LogSource]]

    @property
    def attempt(self) -> int | None:
        """The attempt's number; None for a batch script."""
        return self.key if isinstance(self.key, int) else None


def sections(run: RunDir, history: RunHistory, wanted: frozenset[int] | str) -> list[Section]:
    """What there is to print, in order."""
    parts: list[Section] = []
    if wanted != BATCH:
        parts += _attempts(run, history, ALL if wanted == TROUBLE else wanted)
    if wanted in {BATCH, TROUBLE}:
        parts += _batch(run, history, by_job=wanted == TROUBLE)
    return parts


def both(grep: re.Pattern[str] | None, *, err: bool) -> Callable[[], Callable[[bytes], bool]]:
    """Makes, for each log, what says whether a line is shown under `--grep` and `--err`."""

    def make() -> Callable[[bytes], bool]:
        trouble = Trouble() if err else None

        def wanted(line: bytes) -> bool:
            is_of_trouble = trouble is None or trouble(line)
            return is_of_trouble and (
                grep is None or grep.search(line.decode(errors="replace")) is not None
            )

        return wanted

    return make


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


class LineFilter(Generic[Item]):
    """Passes on the items whose lines are wanted, with their neighbours."""

    def __init__(self, wanted: Callable[[bytes], bool], context: int = 0) -> None:
        self._wanted = wanted
        self._context = context
        self._before: deque[Item] = deque(maxlen=context)
        self._after = 0

    def feed(self, line: bytes, item: Item) -> list[Item]:
        """What is to be shown by now, given the next line."""
        if self._wanted(line):
            shown = [*self._before, item]
            self._before.clear()
            self._after = self._context
            return shown
        if self._after > 0:
            self._after -= 1
            return [item]
        self._before.append(item)
        return []


def is_trouble(line: bytes) -> bool:
    """Whether a line by itself tells of trouble."""
    low = line.lower()
    return any(hint in low for hint in _HINTS) and _TROUBLE.search(line) is not None


# ---- attempts


def _attempts(run: RunDir, history: RunHistory, wanted: frozenset[int] | str) -> list[Section]:
    from hpctrain.ledger.history.attempts import attempts

    views = attempts(history)
    of_attempts = []
    for position, view in enumerate(views):

        def files(view: AttemptView = view) -> list[LogSource]:
            return _rank_logs(run, view, wanted)

        of_attempts.append(
            Section(
                view.number,
                _title(view),
                _restored(history.attempt(view.number)),
                _end(view),
                view.started,
                None if view.reason is None else view.ended,
                followed=position + 1 < len(views),
                timed=True,
                attempts=frozenset({view.number}),
                files=files,
            )
        )
    return of_attempts


def _title(view: AttemptView) -> str:
    where = f" on {fold_nodes(view.nodes)}" if view.nodes else ""
    return f"attempt {view.number}{where}{_DOT}job {view.job_id or 'unknown'}"


def _restored(attempt: AttemptRecord | None) -> str:
    """What it resumed from; nothing for the first one."""
    step = None if attempt is None else attempt.restored_step
    if attempt is None or step is None or (attempt.number == 1 and step == 0):
        return ""
    if attempt.own_loop:
        return f"the program resumed from step {step:,}"
    if not attempt.from_checkpoint:
        return "no checkpoint, begins at step 0"
    before, now = attempt.from_world_size, attempt.world_size
    facts = [f"from {attempt.read_from}"] if attempt.read_from not in {"", "disk"} else []
    facts += [f"{before}{_ARROW}{count(now, 'rank')}"] if before and now else []
    facts += [] if attempt.restore_s is None else [_took(attempt.restore_s)]
    return f"restored step {step:,}" + (f" ({', '.join(facts)})" if facts else "")


def _took(seconds: float) -> str:
    return step_time(seconds) if seconds < 1 else duration(seconds)


def _end(view: AttemptView) -> str:
    if view.reason is None:
        return ""
    cause = view.reason.value if view.cause is None else view.cause.value
    why = f" ({_why(view)})" if _why(view) else ""
    facts = [f"attempt {view.number} ended: {cause}{why}"]
    if view.steps_lost is not None and view.reason is not EndReason.COMPLETED:
        facts.append(f"{count(view.steps_lost, 'step')} lost")
    if view.next in _FOLLOWS:
        facts.append(_FOLLOWS[view.next])
    return _DOT.join(facts)


def _why(view: AttemptView) -> str:
    """What the first rank to fail said, or one line more about the end."""
    failure = view.failure
    words = view.detail if view.detail != view.reason else ""
    if failure is not None:
        words = f"{'' if failure.rank is None else f'rank {failure.rank}: '}{failure.summary}"
    what = " ".join(words.split())
    return what if len(what) <= _LONGEST_WHY else f"{what[: _LONGEST_WHY - 3]}..."


def _rank_logs(run: RunDir, view: AttemptView, wanted: frozenset[int] | str) -> list[LogSource]:
    if not isinstance(wanted, str):
        ranks = sorted(wanted)
        return [_source(view, rank, run.rank_log(view.number, rank)) for rank in ranks]
    with contextlib.suppress(FileNotFoundError):
        paths = sorted(run.attempt(view.number).iterdir())
        numbered = [(int(m[1]), path) for path in paths if (m := _RANK_LOG.fullmatch(path.name))]
        return [_source(view, rank, path) for rank, path in numbered]
    return []


def _source(view: AttemptView, rank: int, path: Path) -> LogSource:
    on_each = view.world_size // len(view.nodes) if view.nodes else 0
    at = rank // on_each if on_each else len(view.nodes)
    node = view.nodes[at] if at < len(view.nodes) else ""
    short = node.partition(".")[0]
    return LogSource(" ".join(filter(None, [f"a{view.number} r{rank}", short])), path, rank, node)


# ---- the batch side


def _batch(run: RunDir, history: RunHistory, *, by_job: bool) -> list[Section]:
    """Each submission's output: the batch script's and, beside it, that of its agents."""
    jobs = _jobs(history)
    of_jobs = []
    for position, (token, (job_id, begun)) in enumerate(jobs.items()):
        where = f"job {job_id} " if by_job else ""

        def files(token: str = token, where: str = where) -> list[LogSource]:
            return _outputs(run, token, where)

        title = f"job {job_id}{_DOT}{token}"
        followed = position + 1 < len(jobs)
        section = Section(
            token, title, "", "", begun, None, followed=followed, timed=False,
            attempts=_of_job(history, job_id), files=files,
        )  # fmt: skip
        of_jobs.append(section)
    return of_jobs


def _jobs(history: RunHistory) -> dict[str, tuple[str, float]]:
    """Each submission's job id, and when it was submitted."""
    jobs = [
        (number, submission.token, submission.job_id, submission.accepted)
        for number, submission in enumerate(history.submissions, start=1)
        if submission.accepted is not None
    ]
    submitted = {job_id for _, _, job_id, _ in jobs}
    for attempt in history.attempts:  # a batch script submitted by hand
        if attempt.started is not None and attempt.job_id not in submitted:
            job_id = attempt.job_id
            jobs.append((attempt.submission, f"job-{job_id}", job_id, attempt.started))
            submitted.add(job_id)
    jobs.sort(key=lambda row: row[0])
    return {token: (job_id, t) for _, token, job_id, t in jobs}


def _of_job(history: RunHistory, job_id: str) -> frozenset[int]:
    began = (attempt for attempt in history.attempts if attempt.started is not None)
    return frozenset(attempt.number for attempt in began if attempt.job_id == job_id)


def _outputs(run: RunDir, token: str, where: str) -> list[LogSource]:
    """Output files of one submission: TOKEN.out of the script, TOKEN-0.out and so on of agents."""
    with contextlib.suppress(FileNotFoundError):
        paths = sorted(path for path in run.jobs.iterdir() if path.suffix == ".out")
        own = [p for p in paths if p.stem == token or p.stem.startswith(f"{token}-")]
        return [LogSource(f"{where}{_name(path.stem.removeprefix(token))}", path) for path in own]
    return []


def _name(suffix: str) -> str:
    return f"agent {suffix.lstrip('-')}" if suffix else BATCH


_AT_ONCE = 1 << 26
"""Bytes that are read at once of all logs together."""
_LEAST_AT_ONCE, _MOST_AT_ONCE = 1 << 16, 1 << 22
_RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * 2
_Print: TypeAlias = "Callable[[Printer], None]"


@dataclass(frozen=True)
class LogSelection:
    """What of a run's output is shown, and how.

    `ranks` are numbers, or ALL, BATCH, TROUBLE; `since` is in seconds since the epoch; `lines`
    makes the filter of each log, None shows all; `context` is lines around each of those.
    """

    ranks: frozenset[int] | str = frozenset({0})
    attempt: int | None = None
    since: float | None = None
    lines: Callable[[], Callable[[bytes], bool]] | None = None
    context: int = 0
    as_json: bool = False
    color: bool = False

    @property
    def of_several(self) -> bool:
        """Whether lines of several ranks may come, so that each needs its rank."""
        if isinstance(self.ranks, str):
            return self.ranks != BATCH
        return len(self.ranks) > 1


@dataclass
class Printer:
    """Prints what is new, section by section, each line once."""

    run: RunDir
    out: BinaryIO
    choice: LogSelection
    live: bool = False
    """Somebody waits for what comes: what is under way has its title before its first line."""
    warn: Callable[[str], None] = echo_note
    lines: int = 0
    _unclear: set[int | str] = field(default_factory=set)
    _streams: dict[Path, _Stream] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _places: dict[int | str, _Place] = field(default_factory=dict)
    _known: tuple[int, list[Section]] = (-1, [])
    _held: _Held | None = None
    open_logs: int = 0
    """How many logs the last look opened."""

    def begin_at_tail(self, history: RunHistory, count: int) -> None:
        """Pass over all but the last `count` lines of each rank."""
        if self.choice.lines is not None:  # which ones those are is known when all have been read
            self._held = _Held(count)
            return
        left: dict[int | str, int] = {}
        for section in reversed(self._sections(history)):
            for source in section.files():
                key = source.label if source.rank is None else source.rank
                offset, seen = tail_offset(source.path, left.get(key, count))
                left[key] = left.get(key, count) - seen
                self._offsets[source.path] = offset
            if left and all(lines <= 0 for lines in left.values()):
                self._pass_over(section, history)
                return

    def show(self, history: RunHistory, *, over: bool) -> None:
        """Print what is new; `over` when nobody writes any more.

        The end of an attempt is in the ledger before its last lines can be seen over NFS: a section
        is closed only when it is shown for the second time after its end.
        """
        self.open_logs = 0
        for section in self._sections(history):
            place = self._places.setdefault(section.key, _Place())
            if not place.closed and self._is_too_old(section):
                place.closed = True
            if place.closed:
                continue
            ending = bool(section.end) or section.followed
            self._show(section, place, last=over or (ending and place.ending))
            place.ending = place.ending or ending
        if self._held is not None:
            held, self._held = self._held, None
            held.release(self)
        self.out.flush()

    def note(self, text: str) -> None:
        """A line of ours among those of the ranks; beside them where a program reads them."""
        if self._held is not None:
            self._held.note(text)
        elif self.choice.as_json:
            return
        else:
            marker = f"{_RULE} {text} {_RULE}"
            marker = click.style(marker, bold=True) if self.choice.color else marker
            self.out.write(f"{clean(marker)}\n".encode(errors="replace"))

    @property
    def is_between(self) -> bool:
        """Whether nothing is under way: no section has begun, or all are closed."""
        return all(place.closed for place in self._places.values())

    def _sections(self, history: RunHistory) -> list[Section]:
        count, shown = self._known
        if count != history.count:
            shown = sections(self.run, history, self.choice.ranks)
            only = self.choice.attempt
            shown = [one for one in shown if only is None or only in one.attempts]
            self._known = (history.count, shown)
        return shown

    def _pass_over(self, last: Section, history: RunHistory) -> None:
        """Sections before the one that the tail begins in are not printed at all."""
        for section in self._sections(history):
            if section.key == last.key:
                return
            self._places[section.key] = _Place(closed=True)

    def _is_too_old(self, section: Section) -> bool:
        since = self.choice.since
        return since is not None and section.ended is not None and section.ended < since

    def _show(self, section: Section, place: _Place, *, last: bool) -> None:
        if self.choice.lines is None or (self.live and not (section.end or section.followed)):
            self._title(section, place)
        sources = section.files()
        self.open_logs += len(sources)
        at_once = min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, _AT_ONCE // max(1, len(sources))))
        streams = [self._stream(source, section) for source in sources]
        now = clock.now()
        new = [one.new(section, now, last=last, at_once=at_once) for one in streams]
        several = len(sources) > 1 or self.choice.of_several
        for line in heapq.merge(*new, key=lambda line: line.about):
            self._title(section, place)
            self.put(section, line, several=several)
        if last:
            place.closed = True
            if section.end and place.titled:
                self.note(section.end)

    def _title(self, section: Section, place: _Place) -> None:
        """The title once, and once what was restored, together where both are known."""
        if not place.titled:
            place.titled = True
            place.news_shown = bool(section.news)
            self.note(" \N{MIDDLE DOT} ".join(filter(None, [section.title, section.news])))
        elif section.news and not place.news_shown:
            place.news_shown = True
            self.note(f"attempt {section.key}: {section.news}")

    def _stream(self, source: LogSource, section: Section) -> _Stream:
        if source.path not in self._streams:
            offset = max(self._offsets.get(source.path, 0), self._since(source, section))
            self._streams[source.path] = _Stream(source, section, offset, self.choice)
        return self._streams[source.path]

    def _since(self, source: LogSource, section: Section) -> int:
        """Where the lines begin that may have been written since the moment that was asked for."""
        since = self.choice.since
        if since is None or section.begun >= since:
            return 0
        size, changed = _size_and_change(source.path)
        marks = LogTimes(source.path).read() if section.timed else []
        if not marks and changed < since:
            return size
        if not marks and size and section.key not in self._unclear:
            self._unclear.add(section.key)
            self.warn(f"when {section.title} wrote which line is not on record: all are shown")
        return line_start(source.path, first_offset(marks, since))

    def put(self, section: Section, line: LogLine, *, several: bool) -> None:
        """Print a line, or keep it while the last ones are looked for."""
        if self._held is not None:
            self._held.line(section, line, several=several)
            return
        self.lines += 1
        if self.choice.as_json:
            self.out.write(json.dumps(_as_json(section, line)).encode() + b"\n")
            return
        label = f"[{line.source.label}]"
        label = clean(click.style(label, dim=True) if self.choice.color else label)
        prefix = f"{label} ".encode(errors="replace") if several else b""
        text = clean_log(line.text) if self.out.isatty() else line.text
        self.out.write(prefix + text + b"\n")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log.

    `about` is when it was written, as far as that is known.
    """

    about: float
    is_certain: bool
    source: LogSource
    text: bytes


class _Stream:
    """One log while it is being shown."""

    def __init__(
        self, source: LogSource, section: Section, offset: int, choice: LogSelection
    ) -> None:
        self._source = source
        self._log = LogFile(source.path, offset)
        self._times = LogTimes(source.path) if section.timed else None
        self._filter = LineFilter[LogLine](choice.lines(), choice.context) if choice.lines else None
        self._looked: LogMark | None = None

    def new(self, section: Section, now: float, *, last: bool, at_once: int) -> Iterator[LogLine]:
        """The lines since the last call that are to be shown; with `last` also half a line."""
        is_certain, guess = self._guess(section, now)
        for text in self._log.lines(at_once):
            yield from self._chosen(LogLine(guess.at(self._log.at), is_certain, self._source, text))
        for text in self._log.rest() if last else ():
            yield from self._chosen(LogLine(guess.at(self._log.at), is_certain, self._source, text))

    def _chosen(self, line: LogLine) -> Iterable[LogLine]:
        return (line,) if self._filter is None else self._filter.feed(line.text, line)

    def _guess(self, section: Section, now: float) -> tuple[bool, Guess]:
        marks = list(self._times.read()) if self._times else []
        has_marks = bool(marks)
        size, changed = _size_and_change(self._source.path)
        if section.ended is not None:
            changed = min(changed, section.ended + LATE_S)
        if self._looked is not None:  # what is new came since; a file server's clock may differ
            marks.append(self._looked)
            changed = now
        self._looked = LogMark(now, size)
        return has_marks, Guess(marks, section.begun, LogMark(changed, size))


def _size_and_change(path: Path) -> tuple[int, float]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0.0
    return status.st_size, status.st_mtime


@dataclass
class _Place:
    """How far a section has been shown."""

    titled: bool = False
    news_shown: bool = False
    ending: bool = False
    closed: bool = False


def _as_json(section: Section, line: LogLine) -> dict[str, object]:
    return {
        "attempt": section.attempt,
        "rank": line.source.rank,
        "node": line.source.node or None,
        "source": line.source.label,
        "t": round(line.about, 1) if line.is_certain else None,
        "text": line.text.decode(errors="backslashreplace"),
    }


class _Held:
    """The last lines of each rank while all are read: the tail of what a filter lets through."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._order = 0
        self._lines: dict[int | str, deque[tuple[int, _Print]]] = {}
        self._notes: list[tuple[int, _Print]] = []

    def note(self, text: str) -> None:
        """Keep a title or an end."""
        self._order += 1
        self._notes.append((self._order, lambda printer: printer.note(text)))

    def line(self, section: Section, line: LogLine, *, several: bool) -> None:
        """Keep a line until so many of its rank have come after it."""

        def put(printer: Printer) -> None:
            printer.put(section, line, several=several)

        self._order += 1
        key = line.source.label if line.source.rank is None else line.source.rank
        self._lines.setdefault(key, deque(maxlen=self._count)).append((self._order, put))

    def release(self, printer: Printer) -> None:
        """Print them, with the titles and ends from the title on that the first one is below."""
        lines = [one for held in self._lines.values() for one in held]
        begin = min((order for order, _ in lines), default=self._order)
        first = max((order for order, _ in self._notes if order <= begin), default=0)
        kept = [*lines, *(note for note in self._notes if note[0] >= first)]
        for _, put in sorted(kept, key=lambda pair: pair[0]):
            put(printer)
