"""`hpctrain status`, `cancel` and `rm`: runs are shown, stopped for good, deleted.

tests/unit/cli/test_status.py, test_cancel.py and tests/slurm/test_cancel.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    ask_to_act,
    complete_run,
    foreign_option,
    json_option,
    newest_to_act_on,
    runs_option,
    yes_option,
)
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_STOP_FILE
from hpctrain.core.base.text import count, duration, size, time_of_day
from hpctrain.core.terminal import can_redraw, echo_json, echo_note
from hpctrain.errors import ChecksFailed, ClusterUnreachable, HpctrainError, RunAlive, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import OVER, RunState
from hpctrain.ledger.run.find_run import find_run, indexed
from hpctrain.ledger.run.layout import RunDir, is_elsewhere
from hpctrain.ledger.run.ownership import refuse_foreign
from hpctrain.observe.status.reader import StatusReader, newest_ranks
from hpctrain.observe.status.status import UNDER_WAY_STATES, RunStatus, exit_status
from hpctrain.observe.status.text import as_json, ranks_as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType


@click.command(
    name="cancel",
    epilog="""\b
Examples:
  hpctrain cancel lm-3 --save     save, then exit; `hpctrain resume lm-3` loses no step
  hpctrain cancel lm-3            at once; steps since the last checkpoint are lost
  hpctrain cancel lr-0.1 lr-0.01  several runs
""",
)
@click.argument("names", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@click.option("--save", is_flag=True, help="Let the run save and exit first.")
@yes_option
@foreign_option
@runs_option
@json_option
def command(
    *, names: tuple[str, ...], save: bool, yes: bool, foreign: bool, as_json: bool, runs: Path
) -> int:
    """Stop a run for good: it is not requeued.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest. Without
    RUN, shows the newest and asks.
    """
    if not names and not yes:
        newest = newest_to_act_on("cancel", runs)
        ask_to_act("cancel", newest)
        names = (newest.name,)
    facts: list[dict[str, object]] = []
    failed = 0
    for name in names or ("-",):
        try:
            facts.append(_cancel(name, save=save, foreign=foreign, runs=runs, quiet=as_json))
        except HpctrainError as error:
            if len(names) < 2:  # noqa: PLR2004
                raise
            click.echo(f"hpctrain: error: {error}", err=True)
            failed = failed or error.exit_code
    if as_json:
        echo_json(facts if len(names) > 1 else facts[0])
    return failed


def _cancel(named: str, *, save: bool, foreign: bool, runs: Path, quiet: bool) -> dict[str, object]:
    """Cancel a run, and say so unless a program reads what is returned."""
    from hpctrain.cli.api import cancel, status

    ended = cancel(named, save=save, foreign=foreign, runs=runs)
    run_dir = RunDir(ended.dir)
    action = "asked to save and stop" if ended.saves else "cancelled" if ended.job_id else "none"
    if not quiet and ended.job_id is None:
        state = status(str(run_dir.root), runs=runs).state
        click.echo(f"{run_dir.name} has no job to cancel: it is {state}")
    elif not quiet:
        history = RunHistory.read(run_dir)
        click.echo(_report(run_dir, ended.job_id or "", history, asked=save, saves=ended.saves))
        click.echo(f"\n  hpctrain status {run_dir.typed}\n  hpctrain resume {run_dir.typed}")
    return {"run": run_dir.name, "job_id": ended.job_id, "action": action, "saves": ended.saves}


def _report(run: RunDir, job_id: str, history: RunHistory, *, asked: bool, saves: bool) -> str:
    from hpctrain.ledger.history.progress import listens, progress, reported

    step = progress(history).saved_step
    if not saves:
        kept = f"its newest checkpoint is of step {step}" if step else "it had saved nothing yet"
        if history.sealed_path:
            kept = f"its newest registered checkpoint is {history.sealed_path}"
        elif not step and reported(history).is_silent:
            kept = "hpctrain does not know what its program has saved"
        had = "; it was not training, so there was nothing more to save" if asked else ""
        return f"cancelled job {job_id} of {run.name}; {kept}{had}"
    lines = [f"asked {run.name} (job {job_id}) to save and stop; it is not requeued"]
    if not listens(history):
        lines.append(
            "its program has not called hpctrain.init() so far: it stops only if it catches "
            f"SIGTERM or looks for {HPCTRAIN_STOP_FILE}. `hpctrain cancel {run.typed}` ends it at "
            "once"
        )
    return "\n".join(lines)


@click.command(
    name="rm",
    epilog="""\b
Examples:
  hpctrain rm lm-3             shows the size, and asks
  hpctrain rm lr-0.1 lr-1 -y   for scripts
