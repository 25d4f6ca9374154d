"""`hpctrain sites init|probe|test`: a preset for a cluster of one's own, drafted and tried out.

tests/unit/site/test_draft.py and tests/unit/submit/test_sbatch_test.py hold the promises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.base import clock
from hpctrain.cli.options import json_option, site_argument

if TYPE_CHECKING:
    from hpctrain.preflight.facts import NodeFacts
    from hpctrain.submit.preflight import SbatchTrial

OF_PRESETS = "slurm"
"""The scheduler whose clusters presets describe."""
_COLORS = {"accepted": "green", "refused": "red"}


@click.command("init")
@click.option("--from-slurm", "source", flag_value="slurm", help="Ask the SLURM that answers here.")
@click.option("--name", metavar="NAME", help="The site's name.  [default: SLURM's ClusterName]")
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(path_type=Path), help="Write there, anew."
)
def init_command(*, source: str | None, name: str | None, output: Path | None) -> None:
    """Write a draft of this cluster's preset from what SLURM tells of it.

    Partitions with their limits, GPUs and usable CPUs, preemption with grace and signal, KillWait.
    What SLURM does not know is left out: `hpctrain sites probe` finds interfaces and adapters.

    \b
    hpctrain sites init --from-slurm                      print it
    hpctrain sites init --from-slurm -o mycluster.toml    write it
    hpctrain sites validate mycluster.toml
    hpctrain sites test mycluster.toml
    """  # noqa: D301 - click wants the control character
    from datetime import date

    from hpctrain.errors import UsageError
    from hpctrain.scheduler.base import get_cluster
    from hpctrain.site.detect import draft, site_name

    if source is None:
        raise click.UsageError("nothing to draft from; say --from-slurm.")
    facts = get_cluster(source).facts()
    chosen = name or (output.stem if output else site_name(facts.name))
    today = date.fromtimestamp(clock.now())  # noqa: DTZ012 - a day
    text = draft(facts, name=chosen, today=today.isoformat())
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {output} exists; name another file, or delete it") from None
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from None
    click.echo(f"{output}: a draft for {facts.name}; next: hpctrain sites validate {output}")


@click.command("probe")
@click.option("--toml", "as_toml", is_flag=True, help="A draft of [network], [expect], [storage].")
@json_option
def probe_command(*, as_toml: bool, as_json: bool) -> None:
    """Read this node: interfaces, adapters, GPUs, limits, versions.

    Run it on a compute node, as in `srun -N1 hpctrain sites probe`. Changes nothing.
    """
    from hpctrain.errors import UsageError
    from hpctrain.preflight.facts import draft
    from hpctrain.preflight.probe import probe
    from hpctrain.terminal import echo_json

    if as_toml and as_json:
        raise UsageError("--toml and --json: choose one")
    facts = probe(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    if as_json:
        echo_json(facts.plain())
    elif as_toml:
        click.echo(draft(facts), nl=False)
    else:
        _echo_facts(facts)


def _echo_facts(facts: NodeFacts) -> None:
    """One line for each fact; what could not be read says why."""
    from hpctrain.drawing import echo_table

    rows: list[tuple[str, str]] = [("node", facts.node), ("host", facts.host)]
    interfaces = facts.interfaces or []
    rows += [
        (f"interface {i.name}", f"{'up' if i.up else 'down'} {' '.join(i.addresses)}")
        for i in interfaces
    ]
    rows += [
        (f"adapter {p.hca}:{p.port}", f"{p.state} {p.rate_gbps:g} Gb/s {p.link_layer}")
        for p in facts.ports or []
        if p.rate_gbps is not None
    ]
    rows += [("efa", ", ".join(facts.efa or [])), ("slingshot", ", ".join(facts.cxi or []))]
    rows += [
        (f"gpu {g.index}", f"{g.name}, driver {g.driver}, NVLinks {g.nvlinks}")
        for g in facts.gpus or []
    ]
    rows += [
        ("shared memory", f"{facts.shm_gib} GiB" if facts.shm_gib else ""),
        ("memlock", _kib(facts.memlock or "")),
        ("nofile", str(facts.nofile or "")),
    ]
    rows += [(f"disk {folder}", f"{free} GiB free") for folder, free in (facts.local or {}).items()]
    rows += [(name, value) for name, value in (facts.versions or {}).items()]
    rows += [(f"nccl.conf {name}", value) for name, value in (facts.nccl_conf or {}).items()]
    rows = [row for row in rows if row[1]]
    rows += [(name, f"unknown: {why}") for name, why in facts.unreadable.items()]
    echo_table(rows)


def _kib(limit: str) -> str:
    return f"{limit} KiB" if limit.isdigit() else limit


@click.command("test")
@site_argument
@click.option("--partition", multiple=True, metavar="P", help="Only these; may be repeated.")
@click.option("--nodes", multiple=True, type=click.IntRange(min=1), default=(1, 2),
              show_default=True, metavar="N", help="Nodes of a job; may be repeated.")  # fmt: skip
@click.option("--account", metavar="A", help="Account to charge.")
@click.option("--scripts", is_flag=True, help="Print the scripts too.")
@json_option
def test_command(
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
    from hpctrain.scheduler.base import get_cluster
    from hpctrain.submit.preflight import Asked, try_site
    from hpctrain.terminal import echo_json

    asked = Asked(name, partition, nodes, account)
    trials = try_site(asked, cwd=Path.cwd(), environ=os.environ, cluster=get_cluster(OF_PRESETS))
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
