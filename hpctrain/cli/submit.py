"""`hpctrain submit` and `resume`: from a command line to a run and its next job.

tests/unit/cli/test_submit.py, tests/unit/submit/test_site_submit.py, tests/slurm/test_elastic.py
and tests/e2e/test_damaged.py hold the promises.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    JobCommand,
    ask_to_act,
    cluster_option,
    complete_run,
    echo_table,
    engine_options,
    foreign_option,
    job_flags,
    job_options,
    json_option,
    locked_option,
    newest_to_act_on,
    profile_options,
    runs_option,
    set_option,
    submission_options,
    submit_request,
    yes_option,
)
from hpctrain.cli.progress import progress
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base.text import count
from hpctrain.core.terminal import echo_json, echo_warning
from hpctrain.errors import ClusterError, UsageError
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.launch import SubmittedRun
    from hpctrain.launch.prepare import Prepared, SubmitRequest
    from hpctrain.launch.resume import PreparedResume
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
  hpctrain submit --nodes 4 --gpus-per-node 8 --profile steps=100:103,ranks=0,7
  hpctrain submit --from lm-3@4000 --without data -- train.py   weights and optimizer of another run
  hpctrain submit --after prepare --nodes 4 -- train.py starts when the run `prepare` is done
  hpctrain submit --nodes 4 --then 'export.py --to hub' -- train.py
  hpctrain submit --cluster local --nodes 2 --ranks-per-node 2 --name try-1
"""


@click.command(name="submit", cls=JobCommand, epilog=EXAMPLES)
@submission_options
@profile_options
@cluster_option("Where to run; slurm if there is an sbatch, else local: processes on this machine.")
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
@click.option("--no-submit", is_flag=True, help="Only make the run directory.")
@click.option("--dry-run", is_flag=True, help="Show what would be submitted, and submit nothing.")
@click.option(
    "--script", "whole", is_flag=True, help="With --dry-run: also print the batch script."
)
def command(
    *,
    no_submit: bool,
    dry_run: bool,
    whole: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Start a run: check it, make its directory, submit its job.

    Runs PROGRAM under torchrun's environment: a Python script, -m MODULE, or any executable;
    without PROGRAM the shipped recipe.
    Settings come from the site, then ./hpctrain.toml, then flags; the later wins. The site
    comes from --site, HPCTRAIN_SITE or hpctrain.toml; otherwise it is detected.
    """
    from hpctrain.advise.lint.render import lint_notes

    if whole and not dry_run:
        raise UsageError("--script shows the batch script of a --dry-run: give both")
    request = submit_request(
        flags,
        cluster_needed=not dry_run and not no_submit,
        ask_partitions=not dry_run,
        lint=lint_notes,
    )
    if dry_run:
        _dry_run(request, whole=whole, as_json=as_json)
        return 0
    from hpctrain.launch.launch import submit_run

    submitted = submit_run(request, start=not no_submit, progress=progress)
    _report(submitted, as_json=as_json)
    lacking = submitted.job_id is not None and None in submitted.following.values()
    return ClusterError.exit_code if lacking else 0


def _dry_run(request: SubmitRequest, *, whole: bool, as_json: bool) -> None:
    """Make ready what would be submitted, and print it."""
    from hpctrain.launch.prepare import prepare

    prepared, shaped = prepare(request), None
    if request.begin or request.without:
        from hpctrain.launch.launch import begin_of

        if begin := begin_of(request):
            prepared.notes.append(f"begins with {begin.line}")
    if prepared.spec.settings.shape.choose != "no":  # else without launch.py, which takes 75 ms
        from hpctrain.launch.launch import choose_shape_of

        shaped = choose_shape_of(prepared)
    if shaped is not None:
        _show_shaped(prepared, shaped, whole=whole, as_json=as_json)
    else:
        _show(prepared, whole=whole, as_json=as_json)


def _show_shaped(prepared: Prepared, shaped: ShapedJob, *, whole: bool, as_json: bool) -> None:
    """Print the candidates, and what would be submitted in the chosen shape."""
    from dataclasses import replace

    from hpctrain.launch.shape import in_shape, table

    prepared.notes.extend(shaped.notes)
    chosen = replace(prepared, spec=in_shape(prepared.spec, shaped.shape))
    if shaped.choice and not as_json:
        header, rows = table(shaped.choice)
        echo_table(rows, header=header, right=range(1, len(header)))
        click.echo("\n".join([*shaped.lines(), ""]))
    more = {"shape": shaped.as_json()}
    _show(chosen, whole=whole, as_json=as_json, more=more)


def _show(
    prepared: Prepared,
    *,
    whole: bool,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print what would be submitted."""
    from hpctrain.core.settings.spec import hide

    spec = prepared.spec
    if spec.settings.run.snapshot == "yes":
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


def _report(submitted: SubmittedRun, *, as_json: bool) -> None:
    """Print what was made."""
    from hpctrain.launch.program import hears_requests

    prepared, run, job_id = submitted.prepared, submitted.run, submitted.job_id
    spec = prepared.spec
    cancel = "cancel --save" if hears_requests(spec.entry) else "cancel"
    verbs = ("status", "logs -f", cancel) if job_id else ("resume", "status")
    following = [f"hpctrain {verb} {run.typed}" for verb in verbs]
    if as_json:
        echo_json(_facts(submitted, following))
        return
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
        edits = " with uncommitted edits" if spec.snapshot.dirty else ""
        commit = spec.snapshot.commit[:10] or "no commit yet"
        rows.append(("code", f"a copy of {count(spec.snapshot.files, 'file')}, {commit}{edits}"))
    if spec.dropped_env:
        rows.append(("dropped", f"from the environment: {', '.join(spec.dropped_env)}"))
    echo_table(rows)
    click.echo()
    click.echo("\n".join(f"  {line}" for line in following))


def _job_text(prepared: Prepared, job_id: str | None) -> str:
    shape = f"({_shape(prepared.spec)})"
    return f"{job_id} on {prepared.spec.cluster} {shape}" if job_id else f"none submitted {shape}"


def _shape(spec: Spec) -> str:
    slurm = spec.settings.slurm
    site = f", site {spec.site}" if spec.site else ""
    return f"nodes {slurm.nodes}{_spares_text(spec)}, ranks per node {slurm.ranks()}{site}"


def _spares_text(spec: Spec) -> str:
    """The nodes that are asked for besides, where the scheduler gives any."""
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


BEHIND_DASHES = "hpctrain.program"
"""Of a command's context: what stands behind its `--`."""


class _WithProgram(JobCommand):
    """A command behind whose `--` a program stands, which is none of its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put what stands behind `--` aside."""
        own, program = _cut(args)
        ctx.meta[BEHIND_DASHES] = program
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Name it in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- BEHIND_DASHES ARGS...]"]


