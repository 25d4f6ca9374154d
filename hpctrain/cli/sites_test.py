"""`hpctrain sites test`: a preset tried out with sbatch.

tests/unit/submit/test_sbatch_test.py holds the promises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import json_option
from hpctrain.cli.sites_names import site_argument

if TYPE_CHECKING:
    from hpctrain.submit.sbatch_test import SbatchTrial

_COLORS = {"accepted": "green", "refused": "red"}


@click.command("test")
@site_argument
@click.option("--partition", multiple=True, metavar="P", help="Only these; may be repeated.")
@click.option("--nodes", multiple=True, type=click.IntRange(min=1), default=(1, 2),
              show_default=True, metavar="N", help="Nodes of a job; may be repeated.")  # fmt: skip
@click.option("--account", metavar="A", help="Account to charge.")
@click.option("--scripts", is_flag=True, help="Print the scripts too.")
@json_option
def command(
    *,
    name: str,
    partition: tuple[str, ...],
    nodes: tuple[int, ...],
    account: str | None,
    scripts: bool,
    as_json: bool,
) -> None:
    """Render this site's job scripts and ask sbatch whether it would take them.

    For every partition that submit may choose, at one node and at two; with all GPUs of a node.
    Nothing is submitted (sbatch --test-only). Exit code 3 where a script is refused.

    \b
    hpctrain sites test mycluster
    hpctrain sites test ./mycluster.toml --partition gpu --nodes 8 --account lab
    """  # noqa: D301 - click wants the control character
    from dataclasses import asdict

    from hpctrain.errors import ChecksFailed
    from hpctrain.scheduler.slurm.command import run
    from hpctrain.submit.sbatch_test import Asked, try_site
    from hpctrain.terminal import echo_json

    asked = Asked(name, partition, nodes, account)
    trials = try_site(asked, cwd=Path.cwd(), environ=os.environ, ask=run)
    if as_json:
        echo_json([asdict(trial) for trial in trials])
    else:
        if scripts:
            for trial in trials:
                click.echo(trial.script)
        from hpctrain.drawing import echo_table

        echo_table([_row(trial) for trial in trials], header=("PARTITION", "NODES", "", ""))
    refused = [trial for trial in trials if not trial.accepted]
    if refused:
        raise ChecksFailed(f"{len(refused)} of {len(trials)} scripts refused; see above")


def _row(trial: SbatchTrial) -> tuple[Any, ...]:
    from rich.text import Text

    word = "accepted" if trial.accepted else "refused"
    gpus = f"{trial.gpus_per_node} GPUs a node" if trial.gpus_per_node else ""
    said = trial.why or gpus
    return (trial.partition or "default", trial.nodes, Text(word, _COLORS[word]), said)
