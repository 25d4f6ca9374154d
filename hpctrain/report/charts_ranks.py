"""Charts of ranks, of saves, and of the attempts as bars over time. Pure.

Times, memory and waits of ranks, what checkpoints cost, and what each moment of an attempt was
spent on (`timeline`). Waits for data and saves inside a stretch of steps are known as sums only, so
a stretch is one bar that says how it was shared. Where attempts are many, neighbours share a line,
and what is shorter than a pixel goes to what fills most of its pixel.
tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from hpctrain.base.text import count, size
from hpctrain.history.goodput import TimeClass
from hpctrain.report import curves
from hpctrain.report.curves import groups
from hpctrain.report.figures import Chart, axis, layout, local, time_axis
from hpctrain.report.wording import COLOURS, SERIES, percent, step_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.history.goodput import TimeSlice
    from hpctrain.report.gather import ReportData

GIB = 2**30
NO_RANKS = "no attempt wrote a ranks.jsonl, which rank 0 does as the run goes on"
MOST_LINES = 60
PIXELS = 900
TRAINING = frozenset({TimeClass.STEP, TimeClass.DATA, TimeClass.SAVE})


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
    waits = curves.waits(data.ranks)
    if waits is None:
        return Chart(key, title, f"No waits to show: {NO_RANKS}.")
    groups = curves.groups(len(waits.wall_s), curves.MOST_BARS)
    names = [
        str(group.start) if len(group) == 1 else f"{group.start}-{group[-1]}" for group in groups
    ]
    own = waits.own_s
    rest = [
        max(0.0, wall - data_s - (own[rank] if own is not None else 0.0))
        for rank, (wall, data_s) in enumerate(zip(waits.wall_s, waits.data_s, strict=True))
    ]
    rows = [("waiting for data", waits.data_s, COLOURS[TimeClass.DATA])]
    if own is not None:
        rows.insert(0, ("own work", own, COLOURS[TimeClass.STEP]))
        rows.append(("with and for other ranks", rest, "#8896ab"))
    else:
        rows.append(("work, and waiting for others", rest, "#8896ab"))
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [_share(values, waits.wall_s, group) for group in groups],
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
    return Chart(key, title, _waits_words(waits), drawn, has_legend=True)


def _share(values: Sequence[float], wall_s: Sequence[float], group: range) -> float:
    whole = sum(wall_s[at] for at in group)
    return round(100 * sum(values[at] for at in group) / whole, 2) if whole else 0.0


def _waits_words(waits: curves.Waits) -> str:
    share = [d / w if w else 0.0 for d, w in zip(waits.data_s, waits.wall_s, strict=True)]
    most = max(range(len(share)), key=share.__getitem__)
    words = f"Rank {most} waited longest for data: {percent(share[most])} of its time."
    if waits.own_s is None or len(share) == 1:
        return words
    rank, times = waits.slowest.most_common(1)[0]
    return (
        f"{words} The others waited most often for rank {rank}: slowest in "
        f"{percent(times / waits.samples)} of {count(waits.samples, 'sample')}, "
        f"in the middle {percent(waits.behind[rank])} above the median."
    )


# ---- saves


def saves_chart(data: ReportData) -> Chart:
    """What each checkpoint cost."""
    key, title = "saves", "What checkpoints cost"
    saves = [save for save in data.history.saves if save.step is not None]
    if not saves:
        none = "No checkpoint of a known step was committed."
        return Chart(key, title, none if data.history.saves else "No checkpoint was committed.")
    shown = curves.thin_saves(saves)
    x = [save.step for save in shown]
    rows = (
        ("until committed", [save.seconds for save in shown], "#b7c3d3", "y"),
        ("training stopped", [save.cost_s for save in shown], COLOURS[TimeClass.SAVE], "y"),
        (
            "size",
            [None if b is None else b / GIB for b in (s.size_bytes for s in shown)],
            "#8896ab",
            "y2",
        ),
    )
    hover = [
        f"step {save.step:,}, attempt {save.attempt}, {escape(save.mode or save.kind)}"
        for save in shown
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
        curves.median([save.cost_s for save in saves]),
        curves.median([save.seconds for save in saves]),
    )
    weight = next((save.size_bytes for save in reversed(saves) if save.size_bytes), None)
    words = f"{count(len(saves), 'save')}: training stopped {step_seconds(stall)} for one"
    words += f", committed after {step_seconds(whole)} (medians)"
    words += f", {size(weight)} each" if weight else ""
    missed = sum(data.history.missed.values())
    return f"{words}.{f' {missed} more failed or were left out.' if missed else ''}"


@dataclass
class Bar:
    """A stretch of one line.

    Attributes:
        line: Counted from 0.
        start: Seconds since the epoch.
        end: The same.
        kind: What it was spent on; STEP also stands for the data waits and saves in it.
        attempts: The first and the last attempt in it; None for the time before the first.
        shares: Seconds of each kind in it.
    """

    line: int
    start: float
    end: float
    kind: TimeClass
    attempts: tuple[int, int] | None
    shares: dict[TimeClass, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Bars, and the attempts of each line: first and last."""

    bars: list[Bar]
    lines: list[tuple[int, int]]


