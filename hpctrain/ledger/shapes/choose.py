"""Which of the candidates a run's next job takes, and why.

`prefer` "time" takes the shape that finishes first. "balanced" takes the first to finish of those
that cost little more than the middle of the range, "cost" of those that cost hardly more than the
cheapest. A shape that the run has already is kept unless another one is clearly better.

Pure. tests/unit/shapes/test_choose.py holds the promises.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from hpctrain.core.base.text import count, duration, percent
from hpctrain.ledger.shapes.forecast import RunFacts, ShapeForecast, forecast
from hpctrain.ledger.shapes.waits import DAY_S, QueueWait, between, expected_wait

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.ledger.shapes.candidates import JobShape
    from hpctrain.ledger.shapes.waits import WaitRecord

Prefer = Literal["time", "cost", "balanced"]
PREFERENCES: tuple[Prefer, ...] = get_args(Prefer)
COST_EXTRA = 0.05
"""Node-hours above the cheapest shape's that `cost` pays for an earlier finish: restarts take a few
percent of short jobs, and longer ones wait for days (benchmarks/time_to_result.py)."""
BALANCED_EXTRA = 0.10
"""Node-hours above those of the middle of the range that `balanced` pays for an earlier finish. Of
the cheapest size's it would be too few: one node is the cheapest, and takes weeks."""
CLEARLY = 0.10
"""A run leaves its shape for one that is better by this part at least, so that nothing flaps."""


@dataclass(frozen=True)
class Wish:
    """What the user asked for.

    Attributes:
        prefer: What counts.
        most_node_hours: For the whole run, what it has used so far included; None for no limit.
    """

    prefer: Prefer = "time"
    most_node_hours: float | None = None


@dataclass(frozen=True)
class ShapeChoice:
    """The shape of the next job, with all that were looked at.

    Attributes:
        row: The chosen one; None where every candidate is refused.
        rows: All candidates, as enumerated.
        why: Two lines.
        kept: Whether it is the shape that the run had before.
    """

    row: ShapeForecast | None
    rows: tuple[ShapeForecast, ...]
    why: tuple[str, str]
    kept: bool = False

    def as_json(self) -> dict[str, Any]:
        """For `--json` and for the ledger."""
        return {
            "chosen": asdict(self.row.shape) if self.row else None,
            "why": list(self.why),
            "kept": self.kept,
            "candidates": [asdict(row.shape) | _numbers(row) for row in self.rows],
        }


def _numbers(row: ShapeForecast) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "shape"}


def choose_shape(
    shapes: Sequence[JobShape],
    facts: RunFacts,
    estimates: Mapping[JobShape, float | None],
    *,
    refused: Mapping[JobShape, str] | None = None,
    records: Sequence[WaitRecord] = (),
    partition: str = "",
    longest_s: float = DAY_S,
    wish: Wish | None = None,
    now_has: JobShape | None = None,
) -> ShapeChoice:
    """Forecast every candidate and choose one.

    Args:
        shapes: The candidates.
        facts: Of the run.
        estimates: SLURM's estimated wait in seconds of each; None or missing where it gave none.
        refused: Why the scheduler would not take a shape; "" or missing where it would.
        records: Waits of own jobs, oldest first.
        partition: Where the job goes.
        longest_s: The longest time limit there.
        wish: What counts.
        now_has: The shape of the run's last job; None before the first.
    """
    wish = wish or Wish()
    waits = {s: expected_wait(s, estimates.get(s), records, partition, longest_s) for s in shapes}
    usual = _usual(list(waits.values()))
    rows = [
        _within(forecast(shape, facts, wait, _later(wait, usual)), facts, wish)
        for shape, wait in waits.items()
    ]
    rows = [replace(row, refused=(refused or {}).get(row.shape) or row.refused) for row in rows]
    return decide(rows, wish=wish, now_has=now_has)


