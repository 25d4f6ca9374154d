"""Words, colours and layout that charts, page and text share. Pure.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import duration, fold_nodes
from hpctrain.ledger.history.goodput import TimeClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.attempts import AttemptView
    from hpctrain.observe.report.gather import Point


NAMES = {
    TimeClass.STEP: "useful steps",
    TimeClass.DATA: "waiting for data",
    TimeClass.SAVE: "stopped for saves",
    TimeClass.STARTUP: "start-up",
    TimeClass.RESTORE: "restore",
    TimeClass.WARM_UP: "first step (warm-up)",
    TimeClass.REDONE: "steps done again",
    TimeClass.NO_PROGRESS: "without progress",
    TimeClass.SUSPENDED: "suspended",
    TimeClass.STALL: "stall",
    TimeClass.TEARDOWN: "teardown",
    TimeClass.OTHER: "other",
    TimeClass.QUEUE: "in the queue",
}
"""Every class in the order in which charts show it."""

COLOURS = {
    TimeClass.STEP: "#2f9e63",
    TimeClass.DATA: "#e0a22e",
    TimeClass.SAVE: "#2f7fc1",
    TimeClass.STARTUP: "#8896ab",
    TimeClass.RESTORE: "#6a62b7",
    TimeClass.WARM_UP: "#b184cf",
    TimeClass.REDONE: "#d64550",
    TimeClass.NO_PROGRESS: "#a83279",
    TimeClass.SUSPENDED: "#4f7d8c",
    TimeClass.STALL: "#8f2d38",
    TimeClass.TEARDOWN: "#a8835a",
    TimeClass.OTHER: "#59616d",
    TimeClass.QUEUE: "#c3c9d2",
}
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


def figure(value: float | None, unit: str = "") -> str:
    """A number in three digits: "43.7k tokens/s"."""
    if value is None or not math.isfinite(value):
        return NOTHING
    tail = f" {unit}" if unit else ""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}{tail}"
    return f"{value:.3g}{tail}"


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


def steps(attempt: AttemptView) -> str:
    """From which step to which, and where the first one's state came from but for the disk."""
    if attempt.first_step is None and attempt.last_step is None:
        return NOTHING
    last = "?" if attempt.last_step is None else f"{attempt.last_step:,}"
    source = f" ({attempt.read_from})" if attempt.read_from not in {"", "disk"} else ""
    return f"{attempt.first_step or 0:,}{source} → {last}"


def recovered(following: AttemptView | None) -> str:
    """How long until the next attempt trained: its wait in the queue, and its way to a step."""
    if following is None or following.ready_s is None:
        return NOTHING
    queue = "" if following.queued_s is None else f"{duration(following.queued_s)} queue + "
    return f"{queue}{duration(following.ready_s)}"


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

    Attributes:
        key: Its id in the page.
        title: Its heading.
        words: What it shows, with its main number; where there is no figure, why.
        figure: What plotly draws; None where there is no data.
        has_legend: Whether its traces have to be told apart.
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
