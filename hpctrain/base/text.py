"""Text of facts on a screen: columns, durations, host lists, sizes, progress, ranks on nodes. Pure.

tests/unit/cli/test_status.py, tests/unit/base/test_progress.py and tests/unit/plan/test_mesh.py
hold the promises.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.mesh import AXES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.base.mesh import Mesh

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_GAP = 2
_NARROWEST = 8
LABEL = 12
"""Columns that the label of a line takes, e.g. "checkpoint"."""
_COLOUR = re.compile(r"(\033\[[0-9;]*m)")
SPARSE_S = 10.0
"""Between two lines in a log; shorter work is told by its result alone."""
NODES_SHOWN = 8
"""More nodes than these are shown together where one row can tell their places."""
ROWS_SHOWN = 12


@dataclass
class Column:
    """One column of a table: its title and its cells."""

    title: str
    cells: list[str]
    right: bool = False
    drop: int = 0
    """Left out when there is no room, the lowest number first; 0 never, 1 before all else."""
    shrink: bool = False
    """Cut where there is no room, before anything is left out for good."""
    short: Column | None = None
    """Takes this one's place where there is no room, before anything is cut."""

    @property
    def width(self) -> int:
        """Of the widest cell."""
        return max([len(self.title), *map(len, self.cells)])


def fit(columns: list[Column], width: int) -> list[str]:
    """Header and rows within the width: what can be missed is shortened, cut, then left out."""
    columns = list(columns)
    while (excess := sum(column.width + _GAP for column in columns) - _GAP - width) > 0:
        idle = next((c for c in columns if c.drop == 1), None)
        if idle is not None:
            columns.remove(idle)
            continue
        long = next((place for place, c in enumerate(columns) if c.short is not None), None)
        if long is not None:
            columns[long] = columns[long].short or columns[long]
            continue
        flexible = next((c for c in columns if c.shrink and c.width > _NARROWEST), None)
        droppable = min((c for c in columns if c.drop), key=lambda c: c.drop, default=None)
        if flexible is not None and flexible.width - excess >= _NARROWEST:
            _cut(flexible, flexible.width - excess)
        elif droppable is not None:
            columns.remove(droppable)
        elif flexible is not None:
            _cut(flexible, _NARROWEST)
        else:
            break
    rows = zip(*([c.title, *c.cells] for c in columns), strict=True)
    return [
        (" " * _GAP)
        .join(
            cell.rjust(c.width) if c.right else cell.ljust(c.width)
            for cell, c in zip(row, columns, strict=True)
        )
        .rstrip()
        for row in rows
    ]


def _cut(column: Column, width: int) -> None:
    column.title = column.title[:width]
    column.cells = [
        cell if len(cell) <= width else f"{cell[: width - 2]}.." for cell in column.cells
    ]


def pack(items: Sequence[str], width: int, *, label: str = "", gap: str = ", ") -> list[str]:
    """Items beside each other, in as many lines as it takes; an item is never cut in two.

    Args:
        items: Each without colour.
        width: Of the screen; only an item that is longer by itself goes beyond it.
        label: Before the first line; the others begin below the items.
        gap: Between two items of a line.
    """
    head = f"{label:<{LABEL}}" if label else ""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(gap) + len(item) <= width - len(gap.rstrip()):
            lines[-1] += gap + item
            continue
        if lines:
            lines[-1] += gap.rstrip()
        lines.append((" " * len(head) if lines else head) + item)
    return lines


def crop(line: str, width: int) -> str:
    """A line cut to so many columns; its colours take none, and end with it."""
    if len(_COLOUR.sub("", line)) <= width:
        return line
    left, kept = width - 2, ""
    for part in _COLOUR.split(line):
        if _COLOUR.fullmatch(part):
            kept += part
        else:
            kept += part[: max(0, left)]
            left -= len(part)
    return f"{kept}.."


def fold_nodes(nodes: Sequence[str]) -> str:
    """Host names as SLURM writes them: n[1-3,7]."""
    digits: dict[str, list[str]] = {}
    folded: list[str] = []
    for node in nodes:
        match = re.fullmatch(r"(.*?)(\d+)", node)
        if match is None:
            folded.append(node)
        else:
            digits.setdefault(match[1], []).append(match[2])
    for stem, texts in digits.items():
        padded = any(text.startswith("0") for text in texts)
        for width in sorted({len(text) for text in texts}) if padded else [0]:
            numbers = sorted({int(text) for text in texts if width in {0, len(text)}})
            inside = ",".join(_ranges(numbers, width))
            folded.append(f"{stem}[{inside}]" if len(numbers) > 1 else f"{stem}{inside}")
    return ",".join(folded)


def _ranges(numbers: Sequence[int], width: int) -> list[str]:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [
        f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}"
        for low, high in ranges
    ]


def duration(seconds: float) -> str:
    """Two units at most: "41 s", "3m20s", "7h31m", "2d4h"."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR}h"


def clock(t: float, now: float) -> str:
    """Local time, with as much of the date as is needed."""
    if abs(now - t) < _DAY / 2:
        return time.strftime("%H:%M:%S", time.localtime(t))
    pattern = "%a %H:%M" if abs(now - t) < 6 * _DAY else "%Y-%m-%d"
    return time.strftime(pattern, time.localtime(t))


def step_time(seconds: float) -> str:
    """Time of one step."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(size_bytes: int) -> str:
    """Bytes in the unit that fits."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:  # noqa: PLR2004 - the step from one unit to the next
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def percent(share: float, digits: int = 0) -> str:
    """A share as one says it: "92 %", "91.9 %"."""
    return f"{100 * share:.{digits}f} %"


def amount(value: float) -> str:
    """A number of three digits or so: "850", "43.7k", "1.25M"."""
    for unit, size_of in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size_of * 0.9995:
            return f"{value / size_of:.3g}{unit}"
    return f"{value:.3g}"


def paint(text: str, code: str, *, on: bool) -> str:
    """Text in a colour of the terminal's."""
    return f"\033[{code}m{text}\033[0m" if on else text


