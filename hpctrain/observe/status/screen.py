"""The screen of one run's status, and the table of all runs, for a console.

The parts of the screen are in the order in which people look: is it alive, why does it wait, what
happened, is it fast, is it safe, is the model fine, what did it cost. Each line has its label.
"""

from __future__ import annotations

import math
import os
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from hpctrain.core.base.text import (
    LABEL,
    amount,
    count,
    duration,
    in_nodes,
    pack,
    percent,
    size,
    step_time,
)
from hpctrain.core.drawing import Column, facts, fitted, rank_map, uncut
from hpctrain.ledger.history.goodput import Goodput, TimeClass
from hpctrain.ledger.history.progress import (
    HOW_TO_REPORT,
    NO_STEP,
    Missed,
    Progress,
    RankSample,
    Saving,
)
from hpctrain.ledger.history.run_state import RunState
from hpctrain.observe.status.event_lines import EVALUATION_FAILED, evaluation_lines, incident_lines
from hpctrain.observe.status.status import DAY_S
from hpctrain.observe.status.tables import attempts_table, ranks_table
from hpctrain.observe.status.text import in_words, next_commands, unaccounted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from hpctrain.observe.status.status import Checkpoint, RunStatus


SMALL = 0.005
"""Classes with a smaller share are added up."""
Fact: TypeAlias = "tuple[str, RenderableType]"
"""A label, and what stands beside it."""
_HOUR_S = 3600.0
SKIPPED_SHOWN = 8
ROOM_SHOWN = 100
"""Room for more checkpoints than these is no news."""
SOON_S = 600.0
"""The end of a run that is nearer than this needs no forecast beside the time left."""
TRACEBACK_LINES = 30
_STYLES = {
    RunState.RUNNING: "green",
    RunState.DONE: "green",
    RunState.FAILED: "red",
    RunState.LOST: "red",
    RunState.STOPPED: "yellow",
    RunState.CANCELLED: "yellow",
    RunState.COMPLETING: "yellow",
    RunState.SUSPENDED: "yellow",
}
_WAITING = frozenset({RunState.PENDING, RunState.REQUEUED})


@dataclass(frozen=True)
class StatusScreen:
    """The screen of a run, as wide as its console but for paths, commands and tracebacks."""

    status: RunStatus
    all_attempts: bool = False
    with_ranks: bool = False
    ranks: RankSample | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its parts with a blank line between two."""
        status, width = self.status, options.max_width
        parts: list[Sequence[RenderableType]] = [
            _header(status, width),
            chain_table(status, width),
            attempts_table(status, width, every=self.all_attempts),
            _numbers(status, width - LABEL),
            ranks_table(status, self.ranks, width) if self.with_ranks else [],
            _failure(status, width),
            [uncut(f"  {line}", "cyan") for line in next_commands(status)],
        ]
        for at, part in enumerate(part for part in parts if part):
            if at:
                yield Text()
            yield from part


@dataclass(frozen=True)
class RunsScreen:
    """One line for each run, and below them what did not answer.

    `here` is the folder of which nobody needs to be told.
    """

    runs: Sequence[RunStatus]
    here: Path | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table and the notes."""
        runs = self.runs
        columns = [
            Column("run", [run.name for run in runs], shrink=True),
            Column("state", [_state(run) for run in runs]),
            Column("step", [_of(run.progress) for run in runs], right=True),
            Column("done", [_percent(run.progress) or "-" for run in runs], right=True, drop=4),
            Column("left", [_left(run) for run in runs], right=True, drop=7),
            Column("speed", [_speed(run) for run in runs], right=True, drop=6),
            Column("goodput", [_goodput(run) for run in runs], right=True, drop=5),
            Column("nodes", [_nodes(run) for run in runs], right=True, drop=3),
            Column("attempts", [str(len(run.attempts)) for run in runs], right=True),
            Column("job", [run.ledger_state.job_id or "-" for run in runs], drop=2),
            Column("for", [_age(run) for run in runs], right=True),
        ]
        folders = [_folder(run, self.here) for run in runs]
        if any(folders):
            less = {"done", "speed", "goodput", "nodes"}
            columns = [replace(c, drop=1) if c.title in less else c for c in columns]
            columns.append(Column("in", folders, shrink=True))
        waits = [_waits_for(run) for run in runs]
        if any(waits):  # whom it waits for is worth more than how fast the others are
            less = {"speed", "goodput", "nodes", "done", "left"}
            columns = [replace(c, drop=1) if c.title in less else c for c in columns]
            columns.append(Column("after", waits, shrink=True))
        yield fitted(columns, options.max_width)
        answers = [run.answer for run in runs]
        notes = {one.note or f"no answer: {one.problem}" for one in answers if one.problem}
        notes |= {unaccounted(one.unaccounted) for one in answers if one.unaccounted}
        for note in sorted(notes):
            yield from _wrapped(note, options.max_width)


