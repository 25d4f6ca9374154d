"""A report as one HTML page that needs no network; its advice also as text. Pure.

Whatever comes from a run (names, nodes, tracebacks) is text here, never markup: `escape` for what
stands in the page, and in the JSON of the charts no "<" that could end a script. A policy in the
page's head forbids the browser to ask anybody for anything. tests/unit/report/test_report.py and
tests/e2e/test_report_browser.py hold the promises.
"""

from __future__ import annotations

import json
import re
import textwrap
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from hpctrain.core.base import VERSION
from hpctrain.ledger.history.run_state import RunState
from hpctrain.observe.report.advice import advice
from hpctrain.observe.report.charts import charts
from hpctrain.observe.report.summary import (
    EVALUATION_TITLES,
    Chart,
    evaluation_rows,
    facts,
    failure_groups,
    failure_line,
    nothing_to_show,
    when,
)
from hpctrain.observe.status.tables import attempt_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.observe.report.gather import ReportData


POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
TRACEBACK_LINES = 400
_MOODS = {
    RunState.DONE: "good",
    RunState.RUNNING: "good",
    RunState.FAILED: "bad",
    RunState.LOST: "bad",
}


def page(data: ReportData) -> str:
    """The report of one run."""
    drawn = charts(data)
    shown = [chart for chart in drawn if chart.figure is not None]
    judged = evaluation_rows(data)
    links = [("advice", "Advice"), *((one.key, one.title) for one in shown), *_LINKS]
    links += [("evaluations", "Evaluations")] if judged else []
    body = [
        _head(data.status.name, _state(data)),
        _nav(links),
        "<main>",
        _facts(data),
        _section("advice", "Advice", _advice(data)),
        *(_chart(chart) for chart in shown),
        _empty(drawn),
        _section("attempts", "Attempts", _attempts(data)),
        _section("failures", "Failures", _failures(data)),
        _section("evaluations", "Evaluations", _table(EVALUATION_TITLES, judged, _STEPS))
        if judged
        else "",
        "</main>",
        _foot(data),
    ]
    return _document(f"{data.status.name} - hpctrain report", body, drawn)


_STEPS = frozenset({"step"})
_LINKS = (("attempts", "Table of attempts"), ("failures", "Failures"))


def _document(title: str, body: Sequence[str], drawn: Sequence[Chart]) -> str:
    here = files("hpctrain.observe.report")
    style, script = (here.joinpath(f"page.{kind}").read_text() for kind in ("css", "js"))
    figures = {chart.key: chart.figure for chart in drawn if chart.figure is not None}
    plotly = _plotly() if figures else ""
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f'<meta name="generator" content="hpctrain {VERSION}">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        *body,
        *([f"<script>{plotly}</script>"] if figures else []),
        f'<script type="application/json" id="figures">{in_script(figures)}</script>',
        *([f"<script>\n{script}</script>"] if figures else []),
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(lines)


def _plotly() -> str:
    """plotly.js as a whole, from the Python package that carries it."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it has no types

    source: str = get_plotlyjs()
    return source


def in_script(value: object) -> str:
    """JSON that can stand in a script: nothing in it ends the script or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _head(title: str, more: str) -> str:
    return f"<header><h1>{escape(title)}</h1>{more}</header>"


def _state(data: ReportData) -> str:
    state = data.status.state
    where = f" · {escape(data.status.cluster)}" if data.status.cluster else ""
    mood = _MOODS.get(state, "")
    return f'<p><strong class="{mood}">{escape(state.value)}</strong>{where}</p>'


def _nav(links: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title in links)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _section(key: str, title: str, body: str) -> str:
    return f'<section id="{key}"><h2>{escape(title)}</h2>{body}</section>'


