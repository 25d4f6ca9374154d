"""What all charts share: a chart's record, its layout, axes and lines. Pure.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.report.curves import Point

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
