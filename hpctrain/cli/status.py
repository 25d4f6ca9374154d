"""`hpctrain status`: where runs are, what became of their attempts, what they lost."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import json_option, runs_flag, runs_option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.ledger.events import Event
    from hpctrain.ledger.status import RunStatus
    from hpctrain.rundir.layout import RunDir

ASKED_AT_ONCE = 8


@click.command(
    name="status",
    epilog="""\b
Examples:
  hpctrain status                 all runs in ./runs
  hpctrain status lm-3            its attempts, checkpoints, and why the last one failed
  hpctrain status - --json        the newest run, for programs
  hpctrain status 4711 --exit-status
                                  0 done, 75 under way, 93 stopped for good, 1 failed
""",
)
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--exit-status", is_flag=True, help="Tell the run's state by the exit code.")
@runs_option
@json_option
def command(*, run: str | None, exit_status: bool, as_json: bool, runs: Path) -> int:
    """Show where runs are; with RUN everything about one.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.errors import UsageError
    from hpctrain.ledger.status import exit_status as code_of
    from hpctrain.rundir.find import find_run

    if run is None:
        if exit_status:
            raise UsageError(
                "--exit-status tells the state of one run: name it, or - for the newest"
            )
        _show_all(runs, as_json=as_json)
        return 0
    status = look(find_run(run, runs=runs), runs)
    _show(status, as_json=as_json)
    return code_of(status) if exit_status else 0


def look(run: RunDir, runs: Path, *, checkpoints: bool = True) -> RunStatus:
    """All that is known of a run: its ledger, its checkpoints, its scheduler's answer.

    Args:
        run: The run.
        runs: The folder of all runs, for the commands that are shown.
        checkpoints: Whether to look at the checkpoints, each of which costs a few file operations.
    """
    from hpctrain.checkpoint import find
    from hpctrain.cli.job import ask
    from hpctrain.errors import NotFound
    from hpctrain.ledger import events as ledger
    from hpctrain.ledger.status import Answer, Checkpoint, status_of
    from hpctrain.settings.spec import load_spec

    events = ledger.read(run)
    cluster, total = "", None
    try:
        spec = load_spec(run.spec)
    except NotFound as error:  # a ledger alone still tells most
        answer = Answer(None, asked=False, problem=str(error))
    else:
        cluster = spec.cluster
        total = spec.settings.train.steps if spec.entry.kind == "recipe" else None
        answer = ask(cluster, events)
    choice = find.choose(run) if checkpoints else find.Choice(None)
    writing = _being_written(run, events)
    newest = None
    if choice.found is not None and choice.found.manifest is not None:
        manifest = choice.found.manifest
        weight = sum(entry.size for entry in manifest.files)
        newest = Checkpoint(choice.found.name, choice.found.step, manifest.created, weight)
    inside = run.root.parent == runs
    label = run.name if inside else str(run.root)
    return status_of(
        events,
        answer,
        name=run.name,
        root=str(run.root),
        cluster=cluster,
        total=total,
        checkpoint=newest,
        skipped=[one for one in choice.skipped if one.name not in writing],
        attempt_log=run.rank_log,
        label=label,
        flags=runs_flag(runs) if inside else "",
    )


def _being_written(run: RunDir, events: Sequence[Event]) -> set[str]:
    """Checkpoints that the newest attempt has begun, and may yet commit."""
    from hpctrain.checkpoint import find
    from hpctrain.ledger.derive import RunState, standing

    now = standing(events)
    if now.phase is not RunState.RUNNING:
        return set()
    return {one.path.name for one in find.staged(run) if one.attempt == now.attempt}


def _show(status: RunStatus, *, as_json: bool) -> None:
    from hpctrain.ledger import view

    if as_json:
        from hpctrain.cli.output import echo_json

        echo_json(view.as_json(status))
        return
    click.echo(view.as_text(status, width=_width(), color=_colored()))


def _show_all(runs: Path, *, as_json: bool) -> None:
    """The table of runs; schedulers are asked side by side, since each may take its time."""
    from concurrent.futures import ThreadPoolExecutor

    from hpctrain.ledger import view
    from hpctrain.rundir.find import all_runs

    def one(run: RunDir) -> RunStatus:
        return look(run, runs, checkpoints=as_json)

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        found = list(pool.map(one, all_runs(runs)))
    if as_json:
        from hpctrain.cli.output import echo_json

        echo_json([view.as_json(status) for status in found])
    elif found:
        click.echo(view.runs_as_text(found, width=_width(), color=_colored()))
    else:
        click.echo(f"no runs in {runs}; `hpctrain submit` starts one")


def _colored() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns
