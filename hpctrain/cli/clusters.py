"""`hpctrain queue` and `local`: when a job would start; the embedded cluster, seen, disturbed."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    cluster_option,
    complete_partition,
    complete_run,
    json_option,
    runs_option,
)
from hpctrain.cluster.scheduler.base import default_cluster, get_cluster
from hpctrain.core.base.text import count, duration, in_nodes
from hpctrain.core.terminal import echo_json
from hpctrain.errors import ClusterUnreachable, UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.find_run import find_run
from hpctrain.ledger.run.ownership import refuse_foreign

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.ledger.shapes.queue import QueueView

SIZES = 6
"""Rows of nodes."""
LIMITS_S = tuple(minutes * 60 for minutes in (30, 60, 120, 240, 480, 1440))


@click.command(
    name="queue",
    epilog="""\b
Examples:
  hpctrain queue                      the default partition
  hpctrain queue --partition gpu      another one
  hpctrain queue --json               the same, for programs
""",
)
@click.option("--partition", "-p", default="", shell_complete=complete_partition, help="Partition.")
@cluster_option("Which scheduler; slurm if there is an sbatch.")
@json_option
def command(partition: str, cluster: str | None, *, as_json: bool) -> None:
    """Show which shapes of a job would start now or soon.

    Calculated from the jobs and nodes that you can see and from SLURM's planned starts. A node with
    a job on it counts as taken. SLURM may start a job earlier: most jobs end before their limit.
    """
    scheduler = get_cluster(cluster or default_cluster(os.environ))
    if scheduler.on_this_machine:
        raise UsageError(f"cluster {scheduler.name} has no queue; use it where there is an sbatch")
    view = scheduler.queue_view(partition)
    if view is None:
        where = f"partition {partition}" if partition else "the default partition"
        raise ClusterUnreachable(
            f"the scheduler shows no queue of {where}: it gave no answer within 2 s, or there is "
            "no such partition; `sinfo` lists them"
        )
    if as_json:
        echo_json(as_value(view, partition))
        return
    from hpctrain.core.drawing import echo_table

    echo_table(facts(view, partition))
    click.echo()
    header, rows = table(view)
    echo_table(rows, header=header, right=range(1, len(header)))


def sizes(view: QueueView) -> list[int]:
    """Return the numbers of nodes that are shown: powers of two, and all."""
    most = len(view.nodes)
    powers = [2**n for n in range(16) if 2**n < most]
    return sorted({*powers[-SIZES + 1 :], most} - {0})


def limits_of(view: QueueView) -> list[int]:
    """Return the time limits that are shown, as far as the partition allows them."""
    most = view.max_time_s
    if most is None:
        return list(LIMITS_S)
    return sorted({*(limit for limit in LIMITS_S if limit < most), most})[-len(LIMITS_S) :]


def starts(view: QueueView) -> list[dict[str, Any]]:
    """Return when each shape would start; None where it never would as things are."""
    from hpctrain.ledger.shapes.queue import JobShape

    return [
        {"nodes": n, "limit_s": limit, "start": view.start_of(JobShape(n, limit))}
        for n in sizes(view)
        for limit in limits_of(view)
    ]


def facts(view: QueueView, partition: str) -> list[tuple[str, str]]:
    """Return what is said of the partition."""
    free = len(view.free(view.now, view.now + 1))
    limit = "no time limit" if view.max_time_s is None else f"limit {duration(view.max_time_s)}"
    planned = sum(claim.start > view.now for claim in view.claims)
    holes = [f"{in_nodes([nodes])} {_until(end, view.now)}" for nodes, end in view.holes()]
    return [
        ("partition", f"{partition or '(default)'}: {count(len(view.nodes), 'node')}, {limit}"),
        ("free now", f"{free} of them{': ' if holes else ''}{', '.join(holes)}"),
        ("waiting", f"{count(planned, 'job')} with a planned start, {view.unplanned} without"),
    ]


def _until(end: float, now: float) -> str:
    from hpctrain.observe.status.finish import moment

    return "with no end planned" if end == math.inf else f"until {moment(end, now)}"


def table(view: QueueView) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: nodes down, time limits across, when each would start."""
    from hpctrain.observe.status.finish import moment

    by_shape = {(row["nodes"], row["limit_s"]): row["start"] for row in starts(view)}

    def cell(start: float | None) -> str:
        if start is None:
            return "-"
        return "now" if start <= view.now else moment(start, view.now)

    limits = limits_of(view)
    header = ["a job of", *(duration(limit) for limit in limits)]
    rows = [[in_nodes([n]), *(cell(by_shape[n, limit]) for limit in limits)] for n in sizes(view)]
    return header, rows


def as_value(view: QueueView, partition: str) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "partition": partition,
        "now": view.now,
        "nodes": len(view.nodes),
        "free": len(view.free(view.now, view.now + 1)),
        "holes": [
            {"nodes": nodes, "until": None if end == math.inf else end}
            for nodes, end in view.holes()
        ],
        "max_time_s": view.max_time_s,
        "planned": sum(claim.start > view.now for claim in view.claims),
        "unplanned": view.unplanned,
        "starts": starts(view),
    }


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
