"""`hpctrain profile`: what steps spend their time on, and a look at a live run.

tests/unit/cli/test_profile.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import foreign_option, json_option, run_argument, runs_option
from hpctrain.run.find_run import runs_flag

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.profile.verdict import Profile
    from hpctrain.run.layout import RunDir

STEPS = 3


@click.command(
    name="profile",
    epilog="""\b
Examples:
  hpctrain profile lm-3                            what the profiles of a run say
  hpctrain profile lm-3 --now --wait               look at 3 steps of rank 0 now
  hpctrain profile lm-3 --now --steps 5 --ranks 0,7
  hpctrain profile lm-3 --now --ranks all --memory
  hpctrain submit --nodes 4 --profile steps=100:103,ranks=0,7
                                                   steps that are known beforehand
""",
)
@run_argument
@click.option("--now", is_flag=True, help="Profile the next steps of a live run.")
@click.option("--steps", type=int, metavar="N", help=f"With --now: how many.  [default: {STEPS}]")
@click.option("--ranks", metavar="R[,R]|all", help="With --now: which.  [default: 0]")
@click.option("--memory", is_flag=True, help="With --now: also what holds the GPU's memory.")
@click.option("--wait", is_flag=True, help="With --now: wait for the profile and show it.")
@json_option
@foreign_option
@runs_option
def command(
    *,
    run: str,
    now: bool,
    steps: int | None,
    ranks: str | None,
    memory: bool,
    wait: bool,
    foreign: bool,
    as_json: bool,
    runs: Path,
) -> None:
    """Show where the time of profiled steps went, rank by rank, and what training is bound by.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest. The traces
    themselves open in ui.perfetto.dev and in TensorBoard.
    """
    from hpctrain.base.files import follow_folder
    from hpctrain.errors import UsageError
    from hpctrain.run.find_run import find_run

    run_dir = find_run(run, runs=runs)
    follow_folder(run_dir.root)
    name = f"{run_dir.name}{runs_flag(runs)}" if run_dir.root.parent == runs else str(run_dir.root)
    given = {"--steps": steps, "--ranks": ranks, "--memory": memory, "--wait": wait}
    if not now:
        if idle := [flag for flag, value in given.items() if value]:
            raise UsageError(f"{idle[0]} needs --now; without it old profiles are shown")
        _show(run_dir, name, as_json=as_json)
        return
    from hpctrain.cli import profile_now
    from hpctrain.run.ownership import own_spec

    own_spec(run_dir, named=run, foreign=foreign)
    request, expected = profile_now.ask_for(
        run_dir, steps=STEPS if steps is None else steps, ranks=ranks or "0", memory=memory
    )
    if wait:
        profile = profile_now.wait_for(run_dir, request, expected)
        _print(run_dir, [profile], as_json=as_json)
    elif as_json:
        _echo({"run": run_dir.name, "job_id": request.job_id, "token": request.token})
    else:
        count = "the next step" if request.steps == 1 else f"{request.steps} steps"
        who = "all ranks" if request.ranks is None else _ranks(request.ranks)
        click.echo(f"asked {run_dir.name} (job {request.job_id}) to profile {count} of {who}")
        click.echo(f"\n  hpctrain profile {name}")


def _show(run: RunDir, name: str, *, as_json: bool) -> None:
    """Print every profile of a run."""
    from hpctrain.cli.profile_now import under_way
    from hpctrain.cli.progress import line
    from hpctrain.profile.files import find
    from hpctrain.profile.verdict import examine
    from hpctrain.run import events as ledger

    found_profiles = find(run.profile)
    profiles = []
    with line() as shown:
        for number, one in enumerate(found_profiles, 1):
            if shown.in_place:  # in a log a line for something that takes a second is too much
                shown.show(
                    f"reading profile {number} of {len(found_profiles)} ({len(one.files)} ranks)"
                )
            profiles.append(examine(one))
    window = under_way(ledger.read(run))
    if window is not None and not as_json:
        click.echo(f"steps {window.first} to {window.last} are being profiled")
    elif not found_profiles and not as_json:
        click.echo(f"{run.name} has no profile so far; while it runs, this takes one:")
        click.echo(f"\n  hpctrain profile {name} --now --wait")
    _print(run, profiles, as_json=as_json)


def _print(run: RunDir, profiles: list[Profile], *, as_json: bool) -> None:
    from hpctrain.profile.files import nsys_reports
    from hpctrain.profile.text import as_text

    reports = nsys_reports(run.profile)
    if as_json:
        _echo(
            {
                "run": run.name,
                "profiles": [profile.as_json() for profile in profiles],
                "nsys_reports": [str(path) for path in reports],
            }
        )
        return
    if profiles:
        click.echo("\n\n".join(as_text(profile) for profile in profiles))
    for path in reports:
        click.echo(f"report of nsys: {path}")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _echo(value: Any) -> None:
    from hpctrain.terminal import echo_json

    echo_json(value)
