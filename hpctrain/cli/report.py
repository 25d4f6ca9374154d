"""`hpctrain report`: what runs did, as a page of their own or as text.

tests/unit/report/test_report.py holds the promises.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_run, json_option, runs_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.incidents import NodePast
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.report.gather import ReportData

TOGETHER = "hpctrain-compare-{}.html"
MOST_NAMED, LONGEST_NAME = 3, 100
"""Runs, and characters of their names, in the name of a page on several."""
_RUNS_SHOWN = 3


@click.command(
    name="report",
    epilog="""\b
Examples:
  hpctrain report lm-3                    writes runs/lm-3/report.html
  hpctrain report lm-3 -o /tmp/lm-3.html --open
  hpctrain report lm-3 lm-4 --compare     both in hpctrain-compare-lm-3-lm-4.html
  hpctrain report - --text                the newest run's numbers, here
  hpctrain report --nodes                 nodes that your runs found slow, how often
""",
)
@click.argument("runs_named", nargs=-1, metavar="RUN...", shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help=f"Path of the page.  [default: report.html in the run's directory, or {TOGETHER}]",
)
@click.option("--compare", is_flag=True, help="Compare the runs in one page.")
@click.option("--text", "as_text", is_flag=True, help="Print the numbers; write no page.")
@click.option(
    "--nodes",
    "of_nodes",
    is_flag=True,
    help="List slow nodes and in how many runs: all yours, or these.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in this machine's browser.")
@runs_option
@json_option
def command(
    *,
    runs_named: tuple[str, ...],
    output: str | None,
    compare: bool,
    as_text: bool,
    of_nodes: bool,
    show: bool,
    runs: Path,
    as_json: bool,
) -> None:
    """Write a report of runs as one HTML page: charts, numbers, advice.

    RUN is a name, a job id, a unique beginning of a name, a path, or - for the newest.
    """
    from hpctrain.ledger.run.find_run import find_run
    from hpctrain.observe.report.gather import gather
    from hpctrain.observe.status.reader import StatusReader

    if of_nodes:
        _check_nodes({"-o": output is not None, "--compare": compare, "--open": show})
        _report_nodes(runs_named, runs, as_json=as_json)
        return
    if not runs_named:
        raise click.UsageError("Missing argument 'RUN...'.", click.get_current_context())
    _check(len(runs_named), output, compare=compare, as_text=as_text, show=show)
    run_dirs = list(dict.fromkeys(find_run(name, runs=runs) for name in runs_named))
    _refuse_foreign([] if output or compare or as_text else run_dirs)
    reader = StatusReader(runs)
    gathered = [gather(run, reader.look(run)) for run in run_dirs]
    if as_text:
        pages: list[Path] = []
    elif compare:
        pages = [_write_together(gathered, output)]
    else:
        pages = [_write(data, output) for data in gathered]
    if as_json:
        _print_json(gathered, pages)
    elif as_text:
        _print(gathered, compare=compare)
    else:
        for page in pages:
            click.echo(f"wrote {page} ({_size(page)})")
    if show:
        for page in pages:
            _open(page)


def _refuse_foreign(runs: Sequence[RunDir]) -> None:
    from hpctrain.ledger.run.ownership import refuse_foreign

    for run in runs:
        refuse_foreign(run, hint="; name a file of your own for the page: -o FILE")


def _check(named: int, output: str | None, *, compare: bool, as_text: bool, show: bool) -> None:
    """Refuse flags that contradict each other."""
    from hpctrain.errors import UsageError

    if as_text and output is not None:
        raise UsageError(f"--text prints and writes no page: leave out -o {output}, or --text")
    if as_text and show:
        raise UsageError("--text writes no page that --open could show: leave one of them out")
    if output is not None and named > 1 and not compare:
        raise UsageError(
            f"-o {output} is one page for {named} runs: add --compare, or leave -o out"
        )


def _check_nodes(given: dict[str, bool]) -> None:
    from hpctrain.errors import UsageError

    for flag, is_given in given.items():
        if is_given:
            raise UsageError(f"--nodes prints a table and writes no page: leave {flag} out")


def _report_nodes(named: Sequence[str], runs: Path, *, as_json: bool) -> None:
    """Which nodes were found slow: by the ledgers alone, no scheduler is asked."""
    from dataclasses import asdict

    from hpctrain.core.terminal import echo_json, echo_note
    from hpctrain.ledger.history.incidents import MARKERS, node_pasts
    from hpctrain.ledger.run.events import read_marked
    from hpctrain.ledger.run.find_run import find_run, look_into

    folder = None if named else look_into(runs, own=True)
    looked_at = folder.runs if folder else dict.fromkeys(find_run(one, runs=runs) for one in named)
    ledgers, unread = [], []
    for run in looked_at:
        try:
            ledgers.append((run.name, read_marked(run, *MARKERS)))
        except OSError as error:
            unread.append(f"{run.root}: {error.strerror or error}")
    pasts = node_pasts(ledgers)
    if as_json:
        left_out = folder.left_out if folder else ""
        heard = {"runs": len(ledgers), "unread": unread, "left_out": left_out or None}
        echo_json({**heard, "nodes": [asdict(past) for past in pasts]})
        return
    _print_nodes(pasts, len(ledgers))
    for why in unread:
        echo_note(f"not counted: {why}")
    if folder and folder.left_out:
        echo_note(f"{folder.root} has besides {folder.left_out}, not counted")


def _print_nodes(pasts: Sequence[NodePast], runs: int) -> None:
    from datetime import datetime

    from hpctrain.core.base.text import count, percent
    from hpctrain.core.drawing import echo_table

    if not pasts:
        click.echo(f"{count(runs, 'run')}; no node of a cluster has served in them")
        return
    slow = [past for past in pasts if past.slow]
    rows = [
        (
            past.node,
            past.cluster or None,
            f"{len(past.slow)} of {past.served}",
            past.findings,
            None if past.worst is None else percent(past.worst),
            datetime.fromtimestamp(past.newest_t or 0).astimezone().strftime("%Y-%m-%d"),
            ", ".join(past.slow[:_RUNS_SHOWN]) + (", ..." if past.slow[_RUNS_SHOWN:] else ""),
        )
        for past in slow
    ]
    header = ("NODE", "CLUSTER", "SLOW IN RUNS", "TIMES", "AT MOST", "LAST", "RUNS")
    echo_table(rows, header=header, right=(3, 4))
    others = count(len(pasts) - len(slow), "node")
    which = f"{others} besides" if slow else others
    click.echo(f"{count(runs, 'run')}; {which} served, and nobody found them slow")


def _write(data: ReportData, output: str | None) -> Path:
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.observe.report.page import page

    target = Path(output) if output else RunDir(Path(data.status.root)).report
    return _put(target, page(data))


def _write_together(gathered: Sequence[ReportData], output: str | None) -> Path:
    from hpctrain.observe.report.page import comparison_page

    names = [data.status.name for data in gathered]
    more = [f"and-{len(names) - MOST_NAMED}"] if len(names) > MOST_NAMED else []
    together = TOGETHER.format("-".join([*names[:MOST_NAMED], *more])[:LONGEST_NAME])
    return _put(Path(output or together), comparison_page(gathered))


def _put(target: Path, text: str) -> Path:
    """Write a page, whole or not at all."""
    from hpctrain.errors import UsageError

    # A name that nobody can guess, and no link is followed: others may write into that folder.
    staged = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(staged, flags, 0o666), "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(text.encode(errors="replace"))
        staged.replace(target)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise UsageError(
            f"{target} cannot be written: {error.strerror}; -o FILE names another place"
        ) from None
    return target


def _print_json(gathered: Sequence[ReportData], pages: Sequence[Path]) -> None:
    """What `status --json` tells of each run, its advice, and where the pages are."""
    from dataclasses import asdict

    from hpctrain.core.terminal import echo_json
    from hpctrain.observe.report.advice import advice
    from hpctrain.observe.status.as_json import as_json as status_json

    reports: list[dict[str, Any]] = []
    for data in gathered:
        more = {"advice": [asdict(one) for one in advice(data)], "problems": list(data.problems)}
        reports.append({**status_json(data.status), **more})
    echo_json({"pages": [str(page) for page in pages], "runs": reports})


def _print(gathered: Sequence[ReportData], *, compare: bool) -> None:
    from hpctrain.observe.report.text import as_text, comparison

    width = shutil.get_terminal_size((80, 24)).columns
    if compare:
        click.echo(comparison(gathered, width=width))
        return
    click.echo("\n\n".join(as_text(data, width=width) for data in gathered))


def _size(page: Path) -> str:
    from hpctrain.core.base.text import size

    return size(page.stat().st_size)


def _open(page: Path) -> None:
    """Show a page in the browser of the user's screen, or say how to bring it there."""
    import webbrowser

    from hpctrain.core.terminal import echo_note

    screen = sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )
    if not (screen and webbrowser.open(page.absolute().as_uri())):
        host = os.uname().nodename
        echo_note(f"there is no browser here; from your machine: scp {host}:{page.absolute()} .")
