"""Charts as plotly reads them: {"data": [...], "layout": {...}}, each with a sentence. Pure.

Charts are plain dictionaries, so only the page needs plotly. Names that users chose are escaped:
plotly reads HTML in its texts. A chart without data has a line that says why. In the time line,
data waits and saves inside a stretch of steps are known as sums only, so a stretch is one bar.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import amount, count, duration, size
from hpctrain.ledger.history.goodput import TimeClass, TimeSlice
from hpctrain.observe.report import gather
from hpctrain.observe.report.summary import (
    COLOURS,
    NAMES,
    SERIES,
    Chart,
    axis,
    ended,
    layout,
    line,
    local,
    node_hours,
    percent,
    step_seconds,
    time_axis,
    when,
    where,
)
from hpctrain.observe.status.event_lines import metrics_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.observe.report.gather import ReportData


MOST_RESUMES = 400
LINE_PX, LEAST_PX, ALL_PX = 26, 12, 600
"""Height of a line of the timeline: as wished, at least, and of all of them if there is room."""


def charts(data: ReportData) -> list[Chart]:
    """All charts of one run, in the order of the page."""
    makers = (
        attempts_chart,
        time_chart,
        loss,
        throughput,
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
    labels = [f"{number} " for number in drawn.lines]
    traces = []
    for kind in NAMES:
        bars = [bar for bar in drawn.bars if bar.kind is kind]
        if bars:
            traces.append(_bar_trace(kind, bars, [views.get(one) for one in drawn.lines], labels))
    shown = f", the newest {MOST_LINES} shown" if len(views) > MOST_LINES else ""
    words = (
        f"{count(len(views), 'attempt')}{shown}; the colour says what the time went to. "
        "Waits for data and saves lie within the green."
    )
    height = 80 + round(len(drawn.lines) * max(LEAST_PX, min(LINE_PX, ALL_PX / len(drawn.lines))))
    axes = {
        "xaxis": time_axis(),
        "yaxis": axis("attempt", type="category", categoryarray=labels, autorange="reversed"),
    }
    shape = layout(height, barmode="overlay", bargap=0.25, **axes)
    return Chart(key, title, words, {"data": traces, "layout": shape}, has_legend=True)


def _bar_trace(
    kind: TimeClass,
    bars: Sequence[Bar],
    views: Sequence[AttemptView | None],
    labels: Sequence[str],
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": "training" if kind is TimeClass.STEP else NAMES[kind],
        "marker": {"color": COLOURS[kind], "line": {"width": 0}},
        "y": [labels[bar.line] for bar in bars],
        "base": [local(bar.start) for bar in bars],
        "x": [round(1000 * (bar.end - bar.start)) for bar in bars],
        "hovertext": [_bar_words(bar, views[bar.line]) for bar in bars],
        "hoverinfo": "text",
    }


def _bar_words(bar: Bar, view: AttemptView | None) -> str:
    whole = bar.end - bar.start
    lines = [f"<b>{'training' if bar.kind is TimeClass.STEP else NAMES[bar.kind]}</b>"]
    lines.append(f"{duration(whole)} from {when(bar.start)}")
    if bar.shares.keys() - {bar.kind}:
        most = sorted(bar.shares.items(), key=lambda one: -one[1])
        total = sum(bar.shares.values())
        lines += [f"{NAMES[kind]} {percent(part / total)}" for kind, part in most[:4] if total]
    if view is not None:
        lines.append(f"attempt {view.number} on {escape(where(view))}: {escape(ended(view))}")
    return "<br>".join(lines)


def time_chart(data: ReportData) -> Chart:
    """What the allocated time went to, the largest class first."""
    key, title = "goodput", "Where the allocated time went"
    spent = data.status.goodput
    if spent.allocated_s <= 0:
        return Chart(key, title, "Nothing was allocated so far.")
    # All of the time of a program that reports no step is "other".
    names = NAMES | ({TimeClass.OTHER: "running"} if data.status.reported.is_silent else {})
    rows = sorted(
        ((kind, seconds) for kind, seconds in spent.node_seconds.items() if seconds > 0),
        key=lambda row: -row[1],
    )
    shares = [seconds / spent.allocated_s for _, seconds in rows]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [names[kind] for kind, _ in rows],
        "x": [100 * share for share in shares],
        "text": [percent(share) for share in shares],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertext": [f"{node_hours(seconds)} node-hours" for _, seconds in rows],
        "hoverinfo": "text",
        "marker": {"color": [COLOURS[kind] for kind, _ in rows]},
    }
    shape = layout(
        90 + 30 * len(rows),
        xaxis=axis("% of allocated time", range=[0, 118], tickvals=[0, 25, 50, 75, 100]),
        yaxis=axis("", autorange="reversed"),
    )
    return Chart(key, title, _goodput_words(data), {"data": [trace], "layout": shape})


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


# ---- curves


def loss(data: ReportData) -> Chart:
    """Each step once, with marks where an attempt continued."""
    key, title = "loss", "Loss"
    kept = data.kept
    with_loss = [mark for mark in kept if mark.loss is not None]
    if not with_loss:
        return Chart(key, title, f"No loss to show: {_why_no_marks(data, 'loss')}.")
    traces = [line(gather.by_step(kept, lambda mark: mark.loss), "loss", SERIES[0])]
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
        norm = gather.by_step(kept, lambda mark: mark.grad_norm)
        traces.append(line(norm, "gradient norm", SERIES[1], yaxis="y2"))
        shape["yaxis2"] = axis("gradient norm", domain=[0, 0.34])
    went_on = sum(1 for one in data.resumes if one.step > 0)
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
    """A triangle on the loss where an attempt resumed from a checkpoint."""
    views = {resume.number: resume for resume in data.status.attempts}
    at = {mark.last: mark.loss for mark in data.kept if mark.loss is not None}
    resumes = [resume for resume in data.resumes if resume.step in at]
    stride = max(1, len(resumes) // MOST_RESUMES)
    resumes = resumes[-1::-stride][::-1]
    texts = []
    for resume in resumes:
        view, before = views.get(resume.attempt or 0), views.get((resume.attempt or 0) - 1)
        why = f" after {ended(before)}" if before is not None else ""
        on = f" on {escape(where(view))}" if view is not None else ""
        texts.append(f"attempt {resume.attempt} resumed from step {resume.step:,}{on}{escape(why)}")
    steps = [resume.step for resume in resumes]
    marker = {"symbol": "triangle-down", "size": 10, "color": COLOURS[TimeClass.REDONE]}
    return _markers("resumed", marker, steps, [at[step] for step in steps], texts)


def _evaluated_loss(data: ReportData) -> dict[str, Any]:
    """A diamond where an evaluation has found a loss; all its metrics beside it."""
    rows = [row for row in data.status.evaluations if "loss" in row.metrics]
    rows = rows[:: max(1, len(rows) // MOST_RESUMES)][::-1]
    texts = [
        escape(
            f"step {row.step:,} evaluated{', best' if row.is_best else ''}: "
            + metrics_in_words(row.metrics)
        )
        for row in rows
    ]
    marker = {"symbol": "diamond", "size": 9, "color": SERIES[2]}
    steps = [row.step for row in rows]
    return _markers("evaluated loss", marker, steps, [row.metrics["loss"] for row in rows], texts)


def _markers(
    name: str, marker: dict[str, Any], x: Sequence[int], y: Sequence[Any], texts: Sequence[str]
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": marker,
        "x": x,
        "y": y,
        "hovertext": texts,
        "hoverinfo": "text",
    }


def throughput(data: ReportData) -> Chart:
    """How much a second, over wall time, with what was done again."""
    key, title = "throughput", "Throughput"
    marks = data.marks
    unit = gather.unit_of(marks)
    rates = [unit.rate(mark) for mark in marks]
    middle = gather.median(rates)
    if middle is None:
        return Chart(key, title, f"No throughput to show: {_why_no_marks(data, 'seconds')}.")
    name = f"{unit.name}/s"
    trace = line(gather.by_time(marks, unit.rate), name, SERIES[2], dates=True, unit=name)
    shape = layout(
        300,
        xaxis=time_axis(),
        yaxis=axis(name, rangemode="tozero"),
    )
    best = max(rate for rate in rates if rate is not None)
    words = f"Median {amount(middle)} {name}, best {amount(best)} {name}."
    return Chart(key, title, words, {"data": [trace], "layout": shape})


def _why_no_marks(data: ReportData, what: str) -> str:
    if not data.marks:
        return "no step is on record"
    return f"the program reports no {what} with its steps"


GIB = 2**30
NO_RANKS = "no attempt wrote a ranks.jsonl, which rank 0 does while the run trains"
MOST_LINES = 60
TRAINING = frozenset({TimeClass.STEP, TimeClass.DATA, TimeClass.SAVE})


def memory_chart(data: ReportData) -> Chart:
    """Memory of each rank's device."""
    key, title = "memory", "Memory per rank"
    held = gather.memory(data.ranks)
    if held is None or not any(held.peak):
        return Chart(key, title, "No memory to show: no rank reported its device's.")
    rows = [("in use at most", held.peak, SERIES[0])]
    if held.reserved:
        rows.insert(0, ("reserved", held.reserved, "#b7c3d3"))
    traces = [
        _rank_bars(name, colour, len(values), "GiB", partial(_most_gib, values))
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
    waits = gather.waits(data.ranks)
    if waits is None:
        return Chart(key, title, f"No waits to show: {NO_RANKS}.")
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
        _rank_bars(name, colour, len(values), "%", partial(_share, values, waits.wall_s))
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


def _rank_bars(
    name: str, colour: str, ranks: int, unit: str, value: Callable[[range], float]
) -> dict[str, Any]:
    """A bar for each rank; of many for neighbours together."""
    groups = gather.groups(ranks, gather.MOST_BARS)
    return {
        "type": "bar",
        "name": name,
        "x": [f"{of.start}" if len(of) == 1 else f"{of.start}-{of[-1]}" for of in groups],
        "y": [value(of) for of in groups],
        "marker": {"color": colour},
        "hovertemplate": f"rank %{{x}}<br>%{{y:.4g}} {unit}<extra>{name}</extra>",
    }


def _most_gib(values: Sequence[float], group: range) -> float:
    return round(max(values[at] for at in group) / GIB, 3)


def _share(values: Sequence[float], wall_s: Sequence[float], group: range) -> float:
    whole = sum(wall_s[at] for at in group)
    return round(100 * sum(values[at] for at in group) / whole, 2) if whole else 0.0


def _waits_words(waits: gather.Waits) -> str:
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
    saves = [save for save in data.saves if save.step is not None]
    if not saves:
        none = "No checkpoint of a known step was committed."
        return Chart(key, title, none if data.saves else "No checkpoint was committed.")
    shown = gather.thin_saves(saves)
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
    saves = data.saves
    stall, whole = (
        gather.median([save.cost_s for save in saves]),
        gather.median([save.seconds for save in saves]),
    )
    weight = next((save.size_bytes for save in reversed(saves) if save.size_bytes), None)
    words = f"{count(len(saves), 'save')}: training stopped {step_seconds(stall)} for one"
    words += f", committed after {step_seconds(whole)} (medians)"
    words += f", {size(weight)} each" if weight else ""
    missed = data.missed
    return f"{words}.{f' {missed} more failed or were left out.' if missed else ''}"


@dataclass
class Bar:
    """A stretch of one line.

    `line` counts from 0, times are seconds since the epoch; `kind` STEP also stands for the data
    waits and saves in it. `shares` are the seconds of each kind.
    """

    line: int
    start: float
    end: float
    kind: TimeClass
    shares: dict[TimeClass, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Bars, and the attempt of each line."""

    bars: list[Bar]
    lines: list[int]


def timeline(slices: Sequence[TimeSlice]) -> Timeline:
    """A line for each of the newest attempts; the queue before one stands in its line."""
    lasting = [slice_ for slice_ in slices if slice_.end > slice_.start]
    numbers = sorted({slice_.attempt for slice_ in lasting if slice_.attempt is not None})
    lines = numbers[-MOST_LINES:] or ([0] if lasting else [])
    by_line: dict[int, list[Bar]] = {number: [] for number in lines}
    for slice_, number in zip(lasting, _owners(lasting, lines), strict=True):
        if number in by_line:
            kind = TimeClass.STEP if slice_.kind in TRAINING else slice_.kind
            bar = Bar(lines.index(number), slice_.start, slice_.end, kind)
            _add(by_line[number], bar, slice_.kind)
    return Timeline([bar for bars in by_line.values() for bar in bars], lines)


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
    joins = last is not None and last.kind is bar.kind and bar.start - last.end <= 1.0
    target = last if last is not None and joins else bar
    if target is bar:
        bars.append(bar)
    target.end = max(target.end, bar.end)
    target.shares[kind] = target.shares.get(kind, 0.0) + bar.end - bar.start