def _folder(run: RunStatus, here: Path | None) -> str:
    """The folder of a run that lies elsewhere, as one types it."""
    home, folder = os.environ.get("HOME", ""), str(Path(run.root).parent)
    if here is None or folder == str(here):
        return ""
    return f"~{folder[len(home) :]}" if home and folder.startswith(f"{home}/") else folder


def chain_table(status: RunStatus, width: int) -> list[RenderableType]:
    """The runs that wait for each other, in order; nothing for a run that is alone."""
    links = status.chain
    if not links:
        return []
    here = [">" if link.run_dir == status.root else "" for link in links]
    columns = [
        Column("", here),
        Column("chain", [link.run for link in links], shrink=True),
        Column("state", [Text(one.state.value, _STYLES.get(one.state, "bold")) for one in links]),
        Column("job", [link.job_id or "-" for link in links], drop=2),
        Column("", [link.words for link in links], shrink=True),
    ]
    return [fitted(columns, width)]


def _nodes(run: RunStatus) -> str:
    return str(len(run.newest.nodes) or "-") if run.newest else "-"


def _waits_for(run: RunStatus) -> str:
    return ", ".join(link.run for link in run.awaited)


def _state(run: RunStatus) -> Text:
    text = Text(run.state.value, _STYLES.get(run.state, "bold"))
    return text if run.answer.asked else Text.assemble(text, "?")


def _wrapped(text: str, width: int) -> list[Text]:
    """Lines that break between words only, so that a command or a path is never cut in two."""
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [uncut(line) for line in lines]


def _header(status: RunStatus, width: int) -> list[Text]:
    progress = status.progress
    state = status.state.value
    since = status.now - status.ledger_state.t
    facts = [status.name, state]
    if status.state in _WAITING and status.ledger_state.t:
        facts[1] += f" for {duration(since)}"
    if progress.step is not None:
        done = _percent(progress)
        facts.append(f"step {_of(progress)}{f' ({done})' if done else ''}")
    if progress.loss is not None:
        facts.append(f"loss {progress.loss:.4g}")
    if status.state is RunState.RUNNING:
        facts += time_left(status)
    first = uncut(pack(facts, width, gap="  "))
    plain = f"{status.name}  {state}"
    if first.plain.startswith(plain):
        first.stylize("bold", 0, len(status.name))
        first.stylize(_STYLES.get(status.state, "bold"), len(plain) - len(state), len(plain))
    words = in_words(status)
    words += "".join(f"\n{line}" for line in finish_lines(status))
    answer = status.answer
    if answer.note:
        words = f"{words}\n{answer.note}"
    elif answer.problem:
        words = f"{words}\n{status.cluster or 'the cluster'} gave no answer: {answer.problem}"
    if answer.unaccounted and not answer.problem:
        words = f"{words}\n{unaccounted(answer.unaccounted)}"
    return [first, *(line for text in words.strip().splitlines() for line in _wrapped(text, width))]


def _numbers(status: RunStatus, width: int) -> list[RenderableType]:
    """Where its ranks stand, speed, model, checkpoints, goodput: a labelled line or more each."""
    rows = [
        *_not_reported(status),
        *([("image", status.image)] if status.image else []),
        *_mesh(status, width),
        *incident_lines(status.incidents),
        *speed_lines(status, width),
        *model_lines(status, width),
        *save_lines(status, width),
        *_evaluations(status, width),
        *goodput_lines(status, width),
    ]
    return [facts(rows)] if rows else []


def _evaluations(status: RunStatus, width: int) -> list[Fact]:
    lines = evaluation_lines(status, width)
    return [(k, Text(words, "red") if k == EVALUATION_FAILED else words) for k, words in lines]


