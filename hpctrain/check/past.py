"""What earlier runs of a program tell of its saves and steps: the newest that has saved counts.

tests/unit/check/test_past.py holds the promises.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError
from hpctrain.history.run_history import RunHistory
from hpctrain.history.run_records import StepMark
from hpctrain.plan import interval
from hpctrain.run.find_run import look_into
from hpctrain.settings.spec import load_spec

if TYPE_CHECKING:
    from hpctrain.settings.spec import Spec

MOST_RUNS = 20
"""Newest runs that are looked at: a folder may hold thousands."""
MARKS = 50
_NO_MATTER = frozenset({"steps", "data"})
"""Of [train]: what changes neither a checkpoint's size nor its time."""


@dataclass(frozen=True)
class PastSaves:
    """Of one earlier run.

    Attributes:
        run: Its name.
        save_s: The longest of its newest saves, as long as it would take these ranks.
        costs: What its newest saves cost; None where it told of none.
        size_bytes: Of its newest committed checkpoint; None where that is not known.
        step_s: Of one of its newest steps; None where it told of none.
    """

    run: str
    save_s: float
    costs: interval.Costs | None
    size_bytes: int | None
    step_s: float | None


def past_saves(spec: Spec, runs: Path, ranks: int) -> PastSaves | None:
    """The newest run of the same program that has saved; None where there is none.

    Args:
        spec: The run that is to come.
        runs: The folder of all runs.
        ranks: That will save.
    """
    try:
        folder = look_into(runs, own=True)
    except HpctrainError:
        return None  # a folder that cannot be read is told by submit's own checks
    for run in folder.runs[:MOST_RUNS]:
        try:
            if not _is_same(spec, load_spec(run.spec)):
                continue
            history = RunHistory.read(run)
        except (HpctrainError, OSError, ValueError):
            continue  # a run that is damaged tells nothing
        save_s = interval.longest_save_s(history, ranks)
        if save_s is not None:
            sizes = [save.size_bytes for save in history.saves if save.committed]
            size = next((one for one in reversed(sizes) if one), None)
            return PastSaves(run.name, save_s, interval.costs(history), size, _step_s(history))
    return None


def _is_same(spec: Spec, other: Spec) -> bool:
    """Whether another run's saves tell something of this one's."""
    entry, theirs = spec.entry, other.entry
    if (entry.kind, entry.module, entry.cwd) != (theirs.kind, theirs.module, theirs.cwd):
        return False
    if entry.kind == "recipe":
        return _model(spec) == _model(other)
    return Path(entry.path).name == Path(theirs.path).name and entry.args == theirs.args


def _model(spec: Spec) -> dict[str, object]:
    return {k: v for k, v in asdict(spec.settings.train).items() if k not in _NO_MATTER}


def _step_s(history: RunHistory) -> float | None:
    marks = [one.fact for one in history.training if isinstance(one, StepMark)]
    times = [fact.p50_s for fact in marks[-MARKS:] if fact.p50_s]
    return statistics.median(times) if times else None
