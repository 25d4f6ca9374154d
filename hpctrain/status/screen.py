"""The screen of one run's status, and the table of all runs. Pure: a `RunStatus` in, text out.

The parts of the screen are in the order in which people look: is it alive, why does it wait, what
happened, is it fast, is it safe, is the model fine, what did it cost. Each line has its label.
tests/unit/cli/test_status.py holds the promises.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hpctrain.base.text import (
    LABEL,
    Column,
    amount,
    count,
    duration,
    fit,
    in_nodes,
    pack,
    paint,
    percent,
    rank_map,
    size,
    step_time,
)
from hpctrain.history.goodput import TimeClass
from hpctrain.history.run_state import RunState
from hpctrain.status.tables import attempts_table
from hpctrain.status.text import in_words, next_commands, nodes_of, unaccounted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.history.goodput import Goodput
    from hpctrain.history.lineage import Progress
    from hpctrain.history.save_record import Missed, Saving
    from hpctrain.status.status import Checkpoint, RunStatus

SMALL = 0.005
"""Classes with a smaller share are added up."""
_DAY_S = 86_400.0
_HOUR_S = 3600.0
SKIPPED_SHOWN = 8
ROOM_SHOWN = 100
"""Room for more checkpoints than these is no news."""
TRACEBACK_LINES = 30
_BOLD, _GREEN, _YELLOW, _RED = "1", "32", "33", "31"
_COLOURS = {
    RunState.RUNNING: _GREEN,
    RunState.DONE: _GREEN,
    RunState.FAILED: _RED,
    RunState.LOST: _RED,
    RunState.STOPPED: _YELLOW,
    RunState.CANCELLED: _YELLOW,
    RunState.COMPLETING: _YELLOW,
}
_WAITING = frozenset({RunState.PENDING, RunState.REQUEUED})


def as_text(
    status: RunStatus,
    *,
    width: int = 80,
    color: bool = False,
    all_attempts: bool = False,
    ranks: str = "",
) -> str:
    """The screen, at most `width` columns wide but for paths, commands and tracebacks.

    Args:
        status: What is known of the run.
        width: Columns of the screen.
        color: Whether it may have colours.
        all_attempts: Show every attempt, however many there are.
        ranks: The table of ranks, where it is wanted.
    """
    parts = [
        _header(status, width, color=color),
        attempts_table(status, width, every=all_attempts),
        _numbers(status, width),
        ranks,
        _failure(status, width),
        _following(status),
    ]
    return "\n\n".join(part for part in parts if part)


def runs_as_text(runs: Sequence[RunStatus], *, width: int = 80, color: bool = False) -> str:
    """One line for each run."""
    columns = [
        Column("run", [run.name for run in runs], shrink=True),
        Column("state", [run.state.value + ("?" * (not run.answer.asked)) for run in runs]),
        Column("step", [_of(run.progress) for run in runs], right=True),
        Column("speed", [_speed(run) for run in runs], right=True, drop=4),
        Column("goodput", [_goodput(run) for run in runs], right=True, drop=5),
        Column("nodes", [str(len(nodes_of(run)) or "-") for run in runs], right=True, drop=3),
        Column("attempts", [str(len(run.attempts)) for run in runs], right=True),
        Column("job", [run.ledger_state.job_id or "-" for run in runs], drop=2),
        Column("for", [_age(run) for run in runs], right=True),
    ]
    lines = fit(columns, width)
    for position, run in enumerate(runs, start=1):
        word, code = run.state.value, _COLOURS.get(run.state, _BOLD)
        if color:
            at = lines[position].find(word, len(lines[position].split("  ")[0]))
            painted = paint(word, code, on=True)
            lines[position] = lines[position][:at] + painted + lines[position][at + len(word) :]
    notes = {
        one.note or f"no answer: {one.problem}"
        for one in (run.answer for run in runs)
        if one.problem
    }
    notes |= {unaccounted(run.answer.unaccounted) for run in runs if run.answer.unaccounted}
    for line in sorted(notes):
        lines += textwrap.wrap(line, width, break_on_hyphens=False)
    return "\n".join(lines)


def _header(status: RunStatus, width: int, *, color: bool) -> str:
    far = status.progress
    state = status.state.value
    since = status.now - status.ledger_state.t
    facts = [status.name, state]
    if status.state in _WAITING and status.ledger_state.t:
        facts[1] += f" for {duration(since)}"
    if far.step is not None:
        facts.append(f"step {_of(far)}{_percent(far)}")
    if far.loss is not None:
        facts.append(f"loss {far.loss:.4g}")
    if status.state is RunState.RUNNING:
        facts += time_left(status)
    lines = pack(facts, width, gap="  ")
    plain = f"{status.name}  {state}"
    if lines[0].startswith(plain):
        painted = paint(status.name, _BOLD, on=color)
        painted += "  " + paint(state, _COLOURS.get(status.state, _BOLD), on=color)
        lines[0] = painted + lines[0].removeprefix(plain)
    words = in_words(status)
    answer = status.answer
    if answer.note:
        words = f"{words}\n{answer.note}"
    elif answer.problem:
        words = f"{words}\n{status.cluster or 'the cluster'} gave no answer: {answer.problem}"
    if answer.unaccounted and not answer.problem:
        words = f"{words}\n{unaccounted(answer.unaccounted)}"
    for line in words.strip().splitlines():
        lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _numbers(status: RunStatus, width: int) -> str:
    """Where its ranks stand, speed, model, checkpoints, goodput: a labelled line or more each."""
    lines = [
        *_mesh(status, width),
        *speed_lines(status, width),
        *model_lines(status, width),
        *save_lines(status, width),
        *goodput_lines(status, width),
    ]
    return "\n".join(lines)


def _mesh(status: RunStatus, width: int) -> list[str]:
    """The newest attempt's mesh, and who stands where; nothing where ranks are on one axis."""
    now = status.mesh
    if now is None or now.mesh.world_size == 1:
        return []
    ranks = f"{in_nodes([len(now.nodes)])} x {count(now.ranks_per_node, 'rank')}"
    lines = [f"mesh        {now.engine}, {now.mesh.text} ({ranks})"]
    if now.mesh.has_axes:
        rows = rank_map(now.mesh, now.nodes, now.ranks_per_node, width=width - 12)
        lines += [f"{'':12}{row}" for row in rows]
    return lines


