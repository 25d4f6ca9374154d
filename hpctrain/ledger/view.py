"""The status of a run as a screen and as JSON. Pure: facts in, text out; it reads and asks nothing.

tests/unit/test_status_cli.py holds the promises.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.ledger.derive import RunState
from hpctrain.ledger.format import (
    Column,
    clock,
    count,
    duration,
    fit,
    fold_nodes,
    in_nodes,
    paint,
    size,
    step_time,
)
from hpctrain.ledger.rank_map import placed, rank_map
from hpctrain.ledger.words import in_words, next_commands, nodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.derive import AttemptView, Progress
    from hpctrain.ledger.saving import Missed, Saving
    from hpctrain.ledger.status import RunStatus

TRACEBACK_LINES = 30
ATTEMPTS_SHOWN = 20
SKIPPED_SHOWN = 8
_BOLD, _GREEN, _YELLOW, _RED = "1", "32", "33", "31"
_COLOURS = {
    RunState.RUNNING: _GREEN,
    RunState.DONE: _GREEN,
    RunState.FAILED: _RED,
    RunState.LOST: _RED,
    RunState.STOPPED: _YELLOW,
    RunState.CANCELLED: _YELLOW,
}


def as_text(status: RunStatus, *, width: int = 80, color: bool = False) -> str:
    """The screen, at most `width` columns wide but for paths, commands and tracebacks."""
    parts = [
        _header(status, width, color=color),
        _attempts(status, width),
        _mesh(status, width),
        _checkpoints(status, width),
        _failure(status),
        _following(status),
    ]
    return "\n\n".join(part for part in parts if part)


def _header(status: RunStatus, width: int, *, color: bool) -> str:
    far = status.progress
    state = paint(status.state.value, _COLOURS.get(status.state, _BOLD), on=color)
    facts = [paint(status.name, _BOLD, on=color), state]
    if far.step is not None:
        facts.append(f"step {_of(far)}{_percent(far)}")
    if far.loss is not None:
        facts.append(f"loss {far.loss:.4g}")
    if status.state is RunState.RUNNING and far.step_s:
        facts.append(f"{step_time(far.step_s)}/step{_time_left(far)}")
    lines = ["  ".join(facts)]
    words = in_words(status)
    if words:
        lines += textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
    if status.answer.problem:
        lines.append(f"{status.cluster or 'the cluster'} gave no answer: {status.answer.problem}")
    return "\n".join(lines)


def _attempts(status: RunStatus, width: int) -> str:
    shown = list(status.attempts)[-ATTEMPTS_SHOWN:]
    if not shown:
        return ""
    one_job = len({attempt.job_id for attempt in status.attempts}) == 1
    columns = [
        Column("#", [str(one.number) for one in shown], right=True),
        Column("job", [one.job_id or "-" for one in shown], drop=1 if one_job else 3),
        Column("where", [fold_nodes(one.nodes) or "-" for one in shown], shrink=True),
        Column("started", [clock(one.started, status.now) for one in shown]),
        Column("ran", [_ran(one, status.now) for one in shown], right=True),
        Column("ended", [_ended(one) for one in shown]),
        Column("steps", [_steps(one) for one in shown]),
        Column("lost", [_or_dash(one.steps_lost) for one in shown], right=True),
        Column("next", [one.next.value if one.next else "-" for one in shown], drop=2),
    ]
    lines = fit(columns, width)
    hidden = len(status.attempts) - len(shown)
    if hidden:
        lines.insert(1, f"... {hidden} earlier attempts (--json shows all)")
    lost = sum(one.steps_lost or 0 for one in status.attempts)
    if len(status.attempts) > 1:
        lines.append(f"{len(status.attempts)} attempts, {lost} steps lost in all")
    return "\n".join(lines)


def _mesh(status: RunStatus, width: int) -> str:
    """The newest attempt's mesh, and who stands where; nothing where ranks are on one axis."""
    now = status.mesh
    if now is None or now.mesh.world_size == 1:
        return ""
    ranks = f"{in_nodes([len(now.nodes)])} x {count(now.ranks_per_node, 'rank')}"
    lines = [f"mesh        {now.engine}, {now.mesh.text} ({ranks})"]
    if now.mesh.has_axes:
        rows = rank_map(now.mesh, now.nodes, now.ranks_per_node, width=width - 12)
        lines += [f"{'':12}{row}" for row in rows]
    return "\n".join(lines)


