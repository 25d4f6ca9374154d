"""`hpctrain logs` prints what ranks wrote, across attempts; `hpctrain events` prints the ledger."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import run_argument, runs_option, since_option
from hpctrain.core.base import clock
from hpctrain.core.terminal import echo_note
from hpctrain.errors import NotFound, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.find_run import find_run

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.logs.follow import Reading
    from hpctrain.observe.logs.sections import LogSelection


_MANY = 5


@click.command(
    name="logs",
    epilog="""\b
Examples:
  hpctrain logs lm-3 -f               follow rank 0 until the run ends
  hpctrain logs lm-3 --rank all --tail 20
  hpctrain logs lm-3 --attempt 2 --rank 5
  hpctrain logs lm-3 --since 10m --rank 0,7
  hpctrain logs lm-3 --grep 'loss (nan|inf)' -C 2
  hpctrain logs lm-3 --err            tracebacks, NCCL, CUDA, SLURM: what went wrong
  hpctrain logs lm-3 --rank batch     what the batch script printed

A rank's stdout and stderr share one file, so --err selects lines by their words.
""",
)
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends.")
@click.option("--rank", "ranks", metavar="R|R,R|all|batch", help="Whose.  [default: 0]")
@click.option("--attempt", metavar="N|all", help="Only this attempt.")
@click.option(
    "--evaluation",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Of the run that evaluates this checkpoint.",
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@since_option
@click.option("--grep", metavar="RE", help="Only lines that match this regular expression.")
@click.option(
    "-C", "--context", type=click.IntRange(min=0), default=0, metavar="N",
    help="With --grep or --err: also N lines before and after.",
)  # fmt: skip
@click.option("--err", is_flag=True, help="Only errors, of all ranks and the batch script.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
@runs_option
def command(
    *,
    run: str,
    follow: bool,
    ranks: str | None,
    attempt: str | None,
    evaluation: int | None,
    tail: int | None,
    since: float | None,
    grep: str | None,
    context: int,
    err: bool,
    as_json: bool,
    runs: Path,
) -> None:
    """Print a run's output, attempt by attempt.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.observe.logs.sections import LogSelection, both

    if context and not err and grep is None:
        raise UsageError("-C shows lines around those of --grep or --err; neither is given")
    choice = LogSelection(
        ranks=_wanted(ranks, err=err),
        attempt=_wanted_attempt(attempt),
        since=since,
        lines=both(_pattern(grep), err=err) if err or grep is not None else None,
        context=context,
        as_json=as_json,
        color=colored(),
    )
    directory = find_run(run, runs=runs)
    if evaluation is not None:
        directory = _evaluation(directory, evaluation)
    _print(directory, choice, follow=follow, tail=tail, ranks=ranks or "0")


def _evaluation(run: RunDir, step: int) -> RunDir:
    """The run that evaluates a checkpoint."""
    from hpctrain.launch.evaluations import children

    there = children(run)
    if step not in there:
        listed = ", ".join(map(str, sorted(there))) or "none"
        raise NotFound(f"{run.name} has no evaluation of step {step}; there are: {listed}")
    return there[step]


def _print(
    run: RunDir, choice: LogSelection, *, follow: bool, tail: int | None, ranks: str
) -> None:
    from hpctrain.ledger.run.events import Tail
    from hpctrain.observe.logs.follow import EndWatch, Follower, notes_to
    from hpctrain.observe.logs.sections import Printer

    ledger = Tail(run.events, "few")
    printer = Printer(run, sys.stdout.buffer, choice, live=follow)
    watch = EndWatch(run, choice.attempt, notes_to(printer))
    watch.add(ledger.new())
    if choice.attempt is not None and not follow:
        _check_attempt(run, watch.history, choice.attempt)
    if isinstance(choice.ranks, frozenset) and not follow:
        _check_ranks(run, watch.history, choice.ranks)
    if tail is not None:
        printer.begin_at_tail(watch.history, tail)
    if follow:
        Follower(printer, ledger, watch).follow()
        return
    printer.show(watch.history, over=True)
    if not printer.lines:
        click.echo(_why_nothing(run, watch.history, choice, ranks), err=True)


def _check_ranks(run: RunDir, history: RunHistory, ranks: frozenset[int]) -> None:
    """See that the run has had one of these ranks, as far as anybody knows."""
    most = max((attempt.world_size for attempt in history.attempts), default=0)
    if most and min(ranks) >= most:
        there = "rank 0 only" if most == 1 else f"ranks 0 to {most - 1}"
        raise NotFound(f"{run.name} has no rank {min(ranks)}; it has {there}")


