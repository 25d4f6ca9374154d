"""Charts of ranks and of saves: times, memory, waits, what checkpoints cost. Pure.

tests/unit/test_report.py holds the promises.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from hpctrain.base.text import count, size
from hpctrain.history.goodput import Spent
from hpctrain.report import curves
from hpctrain.report.figures import Chart, axis, layout, local, time_axis
from hpctrain.report.wording import COLOURS, SERIES, percent, step_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.report.gather import ReportData

GIB = 2**30


def heat(data: ReportData) -> Chart:
    """Step time of each rank over wall time."""
    key, title = "heat", "Step time by rank"
    drawn = curves.heat_map(data.ranks)
    if drawn is None:
        return Chart(key, title, f"No times of ranks to show: {NO_RANKS}.")
    values = sorted(cell for row in drawn.cells for cell in row if cell is not None)
    top = values[min(len(values) - 1, int(0.99 * len(values)))]
    what = "own work in a step" if drawn.is_own else "whole step"
    labels = [str(row.start) if len(row) == 1 else f"{row.start}-{row[-1]}" for row in drawn.rows]
    trace = {
        "type": "heatmap",
        "x": [local(t) for t in drawn.times],
        "y": list(range(len(labels))),
        "z": [[None if v is None else float(f"{v:.4g}") for v in row] for row in drawn.cells],
        "zmin": values[0],
        "zmax": max(top, values[0] * 1.02),
        "colorscale": "YlOrRd",
        "reversescale": True,
        "colorbar": {"title": {"text": "s"}, "thickness": 12, "len": 0.9},
        "customdata": [[label] * len(drawn.times[1:]) for label in labels],
        "hovertemplate": "rank %{customdata}<br>%{x}<br>%{z:.4g} s<extra></extra>",
        "hoverongaps": False,
    }
    every = max(1, len(labels) // 16)
    ticks = list(range(0, len(labels), every))
    height = max(240, min(620, 110 + 16 * len(labels)))
    shape = layout(
        height,
        xaxis=time_axis(),
        yaxis=axis(
            "rank", tickvals=ticks, ticktext=[labels[at] for at in ticks], autorange="reversed"
        ),
    )
    middle = step_seconds(curves.median(values))
    words = f"Darker is slower. The {what} takes {middle} (median over ranks and time)."
    shared = (
        " Neighbouring ranks share a row, the slowest counts." if len(drawn.rows[0]) > 1 else ""
    )
    return Chart(key, title, f"{words}{shared}", {"data": [trace], "layout": shape})


NO_RANKS = "no attempt wrote a ranks.jsonl, which rank 0 does as the run goes on"


def memory_chart(data: ReportData) -> Chart:
    """Memory of each rank's device."""
    key, title = "memory", "Memory per rank"
    held = curves.memory(data.ranks)
    if held is None or not any(held.peak):
        return Chart(key, title, "No memory to show: no rank told of its device's.")
    groups = curves.groups(len(held.peak), curves.MOST_BARS)
    names = [
        str(group.start) if len(group) == 1 else f"{group.start}-{group[-1]}" for group in groups
    ]
    rows = [("in use at most", held.peak, SERIES[0])]
    if held.reserved:
        rows.insert(0, ("reserved", held.reserved, "#b7c3d3"))
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [round(max(values[at] for at in group) / GIB, 3) for group in groups],
            "marker": {"color": colour},
            "hovertemplate": "rank %{x}<br>%{y:.2f} GiB<extra>" + name + "</extra>",
        }
        for name, values, colour in rows
    ]
    top = max(range(len(held.peak)), key=held.peak.__getitem__)
    words = f"Rank {top} held the most: {size(round(held.peak[top]))} in use"
    if held.reserved:
        words += f", {size(round(held.reserved[top]))} reserved"
    tries = f" {held.retries:.0f} allocations were tried again." if held.retries else ""
    shape = layout(
        300,
        barmode="overlay",
        xaxis=axis("rank", type="category"),
        yaxis=axis("GiB", rangemode="tozero"),
    )
    return Chart(
        key,
        title,
        f"{words} (attempt {held.attempt}).{tries}",
        {"data": traces, "layout": shape},
        has_legend=len(traces) > 1,
    )


