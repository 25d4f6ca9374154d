"""`hpctrain check`: everything that can be known before a run, in one list.

tests/unit/cli/test_check.py holds the promises.
"""

from __future__ import annotations

import os
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
    runs_option,
    set_option,
    site_option,
)

if TYPE_CHECKING:
    from hpctrain.advise.check.lines import CheckList
    from hpctrain.launch.prepare import SubmitRequest

EXAMPLES = """\b
Examples:
  hpctrain check --nodes 4                               the shipped recipe
  hpctrain check --nodes 2-4 --time 12:00:00 -- train.py --lr 3e-4
  hpctrain check --site juniper.toml -- -m package.train
  hpctrain check --rehearse -- train.py                  run it here: preempted, resumed
  hpctrain check --ci --strict -- train.py               in a pipeline: JUnit and SARIF
  hpctrain check --json -- train.py
"""
JUNIT_FILE, SARIF_FILE = "hpctrain-check.xml", "hpctrain-check.sarif"
_COLORS = {"fail": "red", "note": "yellow", "not known": "cyan", "ok": "green"}


@click.command(name="check", cls=JobCommand, epilog=EXAMPLES)
@job_options
@engine_options
@site_option
@cluster_option("Where it would run; slurm if there is an sbatch, otherwise local.")
@click.option("--name", "-J", help="The run's name.")
@click.option("--container", metavar="IMAGE", help="Container image for the ranks.")
@click.option("--config", metavar="FILE", help="Settings file.")
@set_option("Any setting.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Environment of the ranks.")
@locked_option
@click.option(
    "--rehearse",
    is_flag=True,
    help="Run the program on 2 CPU ranks here: a few steps, preempted, resumed, compared.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit for each part of a rehearsal.",
)
@click.option("--strict", is_flag=True, help="Treat notes as failures.")
@click.option("--ci", is_flag=True, help=f"For pipelines: write {JUNIT_FILE} and {SARIF_FILE}.")
@click.option("--junit", metavar="FILE", help="Write the list as JUnit's XML.")
@click.option("--sarif", metavar="FILE", help="Write findings of lint and checks as SARIF.")
@runs_option
@json_option
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[-- PROGRAM ARGS...]")
def command(
    *,
    script: tuple[str, ...],
    config: str | None,
    as_json: bool,
    rehearse: bool,
    timeout: float,
    strict: bool,
    ci: bool,
    junit: str | None,
    sarif: str | None,
    **flags: Any,
) -> int:
    """Check a submission before `hpctrain submit`; submits and keeps nothing.

    Takes submit's options. Checks settings, site, scheduler, disk, lint and the program's
    imports; compares lead time, interval and disk with saves of earlier runs. With --rehearse
    the program runs on this machine's CPUs, in its own working directory, and may write there.

    \b
    ok         as it should be
    note       worth a look
    fail       it would be refused, fail, or lose its work
    not known  nobody can say before a run

    Exit code 3 if a check failed (with --strict: or a note); submit's code if it would refuse.
    """  # noqa: D301 - click wants the control character
    from hpctrain.launch.prepare import SubmitRequest

    request = SubmitRequest(
        cwd=Path.cwd(),
        environ=os.environ,
        command=script,
        config=Path(config) if config else None,
        cluster_needed=False,
        imports_needed=False,
        ask_accounting=True,
        ask_partitions=True,
        job=job_flags(flags),
        **flags,
    )
    checks = _ask(request, rehearse_s=timeout if rehearse else None)
    checks.strict = strict
    _write(checks, junit or (JUNIT_FILE if ci else ""), sarif or (SARIF_FILE if ci else ""))
    _print_list(checks, as_json=as_json)
    return checks.exit_code


def _ask(request: SubmitRequest, *, rehearse_s: float | None) -> CheckList:
    """All checks, with what is being looked at shown on a terminal; None for no rehearsal."""
    from hpctrain.advise.check.gather import check_all
    from hpctrain.cli.progress import line

    with line() as one_line:

        def say(text: str) -> None:
            if one_line.in_place:  # elsewhere the list itself comes soon enough
                one_line.show(f"looking at {text}")

        checks = check_all(request, say)[0]
        if rehearse_s is not None:
            from hpctrain.advise.check.rehearsal import add_rehearsal

            add_rehearsal(checks, request, say, patience_s=rehearse_s)
    return checks


def _write(checks: CheckList, junit: str, sarif: str) -> None:
    """Write the files that pipelines read; "" for none."""
    from hpctrain.core.base.files import replace_text

    if junit:
        from hpctrain.advise.check.lines import junit as as_junit

        replace_text(Path(junit), as_junit(checks))
    if sarif:
        import json

        from hpctrain.advise.check.lines import sarif as as_sarif

        replace_text(Path(sarif), json.dumps(as_sarif(checks), indent=1) + "\n")


def _print_list(checks: CheckList, *, as_json: bool) -> None:
    """Print the list."""
    from hpctrain.advise.check.lines import summary, text_lines
    from hpctrain.core.terminal import clean, echo_json

    if as_json:
        echo_json(checks.plain())
        return
    for text, status in text_lines(checks.lines):
        mark, rest = text[: len(status)], text[len(status) :]
        click.echo(click.style(mark, fg=_COLORS.get(status)) + clean(rest))
    click.echo(summary(checks))
