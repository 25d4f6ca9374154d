"""A check's answers, and what is known of saves before a run. Pure.

Saves are compared with the disk, the time limit and the notice of a preemption. Numbers come from
the newest earlier run of the program that saved; without one they are not known. The rules are
those of the ranks: `plan.interval` and docs/staying-alive.md.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.text import count, duration, size
from hpctrain.core.settings.spec import Spec, load_spec
from hpctrain.errors import ChecksFailed, HpctrainError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_records import StepMark
from hpctrain.ledger.plan import interval
from hpctrain.ledger.run.find_run import look_into

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.core.settings.schema import CheckpointSettings

OK, NOTE, FAIL, NOT_KNOWN = "ok", "note", "fail", "not known"
STATUSES = (OK, NOTE, FAIL, NOT_KNOWN)
FORMAT = 1


@dataclass(frozen=True)
class CheckLine:
    """One check's answer."""

    check: str  # which
    # ok; note: worth a look; fail: the run would be refused, fail or lose its work; not known:
    # nobody can say before a run, or it could not be read
    status: str
    message: str  # what was found, with its value and where that came from
    hint: str = ""  # what to do
    path: str = ""  # the file that it is about, as seen from where the command was called
    line: int = 0  # in it, 0 for all of it
    seconds: float = 0.0  # how long the check took, where that is worth telling


@dataclass
class CheckList:
    """All answers, in the order in which they were found."""

    lines: list[CheckLine] = field(default_factory=list)  # the answers
    refusal: int = 0  # the exit code with which `submit` would refuse, 0 where it would not
    name: str = ""  # what is checked: the program, or the shipped recipe
    calls_hpctrain: bool | None = None  # None: not known
    strict: bool = False  # notes fail too

    def number(self, status: str) -> int:
        """How many checks have that answer."""
        return sum(one.status == status for one in self.lines)

    @property
    def exit_code(self) -> int:
        """That of submit's refusal, else 3 where a check failed, else 0."""
        failed = self.number(FAIL) or (self.strict and self.number(NOTE))
        return self.refusal or (ChecksFailed.exit_code if failed else 0)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "format": FORMAT,
            "program": self.name,
            "exit_code": self.exit_code,
            "failed": self.number(FAIL),
            "notes": self.number(NOTE),
            "not_known": self.number(NOT_KNOWN),
            "checks": [asdict(one) for one in self.lines],
        }


def text_lines(lines: list[CheckLine]) -> Iterator[tuple[str, str]]:
    """(text, status) for each line of the screen."""
    wide = max((len(one.check) for one in lines), default=0)
    room = max(len(status) for status in STATUSES)
    for line in lines:
        took = f" ({line.seconds:.1f} s)" if line.seconds else ""
        yield f"{line.status:{room}}  {line.check:{wide}}  {line.message}{took}", line.status
        if line.hint and line.status != OK:
            yield f"{'':{room}}  {'':{wide}}  -> {line.hint}", ""


def summary(checks: CheckList) -> str:
    """The last line."""
    parts = [f"{checks.number(FAIL)} failed"] if checks.number(FAIL) else []
    parts += [count(checks.number(NOTE), "note")] if checks.number(NOTE) else []
    parts += [f"{checks.number(NOT_KNOWN)} not known"] if checks.number(NOT_KNOWN) else []
    what = ", ".join(parts) or "all is well"
    return f"{what} in {count(len(checks.lines), 'check')}: exit code {checks.exit_code}"


FULL_SHARE = 0.8
"""A forecast that takes more of what is free is worth a look: others write there too."""
MOST_LEAVING = 0.5
"""Past this share of a job's time it would mostly stop."""


@dataclass(frozen=True)
class ForecastFacts:
    """What is known of the jobs to come."""

    limit_s: float  # time limit of each
    nodes: int  # the fewest
    margin_s: float  # run.stop_margin_s
    lead_s: float  # slurm.signal_lead_s
    # whether the program tells hpctrain of its steps and saves; None where nobody knows
    calls_hpctrain: bool | None
    # from the notice of a preemption to the kill; None where jobs are not preempted
    notice_s: float | None = None
    notice_from: str = ""  # where that stands
    steps: int | None = None  # how many there will be; None where nobody knows