def _cut(args: list[str]) -> tuple[list[str], list[str]]:
    """Return what is in front of `--`, and what is behind it."""
    if "--" not in args:
        return args, []
    at = args.index("--")
    if not args[at + 1 :]:
        raise click.UsageError("nothing stands behind --; name the program with its arguments.")
    return args[:at], args[at + 1 :]


@click.command(
    cls=_WithProgram,
    epilog="""\b
Examples:
  hpctrain resume                        the newest run; asks first
  hpctrain resume lm-3 --nodes 2         on two nodes; the checkpoint is resharded
  hpctrain resume lm-3 --engine fsdp2 --mesh tp=2
                                         with another engine; the weights are the same
  hpctrain resume lm-3 --from 4000       back to step 4000; newer ones are quarantined
  hpctrain resume lm-3 --new-code        with your checkout as it is now
  hpctrain resume lm-3 -- train.py --epochs 40
                                         with other arguments, also after it is done
  hpctrain resume lm-3 --dry-run         show the plan, and start nothing
""",
)
@click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_run)
@job_options
@engine_options
@profile_options
@set_option("Change a setting.")
@click.option(
    "--from",
    "from_step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Resume from this checkpoint and quarantine newer ones. 0 starts over.",
)
@click.option(
    "--new-code",
    is_flag=True,
    help="Run your checkout as it is now, not the run's copy.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and start nothing.")
@yes_option
@json_option
@locked_option
@foreign_option
@runs_option
def resume(
    run: str | None,
    *,
    sets: tuple[str, ...],
    from_step: int | None,
    new_code: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    allow_locked: bool,
    foreign: bool,
    runs: Path,
    **flags: Any,
) -> None:
    """Resume a run that is not running.

    RUN is a name, a job id, a unique beginning of a name, or - for the newest. Loads the
    newest complete checkpoint, at any number of nodes and with any engine. Shows which
    checkpoints were considered.

    Uses the run's copy of its code; the line `code` names what differs in your checkout. A
    program behind -- runs in its current version, in the run's working directory.
    """
    from dataclasses import asdict

    from hpctrain.core.settings.spec import hide, secrets_in
    from hpctrain.launch.change import ResumeRequest
    from hpctrain.launch.resume import prepare_resume, resume_run
    from hpctrain.ledger.run.find_run import LATEST, find_run
    from hpctrain.ledger.run.ownership import own_spec

    asks = run is None and not yes and not dry_run
    run_dir = newest_to_act_on("resume", runs) if asks else find_run(run or LATEST, runs=runs)
    request = ResumeRequest(
        job_flags(flags),
        sets,
        from_step,
        allow_locked=allow_locked,
        program=click.get_current_context().meta[BEHIND_DASHES],
        new_code=new_code,
        ask_accounting=True,
    )
    spec = own_spec(run_dir, named=run or LATEST, foreign=foreign)
    prepared = prepare_resume(run_dir, spec, request, os.environ)
    secrets = secrets_in(prepared.spec)
    if not as_json:
        click.echo(hide(_plan_text(prepared), secrets))
    if asks:
        ask_to_act("resume", run_dir)
    job_id, followers = None, list[str]()
    if not dry_run:
        job_id, followers = resume_run(run_dir, prepared, from_step, progress)
    facts = {
        "plan": asdict(prepared.plan),
        "code": hide(prepared.code.line, secrets),
        "notes": hide([*prepared.notes, *followers], secrets),
        "job_id": job_id,
        "awaited": [asdict(one) for one in prepared.awaited],
        "shape": prepared.shaped.as_json() if prepared.shaped else None,
        "run_dir": str(run_dir.root),
    }
    if as_json:
        echo_json(facts)
    elif job_id is not None:
        click.echo("".join(f"note         {line}\n" for line in followers), nl=False)
        click.echo(f"job          {job_id}\nnext         hpctrain logs {run_dir.typed} -f")


def _plan_text(prepared: PreparedResume) -> str:
    """What a resume will do, as people read it."""
    from hpctrain.launch.resume import as_text

    lines = [as_text(prepared.plan), f"code         {prepared.code.line}"]
    lines += [f"note         {note}" for note in prepared.notes]
    if prepared.shaped and prepared.shaped.choice:
        lines += [f"shape        {line}" for line in prepared.shaped.lines()]
    lines += [f"after        {one.run} (job {one.job_id})" for one in prepared.awaited]
    return "\n".join(lines)