def _not_reported(status: RunStatus) -> list[Fact]:
    """Why no step is shown, and how a program tells its steps."""
    words = status.reported
    if not words.is_silent or not words.is_long:
        return []
    return [("steps", f"not known: {NO_STEP}; {HOW_TO_REPORT}")]


def _mesh(status: RunStatus, width: int) -> list[Fact]:
    """The newest attempt's mesh, and who stands where; nothing where ranks are on one axis."""
    now = status.mesh
    if now is None or now.mesh.world_size == 1:
        return []
    ranks = f"{in_nodes([len(now.nodes)])} x {count(now.ranks_per_node, 'rank')}"
    rows: list[Fact] = [("mesh", f"{now.engine}, {now.mesh.text} ({ranks})")]
    if now.mesh.has_axes:
        rows.append(("", rank_map(now.mesh, now.nodes, now.ranks_per_node, width=width)))
    return rows


def _failure(status: RunStatus, width: int) -> list[Text]:
    """The last failure, once: its traceback, how often it came, and where the whole log is."""
    failure = status.failure
    if failure is None:
        return []
    same = [a.failure for a in status.attempts if a.failure is not None]
    times = sum(1 for one in same if one.summary == failure.summary)
    often = f", as in {count(times - 1, 'other attempt')}" if times > 1 else ""
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    where = f"{rank} on {failure.node}" if failure.node else rank
    text = f"attempt {failure.attempt} failed{often}: {where or 'somewhere'}: {failure.summary}"
    lines = _wrapped(text, width)
    if failure.traceback and status.state is not RunState.DONE:
        lines += [uncut(f"  {line}", "dim") for line in _short(failure.traceback)]
    if status.failure_log:
        lines.append(uncut(f"log {status.failure_log}"))
    return lines


def _short(traceback: str) -> list[str]:
    """The end of a traceback is where the error is; its beginning says whose it is."""
    lines = textwrap.dedent(traceback).strip("\n").splitlines()
    left_out = len(lines) - TRACEBACK_LINES
    if left_out <= 0:
        return lines
    return [lines[0], f"  ... {left_out + 1} lines", *lines[left_out + 2 :]]


def _age(run: RunStatus) -> str:
    """How long the run has been in its state."""
    return duration(run.now - run.ledger_state.t) if run.ledger_state.t else "-"


def _speed(run: RunStatus) -> str:
    return rate(run) if run.state is RunState.RUNNING else "-"


def _goodput(run: RunStatus) -> str:
    useful = run.goodput.useful_of_allocated
    return "-" if useful is None else percent(useful, 1)


def _of(progress: Progress) -> str:
    step = "-" if progress.step is None else f"{progress.step:,}"
    return step if progress.total is None else f"{step}/{progress.total:,}"


def _percent(progress: Progress) -> str:
    if progress.step is None or not progress.total:
        return ""
    return f"{min(100, 100 * progress.step // progress.total)} %"


def finish_lines(status: RunStatus) -> list[str]:
    """When the run will be done, and what that assumes; nothing more of one that soon is."""
    if status.finish is None or (status.finish.high or math.inf) - status.now < SOON_S:
        return []
    assumes = "; ".join(status.finish.assumes)
    return [status.finish.text(status.now), *([f"assumes {assumes}"] if assumes else [])]


def time_left(status: RunStatus) -> list[str]:
    """Time of a step, and how long it takes to the last one at this speed."""
    each, left = status.step_s, status.left_s
    if not each:
        return []
    until = "" if left is None else f", about {duration(left)} left"
    return [f"{step_time(each)}/step{until}"]


def _left(run: RunStatus) -> str:
    left = run.left_s if run.state is RunState.RUNNING else None
    return "-" if left is None else duration(left)


def rate(status: RunStatus) -> str:
    """Tokens, else samples, else steps in a second."""
    now = status.speed
    if now is None:
        return "-"
    if now.tokens_per_s:
        return f"{amount(now.tokens_per_s)} tok/s"
    if now.samples_per_s:
        return f"{amount(now.samples_per_s)} samples/s"
    return f"{amount(now.steps_per_s)} steps/s" if now.steps_per_s else "-"