def _failure(status: RunStatus, width: int) -> str:
    """The last failure, once: its traceback, how often it came, and where the whole log is."""
    failure = status.failure
    if failure is None:
        return ""
    same = [a.failure for a in status.attempts if a.failure is not None]
    times = sum(1 for one in same if one.summary == failure.summary)
    often = f", as in {count(times - 1, 'other attempt')}" if times > 1 else ""
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    where = f"{rank} on {failure.node}" if failure.node else rank
    text = f"attempt {failure.attempt} failed{often}: {where or 'somewhere'}: {failure.summary}"
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    if failure.traceback and status.state is not RunState.DONE:
        lines += [f"  {line}".rstrip() for line in _short(failure.traceback)]
    if status.failure_log:
        lines.append(f"log {status.failure_log}")
    return "\n".join(lines)


def _short(traceback: str) -> list[str]:
    """The end of a traceback is where the error is; its beginning says whose it is."""
    lines = textwrap.dedent(traceback).strip("\n").splitlines()
    left_out = len(lines) - TRACEBACK_LINES
    if left_out <= 0:
        return lines
    return [lines[0], f"  ... {left_out + 1} lines", *lines[left_out + 2 :]]


def _following(status: RunStatus) -> str:
    return "\n".join(f"  {line}" for line in next_commands(status))


def _age(run: RunStatus) -> str:
    """How long the run has been in its state."""
    return duration(run.now - run.ledger_state.t) if run.ledger_state.t else "-"


def _speed(run: RunStatus) -> str:
    return rate(run) if run.state is RunState.RUNNING else "-"