def one_of(numbers: list[int]) -> str:
    """Numbers as one says them: "1, 2 or 4"."""
    texts = [str(number) for number in numbers]
    return " or ".join([*([", ".join(texts[:-1])] if texts[:-1] else []), texts[-1]])


def in_nodes(numbers: list[int]) -> str:
    """Numbers of nodes as one says them: "2 or 4 nodes"."""
    return "1 node" if numbers == [1] else f"{one_of(numbers)} nodes"


def count(number: int, noun: str) -> str:
    """So many of something: "1 rank", "3 ranks"."""
    return (
        f"{number} {noun}"
        if number == 1
        else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
    )


@dataclass
class Meter:
    """Counts bytes; whoever shows them says what time it is (seconds of any one clock).

    Attributes:
        label: What is done, e.g. "reading".
        total: Bytes to come, or about so many; a reader of whole blocks may read some more.
        started: When the work began.
        done: Bytes so far.
        told: When a line was last due; work counts as told when it begins.
    """

    label: str
    total: int
    started: float
    done: int = 0
    told: float | None = None

    def due(self, now: float, every_s: float = SPARSE_S) -> bool:
        """Whether the next line is due; it counts as told from then on."""
        if now - (self.started if self.told is None else self.told) < every_s:
            return False
        self.told = now
        return True

    def text(self, now: float) -> str:
        """E.g. "reading 1.5 GiB of 6.0 GiB (25 %), 310.0 MiB/s, 15 s left"."""
        done = min(self.done, self.total)
        share = f" ({100 * done // self.total} %)" if self.total else ""
        far = f"{self.label} {size(done)} of {size(self.total)}{share}"
        rate = done / (now - self.started) if now > self.started else 0.0
        if not rate:
            return far
        return f"{far}, {size(round(rate))}/s, {duration((self.total - done) / rate)} left"


def rank_map(
    mesh: Mesh, nodes: Sequence[str], ranks_per_node: int, *, width: int = 80
) -> list[str]:
    """A table of the axes that are in use: a row for each node, or for several where they are many.

    Args:
        mesh: Of all ranks.
        nodes: Host names in the order of their ranks.
        ranks_per_node: Ranks on each.
        width: Columns of the screen.
    """
    rows = list(_rows(mesh, nodes, ranks_per_node))
    left_out = max(0, len(rows) - ROWS_SHOWN)
    shown = rows[: ROWS_SHOWN - 1] + rows[-1:] if left_out else rows
    used = [axis for axis in (*AXES, "ep") if getattr(mesh, axis) > 1] or ["dp_shard"]
    columns = [
        Column("node", [where for where, _ in shown], shrink=True),
        Column("ranks", [_folded(set(ranks)) for _, ranks in shown]),
        *(Column(a, [_folded(_places(mesh, r, a)) for _, r in shown]) for a in used),
    ]
    lines = fit(columns, width)
    if left_out:
        lines.insert(-1, f"... {count(left_out, 'row')} more (--json has all)")
    return lines


def placed(mesh: Mesh, nodes: Sequence[str], ranks_per_node: int) -> list[dict[str, str | int]]:
    """Every rank with its node and its place on each axis, for programs."""
    return [
        {"rank": rank, "node": nodes[rank // ranks_per_node], **mesh.place(rank)}
        for rank in range(min(mesh.world_size, len(nodes) * ranks_per_node))
    ]


def _rows(mesh: Mesh, nodes: Sequence[str], ranks_per_node: int) -> Iterator[tuple[str, range]]:
    """Nodes and ranks. Where there are many, adjoining nodes of one stage and copy are one row."""
    each = [range(n * ranks_per_node, (n + 1) * ranks_per_node) for n in range(len(nodes))]
    parts = [[_places(mesh, ranks, axis) for axis in AXES[:2]] for ranks in each]
    first = 0
    for n in range(1, len(nodes) + 1):
        alike = n < len(nodes) and parts[n] == parts[first] and all(len(p) == 1 for p in parts[n])
        if alike and len(nodes) > NODES_SHOWN:
            continue
        for block in _blocks(mesh, range(each[first].start, each[n - 1].stop), AXES):
            yield fold_nodes(nodes[first:n]), block
        first = n


def _blocks(mesh: Mesh, ranks: range, axes: Sequence[str]) -> Iterator[range]:
    """Adjoining ranks cut where it needs be, so that each part takes every place of its rows."""
    if _is_block(mesh, ranks) or not axes:
        yield ranks
        return
    first = ranks.start
    for rank in range(ranks.start + 1, ranks.stop + 1):
        if rank == ranks.stop or mesh.place(rank)[axes[0]] != mesh.place(first)[axes[0]]:
            yield from _blocks(mesh, range(first, rank), axes[1:])
            first = rank


def _is_block(mesh: Mesh, ranks: range) -> bool:
    """Whether the ranks are all combinations of the places that they have on each axis."""
    size = 1
    for axis in AXES:
        size *= len(_places(mesh, ranks, axis))
    return size == len(ranks)


def _places(mesh: Mesh, ranks: range, axis: str) -> set[int]:
    return {mesh.place(rank)[axis] for rank in ranks}


def _folded(numbers: set[int]) -> str:
    """Numbers as ranges: 0-3,7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