def speed_lines(status: RunStatus, width: int) -> list[Fact]:
    """How fast the newest attempt trains, or did last."""
    now = status.speed
    if now is None:
        return []
    items = [rate(status)]
    if now.step_p50_s is not None:
        p95 = "" if now.step_p95_s is None else f", p95 {step_time(now.step_p95_s)}"
        items.append(f"step p50 {step_time(now.step_p50_s)}{p95}")
    if now.mfu is not None:
        items.append(f"MFU {percent(now.mfu)}")
    if now.data_share is not None:
        items.append(f"data wait {percent(now.data_share)}")
    if now.slow_rank is not None:
        by = "" if now.slow_by is None else f" ({100 * now.slow_by:+.0f} %)"
        items.append(f"slowest rank {now.slow_rank}{by}")
    return [("speed", pack(items, width))]


def model_lines(status: RunStatus, width: int) -> list[Fact]:
    """Is the model fine? Loss alone is in the header already."""
    now = status.speed
    if now is None or (now.grad_norm is None and not now.skipped):
        return []
    items = [] if now.loss is None else [f"loss {now.loss:.4g}"]
    if now.grad_norm is not None:
        items.append(f"gradient norm {now.grad_norm:.4g}")
    if now.skipped:
        steps = "1 update" if now.skipped == 1 else f"{now.skipped} updates"
        items.append(f"{steps} skipped in the last {duration(now.window_s)}")
    return [("model", pack(items, width))]


def goodput_lines(status: RunStatus, width: int) -> list[Fact]:
    """What came of the allocation, the two rates and the classes that make it up."""
    spent = status.goodput
    if spent.allocated_s <= 0:
        return []
    items: list[str] = []
    useful, since = spent.useful_of_allocated, spent.useful_since_submit
    silent = status.reported.is_silent
    if useful is not None:
        today = status.day.useful_of_allocated if spent.submitted_s > DAY_S else None
        lately = "" if today is None else f" (last 24 h {percent(today, 1)})"
        items.append(f"{percent(useful, 1)} of allocated{lately}")
    if not spent.reports_steps and not silent and any(one.ended for one in status.attempts):
        items.append(f"useful share not known ({NO_STEP})")
    if since is not None:
        items.append(f"{percent(since, 1)} since submit")
    items.append(f"{_node_hours(spent.allocated_s)} allocated")
    if spent.seconds[TimeClass.QUEUE] > 0:
        items.append(f"{duration(spent.seconds[TimeClass.QUEUE])} in the queue")
    label = "time" if silent else "goodput"
    return [(label, pack(items, width)), ("", _classes(spent, width, silent=silent))]


def _node_hours(node_seconds: float) -> str:
    hours = node_seconds / _HOUR_S
    if hours < 1:
        return f"{60 * hours:.1f} node-minutes"
    return f"{hours:,.0f} node-hours" if hours >= 100 else f"{hours:.1f} node-hours"  # noqa: PLR2004


def _classes(spent: Goodput, width: int, *, silent: bool) -> str:
    """Shares of the allocated time, the largest first; they add up to 100.0 as they are shown.

    Of a program that reports no step all of its own time is "other", which is called running.
    """
    shares = {kind.value.replace("_", "-"): s for kind, s in spent.node_seconds.items() if s > 0}
    if silent and TimeClass.OTHER in shares:
        shares["running"] = shares.pop(TimeClass.OTHER)
    large = {name: s for name, s in shares.items() if s >= SMALL * spent.allocated_s}
    rest = sum(shares.values()) - sum(large.values())
    ordered = sorted(large.items(), key=lambda item: -item[1])
    if rest > 0:
        ordered.append(("rest", rest))
    tenths = [round(1000 * seconds / spent.allocated_s) for _, seconds in ordered]
    # Rounding is taken out of the last one, but steps are as the line above says.
    adjusted = -2 if len(ordered) > 1 and ordered[-1][0] == TimeClass.STEP.value else -1
    tenths[adjusted] += 1000 - sum(tenths)
    texts = [f"{name} {value / 10:.1f} %" for (name, _), value in zip(ordered, tenths, strict=True)]
    return pack(texts, width)