def check_lead(job: ForecastFacts, past: PastSaves | None) -> list[CheckLine]:
    """Whether a step and a save fit before the time limit, and after a notice."""
    if past is None:
        rule = f"the save before the end needs {_rule(job)}; the time limit is {_span(job.limit_s)}"
        hint = "the first save of a run here shows how long one takes"
        return [CheckLine("lead time", NOT_KNOWN, f"no run of it has saved here: {rule}", hint)]
    step_s = past.step_s or 0.0
    need = job.margin_s + interval.CLOCK_SAFETY * past.save_s + 2 * step_s
    sums = (
        f"{job.margin_s:g} s margin + {interval.CLOCK_SAFETY:g} x save {_span(past.save_s)} + "
        f"2 x step {_span(step_s) if past.step_s else '(not known)'} = {_span(need)} "
        f"(as {past.run} saved)"
    )
    if job.calls_hpctrain is False:
        lines = [_foreign_lead(job, past)]
    elif need >= job.limit_s:
        hint = "raise --time, or save less: a job this short ends before it has saved"
        message = f"{sums}, and the time limit is {_span(job.limit_s)}"
        lines = [CheckLine("lead time", FAIL, message, hint)]
    elif need > MOST_LEAVING * job.limit_s:
        message = f"{sums}, most of the time limit of {_span(job.limit_s)}"
        lines = [CheckLine("lead time", NOTE, message, "raise --time")]
    else:
        message = f"{sums} before the limit of {_span(job.limit_s)}"
        lines = [CheckLine("lead time", OK, message)]
    return lines + _notice(job, past)


def _rule(job: ForecastFacts) -> str:
    if job.calls_hpctrain is None:
        return "a time of which nothing is known, as it may or may not call hpctrain"
    if job.calls_hpctrain is False:
        return "its own time: it is told slurm.signal_lead_s before the limit"
    return f"{job.margin_s:g} s margin + {interval.CLOCK_SAFETY:g} x a save + 2 steps"


def _foreign_lead(job: ForecastFacts, past: PastSaves) -> CheckLine:
    """A program that does not know hpctrain is warned a fixed time before the limit."""
    span_s = max(job.margin_s, job.lead_s)
    need = interval.CLOCK_SAFETY * past.save_s + (past.step_s or 0.0)
    message = (
        f"the program is told {_span(span_s)} before the limit; {interval.CLOCK_SAFETY:g} x save "
        f"{_span(past.save_s)} + a step = {_span(need)} (as {past.run} saved)"
    )
    if span_s >= need:
        return CheckLine("lead time", OK, message)
    hint = f"--set slurm.signal_lead_s={int(need) + 1}"
    return CheckLine("lead time", FAIL, message, hint)


def _notice(job: ForecastFacts, past: PastSaves) -> list[CheckLine]:
    if job.notice_s is None:
        return []
    need = interval.LAST_SAVE_SAFETY * past.save_s + (past.step_s or 0.0) + interval.LEAVE_S
    message = (
        f"a preemption kills {_span(job.notice_s)} after its notice ({job.notice_from}); a step, "
        f"a save and leaving take {_span(need)} (as {past.run} saved)"
    )
    if need <= job.notice_s:
        return [CheckLine("notice", OK, message)]
    hint = "what was trained since the last checkpoint is lost then: save more often, or elsewhere"
    return [CheckLine("notice", NOTE, message, hint)]


