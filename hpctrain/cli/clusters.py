"""`hpctrain local`: the embedded cluster, seen and disturbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import complete_run, runs_option
from hpctrain.core.base.text import count
from hpctrain.core.terminal import echo_json
from hpctrain.errors import UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.ownership import refuse_foreign

if TYPE_CHECKING:
    from pathlib import Path


@click.group(
    epilog="""\b
Examples:
  hpctrain local list
  hpctrain local preempt demo --leave 2 --grace 30    takes all nodes except two
  hpctrain local fail-node demo --node 1              a node dies
"""
)
def local_command() -> None:
    """Inspect the local cluster, and rehearse preemptions or dead nodes."""


def _job_id(run: str, runs: Path) -> str:
    from hpctrain.launch.live_job import newest_submission

    run_dir = find_run(run, runs=runs)
    refuse_foreign(run_dir, group=False, hint="; name a run of your own")  # it may name our job
    _, job_id = newest_submission(RunHistory.read(run_dir))
    if job_id is None or not job_id.startswith("local-"):
        raise UsageError(f"{run_dir.name} has no job on the local cluster (its job is {job_id})")
    return job_id


@local_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_jobs(as_json: bool) -> None:
    """List local jobs of this machine."""
    from dataclasses import asdict

    from hpctrain.cluster.scheduler import local as client

    jobs = client.all_jobs()
    if as_json:
        echo_json([asdict(record) for record in jobs])
        return
    for record in jobs:
        state = (
            record.state if record.state in client.OVER or client.is_controlled(record) else "LOST"
        )
        click.echo(f"{record.job_id:10} {state:10} {len(record.nodes)} nodes  {record.run_dir}")


@local_command.command()
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--leave",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes that stay for the next start.  [default: the fewest that it can do with]",
)
@click.option("--grace", "grace_s", type=float, default=0.0, help="Grace time in seconds.")
@runs_option
def preempt(run: str, leave: int | None, grace_s: float, runs: Path) -> None:
    """Preempt RUN: another job takes its nodes."""
    from hpctrain.cluster.scheduler import local as client

    job_id = _job_id(run, runs)
    record = client.read(job_id)
    if leave is None:
        leave = record.min_nodes if record is not None else 1
    if record is not None and leave < record.min_nodes:
        raise UsageError(
            f"--leave {leave}: {run} needs at least {count(record.min_nodes, 'node')} and could "
            f"not start again; leave {record.min_nodes} or more, or submit with --nodes MIN-MAX"
        )
    client.request(job_id, "preempt", leave=leave, grace_s=grace_s)
    click.echo(f"{job_id} is preempted; its next start has {count(leave, 'node')}")


@local_command.command("free")
@click.argument("run", shell_complete=complete_run)
@runs_option
def free_nodes(run: str, runs: Path) -> None:
    """Free the nodes for the next start."""
    from hpctrain.cluster.scheduler import local as client

    client.request(_job_id(run, runs), "free")


@local_command.command("fail-node")
@click.argument("run", shell_complete=complete_run)
@click.option("--node", type=int, default=0, help="Which node dies.")
@runs_option
def fail_node(run: str, node: int, runs: Path) -> None:
    """Let a node fail silently."""
    from hpctrain.cluster.scheduler import local as client

    job_id = _job_id(run, runs)
    client.request(job_id, "fail_node", node=node)
    click.echo(f"node {node} of {job_id} is dead")