def _goodput(run: RunStatus) -> str:
    useful = run.goodput.useful_of_allocated
    return "-" if useful is None else percent(useful, 1)


def _of(far: Progress) -> str:
    step = "-" if far.step is None else f"{far.step:,}"
    return step if far.total is None else f"{step}/{far.total:,}"


def _percent(far: Progress) -> str:
    if far.step is None or not far.total:
        return ""
    return f" ({100 * far.step // far.total} %)"


def time_left(status: RunStatus) -> list[str]:
    """Time of a step, and how long it takes to the last one at this speed."""
    far, now = status.progress, status.speed
    each = 1 / now.steps_per_s if now is not None and now.steps_per_s else far.step_s
    if not each:
        return []
    if far.step is None or far.total is None or far.step >= far.total:
        return [f"{step_time(each)}/step"]
    return [f"{step_time(each)}/step, about {duration((far.total - far.step) * each)} left"]


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


def speed_lines(status: RunStatus, width: int) -> list[str]:
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
    return pack(items, width, label="speed")


def model_lines(status: RunStatus, width: int) -> list[str]:
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
    return pack(items, width, label="model")


def goodput_lines(status: RunStatus, width: int) -> list[str]:
    """What came of the allocation, the two rates and the classes that make it up."""
    spent = status.goodput
    if spent.allocated_s <= 0:
        return []
    items: list[str] = []
    useful, since = spent.useful_of_allocated, spent.useful_since_submit
    if useful is not None:
        today = status.day.useful_of_allocated if spent.submitted_s > _DAY_S else None
        lately = "" if today is None else f" (last 24 h {percent(today, 1)})"
        items.append(f"{percent(useful, 1)} of allocated{lately}")
    if not spent.tells_steps and any(one.ended is not None for one in status.attempts):
        items.append("useful share not known (no hpctrain.init() in the program)")
    if since is not None:
        items.append(f"{percent(since, 1)} since submit")
    items.append(f"{_node_hours(spent.allocated_s)} allocated")
    if spent.seconds[TimeClass.QUEUE] > 0:
        items.append(f"{duration(spent.seconds[TimeClass.QUEUE])} in the queue")
    return [*pack(items, width, label="goodput"), *_classes(spent, width)]


def _node_hours(node_seconds: float) -> str:
    hours = node_seconds / _HOUR_S
    if hours < 1:
        return f"{60 * hours:.1f} node-minutes"
    return f"{hours:,.0f} node-hours" if hours >= 100 else f"{hours:.1f} node-hours"  # noqa: PLR2004


def _classes(spent: Goodput, width: int) -> list[str]:
    """Shares of the allocated time, the largest first; they add up to 100.0 as they are shown."""
    shares = {kind.value.replace("_", "-"): s for kind, s in spent.node_seconds.items() if s > 0}
    large = {name: s for name, s in shares.items() if s >= SMALL * spent.allocated_s}
    rest = sum(shares.values()) - sum(large.values())
    ordered = sorted(large.items(), key=lambda item: -item[1])
    if rest > 0:
        ordered.append(("rest", rest))
    tenths = _tenths(ordered, spent)
    texts = [f"{name} {value / 10:.1f} %" for (name, _), value in zip(ordered, tenths, strict=True)]
    return pack(texts, width, label=" ")


def _tenths(ordered: list[tuple[str, float]], spent: Goodput) -> list[int]:
    """Tenths of a percent for each; steps get what the line above says of them."""
    names = [name for name, _ in ordered]
    if TimeClass.STEP.value not in names or len(names) == 1:
        return apportioned([value for _, value in ordered])
    steps = round(1000 * spent.node_seconds[TimeClass.STEP] / spent.allocated_s)
    place = names.index(TimeClass.STEP.value)
    others = [value for name, value in ordered if name != TimeClass.STEP.value]
    of_others = apportioned(others, 1000 - steps)
    return [*of_others[:place], steps, *of_others[place:]]


