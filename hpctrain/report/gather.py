"""All that a report needs from a run's directory. The only module of the room that reads.

What is missing or torn is left out and named in `problems`; nothing that a run directory can hold
makes it raise. `history` is the ledger as curves need it, and pure: step marks, saves and resumes.
What a step mark lacks is None: older ledgers and other programs tell less.
tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.files import read_plain
from hpctrain.errors import HpctrainError
from hpctrain.history.rank_samples import RankSample, rank_sample
from hpctrain.history.run_state import live
from hpctrain.plan.interval import Costs, Failures, costs, failures
from hpctrain.run import events as ledger
from hpctrain.run.event_fields import finite, text, whole
from hpctrain.settings.spec import load_spec
from hpctrain.status.text import unaccounted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.run.events import Event
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
class Resume:
    """An attempt began to train at `step`, 0 for the beginning."""

    t: float
    attempt: int | None
    step: int


@dataclass(frozen=True)
class Save:
    """A checkpoint that was committed, and what it cost."""

    t: float
    attempt: int | None
    step: int
    seconds: float | None
    stall_s: float | None
    waited_s: float
    size_bytes: int | None
    mode: str


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
    resumes: tuple[Resume, ...]
    saves: tuple[Save, ...]
    missed: dict[str, int]
    device: str
    excluded: tuple[tuple[int | None, str], ...]


def history(events: Iterable[Event]) -> History:
    """Sort a ledger's events; what an old attempt said beside a newer one counts for nothing."""
    marks: list[StepRow] = []
    kept: list[StepRow] = []
    resumes: list[Resume] = []
    saves: list[Save] = []
    missed: dict[str, int] = {}
    excluded: list[tuple[int | None, str]] = []
    device = ""
    for event in live(events):
        if event.kind == "steps" and (mark := _mark(event)) is not None:
            marks.append(mark)
            kept.append(mark)
        elif event.kind == "restored":
            step = whole(event.data.get("step")) or 0
            while kept and kept[-1].last > step:
                kept.pop()
            resumes.append(Resume(event.t, event.attempt, step))
        elif event.kind == "saved" and (saved := _save(event)) is not None:
            saves.append(saved)
        elif event.kind in {"save_failed", "save_skipped"}:
            missed[event.kind] = missed.get(event.kind, 0) + 1
        elif event.kind == "phase":
            device = text(event.data.get("device")) or device
        elif event.kind == "excluded" and isinstance(event.data.get("nodes"), list):
            excluded += [(event.attempt, text(node)) for node in event.data["nodes"]]
    kinds = tuple(marks), tuple(kept), tuple(resumes), tuple(saves)
    return History(*kinds, missed, device, tuple(excluded))


def _mark(event: Event) -> StepRow | None:
    data = event.data
    first, last = whole(data.get("first")), whole(data.get("last"))
    if first is None or last is None or last < first:
        return None
    begin, end = whole(data.get("sample_first")), whole(data.get("sample_last"))
    samples = end - begin if begin is not None and end is not None and end > begin else None
    told = ("seconds", "loss", "p50_s", "p95_s", "tokens", "grad_norm")
    values = {name: finite(data.get(name)) for name in told}
    return StepRow(event.t, event.attempt, first, last, samples=samples, **values)


def _save(event: Event) -> Save | None:
    data = event.data
    step = whole(data.get("step"))
    if step is None:
        return None
    seconds, stall_s = finite(data.get("seconds")), finite(data.get("stall_s"))
    mode = text(data.get("mode"))
    return Save(
        t=event.t,
        attempt=event.attempt,
        step=step,
        seconds=seconds,
        stall_s=seconds if stall_s is None and mode != "async" else stall_s,
        waited_s=finite(data.get("waited_s")) or 0.0,
        size_bytes=whole(data.get("bytes")),
        mode=mode,
    )


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
