"""A drill as a table for people, as JSON, and as a page in Markdown or HTML. Pure.

tests/unit/cli/test_drill.py holds the promises.
"""

from __future__ import annotations

import textwrap
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.drill.course import DrillResult

FORMAT = 1
_NAME = 17
_OUTCOME = 11
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "td,th{border:1px solid #999;padding:.3em .6em;text-align:left;vertical-align:top}"
    "table{border-collapse:collapse}.broken{color:#a00;font-weight:bold}"
)
_TITLES = ("fault", "outcome", "what is done", "promise", "what came of it", "seconds")


def row(result: DrillResult, width: int = 100) -> str:
    """A fault in the table."""
    indent = " " * (_NAME + _OUTCOME)
    return textwrap.fill(
        result.verdict.why,
        max(width, 60),
        initial_indent=f"{result.fault.name:<{_NAME}}{result.verdict.outcome:<{_OUTCOME}}",
        subsequent_indent=indent,
    )


def summary(results: Sequence[DrillResult]) -> str:
    """How many promises were kept, in a line."""
    counts = {
        outcome: sum(one.verdict.outcome == outcome for one in results)
        for outcome in ("kept", "broken", "not tried")
    }
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def as_json(run: str, results: Sequence[DrillResult]) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "format": FORMAT,
        "run": run,
        "faults": [
            {
                "name": one.fault.name,
                "does": one.fault.does,
                "promise": one.fault.promise,
                "anchor": one.fault.anchor,
                "outcome": one.verdict.outcome,
                "why": one.verdict.why,
                "seconds": round(one.seconds, 1),
            }
            for one in results
        ],
    }


def page(run: str, results: Sequence[DrillResult], *, html: bool) -> str:
    """All of it as a page."""
    cells = [
        (
            one.fault.name,
            one.verdict.outcome,
            one.fault.does,
            one.fault.promise,
            one.verdict.why,
            f"{one.seconds:.0f}",
        )
        for one in results
    ]
    title = f"Drill of {run}: {summary(results)}"
    if not html:
        lines = [f"# {_plain(title)}", "", _line(_TITLES), _line("---" for _ in _TITLES)]
        return "\n".join([*lines, *(_line(_plain(cell) for cell in each) for each in cells)]) + "\n"
    head = "".join(f"<th>{one}</th>" for one in _TITLES)
    body = "".join(
        f'<tr class="{escape(each[1])}">'
        + "".join(f"<td>{escape(cell)}</td>" for cell in each)
        + "</tr>\n"
        for each in cells
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>{escape(title)}</h1>\n<table><tr>{head}</tr>\n{body}</table></body></html>\n"
    )


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Text in a cell of Markdown: a name or a message is no markup."""
    return "".join(f"\\{c}" if c in "|\\`*_<>[]#" else c for c in text).replace("\n", " ")