def apportioned(values: list[float], total: int = 1000) -> list[int]:
    """Whole numbers in the values' proportions that add up, rounded up where most is cut off."""
    whole = sum(values)
    if whole <= 0:
        return [0 for _ in values]
    exact = [total * value / whole for value in values]
    parts = [int(one) for one in exact]
    by_rest = sorted(range(len(values)), key=lambda place: parts[place] - exact[place])
    for place in by_rest[: total - sum(parts)]:
        parts[place] += 1
    return parts


def save_lines(status: RunStatus, width: int) -> list[str]:
    """Labelled lines; nothing for a run that never began."""
    lines = _checkpoint(status, width)
    texts = [f"not taken   {one.name}: {one.reason}" for one in status.skipped[:SKIPPED_SHOWN]]
    hidden = len(status.skipped) - SKIPPED_SHOWN
    if hidden > 0:
        texts.append(f"{'':{LABEL}}... {hidden} more (--json shows all)")
    for text in [*_missed_saves(status.saving), *_next_save(status), *texts]:
        lines += textwrap.wrap(
            text,
            width,
            subsequent_indent=" " * LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [*lines, *_disk(status)] if lines else []


def _checkpoint(status: RunStatus, width: int) -> list[str]:
    newest = status.checkpoint
    if newest is None:
        begun = status.progress.saved_step is not None or status.skipped
        none = "none that could be loaded" if begun else "none so far"
        return [f"checkpoint  {none}"] if status.attempts else []
    items = [newest.name]
    if newest.t:
        items.append(f"saved {duration(status.now - newest.t)} ago")
    if newest.size_bytes:
        items.append(size(newest.size_bytes))
    items.append(_verified(status, newest))
    return pack(items, width, label="checkpoint")


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
        return "whole by its manifest, not read back yet"
    last = next(o for o in status.attempts if o.number == readers[-1])
    return f"whole by its manifest, not read back yet (last verified: step {last.first_step:,})"


def _missed_saves(saves: Saving) -> list[str]:
    """A warning for each kind of save that was due and did not come."""
    lines: list[str] = []
    if saves.last_failed is not None:
        before = f", {saves.failed} in a row" if saves.failed > 1 else ""
        lines.append(f"save failed {_at_step(saves.last_failed)}{before}: {saves.last_failed.why}")
    if saves.last_skipped is not None:
        due = saves.committed + saves.failed + saves.skipped
        why = saves.last_skipped.why
        last = _at_step(saves.last_skipped)
        lines.append(f"skipped     {saves.skipped} of {due} saves, the last {last}: {why}")
    return lines


def _at_step(missed: Missed) -> str:
    return "at step -" if missed.step is None else f"at step {missed.step:,}"


def _next_save(status: RunStatus) -> list[str]:
    """When the next save is due and why then; nothing where no rank is there to make it."""
    saves = status.saving
    every = saves.interval
    if every is None or status.state is not RunState.RUNNING:
        return []
    why = f": {every.why}" if every.why else ""
    if every.steps:
        done = status.progress.step or 0
        following = (done // every.steps + 1) * every.steps
        last = status.progress.total or following
        return [f"next save   at step {min(following, last):,} (every {every.steps:,} steps{why})"]
    if every.seconds is None or saves.since is None:
        return []
    # By a node's clock that is ahead of ours the last save may lie in the future.
    left = min(saves.since, status.now) + every.seconds - status.now
    when = f"in about {duration(left)}" if left > 0 else f"due {duration(-left)} ago, or under way"
    return [f"next save   {when} (every {duration(every.seconds)}{why})"]


def _disk(status: RunStatus) -> list[str]:
    free, newest = status.disk_free_bytes, status.checkpoint
    if free is None:
        return []
    each = newest.size_bytes if newest is not None else status.progress.saved_bytes
    text = f"disk        {size(free)} left"
    if each and free // each < ROOM_SHOWN:
        more = count(free // each, "more checkpoint")
        text += f", room for {more}" if free >= each else ", no room for another checkpoint"
    return [text]
