"""`hpctrain submit`: from a command line to a run directory and a job.

tests/unit/cli/test_submit.py holds the promises.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    JobCommand,
    cluster_option,
    engine_options,
    job_flags,
    job_options,
    json_option,
    locked_option,
    profile_options,
    runs_option,
    set_option,
    site_option,
)
from hpctrain.cli.progress import conclude, wait_option
from hpctrain.ledger.run.layout import runs_flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.launch import SubmittedRun
    from hpctrain.launch.prepare import Prepared, SubmitRequest
    from hpctrain.launch.shape import ShapedJob

SETUP_SHOWN = 4
"""Lines of setup in a dry run."""
EXAMPLES = """\b
Examples:
  hpctrain submit --nodes 4
  hpctrain submit --nodes 2-4 --gpus-per-node a100:8 --time 12h -- train.py --lr 3e-4
  hpctrain submit --nodes 2-16 --time auto --dry-run -- train.py  which shape would be done first
  hpctrain submit --nodes 2 --ranks-per-node 4 -- -m package.train --lr 3e-4
  hpctrain submit --nodes 2 -- ./any.sh                 also: bash x, uv run x, a binary
  hpctrain submit --resume-args '--init_from=resume' --resume-if 'out/ckpt.pt' -- train.py
  hpctrain submit --nodes 4 --set train.steps=2000 --engine zero3 --dry-run
  hpctrain submit --nodes 4 --gpus-per-node 8 --engine fsdp2 --mesh tp=8,pp=2
  hpctrain submit --nodes 4 --wait                      watch until the first step is done
  hpctrain submit --nodes 4 --gpus-per-node 8 --profile steps=100:103,ranks=0,7
  hpctrain submit --from lm-3@4000 --without data -- train.py   weights and optimizer of another run
  hpctrain submit --after prepare --nodes 4 -- train.py starts when the run `prepare` is done
  hpctrain submit --nodes 4 --then 'export.py --to hub' -- train.py
  hpctrain submit --cluster local --nodes 2 --ranks-per-node 2 --name try-1
"""


@click.command(name="submit", cls=JobCommand, epilog=EXAMPLES)
@job_options
@engine_options
@profile_options
@site_option
@cluster_option("Where to run; slurm if there is an sbatch, else local: processes on this machine.")
@click.option("--name", "-J", help="Run name; by default the script's name and a number.")
@click.option("--container", metavar="IMAGE", help="Container image for the ranks.")
@click.option(
    "--config", metavar="FILE", help="Settings file.  [default: hpctrain.toml if there is one]"
)
@set_option("Any setting, e.g. train.steps=500.")
@click.option(
    "--env", multiple=True, metavar="NAME=VALUE", help="Environment of the ranks; no secrets."
)
@click.option(
    "--checkpoint",
    multiple=True,
    metavar="PATTERN",
    help="Where PROGRAM saves, e.g. 'out/*.pt' (checkpoint.sealed).",
)
@click.option(
    "--resume-args",
    metavar="ARGS",
    help="Arguments to add from the second start on, e.g. --init_from=resume.",
)
@click.option(
    "--resume-if", metavar="GLOB", help="Add them if files match instead, e.g. 'out/*.pt'."
)
@click.option(
    "--snapshot/--no-snapshot",
    default=None,
    help="Run a copy of the git-tracked files.  [default: yes, up to 64 MB]",
)
@click.option(
    "--from",
    "begin",
    metavar="RUN[@STEP]",
    default="",
    help="Begin with another run's checkpoint (default: the newest): weights, optimizer, "
    "position in the data.",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(["optimizer", "data"]),
    help="What of --from to ignore: the optimizer with schedulers, or the data and the count "
    "of steps.",
)
@click.option(
    "--after",
    multiple=True,
    metavar="RUN",
    help="Start when this run is done; repeatable.",
)
@click.option(
    "--then",
    multiple=True,
    metavar="COMMAND",
    help="Run this in its own job when the run is done ([then]); repeatable.",
)
@locked_option
@runs_option
@wait_option
@click.option("--no-submit", is_flag=True, help="Only make the run directory.")
@click.option("--dry-run", is_flag=True, help="Show what would be submitted, and submit nothing.")
@click.option(
    "--script", "whole", is_flag=True, help="With --dry-run: also print the batch script."
)
@json_option
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGS...]")
def command(
    *,
    script: tuple[str, ...],
    config: str | None,
    no_submit: bool,
    dry_run: bool,
    whole: bool,
    wait: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Start a run: check it, make its directory, submit its job.

    Runs PROGRAM under torchrun's environment: a Python script, -m MODULE, or any executable;
    without PROGRAM the shipped recipe.
    Settings come from the site, then ./hpctrain.toml, then flags; the later wins. The site
    comes from --site, HPCTRAIN_SITE or hpctrain.toml; otherwise it is detected.
    """
    from hpctrain.errors import ClusterError, UsageError
    from hpctrain.launch.prepare import SubmitRequest

    if whole and not dry_run:
        raise UsageError("--script shows the batch script of a --dry-run: give both")
    if wait and (no_submit or dry_run):
        raise UsageError("--wait waits for a job, and --no-submit and --dry-run start none")
    request = SubmitRequest(
        cwd=Path.cwd(),
        environ=os.environ,
        command=script,
        config=Path(config) if config else None,
        cluster_needed=not dry_run and not no_submit,
        ask_accounting=True,
        ask_partitions=not dry_run,
        job=job_flags(flags),
        **flags,
    )
    if dry_run:
        _dry_run(request, whole=whole, as_json=as_json)
        return 0
    from hpctrain.cli.progress import progress
    from hpctrain.launch.launch import submit_run

    submitted = submit_run(request, start=not no_submit, progress=progress)
    code = _report(submitted, wait=wait, as_json=as_json)
    lacking = submitted.job_id is not None and None in submitted.following.values()
    return code or (ClusterError.exit_code if lacking else 0)