def decide(
    rows: Sequence[ShapeForecast], *, wish: Wish, now_has: JobShape | None = None
) -> ShapeChoice:
    """Choose among candidates that are forecast already."""
    open_rows = [row for row in rows if not row.refused]
    if not open_rows:
        reasons = "; ".join(dict.fromkeys(row.refused for row in rows)) or "there is none"
        return ShapeChoice(None, tuple(rows), (f"no shape can be chosen: {reasons}", ""))
    by_finish = all(row.mean_s is not None for row in open_rows)
    best = _best(open_rows, wish.prefer, by_finish=by_finish)
    kept = next((row for row in open_rows if row.shape == now_has), None)
    stays = kept is not None and not _is_clearly_better(
        best, kept, wish.prefer, by_finish=by_finish
    )
    row = kept if stays and kept is not None else best
    return ShapeChoice(row, tuple(rows), _why(row, rows, wish, by_finish=by_finish), kept=stays)


def _usual(waits: Sequence[QueueWait | None]) -> QueueWait | None:
    """The wait of the middle candidate: what a later job may meet when today's hole is gone."""
    given = sorted((wait for wait in waits if wait is not None), key=lambda wait: wait.median_s)
    return given[len(given) // 2] if given else None


def _later(wait: QueueWait | None, usual: QueueWait | None) -> QueueWait | None:
    """The wait of a later job: the geometric mean of this shape's now and what is usual."""
    return wait if wait is None or usual is None else between(wait, usual)


def _within(row: ShapeForecast, facts: RunFacts, wish: Wish) -> ShapeForecast:
    """Refuse what would cost more than the user allows."""
    if wish.most_node_hours is None or row.node_hours is None or row.refused:
        return row
    total = facts.spent_node_hours + row.node_hours
    if total <= wish.most_node_hours:
        return row
    why = f"it would take {total:.1f} node-hours (at most {wish.most_node_hours:g})"
    return replace(row, refused=why, too_dear=True)


def _time(row: ShapeForecast, *, by_finish: bool) -> float:
    """Less is better: seconds until the run is done, or seconds for a unit of work."""
    return row.mean_s if by_finish and row.mean_s is not None else 1 / row.speed


def _cost(row: ShapeForecast, *, by_finish: bool) -> float:
    return row.node_hours if by_finish and row.node_hours is not None else row.cost


def _best(rows: Sequence[ShapeForecast], prefer: Prefer, *, by_finish: bool) -> ShapeForecast:
    def cost(row: ShapeForecast) -> float:
        return _cost(row, by_finish=by_finish)

    most = {
        "time": math.inf,
        "balanced": min(map(cost, _middle(rows))) * (1 + BALANCED_EXTRA),
        "cost": min(map(cost, rows)) * (1 + COST_EXTRA),
    }[prefer]
    affordable = [row for row in rows if cost(row) <= most]
    return min(affordable, key=lambda row: (_time(row, by_finish=by_finish), cost(row)))


def _middle(rows: Sequence[ShapeForecast]) -> list[ShapeForecast]:
    """The rows of the size in the middle of all, by ratios."""
    sizes = {row.shape.nodes for row in rows}
    middle = math.sqrt(min(sizes) * max(sizes))
    size = min(sizes, key=lambda nodes: (abs(math.log(nodes / middle)), nodes))
    return [row for row in rows if row.shape.nodes == size]


def _is_clearly_better(
    best: ShapeForecast, kept: ShapeForecast, prefer: Prefer, *, by_finish: bool
) -> bool:
    time, cost = (
        measure(best, by_finish=by_finish) <= (1 - CLEARLY) * measure(kept, by_finish=by_finish)
        for measure in (_time, _cost)
    )
    return {"time": time, "cost": time or cost, "balanced": time or cost}[prefer]


def _why(
    row: ShapeForecast, rows: Sequence[ShapeForecast], wish: Wish, *, by_finish: bool
) -> tuple[str, str]:
    """Why this one, in two lines: the comparison, and what it rests on."""
    more = percent(BALANCED_EXTRA)
    reason = {
        "time": "finishes first" if by_finish else "does most work per hour of waiting and running",
        "cost": f"finishes first within {percent(COST_EXTRA)} of the fewest node-hours",
        "balanced": f"finishes first within {more} of the middle size's node-hours",
    }[wish.prefer]
    refused = sum(bool(one.refused) for one in rows)
    among = f"{reason} of {count(len(rows), 'candidate')}"
    among += f" ({refused} refused)" if refused else ""
    wait = "not known when" if row.start_s is None else f"in about {duration(row.start_s)}"
    basis = f"starts {wait} ({row.wait_source}); step time: {row.step_source}"
    return f"{row.shape.text}: {among}", basis