def waits_chart(data: ReportData) -> Chart:
    """Where each rank's time went."""
    key, title = "waits", "Where ranks waited"
    found = curves.waits(data.ranks)
    if found is None:
        return Chart(key, title, f"No waits to show: {NO_RANKS}.")
    groups = curves.groups(len(found.wall_s), curves.MOST_BARS)
    names = [
        str(group.start) if len(group) == 1 else f"{group.start}-{group[-1]}" for group in groups
    ]
    own = found.own_s
    rest = [
        max(0.0, wall - data_s - (own[rank] if own is not None else 0.0))
        for rank, (wall, data_s) in enumerate(zip(found.wall_s, found.data_s, strict=True))
    ]
    rows = [("waiting for data", found.data_s, COLOURS[Spent.DATA])]
    if own is not None:
        rows.insert(0, ("own work", own, COLOURS[Spent.STEP]))
        rows.append(("with and for other ranks", rest, "#8896ab"))
    else:
        rows.append(("work, and waiting for others", rest, "#8896ab"))
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [_share(values, found.wall_s, group) for group in groups],
            "marker": {"color": colour},
            "hovertemplate": "rank %{x}<br>%{y:.1f} %<extra>" + name + "</extra>",
        }
        for name, values, colour in rows
    ]
    shape = layout(
        340,
        barmode="stack",
        xaxis=axis("rank", type="category"),
        yaxis=axis("% of its time", range=[0, 100]),
    )
    drawn = {"data": traces, "layout": shape}
    return Chart(key, title, _waits_words(found), drawn, has_legend=True)


def _share(values: Sequence[float], wall_s: Sequence[float], group: range) -> float:
    whole = sum(wall_s[at] for at in group)
    return round(100 * sum(values[at] for at in group) / whole, 2) if whole else 0.0


def _waits_words(found: curves.Waits) -> str:
    share = [d / w if w else 0.0 for d, w in zip(found.data_s, found.wall_s, strict=True)]
    most = max(range(len(share)), key=share.__getitem__)
    words = f"Rank {most} waited longest for data: {percent(share[most])} of its time."
    if found.own_s is None or len(share) == 1:
        return words
    rank, times = found.slowest.most_common(1)[0]
    return (
        f"{words} The others waited most often for rank {rank}: slowest in "
        f"{percent(times / found.samples)} of {count(found.samples, 'sample')}, "
        f"in the middle {percent(found.behind[rank])} above the median."
    )


# ---- saves


def saves_chart(data: ReportData) -> Chart:
    """What each checkpoint cost."""
    key, title = "saves", "What checkpoints cost"
    saves = data.history.saves
    if not saves:
        return Chart(key, title, "No checkpoint was committed.")
    shown = curves.thin_saves(saves)
    x = [one.step for one in shown]
    rows = (
        ("until committed", [one.seconds for one in shown], "#b7c3d3", "y"),
        ("training stopped", [one.stall_s for one in shown], COLOURS[Spent.SAVE], "y"),
        (
            "size",
            [None if b is None else b / GIB for b in (s.size_bytes for s in shown)],
            "#8896ab",
            "y2",
        ),
    )
    hover = [
        f"step {one.step:,}, attempt {one.attempt}, {escape(one.mode or 'sync')}" for one in shown
    ]
    traces = [
        {
            "type": "scatter",
            "mode": "markers" if axis_name == "y" else "lines+markers",
            "name": name,
            "x": x,
            "y": values,
            "yaxis": axis_name,
            "marker": {"color": colour, "size": 7 if axis_name == "y" else 4},
            "line": {"color": colour, "width": 1, "shape": "hv"},
            "text": hover,
            "hovertemplate": "%{text}<br>%{y:.4g} "
            + ("s" if axis_name == "y" else "GiB")
            + f"<extra>{name}</extra>",
        }
        for name, values, colour, axis_name in rows
    ]
    shape = layout(
        420,
        xaxis=axis("step", anchor="y2"),
        yaxis=axis("seconds", domain=[0.4, 1], rangemode="tozero"),
        yaxis2=axis("GiB", domain=[0, 0.3], rangemode="tozero"),
    )
    drawn = {"data": traces, "layout": shape}
    return Chart(key, title, _saves_words(data), drawn, has_legend=True)


def _saves_words(data: ReportData) -> str:
    saves = data.history.saves
    stall, whole = (
        curves.median([one.stall_s for one in saves]),
        curves.median([one.seconds for one in saves]),
    )
    weight = next((one.size_bytes for one in reversed(saves) if one.size_bytes), None)
    words = f"{count(len(saves), 'save')}: training stopped {step_seconds(stall)} for one"
    words += f", committed after {step_seconds(whole)} (medians)"
    words += f", {size(weight)} each" if weight else ""
    missed = sum(data.history.missed.values())
    return f"{words}.{f' {missed} more failed or were left out.' if missed else ''}"
