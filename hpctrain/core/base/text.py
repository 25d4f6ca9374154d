"""Text of facts on a screen: durations, host lists, sizes, progress, ranks on nodes. Pure.

Lists of hosts travel as SLURM writes them, ``n[1-3,07],gpu01``, and are expanded where they are
read: the names of some thousand nodes outgrow what the kernel takes as one word (128 KiB).
tests/unit/cli/test_status.py, tests/unit/base/test_progress.py, test_host_list.py and
tests/unit/plan/test_mesh.py hold the promises.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.core.base.mesh import AXES, INNER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpctrain.core.base.mesh import Mesh

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
LABEL = 12
"""Columns that the label of a line takes, e.g. "checkpoint"."""
SPARSE_S = 10.0
"""Between two lines in a log; shorter work is logged by its result alone."""
NODES_SHOWN = 8
"""More nodes than these are shown together where one row can tell their places."""
_MOST_DIGITS = 11
"""Of a host's number; a name with more is no number that could be counted on."""
ROWS_SHOWN = 12
RANKS_LENGTH = 60


def pack(items: Sequence[str], width: int, *, gap: str = ", ") -> str:
    """Items beside each other, in as many lines as it takes; an item is never cut in two.

    Only an item that is longer by itself goes beyond the width.
    """
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(gap) + len(item) <= width - len(gap.rstrip()):
            lines[-1] += gap + item
        else:
            lines.append(item)
    return f"{gap.rstrip()}\n".join(lines)


def fold_nodes(nodes: Sequence[str]) -> str:
    """Host names as SLURM writes them: n[1-3,7]."""
    digits: dict[str, list[str]] = {}
    folded: list[str] = []
    for node in nodes:
        stem = node.rstrip("0123456789")
        number = node[len(stem) :]
        if 0 < len(number) <= _MOST_DIGITS:
            digits.setdefault(stem, []).append(number)
        else:
            folded.append(node)
    for stem, texts in digits.items():
        padded = any(text.startswith("0") for text in texts)
        for width in sorted({len(text) for text in texts}) if padded else [0]:
            numbers = {int(text) for text in texts if width in {0, len(text)}}
            inside = _ranges(numbers, width)
            folded.append(f"{stem}[{inside}]" if len(numbers) > 1 else f"{stem}{inside}")
    return ",".join(folded)


def fold_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-2,7"; those of a large run by their first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    inside = _ranges(ranks)
    if len(inside) > RANKS_LENGTH:
        return f"{len(ranks):,} ranks ({inside[:RANKS_LENGTH].rpartition(',')[0]}, ...)"
    return f"ranks {inside}" if ranks else "no rank"


def _ranges(numbers: Iterable[int], width: int = 0) -> str:
    """Numbers as ranges: 0-3,7."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(
        f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{width}d}"
        for low, high in ranges
    )


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


def hms(seconds: int) -> str:
    """A time limit as sbatch reads it, without days: "36:00:00"."""
    minutes, rest = divmod(seconds, _MINUTE)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def time_of_day(t: float, now: float) -> str:
    """Local time, with as much of the date as is needed."""
    if abs(now - t) < _DAY / 2:
        return time.strftime("%H:%M:%S", time.localtime(t))
    pattern = "%a %H:%M" if abs(now - t) < 6 * _DAY else "%Y-%m-%d"
    return time.strftime(pattern, time.localtime(t))


def step_time(seconds: float) -> str:
    """Time of one step."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def span(seconds: float) -> str:
    """A time from milliseconds to days: "80 ms", "1.20 s", "3m20s"."""
    return step_time(seconds) if seconds < _MINUTE else duration(seconds)


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
    """Counts bytes; the caller says what time it is (seconds of any one clock).

    `total` may be about so many: a reader of whole blocks may read some more. Work counts as shown
    when it begins.
    """

    label: str
    total: int
    started: float
    done: int = 0
    last_line: float | None = None

    def due(self, now: float, every_s: float = SPARSE_S) -> bool:
        """Whether the next line is due; it counts as told from then on."""
        if now - (self.started if self.last_line is None else self.last_line) < every_s:
            return False
        self.last_line = now
        return True

    def text(self, now: float) -> str:
        """E.g. "reading 1.5 GiB of 6.0 GiB (25 %), 310.0 MiB/s, 15 s left"."""
        done = min(self.done, self.total)
        share = f" ({100 * done // self.total} %)" if self.total else ""
        progress = f"{self.label} {size(done)} of {size(self.total)}{share}"
        rate = done / (now - self.started) if now > self.started else 0.0
        if not rate:
            return progress
        return f"{progress}, {size(round(rate))}/s, {duration((self.total - done) / rate)} left"


def rank_rows(
    mesh: Mesh, nodes: Sequence[str], ranks_per_node: int
) -> tuple[list[str], list[list[str]], int]:
    """Titles and rows of a table of the axes that are in use, and how many rows it leaves out."""
    used = [axis for axis in (*AXES, *INNER) if getattr(mesh, axis) > 1] or ["dp_shard"]
    rows = [
        [where, _ranges(ranks), *(_ranges(_places(mesh, ranks, axis)) for axis in used)]
        for where, ranks in _rows(mesh, nodes, ranks_per_node)
    ]
    titles, left_out = ["node", "ranks", *used], max(0, len(rows) - ROWS_SHOWN)
    if left_out:
        rows = [*rows[: ROWS_SHOWN - 1], ["..."] * len(titles), rows[-1]]
    return titles, rows, left_out


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
