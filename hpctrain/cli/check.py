"""`hpctrain check` and `preflight`: what can be known before a run, and whether nodes are fit.

tests/unit/cli/test_check.py, test_preflight.py and tests/slurm/test_preflight.py hold the promises.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    JobCommand,
    cluster_option,
    config_option,
    job_options,
    json_option,
    runs_option,
    set_option,
    site_option,
    submission_options,
    submit_request,
)
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.core.base import clock
from hpctrain.core.terminal import clean, echo_json, echo_note
from hpctrain.errors import ChecksFailed, ClusterError

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.advise.check.forecast import CheckList
    from hpctrain.cluster.preflight.report import PreflightReport, Result
    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.prepare import SubmitRequest

EXAMPLES = """\b
Examples:
  hpctrain check --nodes 4                               the shipped recipe
  hpctrain check --nodes 2-4 --time 12:00:00 -- train.py --lr 3e-4
  hpctrain check --site juniper.toml -- -m package.train
  hpctrain check --rehearse -- train.py                  run it here: preempted, resumed
  hpctrain check --json --strict -- train.py             in a pipeline
"""
_COLORS = {"fail": "red", "note": "yellow", "not known": "cyan", "ok": "green"}


@click.command(name="check", cls=JobCommand, epilog=EXAMPLES)
@submission_options
@cluster_option("Where it would run; slurm if there is an sbatch, otherwise local.")
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
def command(
    *,
    as_json: bool,
    rehearse: bool,
    timeout: float,
    strict: bool,
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
    request = submit_request(flags, cluster_needed=False, imports_needed=False, ask_partitions=True)
    checks = _ask(request, rehearse_s=timeout if rehearse else None)
    checks.strict = strict
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

        checks = check_all(request, say)
        if rehearse_s is not None:
            from hpctrain.advise.check.rehearsal import add_rehearsal

            add_rehearsal(checks, request, say, patience_s=rehearse_s)
    return checks


def _print_list(checks: CheckList, *, as_json: bool) -> None:
    """Print the list."""
    from hpctrain.advise.check.forecast import summary, text_lines

    if as_json:
        echo_json(checks.plain())
        return
    for text, status in text_lines(checks.lines):
        mark, rest = text[: len(status)], text[len(status) :]
        click.echo(click.style(mark, fg=_COLORS.get(status)) + clean(rest))
    click.echo(summary(checks))


PREFLIGHT_EXAMPLES = """\b
Examples:
  hpctrain preflight --nodes 4
  hpctrain preflight --nodes 16 --gpus-per-node 8 --partition gpu --json
  hpctrain preflight --login-only
  hpctrain preflight --cluster local --nodes 2
"""
CHECKED = 3
TRY_AGAIN = 75
JOB_TIME = "0:20:00"
"""Where no `--time` is given."""


@click.command(name="preflight", cls=JobCommand, epilog=PREFLIGHT_EXAMPLES)
@job_options
@site_option
@cluster_option("Where to look.")
@config_option
@set_option("Any setting, e.g. train.steps=500.")
@click.option("--login-only", is_flag=True, help="Only checks of the login node; no job.")
@click.option(
    "--bandwidth/--no-bandwidth",
    default=True,
    show_default=True,
    help="Try an all-reduce, and find slow nodes.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="For all of it, once the job runs.",
)
@click.option(
    "--try-timeout",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="For one all-reduce of a group of nodes.",
)
@click.option(
    "--bad-node-hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="How long bad nodes stay on the list.",
)
@click.option("--strict", is_flag=True, help="Exit with 75 if something could not be read.")
@runs_option
@json_option
def preflight(
    *,
    login_only: bool,
    bandwidth: bool,
    timeout: float,
    try_timeout: float,
    bad_node_hours: float,
    strict: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Check nodes before a run, and name unfit ones.

    First checks the login node, then runs one job that checks each node, the shared directory,
    clocks and an all-reduce. If the all-reduce is slow, finds the node. Lists bad nodes. Exit
    code 3 if a check failed.
    """
    from hpctrain.cluster.preflight.report import PreflightReport
    from hpctrain.launch.preflight import discard, make, start, wait

    spec, site, runs, results = _login(flags)
    report = PreflightReport([], results)
    if spec is None or login_only or report.status == "fail":
        return _print_report(report, as_json=as_json, strict=strict)
    preflight = make(spec, site, runs, bandwidth=bandwidth, try_s=try_timeout)
    try:
        if preflight.script is not None:
            results += get_cluster(spec.cluster).check_script(preflight.script)
        report = PreflightReport([], results)
        if report.status != "fail":
            say = (lambda _: None) if as_json else echo_note
            job = start(preflight, spec, os.environ)
            say(f"{job.name} started; Ctrl-C cancels it")
            reported = wait(preflight, job, timeout_s=timeout, say=say)
            report = replace(reported, results=[*results, *reported.results])
            _note_bad(report, spec, bad_node_hours)
    except BaseException:
        discard(preflight)
        raise
    if report.status != "fail":
        discard(preflight)
    return _print_report(report, as_json=as_json, strict=strict)


def _login(flags: dict[str, Any]) -> tuple[Spec | None, Site | None, Path, list[Result]]:
    """T0: what would be submitted, and what is to be said of it."""
    from hpctrain.cluster.preflight.report import OK, WARN, Result
    from hpctrain.cluster.site.schema import Site
    from hpctrain.launch.preflight import check_login, refused
    from hpctrain.launch.prepare import prepare

    began = clock.monotonic()
    request = submit_request(flags, time=JOB_TIME)
    try:
        prepared = prepare(request)
    except (ChecksFailed, ClusterError) as error:
        return None, None, request.runs, [refused(error)]
    spec = prepared.spec
    site = None if spec.preset is None else Site.from_plain(spec.preset)
    results = [Result("settings", WARN, note) for note in prepared.notes]
    results += check_login(spec, site, prepared.runs)
    results.append(Result("login node", OK, f"looked at in {clock.monotonic() - began:.1f} s"))
    return spec, site, prepared.runs, results


def _note_bad(report: PreflightReport, spec: Spec, hours: float) -> None:
    """Keep bad nodes out of later jobs, and let those back in that are well."""
    from hpctrain.cluster.preflight.report import bad_nodes_of_user, record_bad
    from hpctrain.launch.launch import name_here

    if get_cluster(spec.cluster).on_this_machine:
        return
    well = [node for node in report.nodes if node not in report.bad]
    record_bad(bad_nodes_of_user(os.environ, name_here(spec)), report.bad, well=well, hours=hours)


def _print_report(report: PreflightReport, *, as_json: bool, strict: bool) -> int:
    """Print the report; the exit code."""
    from hpctrain.cluster.preflight.report import lines, names

    if as_json:
        echo_json(report.plain())
    else:
        click.echo("\n".join(lines(report.results)))
        click.echo()
        bad = f": keep out {names(list(report.bad))}" if report.bad else ""
        click.echo(f"preflight: {report.status}{bad}")
    if report.status == "fail":
        return CHECKED
    return TRY_AGAIN if strict and report.status == "unknown" else 0