def timeline(slices: Sequence[TimeSlice]) -> Timeline:
    """Lines of bars, the first attempt first; the queue before an attempt stands in its line."""
    lasting = [slice_ for slice_ in slices if slice_.end > slice_.start]
    numbers = sorted({slice_.attempt for slice_ in lasting if slice_.attempt is not None})
    if not numbers:
        numbers = [0] if lasting else []
    lines = [(numbers[g.start], numbers[g.stop - 1]) for g in groups(len(numbers), MOST_LINES)]
    where = {
        number: line
        for line, group in enumerate(groups(len(numbers), MOST_LINES))
        for number in numbers[group.start : group.stop]
    }
    by_line: dict[int, list[Bar]] = defaultdict(list)
    for slice_, number in zip(lasting, _owners(lasting, numbers), strict=True):
        line = where[number]
        kind = TimeClass.STEP if slice_.kind in TRAINING else slice_.kind
        _add(
            by_line[line], Bar(line, slice_.start, slice_.end, kind, (number, number)), slice_.kind
        )
    begin = min((b.start for b in lasting), default=0)
    pixel = (max((b.end for b in lasting), default=0) - begin) / PIXELS
    crowded = len(numbers) > MOST_LINES
    drawn = [_coarse(bars, pixel) if crowded else bars for bars in by_line.values()]
    return Timeline([bar for bars in drawn for bar in bars], lines)


def _owners(slices: Sequence[TimeSlice], numbers: Sequence[int]) -> Iterable[int]:
    """The attempt of each slice; time without one leads to the next attempt."""
    following = numbers[-1] if numbers else 0
    owners: list[int] = []
    for time_slice in reversed(slices):
        following = time_slice.attempt if time_slice.attempt is not None else following
        owners.append(following)
    return reversed(owners)


def _add(bars: list[Bar], bar: Bar, kind: TimeClass) -> None:
    """Put a bar behind the others, or lengthen the last where both show the same."""
    last = bars[-1] if bars else None
    joins = (
        last is not None
        and (last.kind, last.attempts) == (bar.kind, bar.attempts)
        and (bar.start - last.end) <= 1.0
    )
    target = last if last is not None and joins else bar
    if target is bar:
        bars.append(bar)
    target.end = max(target.end, bar.end)
    target.shares[kind] = target.shares.get(kind, 0.0) + bar.end - bar.start


def _coarse(bars: Sequence[Bar], pixel: float) -> list[Bar]:
    """The bars with those shorter than a pixel put together, under what fills most of them."""
    bars_drawn: list[Bar] = []
    for bar in bars:
        last = bars_drawn[-1] if bars_drawn else None
        if last is None or (last.end - last.start >= pixel and bar.end - bar.start >= pixel):
            bars_drawn.append(bar)
            continue
        if last.end - last.start >= pixel and last.kind is not bar.kind:
            bars_drawn.append(bar)
            continue
        for kind, seconds in bar.shares.items():
            last.shares[kind] = last.shares.get(kind, 0.0) + seconds
        last.end = max(last.end, bar.end)
        last.attempts = _both(last.attempts, bar.attempts)
        most = max(last.shares, key=lambda kind: last.shares[kind])
        last.kind = TimeClass.STEP if most in TRAINING else most
    return bars_drawn


def _both(first: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    pairs = [pair for pair in (first, other) if pair is not None]
    return (min(p[0] for p in pairs), max(p[1] for p in pairs)) if pairs else None
