"""The status of a run as a screen, and runs as a table. Pure: facts in, text out.

Screens are in the order in which people look: is it alive, why does it wait, what happened, is it
fast, is it safe, is the model fine, what did it cost. tests/unit/test_status_cli.py holds the
promises.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from hpctrain.base.rank_map import rank_map
from hpctrain.base.text import Column, count, duration, fit, in_nodes, pack, paint, percent
from hpctrain.ledger.derive import RunState
from hpctrain.status.as_json import as_json
from hpctrain.status.tables import ranks_as_json, ranks_as_text
from hpctrain.status.text import in_words, next_commands, nodes_of, unaccounted
from hpctrain.status.view_attempts import attempts_table
from hpctrain.status.view_numbers import goodput_lines, model_lines, rate, speed_lines, time_left
from hpctrain.status.view_saves import save_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.derive import Progress
    from hpctrain.status.status import RunStatus

__all__ = ["as_json", "as_text", "ranks_as_json", "ranks_as_text", "runs_as_text"]

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


def _header(status: RunStatus, width: int, *, color: bool) -> str:
    far = status.progress
    state = status.state.value
    since = status.now - status.standing.t
    facts = [status.name, state]
    if status.state in _WAITING and status.standing.t:
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
    told = {
        one.note or f"no answer: {one.problem}"
        for one in (run.answer for run in runs)
        if one.problem
    }
    told |= {unaccounted(run.answer.unaccounted) for run in runs if run.answer.unaccounted}
    for line in sorted(told):
        lines += textwrap.wrap(line, width, break_on_hyphens=False)
    return "\n".join(lines)


def _age(run: RunStatus) -> str:
    """How long the run has been in its state."""
    return duration(run.now - run.standing.t) if run.standing.t else "-"


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