def check_interval(
    checkpoint: CheckpointSettings, job: ForecastFacts, past: PastSaves | None
) -> CheckLine:
    """How often it will save, against its jobs' time limit."""
    name = "interval"
    if not job.calls_hpctrain:
        message = "the program saves when it likes: it does not tell hpctrain"
        if job.calls_hpctrain is None:
            message = "whether the program calls hpctrain cannot be seen"
        return CheckLine(
            name, NOT_KNOWN, message, "`hpctrain help getting-started` says how it could"
        )
    limit = f"the time limit of {_span(job.limit_s)}"
    fixed = interval.as_set(checkpoint)
    if fixed is None:
        costs = past.costs if past else None
        chosen = interval.choose(
            costs.cost_s if costs else None,
            interval.mtbf_s(interval.Failures(), job.nodes),
            max_loss_s=checkpoint.max_loss_s,
            job_s=job.limit_s,
            write_s=costs.write_s if costs else 0.0,
        )
        first = "" if costs else "at first "
        return CheckLine(name, OK, f"{first}every {_span(chosen.seconds)} ({chosen.why})")
    seconds, shown = fixed.seconds, f"{fixed.why} {_span(fixed.seconds)}"
    if fixed.steps:
        shown = f"{fixed.why} {fixed.steps}"
        step_s = past.step_s if past else None
        if step_s is None:
            message = f"{shown}: how long so many steps take is not known; {limit}"
            return CheckLine(name, NOT_KNOWN, message)
        seconds = fixed.steps * step_s
        shown += f" takes {_span(seconds)} (as {past.run if past else ''} stepped)"
    if seconds >= job.limit_s:
        hint = "lower it: where the last save fails, a whole job's work is lost, again and again"
        return CheckLine(name, FAIL, f"{shown}, no less than {limit}", hint)
    if seconds > interval.JOB_SHARE * job.limit_s:
        message = f"{shown}, more than a quarter of {limit}"
        return CheckLine(name, NOTE, message, "lower it, or raise --time")
    return CheckLine(name, OK, f"{shown} within {limit}")


def check_room_for(
    checkpoint: CheckpointSettings,
    job: ForecastFacts,
    past: PastSaves | None,
    free_bytes: int | None,
) -> CheckLine:
    """Whether the checkpoints that are kept fit beside each other."""
    kept, grows = _kept(checkpoint, job)
    words = f"{count(kept, 'checkpoint')} at once (kept, and one that is being written)"
    if grows:
        words += f", and one more every {checkpoint.keep_every} steps"
    free = "not known" if free_bytes is None else size(free_bytes)
    if job.calls_hpctrain is not True:
        message = f"what the program writes itself; {free} free"
        return CheckLine("disk", NOT_KNOWN, message)
    if past is None or past.size_bytes is None or free_bytes is None:
        message = f"{words} of a size that is not known before a first save; {free} free"
        hint = "--rehearse shows a checkpoint's size; `hpctrain plan` forecasts it from the model"
        return CheckLine("disk", NOT_KNOWN, message, hint)
    need = kept * past.size_bytes
    message = f"{words} of {size(past.size_bytes)} (as {past.run} saved): {size(need)}; {free} free"
    if need > free_bytes:
        hint = "make room, choose another disk with --runs, or keep fewer (checkpoint.keep_last)"
        return CheckLine("disk", FAIL, message, hint)
    if need > FULL_SHARE * free_bytes or grows:
        return CheckLine("disk", NOTE, message, "look at the quota: it is not seen here")
    return CheckLine("disk", OK, message)


def _kept(checkpoint: CheckpointSettings, job: ForecastFacts) -> tuple[int, bool]:
    """How many lie there at most, and whether there will be more that nobody can count."""
    kept = checkpoint.keep_last + checkpoint.keep_best + 1
    if not checkpoint.keep_every:
        return kept, False
    if job.steps is None:
        return kept, True
    return kept + job.steps // checkpoint.keep_every, False


def _span(seconds: float) -> str:
    """A duration of which the first digits count: "0.4 s", "3m20s"."""
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)  # noqa: PLR2004 - two digits


MOST_RUNS = 20
"""Newest runs that are looked at: a folder may hold thousands."""
MARKS = 50
_NO_MATTER = frozenset({"steps", "data"})
"""Of [train]: what changes neither a checkpoint's size nor its time."""


@dataclass(frozen=True)
class PastSaves:
    """Of one earlier run."""

    run: str  # its name
    save_s: float  # the longest of its newest saves, as long as it would take these ranks
    costs: interval.Costs | None  # what its newest saves cost; None where it told of none
    size_bytes: int | None  # of its newest committed checkpoint; None where that is not known
    step_s: float | None  # of one of its newest steps; None where it told of none


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
        return None  # submit's own checks report a folder that cannot be read
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
            marks = [one.fact for one in history.training if isinstance(one, StepMark)]
            times = [fact.p50_s for fact in marks[-MARKS:] if fact.p50_s]
            step_s = statistics.median(times) if times else None
            return PastSaves(run.name, save_s, interval.costs(history), size, step_s)
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
