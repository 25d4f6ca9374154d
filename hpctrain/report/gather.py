"""Reads all that a report needs from a run's directory. The only module of the room that reads.

What is missing or torn is left out and named in `problems`; nothing that a run directory can hold
makes it raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain
from hpctrain.errors import HpctrainError
from hpctrain.history.rank_samples import RankSample, rank_sample
from hpctrain.plan.interval import Costs, Failures, costs, failures
from hpctrain.report.history import History, history
from hpctrain.run import events as ledger
from hpctrain.settings.spec import load_spec
from hpctrain.status.text import unaccounted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec
    from hpctrain.status.status import RunStatus

MOST_BYTES = 1 << 30
"""Of one attempt's samples."""


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
    def steps_lost(self) -> int:
        """Steps that were done in vain, over all attempts."""
        return sum(one.steps_lost or 0 for one in self.status.attempts)


def gather(run: RunDir, status: RunStatus) -> ReportData:
    """Read a run's directory, of which nothing has to be there.

    Args:
        run: The run.
        status: What is known of it (`status_of`).
    """
    events = ledger.read(run)
    problems = [] if events else [f"{run.events} is not there, or holds no event"]
    spec, why = _spec(run)
    if status.answer.problem and spec is not None:
        problems.append(f"the scheduler gave no answer: {status.answer.problem}")
    if status.answer.unaccounted:
        problems.append(unaccounted(status.answer.unaccounted))
    samples, torn = _samples(run, [one.number for one in status.attempts])
    return ReportData(
        status=status,
        history=history(events),
        ranks=tuple(samples),
        costs=costs(events),
        failures=failures(events),
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
    found: list[RankSample] = []
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
        found += whole
        # The last line is torn in every file that is being written; more are worth a word.
        if len(whole) < len(lines) - 1:
            problems.append(f"{path}: {len(lines) - len(whole)} of {len(lines)} lines are torn")
    return found, problems
