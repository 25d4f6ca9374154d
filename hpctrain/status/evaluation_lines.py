"""A run's evaluations in the screen of its status: the last, the best, what is under way. Pure.

tests/unit/cli/test_evaluations_shown.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from hpctrain.base.text import count, pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from hpctrain.history.evaluations import EvaluationView
    from hpctrain.status.status import RunStatus

LAST = 3
STEPS_SHOWN = 6
FAILED_SHOWN = 2


def evaluation_lines(status: RunStatus, width: int) -> list[tuple[str, RenderableType]]:
    """Labelled lines; nothing for a run without evaluations."""
    rows = status.evaluations
    done = [row for row in rows if row.state == "evaluated"]
    best = next((row for row in done if row.is_best), None)
    shown = done[:LAST]
    if best is not None and best not in shown:
        shown = [*shown, best]
    lines: list[tuple[str, RenderableType]] = [
        ("evaluated" if not at else "", pack(_measured(row), width)) for at, row in enumerate(shown)
    ]
    if len(done) > len(shown):
        lines.append(("", f"... {len(done) - len(shown)} more (--json shows all)"))
    if under_way := _under_way(rows):
        lines.append(("evaluating", pack(under_way, width, gap="; ")))
    failed = [row for row in rows if row.state == "failed"]
    for row in failed[:FAILED_SHOWN]:
        logs = f" (hpctrain logs {status.label} --evaluation {row.step}{status.flags})"
        why = f"step {row.step:,}{logs if row.run else ''}: {row.why or 'nobody knows why'}"
        lines.append(("eval failed", Text(why, "red")))
    if len(failed) > FAILED_SHOWN:
        lines.append(("", f"... {len(failed) - FAILED_SHOWN} more (--json shows all)"))
    return lines


def metrics_in_words(metrics: Mapping[str, float]) -> str:
    """Names and numbers, as they stand beside a step."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _measured(row: EvaluationView) -> list[str]:
    best = " (best)" if row.is_best else ""
    return [f"step {row.step:,}{best}", *(f"{n} {value:.4g}" for n, value in row.metrics.items())]


def _under_way(rows: Sequence[EvaluationView]) -> list[str]:
    """The states of what is not decided, each with its steps, oldest first."""
    steps: dict[str, list[int]] = {}
    for row in reversed(rows):
        if row.state not in {"evaluated", "failed"}:
            steps.setdefault(row.state, []).append(row.step)
    return [f"{state} {_listed(of)}" for state, of in steps.items()]


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(f"{step:,}" for step in steps[:STEPS_SHOWN])
    if len(steps) == 1:
        return f"step {shown}"
    more = f" and {count(len(steps) - STEPS_SHOWN, 'other')}" if len(steps) > STEPS_SHOWN else ""
    return f"steps {shown}{more}"