def _checkpoints(status: RunStatus, width: int) -> str:
    newest = status.checkpoint
    if newest is None:
        begun = status.progress.saved_step is not None or status.skipped
        none = "none that could be loaded" if begun else "none so far"
        lines = [f"checkpoint  {none}"] if status.attempts else []
    else:
        age = f", saved {duration(status.now - newest.t)} ago" if newest.t else ""
        weight = f", {size(newest.size_bytes)}" if newest.size_bytes else ""
        lines = [f"checkpoint  {newest.name}{age}{weight}"]
    texts = [f"not taken   {one.name}: {one.reason}" for one in status.skipped[:SKIPPED_SHOWN]]
    for text in [*_missed_saves(status.saving), *_next_save(status), *texts]:
        lines += textwrap.wrap(
            text, width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


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
    return f"at step {_or_dash(missed.step)}"


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
        return [f"next save   at step {min(following, last)} (every {every.steps} steps{why})"]
    if every.seconds is None or saves.since is None:
        return []
    left = saves.since + every.seconds - status.now
    when = f"in about {duration(left)}" if left > 0 else f"due {duration(-left)} ago, or under way"
    return [f"next save   {when} (every {duration(every.seconds)}{why})"]


def _failure(status: RunStatus) -> str:
    """The last failure, once: its traceback, how often it came, and where the whole log is."""
    failure = status.failure
    if failure is None:
        return ""
    same = [a.failure for a in status.attempts if a.failure is not None]
    times = sum(1 for one in same if one.summary == failure.summary)
    often = f", as in {times - 1} other attempt(s)" if times > 1 else ""
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    where = f"{rank} on {failure.node}" if failure.node else rank
    lines = [f"attempt {failure.attempt} failed{often}: {where or 'somewhere'}: {failure.summary}"]
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
    verbs = next_commands(status)
    return "\n".join(f"  {line}" for line in verbs)


def runs_as_text(runs: Sequence[RunStatus], *, width: int = 80, color: bool = False) -> str:
    """One line for each run."""
    columns = [
        Column("run", [run.name for run in runs], shrink=True),
        Column("state", [run.state.value + ("?" * (not run.answer.asked)) for run in runs]),
        Column("step", [_of(run.progress) for run in runs], right=True),
        Column("nodes", [_or_dash(len(nodes_of(run)) or None) for run in runs], right=True),
        Column("attempts", [str(len(run.attempts)) for run in runs], right=True, drop=1),
        Column("job", [run.standing.job_id or "-" for run in runs], drop=2),
        Column("for", [_age(run) for run in runs], right=True),
    ]
    lines = fit(columns, width)
    for position, run in enumerate(runs, start=1):
        word, code = run.state.value, _COLOURS.get(run.state, _BOLD)
        if color:
            at = lines[position].find(word, len(lines[position].split("  ")[0]))
            painted = paint(word, code, on=True)
            lines[position] = lines[position][:at] + painted + lines[position][at + len(word) :]
    problems = sorted({run.answer.problem for run in runs if run.answer.problem})
    return "\n".join([*lines, *(f"no answer: {problem}" for problem in problems)])


def _age(run: RunStatus) -> str:
    """How long the run has been in its state."""
    return duration(run.now - run.standing.t) if run.standing.t else "-"


# ---- JSON ---------------------------------------------------------------------------------------


def as_json(status: RunStatus) -> dict[str, Any]:
    """The same for programs; times are seconds since the epoch."""
    far, now = status.progress, status.standing
    return {
        "run": status.name,
        "run_dir": status.root,
        "state": status.state.value,
        "words": in_words(status),
        "step": far.step,
        "total_steps": far.total,
        "loss": _finite(far.loss),
        "step_s": far.step_s,
        "last_seen": far.seen,
        "since": now.t or None,
        "cluster": status.cluster,
        "job_id": now.job_id,
        "job": asdict(status.answer.job) if status.answer.job else None,
        "cluster_problem": status.answer.problem or None,
        "cancel_requested": now.cancel or None,
        "exit_code": now.exit_code,
        "why": now.detail or None,
        "checkpoint": asdict(status.checkpoint) if status.checkpoint else None,
        "not_taken": [asdict(one) for one in status.skipped],
        "interval": asdict(status.saving.interval) if status.saving.interval else None,
        "saves": _saves_json(status.saving),
        "mesh": _mesh_json(status),
        "attempts": [_attempt_json(one) for one in status.attempts],
        "steps_lost": sum(one.steps_lost or 0 for one in status.attempts),
        "failure": asdict(status.failure) if status.failure else None,
        "failure_log": status.failure_log or None,
        "next": next_commands(status),
    }


def _mesh_json(status: RunStatus) -> dict[str, Any] | None:
    """The newest attempt's mesh, with every rank's node and place on each axis."""
    if status.mesh is None:
        return None
    now = status.mesh
    return {**asdict(now), "ranks": placed(now.mesh, now.nodes, now.ranks_per_node)}


def _saves_json(saves: Saving) -> dict[str, Any]:
    value = asdict(saves)
    del value["interval"]
    return value


def _attempt_json(attempt: AttemptView) -> dict[str, Any]:
    value = asdict(attempt)
    value["failure"] = attempt.failure.summary if attempt.failure else None
    return value


def _ran(attempt: AttemptView, now: float) -> str:
    return duration((now if attempt.ended is None else attempt.ended) - attempt.started)


def _ended(attempt: AttemptView) -> str:
    if attempt.reason is not None:
        return attempt.reason.value
    return "running" if attempt.ended is None else "unknown"


def _steps(attempt: AttemptView) -> str:
    if attempt.first_step is None:
        return "-"
    return f"{attempt.first_step}-{attempt.last_step}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _of(far: Progress) -> str:
    step = _or_dash(far.step)
    return step if far.total is None else f"{step}/{far.total}"


def _percent(far: Progress) -> str:
    if far.step is None or not far.total:
        return ""
    return f" ({100 * far.step // far.total} %)"


def _time_left(far: Progress) -> str:
    if far.step is None or far.total is None or far.step_s is None or far.step >= far.total:
        return ""
    return f", about {duration((far.total - far.step) * far.step_s)} left"


def _finite(value: float | None) -> float | None:
    return value if value is None or abs(value) < float("inf") else None
