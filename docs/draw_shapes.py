"""Draws a choice of shapes, and the shapes of a run over time, as SVG from the run's events.

Text in, text out; generate_pictures.py says where both lie.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from docs.draw_architecture import EDGES, FAINT, FILLS, INK, LEFT, svg

WIDTH, NAME_WIDTH, BAR, ROW = 860, 130, 13, 22
HOUR_S = 3600
Event = dict[str, Any]


def shapes_svg(ledger: str) -> str:
    """The candidates of the run's last choice above, its starts over time below."""
    events = [json.loads(line) for line in ledger.splitlines()]
    choices = [event for event in events if event["kind"] == "shape_chosen"]
    upper, height = _candidates(choices[-1])
    lower, bottom = _starts(events, height + 46)
    return svg(
        WIDTH, bottom, "Candidates of a choice, and the run's shapes over time", upper + lower
    )


def _candidates(choice: Event) -> tuple[list[str], int]:
    rows = [row for row in choice["candidates"] if row["mean_s"] is not None]
    most = max(row["high_s"] for row in rows)
    scale = (WIDTH - 2 * LEFT - NAME_WIDTH - 60) / most
    parts = [
        _text(LEFT, 22, f"Candidates at the {choice['by']}: wait, work and restarts, 80 % interval")
    ]
    for number, row in enumerate(rows):
        y = 38 + number * ROW
        begin, done = (LEFT + NAME_WIDTH + scale * row[name] for name in ("start_s", "mean_s"))
        chosen = (row["nodes"], row["limit_s"]) == (choice["nodes"], choice["limit_s"])
        fill, edge = (FILLS[2], EDGES[2]) if chosen else (FILLS[0], EDGES[0])
        name = f"{row['nodes']} x {_span(row['limit_s'])}{'  chosen' if chosen else ''}"
        parts.append(_text(LEFT, y + BAR - 2, name, size=12.5, colour=INK if chosen else FAINT))
        parts.append(_bar(LEFT + NAME_WIDTH, begin, y, (FILLS[1], EDGES[1])))
        parts.append(_bar(begin, done, y, (fill, edge)))
        low, high = (LEFT + NAME_WIDTH + scale * row[end] for end in ("low_s", "high_s"))
        middle = y + BAR / 2
        parts.append(f"<path d='M{low:.1f} {middle} H{high:.1f}' stroke='{INK}' stroke-width='1'/>")
    bottom = 38 + len(rows) * ROW + 12
    for place in range(5):
        x = LEFT + NAME_WIDTH + (WIDTH - 2 * LEFT - NAME_WIDTH - 60) * place / 4
        parts.append(_text(x, bottom + 4, _span(most * place / 4), size=12, colour=FAINT))
    return parts, bottom + 12


def _starts(events: list[Event], top: int) -> tuple[list[str], int]:
    first, last = events[0]["t"], events[-1]["t"]
    begun = [event for event in events if event["kind"] == "attempt_started"]
    ends = {e["attempt"]: e["t"] for e in events if e["kind"] == "attempt_ended"}
    most = max(len(event["nodes"]) for event in begun)
    scale = (WIDTH - 2 * LEFT - NAME_WIDTH - 20) / (last - first)
    base = top + 24 + 34 * most
    parts = [_text(LEFT, top, "The run's nodes over time, and when the shape was chosen")]
    for event in begun:
        left = LEFT + NAME_WIDTH + scale * (event["t"] - first)
        right = LEFT + NAME_WIDTH + scale * (ends.get(event["attempt"], last) - first)
        height = 34 * len(event["nodes"])
        parts.append(
            f"<rect x='{left:.1f}' y='{base - height}' width='{right - left:.1f}' "
            f"height='{height}' fill='{FILLS[0]}' stroke='{EDGES[0]}'/>"
        )
        name = f"{len(event['nodes'])} node{'s' if len(event['nodes']) > 1 else ''}"
        parts.append(_text(left + 6, base - height + 20, name, size=12.5))
    for event in events:
        if event["kind"] == "shape_chosen":
            x = LEFT + NAME_WIDTH + scale * (event["t"] - first)
            name = f"{event['by']}: {event['nodes']} x {_span(event['limit_s'])}"
            parts.append(
                f"<path d='M{x:.1f} {base} V{base + 10}' stroke='{EDGES[2]}' stroke-width='2'/>"
            )
            parts.append(_text(x, base + 26, name, size=12, colour=FAINT))
    parts.append(
        f"<path d='M{LEFT + NAME_WIDTH} {base} H{WIDTH - LEFT}' stroke='{FAINT}' stroke-width='1'/>"
    )
    return parts, base + 40


def _text(x: float, y: float, text: str, *, size: float = 14.5, colour: str = INK) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}'>{escape(text)}</text>"


def _bar(left: float, right: float, y: float, colours: tuple[str, str]) -> str:
    return (
        f"<rect x='{left:.1f}' y='{y}' width='{max(0.5, right - left):.1f}' height='{BAR}' "
        f"fill='{colours[0]}' stroke='{colours[1]}'/>"
    )


def _span(seconds: float) -> str:
    if seconds < HOUR_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.1f} h".replace(".0 h", " h")