def _dry_run(request: SubmitRequest, *, whole: bool, as_json: bool) -> None:
    """Make ready what would be submitted, and print it."""
    from hpctrain.launch.prepare import prepare

    prepared = prepare(request)
    if request.begin or request.without:
        from hpctrain.launch.launch import begin_of

        begin = begin_of(request)
        if begin is not None:
            prepared.notes.append(f"begins with {begin.line}")
    if prepared.spec.settings.shape.choose != "no":
        from hpctrain.launch.launch import choose_shape_of

        shaped = choose_shape_of(prepared)
        if shaped is not None:
            _show_shaped(prepared, request, shaped, whole=whole, as_json=as_json)
            return
    _show(prepared, request, whole=whole, as_json=as_json)


def _show_shaped(
    prepared: Prepared, request: SubmitRequest, shaped: ShapedJob, *, whole: bool, as_json: bool
) -> None:
    """Print the candidates, and what would be submitted in the chosen shape."""
    from dataclasses import replace

    from hpctrain.launch.shape import in_shape, table

    prepared.notes.extend(shaped.notes)
    chosen = replace(prepared, spec=in_shape(prepared.spec, shaped.shape))
    if not as_json:
        from hpctrain.core.drawing import echo_table

        if shaped.choice:
            header, rows = table(shaped.choice)
            echo_table(rows, header=header, right=range(1, len(header)))
            click.echo("\n".join([*shaped.lines(), ""]))
    more = {"shape": shaped.as_json()}
    _show(chosen, request, whole=whole, as_json=as_json, more=more)


