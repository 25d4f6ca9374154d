"""The charts as plotly reads them: {"data": [...], "layout": {...}}, each with a sentence. Pure.

Figures are plain dictionaries, so that plotly is needed for its drawing program alone. Whatever a
user may have named (runs, nodes) is escaped: plotly reads a little HTML in its texts. Each chart
that has no data has a line that says why. tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from hpctrain.base.text import count, duration
from hpctrain.history.goodput import TimeClass
from hpctrain.report import curves
from hpctrain.report.charts_ranks import (
    MOST_LINES,
    heat,
    memory_chart,
    saves_chart,
    timeline,
    waits_chart,
)
from hpctrain.report.figures import Chart, axis, layout, line, local, time_axis
from hpctrain.report.wording import (
    COLOURS,
    NAMES,
    SERIES,
    ended,
    figure,
    node_hours,
    percent,
    step_seconds,
    when,
    where,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.history.attempts import AttemptView
    from hpctrain.report.charts_ranks import Bar
    from hpctrain.report.gather import ReportData

MOST_RESUMES = 400
LINE_PX, LEAST_PX, ALL_PX = 26, 12, 600
"""Height of a line of the timeline: as wished, at least, and of all of them if there is room."""


def charts(data: ReportData) -> list[Chart]:
    """All charts of one run, in the order of the page."""
    makers = (
        attempts_chart,
        waterfall,
        loss,
        throughput,
        step_times,
        heat,
        memory_chart,
        saves_chart,
        waits_chart,
    )
    return [make(data) for make in makers]


# ---- attempts and goodput


def attempts_chart(data: ReportData) -> Chart:
    """A line per attempt over wall time."""
    key, title = "timeline", "Attempts over time"
    drawn = timeline(data.status.goodput.slices)
    if not drawn.bars:
        return Chart(key, title, "No time to show: no attempt is on record.")
    views = {one.number: one for one in data.status.attempts}
    labels = [_line_label(pair) for pair in drawn.lines]
    traces = []
    for kind in NAMES:
        bars = [bar for bar in drawn.bars if bar.kind is kind]
        if bars:
            traces.append(_bar_trace(kind, bars, views, labels))
    shared = f", {MOST_LINES} lines at most" if len(drawn.lines) < len(views) else ""
    words = (
        f"{count(len(views), 'attempt')}{shared}; the colour says what the time went to. "
        "Waits for data and saves lie within the green."
    )
    height = 80 + round(len(drawn.lines) * max(LEAST_PX, min(LINE_PX, ALL_PX / len(drawn.lines))))
    axes = {
        "xaxis": time_axis(),
        "yaxis": axis("attempt", type="category", categoryarray=labels, autorange="reversed"),
    }
    shape = layout(height, barmode="overlay", bargap=0.25, **axes)
    return Chart(key, title, words, {"data": traces, "layout": shape}, has_legend=True)


def _line_label(pair: tuple[int, int]) -> str:
    first, last = pair
    return f"{first} " if first == last else f"{first}-{last} "


def _bar_trace(
    kind: TimeClass, bars: Sequence[Bar], views: dict[int, AttemptView], labels: Sequence[str]
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": "training" if kind is TimeClass.STEP else NAMES[kind],
        "marker": {"color": COLOURS[kind], "line": {"width": 0}},
        "y": [labels[bar.line] for bar in bars],
        "base": [local(bar.start) for bar in bars],
        "x": [round(1000 * (bar.end - bar.start)) for bar in bars],
        "hovertext": [_bar_words(bar, views) for bar in bars],
        "hoverinfo": "text",
    }


def _bar_words(bar: Bar, views: dict[int, AttemptView]) -> str:
    whole = bar.end - bar.start
    first, last = bar.attempts or (0, 0)
    lines = [f"<b>{'training' if bar.kind is TimeClass.STEP else NAMES[bar.kind]}</b>"]
    lines.append(f"{duration(whole)} from {when(bar.start)}")
    if bar.shares.keys() - {bar.kind}:
        most = sorted(bar.shares.items(), key=lambda one: -one[1])
        total = sum(bar.shares.values())
        lines += [f"{NAMES[kind]} {percent(part / total)}" for kind, part in most[:4] if total]
    view = views.get(first)
    if first != last:
        lines.append(f"attempts {first} to {last}")
    elif view is not None:
        lines.append(f"attempt {first} on {escape(where(view))}: {escape(ended(view))}")
    return "<br>".join(lines)


def waterfall(data: ReportData) -> Chart:
    """From all allocated time down to useful steps."""
    key, title = "goodput", "Where the allocated time went"
    spent = data.status.goodput
    if spent.allocated_s <= 0:
        return Chart(key, title, "Nothing was allocated so far.")
    kept, lost = _kept(data), _lost(data)
    parts = [100 * seconds / spent.allocated_s for _, seconds in lost]
    useful = 100 * spent.node_seconds[kept] / spent.allocated_s
    names = ["allocated", *(NAMES[kind] for kind, _ in lost), _name(kept)]
    trace = {
        "type": "waterfall",
        "orientation": "h",
        "measure": [*["relative"] * (len(lost) + 1), "total"],
        "y": names,
        "x": [100.0, *(-part for part in parts), 0],
        "text": [
            "100 %",
            *(f"\u2212{percent(part / 100)}" for part in parts),
            percent(useful / 100),
        ],
        "textposition": ["inside", *["outside"] * (len(lost) + 1)],
        "cliponaxis": False,
        "hovertext": _waterfall_words(data),
        "hoverinfo": "text",
        "connector": {"line": {"color": "#9aa3ae", "width": 1}},
        "increasing": {"marker": {"color": COLOURS[TimeClass.STARTUP]}},
        "decreasing": {"marker": {"color": COLOURS[TimeClass.REDONE]}},
        "totals": {"marker": {"color": COLOURS[kept]}},
    }
    shape = layout(
        90 + 30 * len(names),
        xaxis=axis("% of allocated time", range=[-14, 118], tickvals=[0, 25, 50, 75, 100]),
        yaxis=axis("", autorange="reversed"),
    )
    return Chart(key, title, _goodput_words(data), {"data": [trace], "layout": shape})


def _kept(data: ReportData) -> TimeClass:
    """What training itself is called; a program that reports no step has nothing but "other"."""
    return TimeClass.OTHER if data.status.telling.is_silent else TimeClass.STEP


def _name(kept: TimeClass) -> str:
    return "running" if kept is TimeClass.OTHER else NAMES[kept]


def _lost(data: ReportData) -> list[tuple[TimeClass, float]]:
    """Node-seconds that did not go to training, the largest class first."""
    spent, kept = data.status.goodput.node_seconds, _kept(data)
    lost = [(kind, spent[kind]) for kind in NAMES if kind is not kept and spent.get(kind, 0) > 0]
    return sorted(lost, key=lambda one: -one[1])


def _goodput_words(data: ReportData) -> str:
    spent = data.status.goodput
    hours = f"{node_hours(spent.allocated_s)} node-hours"
    if spent.useful_of_allocated is None:
        return f"{hours} in all. The program reported no steps, so no share is called useful."
    lost = {kind: s for kind, s in spent.node_seconds.items() if kind is not TimeClass.STEP}
    worst = max(lost, key=lambda kind: lost[kind])
    share = f"{percent(lost[worst] / spent.allocated_s)}: {NAMES[worst]}"
    return (
        f"{percent(spent.useful_of_allocated)} of {hours} went to useful steps. "
        f"The largest loss is {share}."
    )


def _waterfall_words(data: ReportData) -> list[str]:
    spent = data.status.goodput
    kept = _kept(data)
    rows = [("allocated", spent.allocated_s), *((NAMES[k], s) for k, s in _lost(data))]
    rows.append((_name(kept), spent.node_seconds[kept]))
    return [f"<b>{name}</b><br>{node_hours(s)} node-hours" for name, s in rows]


# ---- curves


def loss(data: ReportData) -> Chart:
    """Each step once, with marks where an attempt went on."""
    key, title = "loss", "Loss"
    kept = data.history.kept
    with_loss = [mark for mark in kept if mark.loss is not None]
    if not with_loss:
        return Chart(key, title, f"No loss to show: {_why_no_marks(data, 'loss')}.")
    traces = [line(curves.by_step(kept, lambda mark: mark.loss), "loss", SERIES[0])]
    resumes = _resume_marks(data)
    traces += [resumes] if resumes["x"] else []
    judged = _evaluated_loss(data)
    traces += [judged] if judged["x"] else []
    has_norm = any(mark.grad_norm is not None for mark in kept)
    shape = layout(
        460 if has_norm else 340,
        xaxis=axis("step", anchor="y2" if has_norm else "y"),
        yaxis=axis("loss", domain=[0.42, 1] if has_norm else [0, 1]),
    )
    if has_norm:
        norm = curves.by_step(kept, lambda mark: mark.grad_norm)
        traces.append(line(norm, "gradient norm", SERIES[1], yaxis="y2"))
        shape["yaxis2"] = axis("gradient norm", domain=[0, 0.34])
    went_on = sum(1 for one in data.history.resumes if one.step > 0)
    again = f" {count(went_on, 'resume')} marked; steps that were done again count once."
    odd = sum(1 for mark in kept if mark.loss is None)
    words = (
        f"Loss {with_loss[-1].loss:.4g} at step {with_loss[-1].last:,}, "
        f"lowest {min(mark.loss or 0 for mark in with_loss):.4g}."
        + (again if went_on else "")
        + (f" {count(odd, 'mark')} without a number for it." if odd else "")
    )
    return Chart(key, title, words, {"data": traces, "layout": shape}, has_legend=True)


def _resume_marks(data: ReportData) -> dict[str, Any]:
    """A triangle on the loss where an attempt went on from a checkpoint."""
    views = {resume.number: resume for resume in data.status.attempts}
    at = {mark.last: mark.loss for mark in data.history.kept if mark.loss is not None}
    resumes = [resume for resume in data.history.resumes if resume.step in at]
    stride = max(1, len(resumes) // MOST_RESUMES)
    resumes = resumes[-1::-stride][::-1]
    texts = []
    for resume in resumes:
        view, before = views.get(resume.attempt or 0), views.get((resume.attempt or 0) - 1)
        why = f" after {ended(before)}" if before is not None else ""
        on = f" on {escape(where(view))}" if view is not None else ""
        texts.append(f"attempt {resume.attempt} went on from step {resume.step:,}{on}{escape(why)}")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "resumed",
        "marker": {"symbol": "triangle-down", "size": 10, "color": COLOURS[TimeClass.REDONE]},
        "x": [resume.step for resume in resumes],
        "y": [at[resume.step] for resume in resumes],
        "hovertext": texts,
        "hoverinfo": "text",
    }


def _evaluated_loss(data: ReportData) -> dict[str, Any]:
    """A diamond where an evaluation has found a loss; all its metrics beside it."""
    rows = [row for row in data.status.evaluations if "loss" in row.metrics]
    rows = rows[:: max(1, len(rows) // MOST_RESUMES)][::-1]
    texts = [
        escape(
            f"step {row.step:,} evaluated{', best' if row.is_best else ''}: "
            + ", ".join(f"{name} {value:.4g}" for name, value in row.metrics.items())
        )
        for row in rows
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "evaluated loss",
        "marker": {"symbol": "diamond", "size": 9, "color": SERIES[2]},
        "x": [row.step for row in rows],
        "y": [row.metrics["loss"] for row in rows],
        "hovertext": texts,
        "hoverinfo": "text",
    }


def throughput(data: ReportData) -> Chart:
    """How much a second, over wall time, with what was done again."""
    key, title = "throughput", "Throughput"
    marks = data.history.marks
    unit = curves.unit_of(marks)
    rates = [unit.rate(mark) for mark in marks]
    middle = curves.median(rates)
    if middle is None:
        return Chart(key, title, f"No throughput to show: {_why_no_marks(data, 'seconds')}.")
    name = f"{unit.name}/s"
    trace = line(curves.by_time(marks, unit.rate), name, SERIES[2], dates=True, unit=name)
    shape = layout(
        300,
        xaxis=time_axis(),
        yaxis=axis(name, rangemode="tozero"),
    )
    best = max(rate for rate in rates if rate is not None)
    words = f"Median {figure(middle, name)}, best {figure(best, name)}."
    return Chart(key, title, words, {"data": [trace], "layout": shape})


def step_times(data: ReportData) -> Chart:
    """Median and 95th percentile of step times, over wall time."""
    key, title = "steps", "Step time"
    marks = data.history.marks
    middle = curves.median([curves.step_p50(mark) for mark in marks])
    if middle is None:
        return Chart(key, title, f"No step time to show: {_why_no_marks(data, 'seconds')}.")
    points = curves.by_time(marks, curves.step_p50)
    has_percentiles = any(mark.p50_s is not None for mark in marks)
    name = "median" if has_percentiles else "mean"
    traces = [line(points, name, SERIES[0], dates=True, unit="s")]
    high = curves.median([mark.p95_s for mark in marks])
    words = f"A step takes {step_seconds(middle)} ({name})."
    if high is not None:
        points = curves.by_time(marks, lambda mark: mark.p95_s)
        traces.insert(0, line(points, "95 % below", SERIES[1], dates=True, unit="s"))
        words = f"Half of the steps take below {step_seconds(middle)}, 95 % {step_seconds(high)}."
    shape = layout(320, xaxis=time_axis(), yaxis=axis("seconds", rangemode="tozero"))
    drawn = {"data": traces, "layout": shape}
    return Chart(key, title, words, drawn, has_legend=len(traces) > 1)


def _why_no_marks(data: ReportData, what: str) -> str:
    if not data.history.marks:
        return "no step is on record"
    return f"the program tells no {what} with its steps"
