"""`hpctrain train`: the shipped recipe in this terminal, without a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import runs_option

if TYPE_CHECKING:
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
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Change a setting.")
@click.option("--config", metavar="FILE", help="Settings file [hpctrain.toml].")
@runs_option
def command(name: str | None, sets: tuple[str, ...], config: str | None, runs: Path) -> None:
    """Train the shipped language model in this terminal.

    Ctrl-C saves and leaves; the same command with the same --name goes on from there.
    """
    import os
    from pathlib import Path

    from hpctrain.rundir.find import runs_root
    from hpctrain.rundir.layout import RunDir
    from hpctrain.settings.spec import load_spec
    from hpctrain.submit.prepare import SubmitRequest, create_run, prepare
    from hpctrain.submit.resume import ResumeRequest, change_spec, refuse_alive

    root = runs_root(runs)
    existing = RunDir((root / name).absolute()) if name else None
    if existing is not None and existing.spec.exists():
        spec, _ = change_spec(load_spec(existing.spec), ResumeRequest({}, sets))
        refuse_alive(existing, spec)
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
                snapshot=False,
            )
        )
        run = create_run(prepared.spec, prepared.runs, auto_name=prepared.auto_name)
    click.echo(f"run {run.root}")
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    try:
        from hpctrain.recipes.lm.train import main
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from hpctrain.errors import ChecksFailed

        raise ChecksFailed(
            "hpctrain train needs torch, which this Python does not have; install it, "
            "or submit to a cluster that has it"
        ) from None
    main()
