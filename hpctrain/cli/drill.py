"""`hpctrain drill`: faults planted in a run, and what came of each held against the promises.

tests/unit/cli/test_drill.py and tests/e2e/test_drill.py hold the promises.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hpctrain.advise.drill.promises import FAULTS, DrillFault, chosen
from hpctrain.advise.drill.schedule import Course, row, summary
from hpctrain.advise.drill.schedule import as_json as results_json
from hpctrain.cli.options import cluster_option, json_option, runs_option, set_option
from hpctrain.core.base.env import HPCTRAIN_FAULTS
from hpctrain.core.base.files import make_runs_folder
from hpctrain.core.settings.layers import parse_set
from hpctrain.core.settings.spec import load_spec
from hpctrain.core.terminal import echo_json, echo_note
from hpctrain.errors import ChecksFailed, HpctrainError
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_RECIPE = {
    "train.steps": 1_000_000,
    "train.global_batch": 24,
    "train.seq_len": 16,
    "train.layers": 2,
    "train.dim": 16,
    "train.heads": 2,
    "train.data_limit_mb": 0.2,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": 20,
}
_ANY = {"run.log_every_s": 0.2, "run.restart_pause_s": 1.0, "budget.crashes": 0}
_SCRIPT = {"checkpoint.interval_s": 10.0}


@click.command(
    name="drill",
    epilog="""\b
Examples:
  hpctrain drill                                 the shipped recipe, on this machine or in SLURM
  hpctrain drill --nodes 2 -- train.py --tiny    your own program
  hpctrain drill --faults kill_rank,flip_bit
  hpctrain drill --dry-run
Exit codes: 0 no promise was broken; 3 one was.
""",
)
@click.argument("words", nargs=-1, metavar="[-- SCRIPT ARGS...]")
@click.option("--faults", default="", metavar="NAME,...", help="Only these.  [default: all]")
@click.option("--nodes", default="1", metavar="N", help="Nodes of the drill's own run.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=2, help="Ranks on each.")
@cluster_option("Where its own run is; slurm if there is an sbatch.")
@set_option("A setting of its own run.")
@click.option(
    "--patience",
    type=click.FloatRange(min=1),
    default=300.0,
    help="Time limit of one fault.",
)
@click.option("--dry-run", is_flag=True, help="Only list the faults.")
@runs_option
@json_option
def command(
    *, words: tuple[str, ...], faults: str, dry_run: bool, as_json: bool, runs: Path, **flags: Any
) -> int:
    """Inject faults into a run, one after another, and check the README's promises.

    It starts a run of its own and cancels it at the end.
    """
    picked = chosen([one.strip() for one in faults.split(",") if one.strip()])
    if dry_run:
        _list(picked, as_json=as_json)
        return 0
    with _stop_as_interrupt():
        return _own(list(words), picked, runs, as_json=as_json, **flags)


@contextmanager
def _stop_as_interrupt() -> Iterator[None]:
    """A drill that is ended cleans up as one that is interrupted."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _list(faults: Sequence[DrillFault], *, as_json: bool) -> None:
    if as_json:
        echo_json([{"name": f.name, "does": f.does, "promise": f.promise} for f in faults])
        return
    for fault in faults:
        click.echo(f"{fault.name}\n    does: {fault.does}\n    promise: {fault.promise}")


def _own(
    words: list[str], faults: list[DrillFault], runs: Path, *, as_json: bool, **flags: Any
) -> int:
    from hpctrain.cli import api

    name = f"drill-{secrets.token_hex(3)}"
    settings = _ANY | (_SCRIPT if words else _RECIPE)
    for setting in flags["sets"]:
        section, key, value = parse_set(setting)
        settings[f"{section}.{key}"] = value
    make_runs_folder(runs)
    armed = runs / f".{name}"
    armed.mkdir(mode=0o700)
    try:
        with _armed(armed):
            started = api.submit(
                words,
                name=name,
                nodes=flags["nodes"],
                ranks_per_node=flags["ranks_per_node"],
                cluster=flags["cluster"],
                settings=settings,
                snapshot=False,
                runs=runs,
            )
        run = RunDir(started.dir)
        try:
            course = Course(
                run,
                load_spec(run.spec).cluster,
                armed=armed,
                patience_s=flags["patience"],
            )
            return _inject(course, faults, as_json=as_json)
        finally:
            _end(run, runs)
    finally:
        shutil.rmtree(armed)


@contextmanager
def _armed(folder: Path) -> Iterator[None]:
    """The environment in which a run is submitted whose armed faults wait for their marker to go.

    A fault whose marker is there does not fire; the drill takes it away when its turn has come.
    """
    before = os.environ.get(HPCTRAIN_FAULTS)
    texts = [before] if before else []
    for fault in FAULTS.values():
        if fault.armed:
            (folder / fault.name).touch()
            texts.append(f"{fault.armed},once={folder / fault.name}")
    os.environ[HPCTRAIN_FAULTS] = ";".join(texts)
    try:
        yield
    finally:
        os.environ.pop(HPCTRAIN_FAULTS)
        if before is not None:
            os.environ[HPCTRAIN_FAULTS] = before


def _end(run: Any, runs: Path) -> None:
    """Cancel the drill's own run, whatever it is at."""
    from hpctrain.cli import api

    try:
        api.cancel(run.name, runs=runs)
    except HpctrainError as error:
        echo_note(f"{run.name}: {error}")


def _inject(course: Course, faults: list[DrillFault], *, as_json: bool) -> int:
    width = shutil.get_terminal_size((100, 24)).columns
    results = []
    if not as_json:
        click.echo(f"drill of {course.run.name} on {course.cluster}")
    for result in course.drill(faults):
        results.append(result)
        if not as_json:
            click.echo(row(result, width))
    if as_json:
        echo_json(results_json(course.run.name, results))
    else:
        click.echo(summary(results))
    broken = [one.fault.name for one in results if one.verdict.outcome == "broken"]
    if broken:
        raise ChecksFailed(f"a promise was broken: {', '.join(broken)}")
    return 0