""",
)
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_run)
@click.option("-y", "--yes", is_flag=True, help="Delete without asking.")
@runs_option
def remove(*, names: tuple[str, ...], yes: bool, runs: Path) -> None:
    """Delete a run's folder: its checkpoints, logs and ledger.

    Refuses a run that has a job, or for which another run waits.
    """
    chosen = list(dict.fromkeys(find_run(name, runs=runs) for name in names))
    for run in chosen:
        _refuse_needed(run)
    for run in chosen:
        files, nbytes = _size_of(run)
        shown = f"{run.root}: {size(nbytes)} in {count(files, 'file')}"
        if not yes:
            if not sys.stdin or not sys.stdin.isatty():
                raise UsageError(f"{shown}; nobody is there to ask: add --yes to delete it")
            click.confirm(f"delete {shown}?", abort=True, err=True)
        _delete(run)
        click.echo(f"deleted {shown}")


def _refuse_needed(run: RunDir) -> None:
    """Refuse to delete a run that something still needs."""
    refuse_foreign(run, group=False)
    if run.root.is_symlink():
        target = run.root.readlink()
        raise ChecksFailed(f"{run.root} is a link to {target}: name that, and remove the link")
    status = StatusReader(run.root.parent).look(run, thorough=False)
    if not status.answer.asked and status.ledger_state.phase not in OVER:
        has_job = status.ledger_state.job_id is not None
        first = "" if has_job else f"`hpctrain cancel {status.label}` gives it up; "
        raise ClusterUnreachable(
            f"nobody can say whether {run.name} has a job: {status.answer.problem}; {first}or "
            f"delete {run.root} yourself, if you know that it has none"
        )
    if status.state in UNDER_WAY_STATES:
        job = status.ledger_state.job_id
        raise RunAlive(
            f"{run.name} is {status.state.value}{f' (job {job})' if job else ''}: "
            f"`hpctrain cancel {status.label}` first"
        )
    after = (one for one in status.chain if status.root in one.after)
    waits = [one.run for one in after if one.state in UNDER_WAY_STATES]
    if waits:
        raise RunAlive(f"{', '.join(waits)} waits for {run.name}; cancel that first")


def _size_of(run: RunDir) -> tuple[int, int]:
    """How many files a run has, and how many bytes; what cannot be looked at is left out."""
    files = nbytes = 0
    for folder, _, names in os.walk(run.root):
        for name in names:
            with contextlib.suppress(OSError):
                nbytes += (Path(folder) / name).lstat().st_size
                files += 1
    return files, nbytes


def _delete(run: RunDir) -> None:
    """Delete a run's folder; where that is cut short, no half of a run is left under its name."""
    import secrets

    from hpctrain.ledger.run.fence import run_lock

    gone = run.root.with_name(f".removed-{run.name}-{secrets.token_hex(3)}")
    try:
        with run_lock(run):
            _refuse_needed(run)
            run.root.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        where = gone if gone.exists() else run.root
        raise HpctrainError(f"{where} cannot be deleted: {error.strerror or error}") from None


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
def status(
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
    if interval is not None and not watch:
        raise UsageError(f"--interval {interval:g} is for --watch: give both, or neither")
    if every and (names or is_elsewhere(runs)):
        raise UsageError("--all lists your runs of all folders: leave out RUN and --runs")
    if len(names) != 1:
        _require_run({"--exit-status": exit_status, "--ranks": ranks, "--attempts": attempts})
    reader = StatusReader(runs)
    named = list(dict.fromkeys(find_run(name, runs=runs) for name in names))
    if len(named) == 1:
        look = partial(look_at, reader, named[0], attempts=attempts, ranks=ranks)
    else:
        elsewhere = "" if named or is_elsewhere(runs) else "all" if every else "live"
        look = partial(look_at_all, reader, thorough=as_json, named=named, elsewhere=elsewhere)
    if not watch:
        shown = look()
        click.echo(shown.as_json(indent=2) if as_json else shown.as_text())
    else:
        reader.ask_every_s, reader.account_every_s = ASK_EVERY_S, ACCOUNT_EVERY_S
        shown = _keep_looking(look, interval or INTERVAL_S, as_json=as_json)
    if reader.unreadable:
        echo_note(f"{count(reader.unreadable, 'folder')} in {runs} cannot be read")
    return shown.exit_status if exit_status else 0


def _require_run(given: dict[str, bool]) -> None:
    for flag, on in given.items():
        if on:
            raise UsageError(f"{flag} is about one run: name it, or - for the newest")


TERMINATED = 128 + signal.SIGTERM
_AGES = frozenset({"words", "last_seen", "goodput", "last_24h", "disk_free_bytes"})
"""What changes as time goes by although nothing happens."""


@dataclass(frozen=True)
class Shown:
    """One look.

    Attributes:
        screen: Makes what is drawn; rich is imported only where somebody wants to see it.
        as_value: The same for programs; made when it is asked for, since it takes its time.
        over: Nothing of it is under way.
        sure: False where a run seems lost: between two starts of a job a scheduler may not know it.
        exit_status: The run's state for scripts; 0 for all runs.
    """

    screen: Callable[[], RenderableType]
    as_value: Callable[[], Any]
    over: bool
    sure: bool = True
    exit_status: int = 0

    def as_json(self, indent: int | None = None) -> str:
        """One JSON value."""
        return json.dumps(self.as_value(), indent=indent, allow_nan=False)

    def as_text(self) -> str:
        """The screen for stdout as it is."""
        from hpctrain.core.drawing import colored, drawn, width

        return drawn(self.screen(), width(), color=colored())

    @property
    def news(self) -> Any:
        """What two looks have in common unless something happened: all but ages."""
        value = self.as_value()
        runs = value if isinstance(value, list) else [value]
        return [{key: run[key] for key in run if key not in _AGES} for run in runs]


def look_at(reader: StatusReader, run: RunDir, *, attempts: bool, ranks: bool) -> Shown:
    """Everything about one run."""
    status = reader.look(run)
    newest = status.attempts[-1].number if status.attempts else None
    sample = newest_ranks(run, newest) if ranks and newest is not None else None

    def screen() -> RenderableType:
        from hpctrain.observe.status.screen import StatusScreen

        return StatusScreen(status, attempts, ranks, sample)

    def value() -> dict[str, Any]:
        more = {"ranks": ranks_as_json(sample)} if ranks else {}
        return {**as_json(status), **more}

    over, sure = _over([status])
    return Shown(screen, value, over, sure, exit_status(status))


def look_at_all(
    reader: StatusReader, *, thorough: bool, named: Sequence[RunDir] = (), elsewhere: str = ""
) -> Shown:
    """The table of runs."""
    runs = reader.look_at_all(thorough=thorough, named=named, elsewhere=elsewhere)

    def screen() -> RenderableType:
        from hpctrain.core.drawing import uncut
        from hpctrain.observe.status.screen import RunsScreen

        if not runs:
            older = elsewhere == "live" and indexed()
            more = "; `hpctrain status --all` lists those of other folders" if older else ""
            return uncut(f"no runs in {reader.runs}; `hpctrain submit` starts one{more}")
        return RunsScreen(runs, reader.runs)

    return Shown(screen, lambda: [as_json(one) for one in runs], *_over(runs))


def _keep_looking(look: Callable[[], Shown], interval_s: float, *, as_json: bool = False) -> Shown:
    """Look again and again until all is over; returns the last look."""
    drawn_over = not as_json and can_redraw(sys.stdout)
    lost = False
    with _on_screen(interval_s) if drawn_over else nullcontext(_of_news(as_json=as_json)) as show:
        while True:
            shown = look()
            show(shown)
            if shown.over and (shown.sure or lost):
                return shown
            lost = shown.over
            clock.sleep(interval_s)


def _over(runs: Sequence[RunStatus]) -> tuple[bool, bool]:
    """Whether nothing is under way, and whether that is certain."""
    over = all(run.state not in UNDER_WAY_STATES for run in runs)
    return over, all(run.state is not RunState.LOST for run in runs)


def _of_news(*, as_json: bool) -> Callable[[Shown], None]:
    """Prints a look where it has news."""
    news: list[Any] = []

    def show(shown: Shown) -> None:
        if news and news[-1] == shown.news:
            return
        gap = "\n" if news else ""
        click.echo(shown.as_json() if as_json else gap + shown.as_text())
        news[:] = [shown.news]

    return show


@contextmanager
def _on_screen(interval_s: float) -> Iterator[Callable[[Shown], None]]:
    """Draws a look over the one before; the last one stays when the screen is given back."""
    from hpctrain.core.drawing import Framed, live_screen

    last: list[Shown] = []

    def framed() -> RenderableType:
        now = clock.now()
        footer = f"{time_of_day(now, now)}, again every {duration(interval_s)}; Ctrl-C ends"
        return Framed(last[-1].screen() if last else "", footer)

    def show(shown: Shown) -> None:
        last[:] = [shown]
        screen.refresh()

    def stop() -> None:
        """Ctrl-Z: give the terminal back until the shell continues us."""
        screen.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        screen.start(refresh=True)

    screen = live_screen(framed)
    # Ended or stopped in another way than by Ctrl-C, it would leave a screen without a cursor.
    handlers: dict[int, Callable[[], object]] = {
        signal.SIGTERM: partial(sys.exit, TERMINATED),
        signal.SIGTSTP: stop,
        signal.SIGWINCH: screen.refresh,
    }
    before = {n: signal.signal(n, lambda n, _: handlers[n]() and None) for n in handlers}
    try:
        with screen:
            yield show
    except (Exception, SystemExit):
        last.clear()  # the error stands where the screen would be
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if last:
            click.echo(last[-1].as_text())
