"""Which checkpoints of a run are to be evaluated, and which were. Pure.

A step is held from its commit until the last word on its evaluation: what is in `waiting` must not
be pruned. tests/unit/history/test_evaluations.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.history.run_state import RunState
from hpctrain.settings.schema import OF_EVALUATION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.history.run_history import RunHistory
    from hpctrain.run.event_types import Evaluated
    from hpctrain.settings.schema import EvaluateSettings


def due(history: RunHistory, every: int, *, last: bool) -> list[int]:
    """The steps whose checkpoint is to be evaluated, or was, ascending.

    Args:
        history: The run's.
        every: Every n-th step that was saved, in the order of the first saves; a step that is saved
            again after a restore is the same. 0: none.
        last: The highest of them too, once the run is done.
    """
    saved = (s.step for s in history.saves if s.kind == "saved" and s.step is not None)
    steps = list(dict.fromkeys(saved))
    wanted = set(steps[every - 1 :: every] if every else [])
    if last and history.state.phase is RunState.DONE:
        wanted.update(sorted(steps)[-1:])
    return sorted(wanted | history.asked_evaluations)


def evaluated(history: RunHistory) -> Mapping[int, Evaluated]:
    """The last word on each step's evaluation, also where it has failed."""
    return history.evaluations


def waiting(history: RunHistory, every: int, *, last: bool) -> list[int]:
    """The steps that are due and of which nothing is said yet; all else as for `due`."""
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
            for step, fact in evaluated(history).items()
        },
    )