def save_lines(status: RunStatus, width: int) -> list[Fact]:
    """Labelled lines; nothing for a run that never began."""
    rows = _checkpoint(status, width)
    rows += [*_missed_saves(status.saving), *_next_save(status)]
    rows += [("not taken", f"{one.name}: {one.reason}") for one in status.skipped[:SKIPPED_SHOWN]]
    hidden = len(status.skipped) - SKIPPED_SHOWN
    if hidden > 0:
        rows.append(("", f"... {hidden} more (--json shows all)"))
    return [*rows, *_disk(status)] if rows else []


def _checkpoint(status: RunStatus, width: int) -> list[Fact]:
    newest = status.checkpoint
    if newest is None:
        begun = status.progress.saved_step is not None or status.skipped
        none = "none that could be loaded" if begun else "none so far"
        is_known = status.attempts and (begun or not status.reported.is_silent)
        return [("checkpoint", none)] if is_known else []
    items = [newest.name]
    if newest.t:
        items.append(f"saved {duration(status.now - newest.t)} ago")
    if newest.size_bytes:
        items.append(size(newest.size_bytes))
    items.append(_verified(status, newest))
    return [("checkpoint", pack(items, width))]


def _verified(status: RunStatus, newest: Checkpoint) -> str:
    """Whether its bytes were ever read: a restore proves each of them, the listing none."""
    name = newest.name
    read = status.verified.get(name)
    if read is not None and read >= (newest.t or 0.0):  # else another one had the name
        return f"every byte read {duration(status.now - read)} ago"
    readers = [one.number for one in status.attempts if one.from_checkpoint]
    of_newest = [o.number for o in status.attempts if o.from_checkpoint == name]
    if of_newest:
        return f"verified by attempt {of_newest[-1]}, which read every byte"
    if not readers:
        return "complete by its manifest, not read back yet"
    last = next(o for o in status.attempts if o.number == readers[-1])
    step = "?" if last.first_step is None else f"{last.first_step:,}"
    return f"complete by its manifest, not read back yet (last verified: step {step})"


def _missed_saves(saves: Saving) -> list[Fact]:
    """A warning for each kind of save that was due and did not come."""
    rows: list[Fact] = []
    if saves.last_failed is not None:
        before = f", {saves.failed} in a row" if saves.failed > 1 else ""
        why = f"{_at_step(saves.last_failed)}{before}: {saves.last_failed.why}"
        rows.append(("save failed", Text(why, "red")))
    if saves.last_skipped is not None:
        due = saves.committed + saves.failed + saves.skipped
        why = f"the last {_at_step(saves.last_skipped)}: {saves.last_skipped.why}"
        rows.append(("skipped", f"{saves.skipped} of {due} saves, {why}"))
    return rows


def _at_step(missed: Missed) -> str:
    return "at step -" if missed.step is None else f"at step {missed.step:,}"


def _next_save(status: RunStatus) -> list[Fact]:
    """When the next save is due and why then; nothing where no rank is there to make it."""
    saves = status.saving
    every = saves.interval
    newest = status.newest
    if every is None or status.state is not RunState.RUNNING or newest is None:
        return []
    if newest.first_step is None:  # it is starting: what is known is the last attempt's plan
        return []
    why = f": {every.why}" if every.why else ""
    if every.steps:
        done = status.progress.step or 0
        following = (done // every.steps + 1) * every.steps
        last = status.progress.total or following
        when = f"at step {min(following, last):,} (every {every.steps:,} steps{why})"
        return [("next save", when)]
    if not every.seconds or saves.since is None:
        return []
    # By a node's clock that is ahead of ours the last save may lie in the future.
    left = min(saves.since, status.now) + every.seconds - status.now
    when = f"in about {duration(left)}" if left > 0 else f"due {duration(-left)} ago, or under way"
    return [("next save", f"{when} (every {duration(every.seconds)}{why})")]


def _disk(status: RunStatus) -> list[Fact]:
    free, newest = status.disk_free_bytes, status.checkpoint
    if free is None:
        return []
    each = newest.size_bytes if newest is not None else status.progress.saved_bytes
    text = f"{size(free)} left"
    if each and free // each < ROOM_SHOWN:
        more = count(free // each, "more checkpoint")
        text += f", room for {more}" if free >= each else ", no room for another checkpoint"
    return [("disk", text)]
