"""A report without charts, for a terminal. Pure.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hpctrain.core.base.text import duration
from hpctrain.core.drawing import Column, drawn, fitted
from hpctrain.observe.report.advice import advice
from hpctrain.observe.report.charts import charts
from hpctrain.observe.report.summary import (
    ATTEMPT_TITLES,
    EVALUATION_TITLES,
    NUMBERS,
    attempt_rows,
    classes,
    comparison_rows,
    evaluation_rows,
    facts,
    failure_groups,
    failure_line,
)
from hpctrain.observe.report.wording import nothing_to_show, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.observe.report.gather import ReportData

ATTEMPTS_SHOWN = 60
TRACEBACK_LINES = 30
_DROPPED_FIRST = {"job": 1, "started": 2, "recovered in": 3}


def as_text(data: ReportData, *, width: int = 80) -> str:
    """One run, at most `width` columns wide but for names and tracebacks."""
    parts = [
        data.status.name,
        _facts(data, width),
        _goodput(data),
        _words(data, width),
        _attempts(data, width),
        _evaluations(data, width),
        _failures(data, width),
        _advice(data, width),
        "\n".join(wrap(f"note: {problem}", width) for problem in data.problems),
    ]
    return "\n\n".join(part for part in parts if part)


def comparison(runs: Sequence[ReportData], *, width: int = 80) -> str:
    """Several runs side by side, a column each, or below each other where there is no room."""
    titles, *rows = comparison_rows(runs)
    columns = [Column(title, [row[at] for row in rows]) for at, title in enumerate(titles)]
    if sum(column.width + 2 for column in columns) - 2 <= width:
        return drawn(fitted(columns, width), width)
    blocks = []
    for at, name in enumerate(titles[1:], start=1):
        blocks.append("\n".join([name, *(f"  {row[0]:22}{row[at]}" for row in rows)]))
    return "\n\n".join(blocks)


def wrap(text: str, width: int, indent: str = "") -> str:
    """Filled lines that break between words only."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _facts(data: ReportData, width: int) -> str:
    return "\n".join(
        wrap(f"{one.label:21}{one.value}{f'  ({one.more})' if one.more else ''}", width)
        for one in facts(data)
    )


def _goodput(data: ReportData) -> str:
    if data.status.goodput.submitted_s <= 0:
        return ""
    rows = [row for row in classes(data.status.goodput) if row[1] > 0]
    lines = [
        f"  {name:22}{duration(seconds):>9}  {percent(share) if share else '':>8}"
        for name, seconds, share in rows
    ]
    return "\n".join(["where the time went (wall time, share of allocated)", *lines])


def _words(data: ReportData, width: int) -> str:
    """What each chart would say; the first two are the tables above."""
    drawn = charts(data)[2:]
    lines = [f"{one.title.lower()}: {one.words}" for one in drawn if one.figure is not None]
    return "\n".join(wrap(line, width) for line in [*lines, nothing_to_show(drawn)] if line)


def _attempts(data: ReportData, width: int) -> str:
    rows = attempt_rows(data)
    if not rows:
        return ""
    shown = rows[-ATTEMPTS_SHOWN:]
    columns = [
        Column(
            title,
            [row[at] for row in shown],
            right=title in NUMBERS,
            drop=_DROPPED_FIRST.get(title, 0),
            shrink=title == "where",
        )
        for at, title in enumerate(ATTEMPT_TITLES)
    ]
    table = drawn(fitted(columns, width), width)
    if len(rows) > len(shown):
        return f"... {len(rows) - len(shown)} earlier attempts (the page shows all)\n{table}"
    return table


def _evaluations(data: ReportData, width: int) -> str:
    rows = evaluation_rows(data)
    if not rows:
        return ""
    columns = [
        Column(title, [row[at] for row in rows[:ATTEMPTS_SHOWN]], right=not at, shrink=at > 1)
        for at, title in enumerate(EVALUATION_TITLES)
    ]
    left = len(rows) - ATTEMPTS_SHOWN
    more = f"\n... {left} earlier evaluations (the page shows all)" if left > 0 else ""
    return f"evaluations\n{drawn(fitted(columns, width), width)}{more}"


def _failures(data: ReportData, width: int) -> str:
    blocks = []
    for group in failure_groups(data):
        lines = group.traceback.splitlines()[-TRACEBACK_LINES:]
        head = [wrap(f"failed: {failure_line(group)}", width), f"  {group.summary}"]
        blocks.append("\n".join([*head, *(f"    {one}".rstrip() for one in lines)]))
    return "\n".join(blocks)


def _advice(data: ReportData, width: int) -> str:
    all_advice = advice(data)
    if not all_advice:
        return "advice: nothing to advise"
    lines = ["advice"]
    for number, entry in enumerate(all_advice, start=1):
        lines.append(wrap(f"{number}. {entry.title}: {entry.evidence}", width))
        lines.append(wrap(f"-> {entry.do}", width, "   "))
    return "\n".join(lines)