def _show(
    prepared: Prepared,
    request: SubmitRequest,
    *,
    whole: bool,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print what would be submitted."""
    from hpctrain.cluster.scheduler.base import get_cluster
    from hpctrain.core.settings.secrets import hide
    from hpctrain.core.terminal import echo_json, echo_warning
    from hpctrain.ledger.run.layout import RunDir

    spec = prepared.spec
    if request.snapshot:
        from hpctrain.launch.snapshot import plan_snapshot

        plan_snapshot(spec.entry, spec.settings.run.snapshot)
    run = RunDir(prepared.runs / spec.name)
    text = get_cluster(spec.cluster).preview(spec, run, lambda: _environment(spec))
    text = str(hide(text, prepared.secrets))
    if as_json:
        from dataclasses import asdict

        from hpctrain.cluster.site.environment import expected_environment

        value: dict[str, Any] = {"run_dir": str(run.root), "script": text, "notes": prepared.notes}
        environment = asdict(expected_environment(spec))
        value |= {"environment": environment, "spec": asdict(spec)}
        value["awaited"] = [asdict(one) for one in prepared.awaited]
        value["following"] = [asdict(one) for one in prepared.following]
        value |= more or {}
        echo_json(hide(value, prepared.secrets))
        return
    for note in prepared.notes:
        echo_warning(note)
    for other in prepared.following:
        echo_warning(f"{other.name} follows: {hide(shlex.join(other.command()), prepared.secrets)}")
    if prepared.awaited:
        echo_warning(f"the job waits until these are done: {_awaited_text(prepared)}")
    if spec.dropped_env:
        echo_warning(f"not passed on to the job: {', '.join(spec.dropped_env)}")
    shown = text if whole else str(hide(_in_short(text, spec), prepared.secrets))
    click.echo(shown, nl=not shown.endswith("\n"))


def _in_short(text: str, spec: Spec) -> str:
    """What sbatch is asked for, and what each rank runs; all of it where it is no batch script."""
    options = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    if not options:
        return text
    setup = spec.settings.slurm.setup
    lines = [*options, *(["", "# on each node first:"] if setup else []), *setup[:SETUP_SHOWN]]
    if len(setup) > SETUP_SHOWN:
        lines.append(f"# ... {len(setup) - SETUP_SHOWN} more")
    lines += ["", f"# each rank ({_shape(spec)}), in {spec.entry.cwd}:", shlex.join(spec.command())]
    return "\n".join([*lines, "", "# --script shows the full batch script"])


def _environment(spec: Spec) -> dict[str, str]:
    from hpctrain.cluster.site.environment import expected_environment

    return {name: value.value for name, value in expected_environment(spec).values.items()}


def _report(submitted: SubmittedRun, *, wait: bool, as_json: bool) -> int:
    """Print what was made; with `wait` look on until its first step. Returns the exit code."""
    from hpctrain.core.terminal import echo_warning
    from hpctrain.launch.program import hears_requests

    prepared, run, job_id = submitted.prepared, submitted.run, submitted.job_id
    spec = prepared.spec
    runs = runs_flag(prepared.runs)
    cancel = "cancel --save" if hears_requests(spec.entry) else "cancel"
    verbs = ("status", "logs -f", cancel) if job_id else ("resume", "status")
    following = [f"hpctrain {verb} {run.name}{runs}" for verb in verbs]
    if as_json:
        facts = _facts(submitted, following)
        return conclude(run, prepared.runs, facts, wait=wait)
    for note in submitted.notes:
        echo_warning(note)
    rows = [("run", str(run.root)), ("job", _job_text(prepared, job_id))]
    if submitted.shaped and submitted.shaped.choice:
        rows += zip(("shape", ""), submitted.shaped.lines(), strict=True)
    rows += [("from", submitted.begins_with)] if submitted.begins_with else []
    if prepared.awaited:
        rows.append(("after", _awaited_text(prepared)))
    rows += [("then", _then_text(*one)) for one in submitted.following.items()]
    if spec.settings.engine.kind == "fsdp2":
        rows.append(("mesh", meshes_text(prepared.meshes)))
    if spec.snapshot:
        from hpctrain.core.base.text import count

        edits = " with uncommitted edits" if spec.snapshot.dirty else ""
        commit = spec.snapshot.commit[:10] or "no commit yet"
        rows.append(("code", f"a copy of {count(spec.snapshot.files, 'file')}, {commit}{edits}"))
    if spec.dropped_env:
        rows.append(("dropped", f"from the environment: {', '.join(spec.dropped_env)}"))
    from hpctrain.core.drawing import echo_table

    echo_table(rows)
    click.echo()
    click.echo("\n".join(f"  {line}" for line in following))
    return conclude(run, prepared.runs, None, wait=wait)


def _job_text(prepared: Prepared, job_id: str | None) -> str:
    shape = f"({_shape(prepared.spec)})"
    return f"{job_id} on {prepared.spec.cluster} {shape}" if job_id else f"none submitted {shape}"


def _shape(spec: Spec) -> str:
    slurm = spec.settings.slurm
    site = f", site {spec.site}" if spec.site else ""
    return f"nodes {slurm.nodes}{_spares_text(spec)}, ranks per node {slurm.ranks()}{site}"


def _spares_text(spec: Spec) -> str:
    """The nodes that are asked for besides, where the scheduler gives any."""
    from hpctrain.cluster.scheduler.base import get_cluster
    from hpctrain.core.base.text import count

    spares = spec.settings.alive.spares
    if not spares or get_cluster(spec.cluster).on_this_machine:
        return ""
    return f" and {count(spares, 'spare')}"


def _awaited_text(prepared: Prepared) -> str:
    return ", ".join(f"{one.run} (job {one.job_id})" for one in prepared.awaited)


def _then_text(name: str, job_id: str | None) -> str:
    return f"{name} (job {job_id})" if job_id else f"{name}, not submitted"


def meshes_text(meshes: Mapping[int, Mesh]) -> str:
    """The meshes of a range of nodes in a line."""
    if len(meshes) == 1:
        return next(iter(meshes.values())).text
    return "; ".join(f"{nodes} nodes: {mesh.text}" for nodes, mesh in meshes.items())


def _facts(submitted: SubmittedRun, following: list[str]) -> dict[str, Any]:
    from dataclasses import asdict

    prepared, run = submitted.prepared, submitted.run
    spec = prepared.spec
    return {
        "run": run.name,
        "run_dir": str(run.root),
        "job_id": submitted.job_id,
        "cluster": spec.cluster,
        "site": spec.site,
        "nodes": spec.settings.slurm.nodes,
        "spares": spec.settings.alive.spares,
        "shape": submitted.shaped.as_json() if submitted.shaped else None,
        "from": submitted.begins_with or None,
        "meshes": {nodes: mesh.as_dict() for nodes, mesh in prepared.meshes.items()},
        "snapshot": asdict(spec.snapshot) if spec.snapshot else None,
        "dropped_env": spec.dropped_env,
        "awaited": [asdict(one) for one in prepared.awaited],
        "following": [{"run": run, "job_id": job} for run, job in submitted.following.items()],
        "notes": submitted.notes,
        "next": following,
    }
