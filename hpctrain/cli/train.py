"""`hpctrain train`: the shipped recipe in this terminal, without a cluster.

tests/unit/plan/test_mesh.py holds the promises.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from hpctrain.base.env import HPCTRAIN_RUN_DIR
from hpctrain.cli.options import engine_options, runs_option, set_option
from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@click.command(
    epilog="""\b
Examples:
  hpctrain train                              a small model on the Python library's source
  hpctrain train --set train.steps=1000       longer
  hpctrain train --set train.data=~/texts     on your own text files
  hpctrain train --name first                 a second time: goes on where it stopped
"""
)
@click.option("--name", help="Name of the run; one that exists is gone on with.")
@set_option("Change a setting.")
@click.option("--config", metavar="FILE", help="Settings file [hpctrain.toml].")
@engine_options
@runs_option
def command(
    *,
    name: str | None,
    sets: tuple[str, ...],
    config: str | None,
    engine: str | None,
    mesh: dict[str, str] | None,
    runs: Path,
) -> None:
    """Train the shipped language model in this terminal.

    Ctrl-C saves and leaves; the same command with the same --name goes on from there.
    """
    import os
    from pathlib import Path

    from hpctrain.run.find_run import IndexedRun, record
    from hpctrain.run.layout import RunDir, runs_root
    from hpctrain.run.ownership import own_spec
    from hpctrain.settings.check import engine_flags
    from hpctrain.submit.change import ResumeRequest, change_spec
    from hpctrain.submit.live_job import as_own_run, refuse_alive
    from hpctrain.submit.prepare import SubmitRequest, create_run, prepare
    from hpctrain.terminal import echo_warning

    root = runs_root(runs)
    existing = RunDir((root / name).absolute()) if name else None
    if existing is not None and existing.spec.exists():
        request = ResumeRequest(engine_flags(engine, mesh), sets, alone=True)
        spec, _ = change_spec(own_spec(existing, named=existing.name), request)
        refuse_alive(existing, spec)
        spec, notes = as_own_run(existing, spec)
        for note in notes:
            echo_warning(note)
        spec.dump(existing.spec)
        run = existing
    else:
        prepared = prepare(
            SubmitRequest(
                cwd=Path.cwd(),
                environ=os.environ,
                runs=root,
                cluster="local",
                name=name,
                config=Path(config) if config else None,
                sets=sets,
                engine=engine,
                mesh=mesh,
                alone=True,
                snapshot=False,
            )
        )
        for note in prepared.notes:
            echo_warning(note)
        run = create_run(prepared.spec, prepared.runs, auto_name=prepared.auto_name)
    record([IndexedRun(run)])
    click.echo(f"run {run.root}")
    os.environ[HPCTRAIN_RUN_DIR] = str(run.root)
    with _torch_needed():
        from hpctrain.recipes.lm.train import main
    main()


@contextlib.contextmanager
def _torch_needed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ChecksFailed(
            "hpctrain train needs torch, which this Python does not have; install it, "
            "or submit to a cluster that has it"
        ) from None
