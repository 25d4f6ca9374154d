"""What commands print: JSON for programs, aligned text for people."""

from __future__ import annotations

import click

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def echo_json(value: Any) -> None:
    """Print one JSON value, indented, and nothing else on stdout."""
    import json

    click.echo(json.dumps(value, indent=2, allow_nan=False))


def echo_note(text: str) -> None:
    """Tell something on stderr, where it does not mix with output that is read by a program."""
    click.echo(f"hpctrain: {text}", err=True)


def echo_warning(text: str) -> None:
    """The same for something that the user may want to change, in yellow on a terminal."""
    click.secho(f"hpctrain: note: {text}", err=True, fg="yellow")


def table(
    rows: Sequence[Sequence[object]],
    *,
    header: Sequence[str] = (),
    right: Sequence[int] = (),
    indent: str = "",
) -> str:
    """Rows as aligned columns, two blanks between them; empty text for no rows.

    Args:
        rows: Cells, as many in each row; None shows as "-".
        header: Column titles.
        right: Indices of columns of numbers, which are aligned to the right.
        indent: Put in front of each line.
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    lines = [list(header), *cells] if header else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        (
            indent
            + "  ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        ).rstrip()
        for line in lines
    )
