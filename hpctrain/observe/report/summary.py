"""Numbers, words, colours and layout of a report, as page and text. Pure."""

from __future__ import annotations

import math
import textwrap
import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import amount, count, duration, fold_nodes
from hpctrain.ledger.history.goodput import Goodput, TimeClass
from hpctrain.ledger.history.progress import NO_STEP
from hpctrain.observe.report import gather
from hpctrain.observe.status.event_lines import incident_lines, metrics_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.observe.report.gather import Point, ReportData


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
    return [*rows, *_incidents(data), *_speed(data)]


def _incidents(data: ReportData) -> list[Fact]:
    """What the run has survived, and what guards it; nothing where nothing happened."""
    rows = []
    for label, words in incident_lines(data.status.incidents):
        value, _, more = words.partition("; ")
        rows.append(Fact(label, value, more))
    return rows


def _step(data: ReportData) -> str:
    step = data.status.progress.step
    if step is None:
        return NOT_KNOWN if data.status.reported.is_silent else NOTHING
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
    marks = data.marks
    unit = gather.unit_of(marks)
    rate = gather.median([unit.rate(mark) for mark in marks])
    facts_of_speed = []
    if rate is not None:
        step = step_seconds(gather.median([gather.step_p50(mark) for mark in marks]))
        facts_of_speed.append(Fact(f"{unit.name}/s", amount(rate), f"median; a step {step}"))
    if data.status.progress.loss is not None:
        facts_of_speed.append(
            Fact("loss", f"{data.status.progress.loss:.4g}", "of the last reported step")
        )
    return facts_of_speed


def evaluation_rows(data: ReportData) -> list[tuple[str, ...]]:
    """A row per checkpoint that was or is to be evaluated, the newest first."""
    return [
        (
            f"{row.step:,}",
            f"{row.state}, best" if row.is_best else row.state,
            metrics_in_words(row.metrics) or NOTHING,
            row.why or NOTHING,
        )
        for row in data.status.evaluations
    ]


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


_CLASSES = {
    TimeClass.STEP: ("useful steps", "#2f9e63"),
    TimeClass.DATA: ("waiting for data", "#e0a22e"),
    TimeClass.SAVE: ("stopped for saves", "#2f7fc1"),
    TimeClass.STARTUP: ("start-up", "#8896ab"),
    TimeClass.RESTORE: ("restore", "#6a62b7"),
    TimeClass.WARM_UP: ("first step (warm-up)", "#b184cf"),
    TimeClass.REDONE: ("steps done again", "#d64550"),
    TimeClass.NO_PROGRESS: ("without progress", "#a83279"),
    TimeClass.SUSPENDED: ("suspended", "#4f7d8c"),
    TimeClass.STALL: ("stall", "#8f2d38"),
    TimeClass.TEARDOWN: ("teardown", "#a8835a"),
    TimeClass.OTHER: ("other", "#59616d"),
    TimeClass.QUEUE: ("in the queue", "#c3c9d2"),
}
"""Every class in the order in which charts show it."""
NAMES = {kind: name for kind, (name, _) in _CLASSES.items()}
COLOURS = {kind: colour for kind, (_, colour) in _CLASSES.items()}
SERIES = ("#2f7fc1", "#d9822b", "#2f9e63", "#b1479a", "#8f6f3f", "#3fa7a7", "#d64550", "#6a62b7")
"""Of curves that stand side by side."""

NOTHING = "-"
NOT_KNOWN = "not known"


def percent(share: float | None) -> str:
    """A share with as many digits as one can use: "91.9 %", "0.04 %"."""
    if share is None or not math.isfinite(share):
        return NOTHING
    value = 100 * share
    digits = 1 if value >= 1 or value == 0 else 2
    return f"{value:.{digits}f} %"


def node_hours(seconds: float) -> str:
    """Node-seconds as node-hours."""
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"  # noqa: PLR2004 - three digits


def step_seconds(seconds: float | None) -> str:
    """The time of a step, also of a very short one."""
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def when(t: float) -> str:
    """Local time to the minute, with its date."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))


def ended(attempt: AttemptView) -> str:
    """Why an attempt ended, in a word."""
    if attempt.cause is not None:
        return attempt.cause.value.replace("_", " ")
    if attempt.reason is not None:
        return attempt.reason.value.replace("_", " ")
    return "running" if attempt.ended is None else "unknown"


def where(attempt: AttemptView) -> str:
    """Its nodes, folded."""
    return fold_nodes(attempt.nodes) or NOTHING


BEADS = 60
"""A curve of fewer points shows each of them."""


def nothing_to_show(charts: Sequence[Chart]) -> str:
    """Which charts have no data, and why, in a sentence; "" where all have."""
    empty = [chart for chart in charts if chart.figure is None]
    why = "; ".join(dict.fromkeys(chart.why for chart in empty))
    return f"No data for {', '.join(chart.title.lower() for chart in empty)}: {why}." if why else ""


@dataclass(frozen=True)
class Chart:
    """One chart of a page.

    `words` say what it shows, or why there is no figure. `figure` is what plotly draws.
    """

    key: str
    title: str
    words: str
    figure: dict[str, Any] | None = None
    has_legend: bool = False

    @property
    def why(self) -> str:
        """Of one without a figure: why."""
        return (self.words.partition(": ")[2] or self.words).rstrip(".")

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Name (escaped already) and colour of each of its traces; empty where one is enough.

        The page shows it: plotly's own takes a phone's whole chart.
        """
        if not self.has_legend or self.figure is None:
            return []
        return [(trace["name"], trace["marker"]["color"]) for trace in self.figure["data"]]


def local(t: float) -> str:
    """A time as plotly's date axes take it, in this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) + f".{int(t % 1 * 1000):03d}"


def layout(height: int, **more: Any) -> dict[str, Any]:
    """What all charts have alike; the page puts in its own colours as it is shown."""
    return {
        "height": height,
        "margin": {"l": 40, "r": 12, "t": 12, "b": 24},
        "hovermode": "closest",
        "showlegend": False,
        **more,
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis that makes room for its own labels."""
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def time_axis() -> dict[str, Any]:
    """Wall time; few labels, which stay level on a phone too."""
    return axis("", type="date", nticks=6, tickangle=0)


def line(
    points: Sequence[Point],
    name: str,
    colour: str,
    *,
    dates: bool = False,
    unit: str = "",
    **more: Any,
) -> dict[str, Any]:
    """A curve; alone in its mark a point is drawn, since a line needs two."""
    mode = "lines+markers" if len(points) <= BEADS else "lines"
    x = [local(x) if dates else x for x, _ in points]
    at = "%{x}" if dates else "step %{x:,}"
    return {
        "type": "scatter",
        "mode": mode,
        "name": escape(name),
        "line": {"color": colour, "width": 1.6},
        "marker": {"size": 4, "color": colour},
        "x": x,
        "y": [None if y is None else float(f"{y:.6g}") for _, y in points],
        "hovertemplate": f"{at}<br>%{{y:.5g}} {escape(unit)}<extra>{escape(name)}</extra>",
        **more,
    }
