"""Which checkpoints of a run are to be evaluated, and which were. Pure.

A step is held from its commit until the last word on its evaluation: what is in `waiting` must not
be pruned. tests/unit/history/test_evaluations.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.settings.schema import OF_EVALUATION
from hpctrain.ledger.history.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.core.settings.schema import CheckpointSettings, EvaluateSettings, Settings
    from hpctrain.ledger.history.run_history import RunHistory


def due(history: RunHistory, every: int, *, last: bool) -> list[int]:
    """The steps whose checkpoint is to be evaluated, or was, ascending.

    Every `every`-th step that was saved, in the order of the first saves (a step that is saved
    again after a restore is the same; 0: none), and with `last` the highest one too, once the run
    is done.
    """
    saved = (s.step for s in history.saves if s.kind == "saved" and s.step is not None)
    steps = list(dict.fromkeys(saved))
    wanted = set(steps[every - 1 :: every] if every else [])
    if last and history.state.phase is RunState.DONE:
        wanted.update(sorted(steps)[-1:])
    return sorted(wanted | history.asked_evaluations)


def waiting(history: RunHistory, every: int, *, last: bool) -> list[int]:
    """The steps that are due and of which nothing is said yet; arguments as of `due`."""
    return [s for s in due(history, every, last=last) if s not in history.evaluations]


@dataclass(frozen=True)
class Evaluations:
    """What evaluations say of a run's checkpoints.

    Attributes:
        awaited: Steps that are due and of which nothing is said yet: they must stay.
        metrics: By step, under names that begin with `OF_EVALUATION`.
    """

    awaited: frozenset[int] = frozenset()
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def evaluations_of(history: RunHistory, settings: EvaluateSettings) -> Evaluations:
    """The same for a run with these settings."""
    every, last = (settings.every, settings.last) if settings.script else (0, False)
    return Evaluations(
        frozenset(waiting(history, every, last=last)),
        {
            step: {OF_EVALUATION + name: value for name, value in fact.metrics.items()}
            for step, fact in history.evaluations.items()
        },
    )


@dataclass(frozen=True)
class EvaluationView:
    """One checkpoint that was evaluated, or is to be.

    Attributes:
        state: "evaluated", "failed", "waiting", or where its own run stands, such as "running".
        run: That run's name; "" before there is one.
        why: What went wrong.
        is_best: Whether none is better by `checkpoint.best_metric`.
    """

    step: int
    state: str
    run: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    is_best: bool = False


def views(
    history: RunHistory, settings: Settings, states: Mapping[int, str]
) -> list[EvaluationView]:
    """All of a run's evaluations, the newest step first; `states` has those with a run, by step."""
    seen = evaluations_of(history, settings.evaluate)
    best = _best(seen, settings.checkpoint)
    rows = [EvaluationView(step, states.get(step, "waiting")) for step in seen.awaited]
    for step, fact in history.evaluations.items():
        state = "evaluated" if fact.metrics else "failed"
        row = EvaluationView(step, state, fact.run, dict(fact.metrics), fact.why, step == best)
        rows.append(row)
    return sorted(rows, key=lambda row: -row.step)


def _best(seen: Evaluations, settings: CheckpointSettings) -> int | None:
    """As retention ranks them: of equal ones the newer."""
    sign = 1 if settings.best_is == "lowest" else -1
    metric = settings.best_metric
    ranked = [(sign * of[metric], -step) for step, of in seen.metrics.items() if metric in of]
    return -min(ranked)[1] if ranked else None