def _facts(data: ReportData) -> str:
    cells = "".join(
        f"<div><dt>{escape(one.label)}</dt>"
        f'<dd class="value">{escape(one.value)}</dd>'
        f'<dd class="more">{escape(one.more)}</dd></div>'
        for one in facts(data)
    )
    problems = "".join(f'<p class="none">{escape(one)}</p>' for one in data.problems)
    body = f'<dl class="facts">{cells}</dl>{problems}'
    return f'<section id="summary" aria-label="Summary">{body}</section>'


def _empty(drawn: Sequence[Chart]) -> str:
    words = nothing_to_show(drawn)
    return f'<p class="none">{escape(words)}</p>' if words else ""


def _chart(chart: Chart) -> str:
    """A chart that has a figure."""
    words = escape(chart.words)
    if chart.figure is None:
        return ""
    height = chart.figure["layout"]["height"]
    place = (
        f'<div class="plot" id="chart-{chart.key}" role="img" aria-label="{words}" '
        f'style="height:{height}px"></div>'
    )
    names = "".join(
        f'<li><i style="background:{colour}"></i>{name}</li>' for name, colour in chart.legend
    )
    legend = f'<ul class="legend">{names}</ul>' if names else ""
    body = f"<figure><figcaption>{words}</figcaption>{legend}{place}</figure>"
    return _section(chart.key, chart.title, body)


def _advice(data: ReportData) -> str:
    all_advice = advice(data)
    if not all_advice:
        return '<p class="none">Nothing to advise: no number calls for it.</p>'
    items = "".join(
        f"<li><p><strong>{escape(one.title)}</strong></p>"
        f"<p>{escape(one.evidence)}.</p><p>→ {_with_code(one.do)}.</p></li>"
        for one in all_advice
    )
    return f'<ol class="advice">{items}</ol>'


def _with_code(text: str) -> str:
    """Text of ours in which what one types stands between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _attempts(data: ReportData) -> str:
    if not data.status.attempts:
        return '<p class="none">No attempt is on record.</p>'
    columns = attempt_columns(data.status, data.status.attempts)
    numbers = frozenset(column.title for column in columns if column.right)
    rows = [[str(cell) for cell in row] for row in zip(*(c.cells for c in columns), strict=True)]
    return _table([column.title for column in columns], rows, numbers)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[str]) -> str:
    """A table in a box of its own, which scrolls instead of the page."""
    kinds = [' class="number"' if title in numbers else "" for title in titles]
    head = "".join(
        f'<th scope="col"{kind}>{escape(title)}</th>'
        for title, kind in zip(titles, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="box" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _failures(data: ReportData) -> str:
    groups = failure_groups(data)
    if not groups:
        return '<p class="none">No failure is on record.</p>'
    parts = []
    for group in groups:
        lines = group.traceback.splitlines()[-TRACEBACK_LINES:]
        text = escape("\n".join(lines))
        pre = f'<pre tabindex="0">{text}</pre>' if lines else ""
        parts.append(
            f"<h3>{escape(group.summary)}</h3>"
            f'<p class="faint">{escape(failure_line(group))}</p>{pre}'
        )
    return "".join(parts)


def _foot(data: ReportData) -> str:
    text = f"Made by hpctrain {VERSION} on {when(data.status.now)} from {data.status.root}."
    return f"<footer><p>{escape(text)}</p></footer>"


def as_text(data: ReportData, *, width: int = 80) -> str:
    """Advice, at most `width` columns wide but for names; numbers are those of `status`."""
    parts = [
        data.status.name,
        _advice_text(data, width),
        "\n".join(wrap(f"note: {problem}", width) for problem in data.problems),
    ]
    return "\n\n".join(part for part in parts if part)


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


def _advice_text(data: ReportData, width: int) -> str:
    all_advice = advice(data)
    if not all_advice:
        return "advice: nothing to advise"
    lines = ["advice"]
    for number, entry in enumerate(all_advice, start=1):
        lines.append(wrap(f"{number}. {entry.title}: {entry.evidence}", width))
        lines.append(wrap(f"-> {entry.do}", width, "   "))
    return "\n".join(lines)
