"""`hpctrain resume`: on from the newest whole checkpoint, on other nodes if need be.

tests/unit/submit/test_site_submit.py, tests/slurm/test_elastic.py and tests/e2e/test_damaged.py
hold the promises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    JobCommand,
    ask_to_act,
    complete_run,
    engine_options,
    foreign_option,
    job_flags,
    job_options,
    locked_option,
    newest_to_act_on,
    profile_options,
    runs_option,
    set_option,
    yes_option,
)
from hpctrain.cli.progress import conclude, wait_option

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.launch.resume import PreparedResume


PROGRAM = "hpctrain.program"
"""Of a command's context: what stands behind its `--`."""


class _WithProgram(JobCommand):
    """A command behind whose `--` a program stands, which is none of its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put what stands behind `--` aside."""
        own, program = _cut(args)
        ctx.meta[PROGRAM] = program
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Name it in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- PROGRAM ARGS...]"]


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
@wait_option
@click.option("--dry-run", is_flag=True, help="Show the plan and start nothing.")
@yes_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@locked_option
@foreign_option
@runs_option
def command(
    run: str | None,
    *,
    sets: tuple[str, ...],
    from_step: int | None,
    new_code: bool,
    engine: str | None,
    mesh: dict[str, str] | None,
    profile: dict[str, object] | None,
    nsys: int | None,
    dry_run: bool,
    yes: bool,
    wait: bool,
    as_json: bool,
    allow_locked: bool,
    foreign: bool,
    runs: Path,
    **flags: Any,
) -> int:
    """Resume a run that is not running.

    RUN is a name, a job id, a unique beginning of a name, or - for the newest. Loads the
    newest complete checkpoint, at any number of nodes and with any engine. Shows which
    checkpoints were considered, and which rank will be on which node.

    Uses the run's copy of its code; the line `code` names what differs in your checkout. A
    program behind -- runs in its current version, in the run's working directory.
    """
    from dataclasses import asdict

    from hpctrain.cli.progress import progress
    from hpctrain.core.settings.secrets import hide, secrets_in
    from hpctrain.errors import UsageError
    from hpctrain.launch.change import resume_request
    from hpctrain.launch.resume import prepare_resume, resume_run
    from hpctrain.ledger.run.find_run import LATEST, find_run
    from hpctrain.ledger.run.ownership import own_spec

    if wait and dry_run:
        raise UsageError("--wait waits for a job, and --dry-run starts none")
    asks = run is None and not yes and not dry_run
    run_dir = newest_to_act_on("resume", runs) if asks else find_run(run or LATEST, runs=runs)
    request = resume_request(
        job_flags(flags),
        sets,
        from_step,
        engine=engine,
        mesh=mesh,
        profile=profile,
        nsys=nsys,
        allow_locked=allow_locked,
        program=click.get_current_context().meta[PROGRAM],
        new_code=new_code,
    )
    spec = own_spec(run_dir, named=run or LATEST, foreign=foreign)
    prepared = prepare_resume(run_dir, spec, request, os.environ)
    secrets = secrets_in(prepared.spec)
    if not as_json:
        click.echo(hide(_text(prepared), secrets))
    if asks:
        ask_to_act("resume", run_dir)
    resumed = None if dry_run else resume_run(run_dir, prepared, from_step, progress)
    job_id, followers = (resumed.job_id, resumed.notes) if resumed else (None, [])
    facts = {
        "plan": prepared.plan.as_json(),
        "code": hide(prepared.code.line, secrets),
        "notes": hide([*prepared.notes, *followers], secrets),
        "job_id": job_id,
        "awaited": [asdict(one) for one in prepared.awaited],
        "shape": prepared.shaped.as_json() if prepared.shaped else None,
        "run_dir": str(run_dir.root),
    }
    if not as_json and job_id is not None:
        click.echo("".join(f"note         {line}\n" for line in followers), nl=False)
        click.echo(f"job          {job_id}\nnext         hpctrain logs {run_dir.name} -f")
    return conclude(run_dir, runs, facts if as_json else None, wait=wait)


def _text(prepared: PreparedResume) -> str:
    """What a resume will do, as people read it."""
    from hpctrain.ledger.plan.resume import as_text

    lines = [as_text(prepared.plan), f"code         {prepared.code.line}"]
    lines += [f"note         {note}" for note in prepared.notes]
    if prepared.shaped and prepared.shaped.choice:
        lines += [f"shape        {line}" for line in prepared.shaped.lines()]
    lines += [f"after        {one.run} (job {one.job_id})" for one in prepared.awaited]
    return "\n".join(lines)
