"""Draws the architecture as SVG from text: boxes and arrows on a grid, and the layers of imports.

Text in, text out; generate_pictures.py says where both lie. Colours and sizes stand at the top.
"""

from __future__ import annotations

import configparser
import tomllib
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INK, FAINT, PAPER = "#1f2933", "#52606d", "#ffffff"
FILLS = ("#e3f0fb", "#f3f4f6", "#fdf0dc")
"""Of the columns: login node, files, nodes; the last also marks what may import torch."""
EDGES = ("#6aa5d8", "#b5bcc5", "#d9a648")
BOX_WIDTH, BOX_HEIGHT, GUTTER, ROW = 290, 88, 84, 116
LEFT, TOP = 20, 56
FONT = "font-family='system-ui, Segoe UI, Helvetica, Arial, sans-serif'"
CODE = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"
LEGEND = ((0, "imports no torch"), (2, "imports torch, all of it or a part"))
LAYER_LEFT, LAYER_WIDTH, LAYER_HEIGHT, LAYER_ROW, ROOM_GAP = 130, 880, 26, 33, 6


@dataclass(frozen=True)
class Box:
    """One box of the flow, with its place in pixels."""

    column: int
    row: int
    title: str
    lines: Sequence[tuple[str, bool]]
    """Each with whether it names modules."""

    @property
    def x(self) -> int:
        """Left edge."""
        return LEFT + self.column * (BOX_WIDTH + GUTTER)

    @property
    def y(self) -> int:
        """Upper edge."""
        return TOP + self.row * ROW

    @property
    def middle(self) -> int:
        """Half its height."""
        return self.y + BOX_HEIGHT // 2


def flow_svg(source: str) -> str:
    """Boxes in columns, and arrows between them; `source` is TOML as in architecture.toml."""
    drawing = tomllib.loads(source)
    boxes = {key: _box(raw) for key, raw in drawing["box"].items()}
    rows = 1 + max(box.row for box in boxes.values())
    width = 2 * LEFT + len(drawing["columns"]) * (BOX_WIDTH + GUTTER) - 10
    parts = [
        f"<text x='{LEFT + n * (BOX_WIDTH + GUTTER)}' y='36' font-size='17' font-weight='600'>"
        f"{escape(name)}</text>"
        for n, name in enumerate(drawing["columns"])
    ]
    # Arrows first: a box that one of them passes lies above it.
    for arrow in drawing["arrow"]:
        begin, end = (boxes[key] for key in arrow["between"])
        parts.append(_arrow(begin, end, arrow.get("text", ""), both=arrow.get("both", False)))
    parts += [_drawn(box) for box in boxes.values()]
    return svg(width, TOP + rows * ROW, "How hpctrain's processes and files stand", parts)


def layers_svg(importlinter: str) -> str:
    """The rooms in the order of imports; `importlinter` is the content of .importlinter."""
    contracts = configparser.ConfigParser()
    contracts.read_string(importlinter)
    inner = {
        section["containers"].partition(".")[2]: section["layers"].strip().splitlines()
        for section in contracts.values()
        if "containers" in section
    }
    without = _without_torch(contracts["importlinter:contract:torch"])
    parts, y = [], 14
    for room in inner.pop(""):
        names = [name for layer in inner.get(room, [""]) for name in layer.split(" | ")]
        width = (LAYER_WIDTH - ROOM_GAP * (len(names) - 1)) / len(names)
        parts.append(
            f"<text x='{LEFT}' y='{y + 18}' font-size='14' {CODE} font-weight='600'>{room}</text>"
        )
        for place, name in enumerate(names):
            kind = 0 if f"{room}.{name}".rstrip(".") in without else 2
            x = LAYER_LEFT + place * (width + ROOM_GAP)
            parts.append(
                f"<rect x='{x:g}' y='{y}' width='{width:g}' height='{LAYER_HEIGHT}' rx='5' "
                f"fill='{FILLS[kind]}' stroke='{EDGES[kind]}'/>"
                f"<text x='{x + width / 2:g}' y='{y + 17}' font-size='11.5' {CODE} "
                f"text-anchor='middle'>{name}</text>"
            )
        y += LAYER_ROW
    y += 12
    for place, (kind, words) in enumerate(LEGEND):
        x = LEFT + 180 * place
        parts.append(
            f"<rect x='{x}' y='{y - 12}' width='16' height='16' rx='3' fill='{FILLS[kind]}' "
            f"stroke='{EDGES[kind]}'/><text x='{x + 24}' y='{y + 1}' font-size='13'>{words}</text>"
        )
    return svg(LAYER_LEFT + LAYER_WIDTH + LEFT, y + 20, "Imports point downwards", parts)


