"""The sections of a run's output, by attempt or by job, and filters of their lines.

A filter sees the lines of one log in order and remembers what it needs: a rank's traceback is whole
also where other ranks print in between. tests/unit/cli/test_logs.py holds the promises.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from hpctrain.base.records import EndReason, Next
from hpctrain.base.text import count, duration, fold_nodes, step_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.history.attempts import AttemptView
    from hpctrain.history.run_history import RunHistory
    from hpctrain.history.run_records import AttemptRecord
    from hpctrain.run.layout import RunDir

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

    Attributes:
        label: What stands before its lines where several are shown.
        path: The file.
        rank: Whose it is; None for what the batch side printed.
        node: Where that ran, "" where unknown.
    """

    label: str
    path: Path
    rank: int | None = None
    node: str = ""


@dataclass
class Section:
    """The logs of one attempt, or of one submission's batch script.

    Attributes:
        key: Attempt number or submission token.
        title: Line that stands above it.
        news: Line that stands in it as soon as it is known: what was restored.
        end: Line that stands below it, once it is over.
        begun: When it began, seconds since the epoch.
        ended: When it ended; None while it goes on or where that is not known.
        followed: Another section of its sort has begun.
        timed: The agents tell when its lines were written.
        attempts: Numbers of the attempts that it belongs to.
        files: Looks for its log files.
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
    """What there is to print, in order.

    Args:
        run: The run.
        history: Its own; step marks may be missing.
        wanted: Ranks, or ALL, BATCH, TROUBLE.
    """
    parts: list[Section] = []
    if wanted != BATCH:
        parts += _attempts(run, history, ALL if wanted == TROUBLE else wanted)
    if wanted in {BATCH, TROUBLE}:
        parts += _batch(run, history, told_apart=wanted == TROUBLE)
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
    from hpctrain.history.attempts import attempts

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
    """What it went on from; nothing for the first one, which has nothing to go on from."""
    step = None if attempt is None else attempt.restored_step
    if attempt is None or step is None or (attempt.number == 1 and step == 0):
        return ""
    if attempt.own_loop:
        return f"the program goes on from step {step:,}"
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


def _batch(run: RunDir, history: RunHistory, *, told_apart: bool) -> list[Section]:
    """Each submission's output: the batch script's and, beside it, that of its agents."""
    jobs = _jobs(history)
    of_jobs = []
    for position, (token, (job_id, begun)) in enumerate(jobs.items()):
        where = f"job {job_id} " if told_apart else ""

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
