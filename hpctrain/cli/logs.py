"""`hpctrain logs`: what the ranks printed, across attempts and requeues."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import runs_option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.ledger.events import Event
    from hpctrain.rundir.layout import RunDir


@click.command(
    name="logs",
    epilog="""\b
Examples:
  hpctrain logs lm-3 -f               follow rank 0 until the run ends, across requeues
  hpctrain logs lm-3 --rank all --tail 20
  hpctrain logs lm-3 --attempt 2 --rank 5
  hpctrain logs lm-3 --rank batch     the batch script's own output, where a start failed
""",
)
@click.argument("run", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option(
    "--rank", "ranks", default="0", show_default=True, metavar="R|R,R|all|batch", help="Whose."
)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Of this attempt only.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Begin N lines from the end.")
@runs_option
def command(
    *, run: str, follow: bool, ranks: str, attempt: int | None, tail: int | None, runs: Path
) -> None:
    """Print a run's output, attempt by attempt.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.cli.log_follow import Follower, Printer
    from hpctrain.errors import NotFound
    from hpctrain.ledger.events import Tail
    from hpctrain.rundir.find import find_run

    found = find_run(run, runs=runs)
    wanted = _wanted(ranks)
    ledger = Tail(found.events)
    events = ledger.new()
    begun = {event.attempt for event in events if event.attempt is not None}
    if attempt is not None and attempt not in begun and not follow:
        raise NotFound(f"{found.name} has no attempt {attempt}; it has {len(begun)}")
    printer = Printer(found, sys.stdout.buffer, wanted, attempt)
    if tail is not None:
        printer.begin_at_tail(events, tail)
    if follow:
        Follower(found, printer, ledger, events).follow()
        return
    printer.show(events, over=True)
    if not printer.lines:
        click.echo(_why_nothing(found, events, ranks), err=True)


def _wanted(text: str) -> frozenset[int] | str:
    """The ranks that were asked for, or "all" or "batch".

    Raises:
        UsageError: neither of these.
    """
    from hpctrain.cli.log_sections import BATCH
    from hpctrain.errors import UsageError

    if text in {"all", BATCH}:
        return text
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise UsageError(f"--rank {text!r} is neither a rank, several like 0,3, nor all or batch")
    return frozenset(int(number) for number in numbers)


def _why_nothing(run: RunDir, events: Sequence[Event], ranks: str) -> str:
    if not events or not any(event.kind == "attempt_started" for event in events):
        return f"{run.name} has not started yet; --rank batch shows what the job itself printed"
    return f"{run.name}: rank {ranks} has printed nothing that is on record in {run.root}"