def colored() -> bool:
    """Whether stdout takes colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _wanted_attempt(text: str | None) -> int | None:
    """The attempt that was asked for; None for all."""
    if text is None or text == "all":
        return None
    if re.fullmatch("0*[1-9][0-9]{0,8}", text) is None:
        raise UsageError(f"--attempt {text!r} is neither the number of one (1, 2, ...) nor all")
    return int(text)


def _check_attempt(run: RunDir, history: RunHistory, attempt: int) -> None:
    """See that the run has this attempt."""
    if history.attempt(attempt) is None:
        raise NotFound(f"{run.name} has no attempt {attempt}; it has {len(history.attempts)}")


def _wanted(text: str | None, *, err: bool) -> frozenset[int] | str:
    """The ranks that were asked for, or ALL, BATCH, TROUBLE."""
    from hpctrain.observe.logs.sections import ALL, BATCH, TROUBLE

    if text is None:
        return TROUBLE if err else frozenset({0})
    if text in {ALL, BATCH}:
        return text
    numbers = text.split(",")
    if not all(re.fullmatch("[0-9]{1,9}", number.strip()) for number in numbers):
        raise UsageError(f"--rank {text!r} is neither a rank, several like 0,3, nor all or batch")
    return frozenset(int(number) for number in numbers)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    """The expression that lines must match."""
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--grep {text!r} is no regular expression: {error}") from None


def _why_nothing(run: RunDir, history: RunHistory, choice: LogSelection, ranks: str) -> str:
    if choice.lines is not None:
        return f"{run.name}: no line of that kind is on record"
    if choice.since is not None:
        return f"{run.name}: nothing was printed since then"
    if all(attempt.started is None for attempt in history.attempts):
        return f"{run.name} has not started yet; --rank batch shows what the job itself printed"
    return f"{run.name}: rank {ranks} has printed nothing that is on record in {run.root}"


@click.command(
    name="events",
    epilog="""\b
Examples:
  hpctrain events lm-3                all events; step marks are folded
  hpctrain events lm-3 -f             follow until the run ends
  hpctrain events lm-3 --kind attempt_ended,failure
  hpctrain events lm-3 --since 1d --json
""",
)
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the run ends.")
@click.option("--kind", "kinds", metavar="K,K", help="Only these kinds, as --json names them.")
@click.option("--attempt", metavar="N|all", help="Only this attempt.")
@since_option
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option("--all", "every", is_flag=True, help="Do not fold step marks.")
@click.option("--json", "as_json", is_flag=True, help="The ledger's own lines, one object each.")
@runs_option
def events(
    *,
    run: str,
    follow: bool,
    kinds: str | None,
    attempt: str | None,
    since: float | None,
    tail: int | None,
    every: bool,
    as_json: bool,
    runs: Path,
) -> None:
    """Print the events of a run, from its ledger.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.observe.logs.follow import EventLines, Reading

    run_dir = find_run(run, runs=runs)
    if not run_dir.events.is_file():
        raise NotFound(f"{run_dir.name} has no ledger: {run_dir.events} is not there")
    number = _wanted_attempt(attempt)
    lines = EventLines(_kinds(kinds), number, since, fold=not (every or as_json), as_json=as_json)
    reading = Reading(run_dir, lines)
    first = reading.new(last=not follow)
    for text in first if tail is None else deque(first, maxlen=tail):
        click.echo(text)
    if number is not None and not follow:
        _check_attempt(run_dir, RunHistory.of(reading.turns), number)
    for problem in [*reading.left_out, *([] if follow else reading.nothing(kinds))]:
        click.echo(f"{run_dir.name}: {problem}", err=True)
    if follow:
        _follow(run_dir, reading, number)


def _follow(run: RunDir, reading: Reading, attempt: int | None) -> None:
    from hpctrain.observe.logs import follow as log_follow

    watch = log_follow.EndWatch(run, attempt, echo_note)
    watch.add(reading.turns)
    waiting = ""
    over = False
    while not over:
        over = watch.is_over()
        if watch.waiting and watch.waiting != waiting:
            echo_note(watch.waiting)
        waiting = watch.waiting
        clock.sleep(log_follow.POLL_S)
        attempts_seen = len(reading.turns)
        for text in reading.new(last=over):
            click.echo(text)
        watch.add(reading.turns[attempts_seen:])


def _kinds(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(one.strip() for one in text.split(","))