def _without_torch(contract: configparser.SectionProxy) -> set[str]:
    """Rooms that import no torch, and no part of them does."""
    parted = {line.split(" -> ")[0] for line in contract["ignore_imports"].splitlines()}
    return {
        name.removeprefix("hpctrain.")
        for name in contract["source_modules"].split()
        if not any(part.startswith(f"{name}.") for part in parted)
    }


def _box(raw: dict[str, Any]) -> Box:
    column, row = raw["at"]
    rooms = [(", ".join(map(str, raw["rooms"])), True)] if "rooms" in raw else []
    lines = [(str(line), False) for line in raw.get("text", [])]
    return Box(int(column), int(row), str(raw["title"]), [*rooms, *lines])


def _drawn(box: Box) -> str:
    lines = [
        f"<text x='{box.x + 12}' y='{box.y + 43 + 19 * n}' font-size='12.5' fill='{FAINT}'"
        f"{' ' + CODE if is_code else ''}>{escape(line)}</text>"
        for n, (line, is_code) in enumerate(box.lines)
    ]
    return (
        f"<rect x='{box.x}' y='{box.y}' width='{BOX_WIDTH}' height='{BOX_HEIGHT}' rx='7' "
        f"fill='{FILLS[box.column]}' stroke='{EDGES[box.column]}'/>"
        f"<text x='{box.x + 12}' y='{box.y + 23}' font-size='14.5' font-weight='600'>"
        f"{escape(box.title)}</text>" + "".join(lines)
    )


def _arrow(begin: Box, end: Box, text: str, *, both: bool) -> str:
    points = _path(begin, end)
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    start = " marker-start='url(#head)'" if both else ""
    line = (
        f"<path d='{path}' fill='none' stroke='{FAINT}' stroke-width='1.5'"
        f"{start} marker-end='url(#head)'/>"
    )
    if not text:
        return line
    (x1, y1), (x2, y2) = points[0], points[1]
    turn = ""
    if y1 == y2 == points[-1][1]:  # above what points to the right, below what points to the left
        x, y = (x1 + x2) // 2, y1 - 7 if x1 < x2 else y1 + 16
    else:
        x, y = x2 + 5, (y2 + points[2][1]) // 2
        turn = f" transform='rotate(90 {x} {y})'"
    return line + (
        f"<text x='{x}' y='{y}' font-size='12.5' fill='{FAINT}' text-anchor='middle'{turn}>"
        f"{escape(text)}</text>"
    )


def _path(begin: Box, end: Box) -> list[tuple[int, int]]:
    """Straight where the boxes are neighbours; else through the gutter, or round on the right."""
    if begin.column == end.column:
        x = begin.x + BOX_WIDTH // 2
        if end.row == begin.row + 1:
            return [(x, begin.y + BOX_HEIGHT), (x, end.y)]
        side = begin.x + BOX_WIDTH
        return [(side, begin.middle), (side + 26, begin.middle), (side + 26, end.middle - 12),
                (side, end.middle - 12)]  # fmt: skip
    to_right = begin.column < end.column
    x1 = begin.x + BOX_WIDTH if to_right else begin.x
    x2 = end.x if to_right else end.x + BOX_WIDTH
    if begin.row == end.row:
        return [(x1, begin.middle), (x2, end.middle)]
    turn = (x1 + x2) // 2
    down = 28 if end.row > begin.row else -28
    return [(x1, begin.middle + down), (turn, begin.middle + down), (turn, end.middle - down),
            (x2, end.middle - down)]  # fmt: skip


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a whole picture of these parts, with its title for who cannot see it."""
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' role='img' {FONT} fill='{INK}'>\n"
        f"<title>{escape(title)}</title>\n"
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto-start-reverse'><path d='M0 0 L8 4 L0 8 z' fill='{FAINT}'/>"
        "</marker></defs>\n"
        f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>\n{body}\n</svg>\n"
    )
