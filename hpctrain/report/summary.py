"""The numbers of a report, once: page, text and comparison show the same. Pure.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from hpctrain.base.text import count, duration
from hpctrain.history.goodput import TimeClass
from hpctrain.history.run_state import OVER
from hpctrain.history.telling import NO_STEP
from hpctrain.report import curves
from hpctrain.report.wording import (
    NAMES,
    NOT_KNOWN,
    NOTHING,
    ended,
    figure,
    node_hours,
    percent,
    recovered,
    step_seconds,
    steps,
    when,
    where,
)
from hpctrain.status.mishap_lines import mishap_lines

if TYPE_CHECKING:
    from hpctrain.history.attempts import AttemptView
    from hpctrain.history.goodput import Goodput
    from hpctrain.report.gather import ReportData

ATTEMPT_TITLES = ("#", "job", "where", "started", "ran", "ended", "steps", "lost", "recovered in")
NUMBERS = frozenset({"#", "ran", "lost"})
"""Columns that stand to the right."""
EVALUATION_TITLES = ("step", "state", "metrics", "why")


@dataclass(frozen=True)
class Fact:
    """One number of the summary: what it is, how much, and a word more."""

    label: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class FailureGroup:
    """Attempts that failed alike: the newest tells for all."""

    summary: str
    attempts: tuple[int, ...]
    where: str
    cause: str
    traceback: str


def facts(data: ReportData) -> list[Fact]:
    """The first look at a run."""
    status, spent = data.status, data.status.goodput
    progress = status.progress
    total = "" if progress.total is None else f"of {progress.total:,}"
    rows = [
        Fact("state", status.state.value, _since(data)),
        Fact("step", _step(data), total),
        Fact("useful of allocated", percent(spent.useful_of_allocated), _why_no_rate(spent)),
        Fact("useful since submit", percent(spent.useful_since_submit), _waited(spent)),
        Fact("last 24 hours", percent(status.day.useful_of_allocated), "useful of allocated"),
        _lost(data),
        Fact("attempts", f"{len(status.attempts):,}", _ends(data)),
        Fact("node-hours", node_hours(spent.allocated_s), "allocated"),
    ]
    return [*rows, *_mishaps(data), *_speed(data)]


def _mishaps(data: ReportData) -> list[Fact]:
    """What the run has survived, and what guards it; nothing where nothing happened."""
    rows = []
    for label, words in mishap_lines(data.status.mishaps):
        value, _, more = words.partition("; ")
        rows.append(Fact(label, value, more))
    return rows


def _step(data: ReportData) -> str:
    step = data.status.progress.step
    if step is None:
        return NOT_KNOWN if data.status.telling.is_silent else NOTHING
    return f"{step:,}"


def _lost(data: ReportData) -> Fact:
    lost = data.status.steps_lost
    if lost.steps is None:
        return Fact("steps lost", NOT_KNOWN, lost.why)
    more = f"done again, or in vain; {lost.why}" if lost.why else "done again, or in vain"
    return Fact("steps lost", f"{lost.steps:,}", more)


def _why_no_rate(spent: Goodput) -> str:
    if spent.useful_of_allocated is not None:
        return ""
    return NO_STEP if spent.allocated_s else "nothing was allocated"


def _waited(spent: Goodput) -> str:
    queued = spent.seconds.get(TimeClass.QUEUE, 0.0)
    return f"{duration(queued)} in the queue" if queued >= 1 else ""


def _since(data: ReportData) -> str:
    attempts = data.status.attempts
    if not attempts:
        return ""
    last = attempts[-1].ended
    until = "" if last is None else f" to {when(last)}"
    return f"{when(attempts[0].started)}{until}"


def _ends(data: ReportData) -> str:
    seen: dict[str, int] = {}
    for attempt in data.status.attempts:
        if attempt.ended is not None:
            seen[ended(attempt)] = seen.get(ended(attempt), 0) + 1
    most = sorted(seen.items(), key=lambda attempt: -attempt[1])
    return ", ".join(f"{times} {why}" for why, times in most[:4])


def _speed(data: ReportData) -> list[Fact]:
    marks = data.history.marks
    unit = curves.unit_of(marks)
    rate = curves.median([unit.rate(mark) for mark in marks])
    facts_of_speed = []
    if rate is not None:
        step = step_seconds(curves.median([curves.step_p50(mark) for mark in marks]))
        facts_of_speed.append(Fact(f"{unit.name}/s", figure(rate), f"median; a step {step}"))
    if data.status.progress.loss is not None:
        facts_of_speed.append(
            Fact("loss", f"{data.status.progress.loss:.4g}", "of the last step told")
        )
    return facts_of_speed


def classes(spent: Goodput) -> list[tuple[str, float, float]]:
    """Name, seconds and share of allocated time of each class; the queue has no share."""
    return [
        (
            NAMES[kind],
            spent.seconds[kind],
            spent.node_seconds.get(kind, 0.0) / spent.allocated_s if spent.allocated_s else 0.0,
        )
        for kind in NAMES
    ]


def attempt_rows(data: ReportData) -> list[tuple[str, ...]]:
    """A row per attempt under `ATTEMPT_TITLES`; times to the minute, in this machine's zone."""
    attempts = list(data.status.attempts)
    rows: list[tuple[str, ...]] = []
    for attempt, following in zip_longest(attempts, attempts[1:]):
        rows.append(
            (
                str(attempt.number),
                attempt.job_id or NOTHING,
                where(attempt),
                when(attempt.started),
                duration(_until(data, attempt) - attempt.started),
                _end(data, attempt),
                steps(attempt),
                NOTHING if attempt.steps_lost is None else f"{attempt.steps_lost:,}",
                recovered(following),
            )
        )
    return rows


