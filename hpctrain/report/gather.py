"""All that a report needs from a run's directory. The only module of the room that reads.

What is missing or torn is left out and named in `problems`; nothing that a run directory can hold
makes it raise. `history` is the ledger as curves need it, and pure: step marks, saves and resumes.
What a step mark lacks is None: other programs tell less.
tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain
from hpctrain.errors import HpctrainError
from hpctrain.history.progress import RankSample, rank_sample
from hpctrain.history.run_history import RunHistory
from hpctrain.history.run_records import Restore, SaveRecord, StepMark
from hpctrain.plan.interval import Costs, Failures, costs, failures
from hpctrain.run.event_fields import finite
from hpctrain.settings.spec import load_spec
from hpctrain.status.text import unaccounted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec
    from hpctrain.status.status import RunStatus

MOST_BYTES = 1 << 30
"""Of one attempt's samples."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """Steps that were done since the mark before.

    Attributes:
        t: When it was written: the end of its window, seconds since the epoch.
        attempt: Whose.
        first: First step.
        last: Last step, inclusive.
        seconds: Length of the window.
        loss: Of the last step.
        p50_s: Median step time in the window.
        p95_s: Time that 95 % of its steps stay below.
        tokens: In the window, over all ranks.
        samples: The same in samples.
        grad_norm: The last one told.
    """

    t: float
    attempt: int | None
    first: int
    last: int
    seconds: float | None = None
    loss: float | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    tokens: float | None = None
    samples: int | None = None
    grad_norm: float | None = None

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1


@dataclass(frozen=True)
class History:
    """What the ledger says of the run's steps.

    Attributes:
        marks: Every mark, also of steps that were done again later, in order.
        kept: The marks of the steps that the newest state is made of: each step once.
        resumes: Where attempts began to train.
        saves: Checkpoints that were committed.
        missed: Saves that failed or were left out, by kind of event.
        device: What the newest attempt trained on, where it said.
        excluded: Nodes that an attempt was told to do without, each with the attempt.
    """

    marks: tuple[StepRow, ...]
    kept: tuple[StepRow, ...]
    resumes: tuple[Restore, ...]
    saves: tuple[SaveRecord, ...]
    missed: dict[str, int]
    device: str
    excluded: tuple[tuple[int | None, str], ...]


def steps_of(run: RunHistory) -> History:
    """The run's steps and saves, sorted."""
    marks: list[StepRow] = []
    kept: list[StepRow] = []
    resumes: list[Restore] = []
    for point in run.training:
        if isinstance(point, Restore):
            while kept and kept[-1].last > point.step:
                kept.pop()
            resumes.append(point)
        elif (mark := _mark(point)) is not None:
            marks.append(mark)
            kept.append(mark)
    return History(
        marks=tuple(marks),
        kept=tuple(kept),
        resumes=tuple(resumes),
        saves=tuple(save for save in run.saves if save.committed),
        missed=Counter(save.kind for save in run.saves if not save.committed),
        device=next((a.device for a in reversed(run.attempts) if a.device), ""),
        excluded=tuple(run.excluded),
    )


def _mark(mark: StepMark) -> StepRow | None:
    fact = mark.fact
    if not mark.steps or fact.first is None or fact.last is None:
        return None
    begin, end = fact.sample_first, fact.sample_last
    samples = end - begin if begin is not None and end is not None and end > begin else None
    names = ("seconds", "loss", "p50_s", "p95_s", "tokens", "grad_norm")
    values = {name: finite(getattr(fact, name)) for name in names}
    return StepRow(mark.t, mark.attempt, fact.first, fact.last, samples=samples, **values)


@dataclass(frozen=True)
class ReportData:
    """All that a report shows of one run.

    Attributes:
        status: What `hpctrain status` shows too, so that both say the same.
        history: Steps, saves and resumes.
        ranks: Samples of every attempt that has some, in order.
        costs: What saves have cost of late; None before the first.
        failures: How often it died without a chance to save.
        spec: Its settings; None where they cannot be read.
        problems: What could not be read, a line each.
    """

    status: RunStatus
    history: History
    ranks: tuple[RankSample, ...]
    costs: Costs | None
    failures: Failures
    spec: Spec | None
    problems: tuple[str, ...]

    @property
    def steps_lost(self) -> int | None:
        """Steps that were done in vain, over all attempts; None where none was told."""
        return self.status.steps_lost.steps


def gather(run: RunDir, status: RunStatus) -> ReportData:
    """Read a run's directory, of which nothing has to be there.

    Args:
        run: The run.
        status: What is known of it (`status_of`).
    """
    history = RunHistory.read(run)
    problems = [] if history.count else [f"{run.events} is not there, or holds no event"]
    spec, why = _spec(run)
    if status.answer.problem and spec is not None:
        problems.append(f"the scheduler gave no answer: {status.answer.problem}")
    if status.answer.unaccounted:
        problems.append(unaccounted(status.answer.unaccounted))
    samples, torn = _samples(run, [one.number for one in status.attempts])
    return ReportData(
        status=status,
        history=steps_of(history),
        ranks=tuple(samples),
        costs=costs(history),
        failures=failures(history),
        spec=spec,
        problems=(*problems, *([why] if why else []), *torn),
    )


def _spec(run: RunDir) -> tuple[Spec | None, str]:
    """The run's settings, or why there are none."""
    try:
        return load_spec(run.spec), ""
    except HpctrainError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{run.spec} cannot be read: {error.strerror}"


def _samples(run: RunDir, numbers: Sequence[int]) -> tuple[list[RankSample], list[str]]:
    """Samples of all attempts in order, and what could not be read."""
    samples: list[RankSample] = []
    problems: list[str] = []
    for number in numbers:
        path = run.rank_times(number)
        try:
            lines = read_plain(path, MOST_BYTES).splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        whole = [sample for line in lines if (sample := rank_sample(line, number)) is not None]
        samples += whole
        # The last line is torn in every file that is being written; more are worth a word.
        if len(whole) < len(lines) - 1:
            problems.append(f"{path}: {len(lines) - len(whole)} of {len(lines)} lines are torn")
    return samples, problems
