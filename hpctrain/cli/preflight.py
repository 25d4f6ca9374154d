"""`hpctrain preflight`: whether these nodes are fit to train, and if not, which one is it.

tests/unit/cli/test_preflight.py and tests/slurm/test_preflight.py hold the promises.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import (
    JobCommand,
    cluster_option,
    job_flags,
    job_options,
    json_option,
    runs_option,
    set_option,
    site_option,
)
from hpctrain.core.base import clock

if TYPE_CHECKING:
    from hpctrain.cluster.preflight.report import PreflightReport, Result
    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.spec import Spec
    from hpctrain.launch.preflight import Preflight

EXAMPLES = """\b
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


@click.command(name="preflight", cls=JobCommand, epilog=EXAMPLES)
@job_options
@site_option
@cluster_option("Where to look.")
@click.option("--config", metavar="FILE", help="Settings file.")
@set_option("Any setting.")
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
def command(
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
    from hpctrain.launch.preflight import discard, make

    spec, site, runs, results = _login(flags)
    report = _report([], results)
    if spec is None or login_only or report.status == "fail":
        return _print_report(report, as_json=as_json, strict=strict)
    preflight = make(spec, site, runs, bandwidth=bandwidth, try_s=try_timeout)
    try:
        results += _accepted(preflight, spec.cluster)
        report = _report([], results)
        if report.status != "fail":
            reported = _job(preflight, spec, timeout_s=timeout, quiet=as_json)
            report = replace(reported, results=[*results, *reported.results])
            _note_bad(report, spec, bad_node_hours)
    except BaseException:
        discard(preflight)
        raise
    if report.status != "fail":
        discard(preflight)
    return _print_report(report, as_json=as_json, strict=strict)


def _report(nodes: list[str], results: list[Result]) -> PreflightReport:
    from hpctrain.cluster.preflight.report import PreflightReport

    return PreflightReport(nodes, results)


def _login(flags: dict[str, Any]) -> tuple[Spec | None, Site | None, Path, list[Result]]:
    """T0: what would be submitted, and what is to be said of it."""
    from hpctrain.cluster.preflight.report import OK, WARN, Result
    from hpctrain.cluster.site.schema import Site
    from hpctrain.errors import ChecksFailed, ClusterError
    from hpctrain.launch.preflight import check_login, refused
    from hpctrain.launch.prepare import SubmitRequest, prepare

    began = clock.monotonic()
    config = flags.pop("config")
    request = SubmitRequest(
        cwd=Path.cwd(),
        environ=os.environ,
        config=Path(config) if config else None,
        time=JOB_TIME,
        ask_accounting=True,
        job=job_flags(flags),
        **flags,
    )
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


def _accepted(preflight: Preflight, cluster: str) -> list[Result]:
    """What the scheduler says of the job before it is submitted."""
    if preflight.script is None:
        return []
    from hpctrain.cluster.scheduler.base import get_cluster

    return get_cluster(cluster).check_script(preflight.script)


def _job(preflight: Preflight, spec: Spec, *, timeout_s: float, quiet: bool) -> PreflightReport:
    from hpctrain.core.terminal import echo_note
    from hpctrain.launch.preflight import start, wait

    job = start(preflight, spec, os.environ)
    say = (lambda _: None) if quiet else echo_note
    say(f"{job.name} started; Ctrl-C cancels it")
    return wait(preflight, job, timeout_s=timeout_s, say=say)


def _note_bad(report: PreflightReport, spec: Spec, hours: float) -> None:
    """Keep bad nodes out of later jobs, and let those back in that are well."""
    from hpctrain.cluster.preflight.node_lists import bad_nodes_of_user, record_bad
    from hpctrain.cluster.scheduler.base import get_cluster
    from hpctrain.launch.launch import name_here

    if get_cluster(spec.cluster).on_this_machine:
        return
    well = [node for node in report.nodes if node not in report.bad]
    record_bad(bad_nodes_of_user(os.environ, name_here(spec)), report.bad, well=well, hours=hours)


def _print_report(report: PreflightReport, *, as_json: bool, strict: bool) -> int:
    """Print the report; the exit code."""
    from hpctrain.cluster.preflight.report import lines, names
    from hpctrain.core.terminal import echo_json

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
