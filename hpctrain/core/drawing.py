"""What people see of a command: tables, labelled facts, colours, live screens. Imports rich.

Imported only where something is drawn: help, `--json` and everything on a compute node do without.
Text of a run never becomes markup: what is drawn is `Text`. tests/unit/cli/test_drawing.py holds
the promises.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hpctrain.core.base.text import LABEL, count, rank_rows
from hpctrain.core.terminal import CleanedStream, can_redraw, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live
    from rich.progress import Progress

    from hpctrain.core.base.mesh import Mesh

NARROWEST = 40
"""Columns that a screen has at least."""
_GAP = 2
_NARROWEST_CELL = 8
_BAR = 16
_ANY = 100_000
"""Columns for what is never cut, so that pipes and copied paths have all of it."""
_BLANKS_AT_END = re.compile(r"(?<! ) +(\x1b\[0m)?$", re.MULTILINE)
_AT_ONCE: dict[str, Any] = dict.fromkeys(
    ("auto_refresh", "redirect_stdout", "redirect_stderr"), False
)
"""Drawn when something has changed, not by a thread of rich's."""
Cell: TypeAlias = "str | Text"


@dataclass
class Column:
    """One column of a table: its title and its cells."""

    title: str
    cells: Sequence[Cell]
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
        return max(cell_len(str(cell)) for cell in (self.title, *self.cells))


def fitted(columns: Sequence[Column], width: int) -> Table:
    """A table within the width: what can be missed is shortened, cut, then left out."""
    kept = list(columns)

    def excess(*, narrow: bool = False) -> int:
        widths = [min(c.width, _NARROWEST_CELL) if narrow and c.shrink else c.width for c in kept]
        return sum(widths) + _GAP * (len(kept) - 1) - width

    for column in columns:
        if column.drop == 1 and excess() > 0:
            kept.remove(column)
    for at, column in enumerate(kept):
        if column.short is not None and excess() > 0:
            kept[at] = column.short
    for column in sorted(columns, key=lambda c: c.drop):
        if column.drop > 1 and excess(narrow=True) > 0:
            kept.remove(column)
    table = _plain_table()
    for column in kept:
        table.add_column(Text(column.title), justify="right" if column.right else "left")
    cut = [max(_NARROWEST_CELL, c.width - max(0, excess())) if c.shrink else c.width for c in kept]
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*(_cell(cell, most) for cell, most in zip(row, cut, strict=True)))
    return table


def _plain_table() -> Table:
    return Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")


def _cell(cell: Cell, width: int) -> Text:
    text = cell if isinstance(cell, Text) else Text(cell)
    if text.cell_len > width:
        text = Text(f"{set_cell_size(text.plain, width - 2)}..", text.style)
    return text


def facts(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    """Labelled lines below each other; what is long continues beside its label."""
    grid = Table.grid()
    grid.add_column(width=LABEL, style="dim")
    grid.add_column()
    for label, value in rows:
        grid.add_row(Text(label), Text(value) if isinstance(value, str) else value)
    return grid


def uncut(text: str, style: str = "") -> Text:
    """A line that keeps its length however narrow the screen is: a path, a command."""
    return Text(text, style, no_wrap=True, overflow="ignore")


def rank_map(
    mesh: Mesh, nodes: Sequence[str], ranks_per_node: int, *, width: int = 80
) -> RenderableType:
    """A table of the axes that are in use: a row for each node, or for several of many."""
    titles, rows, left_out = rank_rows(mesh, nodes, ranks_per_node)
    cells = zip(titles, zip(*rows, strict=True), strict=True)
    table = fitted([Column(title, of, shrink=title == "node") for title, of in cells], width)
    if not left_out:
        return table
    return Group(table, Text(f"... {count(left_out, 'row')} more (--json has all)"))


def echo_table(
    rows: Sequence[Sequence[object]],
    *,
    header: Sequence[str] = (),
    right: Sequence[int] = (),
    indent: int = 0,
) -> None:
    """Print rows as aligned columns that are never cut; nothing for no rows.

    None shows as "-"; `right` has indices of columns of numbers, which are aligned to the right.
    """
    if not rows:
        return
    table = _plain_table()
    table.show_header = bool(header)
    for at, _ in enumerate(rows[0]):
        title = Text(header[at] if header else "")
        table.add_column(title, justify="right" if at in right else "left")
    for row in rows:
        table.add_row(*map(_shown, row))
    indented = Padding(table, (0, 0, 0, indent), expand=False)
    click.echo(drawn(indented, _ANY, color=colored()))


def _shown(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text("-" if cell is None else str(cell))


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def colored(stream: TextIO | None = None) -> bool:
    """Whether colours are wanted on a stream, stdout if none is given."""
    return can_redraw(stream or sys.stdout) and not os.environ.get("NO_COLOR")


def drawn(renderable: RenderableType, width: int, *, color: bool = False) -> str:
    """As text, without blanks at the ends of lines; only lines that are `uncut` may be longer."""
    console = _Console(io.StringIO(), color=color, width=width, height=100)
    with console.capture() as captured:
        console.print(Group(renderable), crop=False)  # bare text would lose what it says of itself
    return _BLANKS_AT_END.sub(r"\1", captured.get()).rstrip("\n")


class _Console(Console):
    """One that takes all text as it is, and draws no glyph that the user's language lacks."""

    def __init__(self, stream: TextIO, *, color: bool, **more: Any) -> None:
        super().__init__(
            file=stream.stream if isinstance(stream, CleanedStream) else stream,
            color_system="standard" if color else None,
            legacy_windows=False,
            markup=False,
            emoji=False,
            highlight=False,
            **more,
        )

    @property
    def encoding(self) -> str:
        """Of what is drawn, by which rich chooses its glyphs."""
        names = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
        return super().encoding if "utf" in next(filter(None, names), "").lower() else "ascii"


@dataclass(frozen=True)
class Framed:
    """A screen as far as the terminal's height goes, with a line below it."""

    screen: RenderableType
    footer: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its lines, cleaned: a live screen is written past the border of `terminal`."""
        rows = console.height - 2
        wide = options.update(width=max(NARROWEST, options.max_width), height=None)
        lines = console.render_lines(self.screen, wide, pad=False)
        hidden = len(lines) - rows
        for line in lines[: rows - 1] if hidden > 0 else lines:
            yield from (Segment(clean(text), style) for text, style, _ in line)
            yield Segment.line()
        if hidden > 0:
            yield Text(f"... {hidden + 1} more lines in a taller terminal")
        yield Text()
        yield Text(self.footer, "dim")


def live_screen(draw: Callable[[], RenderableType]) -> Live:
    """The alternate screen of the terminal on stdout, drawn anew at each `refresh`."""
    from rich.live import Live

    console = _Console(sys.stdout, color=colored(), force_terminal=True)
    return Live(console=console, get_renderable=draw, screen=True, **_AT_ONCE)


def live_line(stream: TextIO, *, bar: bool) -> Progress:
    """A line on a terminal that changes and in the end is gone; task 0 says what it shows."""
    from rich import progress
    from rich.table import Column as TableColumn

    console = _Console(stream, color=colored(stream), force_terminal=True)
    one_line = TableColumn(no_wrap=True, overflow="crop")
    text = progress.TextColumn("{task.description}", markup=False, table_column=one_line)
    bars = [progress.BarColumn(_BAR)] if bar else []
    line = progress.Progress(*bars, text, console=console, transient=True, **_AT_ONCE)
    line.add_task("", total=1)
    line.start()
    console.show_cursor()  # who is killed or stopped here leaves the terminal as it was
    return line
