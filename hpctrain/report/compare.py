"""Several runs side by side: their numbers, and charts that lay them over each other. Pure.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from hpctrain.history.goodput import TimeClass
from hpctrain.report import curves
from hpctrain.report.figures import Chart, axis, layout, line
from hpctrain.report.summary import facts
from hpctrain.report.wording import COLOURS, NAMES, NOTHING, SERIES, figure, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.report.curves import Point
    from hpctrain.report.gather import ReportData

POINTS_TOGETHER = 8000
"""Of all curves of a chart."""


def comparison_rows(runs: Sequence[ReportData]) -> list[list[str]]:
    """A header with the runs' names, then a row per number."""
    labels = unique_names(runs)
    tables = [{one.label: one.value for one in facts(data)} for data in runs]
    titles = list(dict.fromkeys(label for table in tables for label in table))
    rows = [[title, *(table.get(title, NOTHING) for table in tables)] for title in titles]
    return [["", *labels], *rows]


def unique_names(runs: Sequence[ReportData]) -> list[str]:
    """The runs' names; where two are alike, with the folder they lie in."""
    names = [data.status.name for data in runs]
    return [
        name if names.count(name) == 1 else data.status.root
        for name, data in zip(names, runs, strict=True)
    ]


def comparison_charts(runs: Sequence[ReportData]) -> list[Chart]:
    """Loss, throughput and goodput of all runs."""
    return [_goodput(runs), _loss(runs), _throughput(runs)]


def _goodput(runs: Sequence[ReportData]) -> Chart:
    key, title = "compare-goodput", "Where the allocated time went"
    names = unique_names(runs)
    with_rate = [
        (name, data.status.goodput)
        for name, data in zip(names, runs, strict=True)
        if data.status.goodput.allocated_s > 0
    ]
    if not with_rate:
        return Chart(key, title, "Nothing was allocated to any of them.")
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": NAMES[kind],
            "y": [escape(name) for name, _ in with_rate],
            "x": [round(100 * g.node_seconds[kind] / g.allocated_s, 3) for _, g in with_rate],
            "marker": {"color": COLOURS[kind]},
            "hovertemplate": "%{y}<br>%{x:.2f} %<extra>" + NAMES[kind] + "</extra>",
        }
        for kind in NAMES
        if kind is not TimeClass.QUEUE and any(g.node_seconds[kind] for _, g in with_rate)
    ]
    shape = layout(
        110 + 40 * len(with_rate),
        barmode="stack",
        xaxis=axis("% of allocated time", range=[0, 100]),
        yaxis=axis("", type="category", autorange="reversed"),
    )
    drawn = {"data": traces, "layout": shape}
    shares = ", ".join(f"{name} {percent(g.useful_of_allocated)}" for name, g in with_rate)
    return Chart(key, title, f"Useful of allocated: {shares}.", drawn, has_legend=True)


def _loss(runs: Sequence[ReportData]) -> Chart:
    key, title = "compare-loss", "Loss"
    sets = [curves.by_step(data.history.kept, lambda mark: mark.loss) for data in runs]
    lines = _overlaid(runs, sets, "step", "loss")
    if lines is None:
        return Chart(key, title, "None of them has a loss on record.")
    last = ", ".join(
        f"{name} {data.status.progress.loss:.4g} at step {data.status.progress.step:,}"
        for name, data in zip(unique_names(runs), runs, strict=True)
        if data.status.progress.loss is not None and data.status.progress.step is not None
    )
    return Chart(key, title, f"Each step once. {last}.", lines, has_legend=True)


def _throughput(runs: Sequence[ReportData]) -> Chart:
    key, title = "compare-throughput", "Throughput"
    units = {curves.unit_of(data.history.marks).name for data in runs if data.history.marks}
    # Runs that count in different things can be laid over each other in steps only.
    unit = next((u for u in (curves.TOKENS, curves.SAMPLES) if units == {u.name}), curves.STEPS)
    sets: list[list[Point]] = []
    for data in runs:
        begin = data.history.marks[0].t if data.history.marks else 0.0
        points = curves.by_time(data.history.marks, unit.rate)
        sets.append([((t - begin) / 3600, rate) for t, rate in points])
    name = f"{unit.name}/s"
    lines = _overlaid(runs, sets, "hours since the first step", name)
    if lines is None:
        return Chart(key, title, "None of them has a step on record.")
    middles = ", ".join(
        f"{label} {figure(curves.median([unit.rate(m) for m in data.history.marks]), name)}"
        for label, data in zip(unique_names(runs), runs, strict=True)
        if data.history.marks
    )
    return Chart(key, title, f"Medians: {middles}.", lines, has_legend=True)


def _overlaid(
    runs: Sequence[ReportData], sets: Sequence[Sequence[Point]], x: str, y: str
) -> dict[str, Any] | None:
    """A curve for each run; None where no run has a point."""
    if not any(value is not None for points in sets for _, value in points):
        return None
    most = max(100, min(curves.MOST_POINTS, POINTS_TOGETHER // max(1, len(sets))))
    names = unique_names(runs)
    traces = [
        line(curves.thin(points, most), name, SERIES[at % len(SERIES)], unit=y)
        | {"hovertemplate": f"{x} %{{x:.6g}}<br>%{{y:.5g}}<extra>{escape(name)}</extra>"}
        for at, (name, points) in enumerate(zip(names, sets, strict=True))
        if points
    ]
    # A rate from zero on: a difference of a percent must not look like half.
    more = {"rangemode": "tozero"} if y.endswith("/s") else {}
    shape = layout(360, xaxis=axis(x), yaxis=axis(y, **more))
    return {"data": traces, "layout": shape}
