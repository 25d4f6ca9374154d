"""`hpctrain cancel` and `rm`: a run stopped for good, at once or after it has saved; and deleted.

tests/unit/cli/test_cancel.py and tests/slurm/test_cancel.py hold the promises.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

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
from hpctrain.errors import (
    ChecksFailed,
    ClusterUnreachable,
    HpctrainError,
    RunAlive,
    UsageError,
)
from hpctrain.ledger.run.layout import runs_flag

if TYPE_CHECKING:
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.layout import RunDir


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
    from hpctrain.core.terminal import echo_json

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
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.run.layout import RunDir

    ended = cancel(named, save=save, foreign=foreign, runs=runs)
    run_dir = RunDir(ended.dir)
    inside = run_dir.root.parent == runs
    label = f"{run_dir.name}{runs_flag(runs)}" if inside else str(run_dir.root)
    action = "asked to save and stop" if ended.saves else "cancelled" if ended.job_id else "none"
    if not quiet and ended.job_id is None:
        state = status(str(run_dir.root), runs=runs).state
        click.echo(f"{run_dir.name} has no job to cancel: it is {state}")
    elif not quiet:
        history = RunHistory.read(run_dir)
        click.echo(
            _report(run_dir.name, ended.job_id or "", history, asked=save, saves=ended.saves)
        )
        click.echo(f"\n  hpctrain status {label}\n  hpctrain resume {label}")
    return {"run": run_dir.name, "job_id": ended.job_id, "action": action, "saves": ended.saves}


def _report(name: str, job_id: str, history: RunHistory, *, asked: bool, saves: bool) -> str:
    from hpctrain.core.base.env import HPCTRAIN_STOP_FILE
    from hpctrain.ledger.history.progress import progress
    from hpctrain.ledger.history.reported import listens, reported

    step = progress(history).saved_step
    if not saves:
        kept = f"its newest checkpoint is of step {step}" if step else "it had saved nothing yet"
        if history.sealed_path:
            kept = f"its newest registered checkpoint is {history.sealed_path}"
        elif not step and reported(history).is_silent:
            kept = "hpctrain does not know what its program has saved"
        had = "; it was not training, so there was nothing more to save" if asked else ""
        return f"cancelled job {job_id} of {name}; {kept}{had}"
    lines = [f"asked {name} (job {job_id}) to save and stop; it is not requeued"]
    if not listens(history):
        lines.append(
            "its program has not called hpctrain.init() so far: it stops only if it catches "
            f"SIGTERM or looks for {HPCTRAIN_STOP_FILE}. `hpctrain cancel {name}` ends it at once"
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
    from hpctrain.core.base.text import count, size
    from hpctrain.ledger.run.find_run import find_run

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
    from hpctrain.ledger.history.run_state import OVER
    from hpctrain.ledger.run.ownership import refuse_foreign
    from hpctrain.observe.status.reader import StatusReader
    from hpctrain.observe.status.status import UNDER_WAY_STATES

    refuse_foreign(run, group=False)
    if run.root.is_symlink():
        target = run.root.readlink()
        raise ChecksFailed(f"{run.root} is a link to {target}: name that, and remove the link")
    status = StatusReader(run.root.parent).look(run, thorough=False)
    if not status.answer.asked and status.ledger_state.phase not in OVER:
        raise ClusterUnreachable(
            f"nobody can say whether {run.name} has a job: {status.answer.problem}; or delete "
            f"{run.root} yourself, if you know that it has none"
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
