"""`hpctrain status`: where runs are, what became of their attempts, what they lost.

tests/unit/cli/test_status.py and tests/unit/scheduler/test_status_questions.py hold the promises.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import complete_run, json_option, runs_option
from hpctrain.ledger.run.layout import runs_flag

if TYPE_CHECKING:
    from pathlib import Path

INTERVAL_S = 5.0
ASK_EVERY_S = 10.0
ACCOUNT_EVERY_S = 120.0
"""While watching, at most so often: questions cost a scheduler that all users share."""


@click.command(
    name="status",
    epilog="""\b
Examples:
  hpctrain status               all runs in ./runs, and live ones elsewhere
  hpctrain status --all         all your runs, wherever they lie
  hpctrain status lm-3          attempts, speed, checkpoints, the last failure
  hpctrain status lr-0.1 lr-1   a line for each of these runs
  hpctrain status lm-3 --watch  redraw every 5 s until the run is over
  hpctrain status lm-3 --ranks  which rank is slow, and why
  hpctrain status - --json      the newest run, for programs
  hpctrain status 4711 --exit-status
                                0 done, 75 under way, 93 stopped, 1 failed
""",
)
@click.argument("names", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@click.option("--watch", is_flag=True, help="Redraw until the run is over.")
@click.option(
    "-i",
    "--interval",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help=f"Seconds between two updates of --watch.  [default: {INTERVAL_S:g}]",
)
@click.option("--all", "every", is_flag=True, help="Also list finished runs in other folders.")
@click.option("--attempts", is_flag=True, help="Show all attempts instead of the last 20.")
@click.option("--ranks", is_flag=True, help="Add a table of ranks: time, data wait, memory.")
@click.option("--exit-status", is_flag=True, help="Return the run's state as exit code.")
@runs_option
@json_option
def command(
    *,
    names: tuple[str, ...],
    watch: bool,
    interval: float | None,
    every: bool,
    attempts: bool,
    ranks: bool,
    exit_status: bool,
    as_json: bool,
    runs: Path,
) -> int:
    """Show runs: one RUN in full, several with a line each.

    Without RUN, lists the runs in ./runs and your live runs in other folders.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.core.base.text import count
    from hpctrain.core.terminal import echo_note
    from hpctrain.errors import UsageError
    from hpctrain.ledger.run.find_run import find_run
    from hpctrain.observe.status.reader import StatusReader
    from hpctrain.observe.status.watch import keep_looking, look_at, look_at_all

    if interval is not None and not watch:
        raise UsageError(f"--interval {interval:g} is for --watch: give both, or neither")
    if every and (names or runs_flag(runs)):
        raise UsageError("--all lists your runs of all folders: leave out RUN and --runs")
    if len(names) != 1:
        _require_run({"--exit-status": exit_status, "--ranks": ranks, "--attempts": attempts})
    reader = StatusReader(runs)
    named = list(dict.fromkeys(find_run(name, runs=runs) for name in names))
    if len(named) == 1:
        look = partial(look_at, reader, named[0], attempts=attempts, ranks=ranks)
    else:
        elsewhere = "" if named or runs_flag(runs) else "all" if every else "live"
        look = partial(look_at_all, reader, thorough=as_json, named=named, elsewhere=elsewhere)
    if not watch:
        shown = look()
        click.echo(shown.as_json(indent=2) if as_json else shown.as_text())
    else:
        reader.ask_every_s, reader.account_every_s = ASK_EVERY_S, ACCOUNT_EVERY_S
        shown = keep_looking(look, interval or INTERVAL_S, as_json=as_json)
    if reader.unreadable:
        echo_note(f"{count(reader.unreadable, 'folder')} in {runs} cannot be read")
    return shown.exit_status if exit_status else 0


def _require_run(given: dict[str, bool]) -> None:
    from hpctrain.errors import UsageError

    for flag, on in given.items():
        if on:
            raise UsageError(f"{flag} is about one run: name it, or - for the newest")