def evaluation_rows(data: ReportData) -> list[tuple[str, ...]]:
    """A row per checkpoint that was or is to be evaluated, the newest first."""
    return [
        (
            f"{row.step:,}",
            f"{row.state}, best" if row.is_best else row.state,
            ", ".join(f"{name} {value:.4g}" for name, value in row.metrics.items()) or NOTHING,
            row.why or NOTHING,
        )
        for row in data.status.evaluations
    ]


def _is_done(data: ReportData, attempt: AttemptView) -> bool:
    """Whether it is over though no end of it is on record: a run in a terminal has no agent."""
    return attempt.ended is None and data.status.state in OVER


def _until(data: ReportData, attempt: AttemptView) -> float:
    seen = data.status.progress.seen
    if _is_done(data, attempt) and seen is not None:
        return seen
    return data.status.now if attempt.ended is None else attempt.ended


def _end(data: ReportData, attempt: AttemptView) -> str:
    return data.status.state.value if _is_done(data, attempt) else ended(attempt)


def failure_groups(data: ReportData) -> list[FailureGroup]:
    """What attempts failed of, the newest kind first; the same failure counts once."""
    groups: dict[str, FailureGroup] = {}
    for attempt in reversed(data.status.attempts):
        failure = attempt.failure
        if failure is None:
            continue
        group = groups.get(failure.summary)
        if group is not None:
            numbers = (attempt.number, *group.attempts)
            groups[failure.summary] = FailureGroup(
                group.summary, numbers, group.where, group.cause, group.traceback
            )
            continue
        rank = "" if failure.rank is None else f"rank {failure.rank}"
        on = f"{rank} on {failure.node}" if failure.node else rank
        text = textwrap.dedent(failure.traceback).strip("\n")
        groups[failure.summary] = FailureGroup(
            failure.summary, (attempt.number,), on, ended(attempt), text
        )
    return list(groups.values())


def failure_line(group: FailureGroup) -> str:
    """Which attempts failed, and where the newest did."""
    numbers = ", ".join(map(str, group.attempts[-8:]))
    times = count(len(group.attempts), "attempt")
    which = f"attempt {numbers}" if len(group.attempts) == 1 else f"{times} ({numbers})"
    return f"{which}: {group.where or 'somewhere'}, {group.cause}"
