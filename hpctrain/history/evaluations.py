"""Which checkpoints of a run are to be evaluated, and which were. Pure.

A step is held from its commit until the last word on its evaluation: what is in `waiting` must not
be pruned. tests/unit/history/test_evaluations.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.history.run_state import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.history.run_history import RunHistory
    from hpctrain.run.event_types import Evaluated


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
