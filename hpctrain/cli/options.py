"""Options and arguments that several commands share, so that they are spelled and read alike.

Among them `--since`, how far back one looks, as people write it (`parse_since`).
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.base import clock
from hpctrain.base.env import HPCTRAIN_RUNS
from hpctrain.run.layout import runs_flag
from hpctrain.scheduler.base import SCHEDULERS
from hpctrain.settings.fields import keys_of
from hpctrain.settings.schema import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from hpctrain.run.layout import RunDir

    _Function = TypeVar("_Function", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")


def runs_option(function: _Function) -> _Function:
    """`--runs DIR`: the folder of all runs, as an absolute path."""
    return click.option(
        "--runs",
        default="runs",
        envvar=HPCTRAIN_RUNS,
        show_default=True,
        metavar="DIR",
        callback=lambda _ctx, _param, value: Path.cwd() / value,
        help=f"Folder of all runs (or {HPCTRAIN_RUNS}).",
    )(function)


def cluster_option(text: str) -> Callable[[_Function], _Function]:
    """`--cluster NAME`: one of the schedulers that there are."""
    return click.option("--cluster", type=click.Choice(list(SCHEDULERS)), help=text)


def json_option(function: _Function) -> _Function:
    """`--json`: one JSON value on stdout, for programs."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object, for programs."
    )(function)


def locked_option(function: _Function) -> _Function:
    """`--allow-locked`: what the site's admins have locked may be changed; it is recorded."""
    return click.option(
        "--allow-locked",
        is_flag=True,
        help="Change what the site's admins have locked; it is recorded.",
    )(function)


def foreign_option(function: _Function) -> _Function:
    """`--foreign`: carry out what a run says that others own or can write."""
    return click.option(
        "--foreign",
        is_flag=True,
        help="Trust a run that others own or can write; RUN is its path then.",
    )(function)


def run_argument(function: _Function) -> _Function:
    """`[RUN]`: a name, a job id, a unique prefix, or `-` for the newest, which is the default."""
    return click.argument("run", default="-", metavar="[RUN]")(function)


def yes_option(function: _Function) -> _Function:
    """`--yes`: take the newest run without asking, for scripts."""
    return click.option(
        "-y", "--yes", is_flag=True, help="Where no RUN is named, take the newest and do not ask."
    )(function)


def newest_to_act_on(verb: str, runs: Path) -> RunDir:
    """The newest run, which a command that changes something would take.

    Raises:
        NotFound: there is no run.
        UsageError: no terminal is there to ask; with the words to type.
    """
    import sys

    from hpctrain.errors import UsageError
    from hpctrain.run.find_run import LATEST, find_run

    run = find_run(LATEST, runs=runs)
    if not sys.stdin or not sys.stdin.isatty():
        raise UsageError(
            f"no run is named; the newest is {_with_state(run)}. Type `hpctrain {verb} "
            f"{run.name}{runs_flag(runs)}`, or add --yes to take the newest"
        )
    return run


def ask_to_act(verb: str, run: RunDir) -> None:
    """Ask on the terminal whether this run is meant.

    Raises:
        click.Abort: it is not.
    """
    click.confirm(f"{verb} {_with_state(run)}?", abort=True, err=True)


def _with_state(run: RunDir) -> str:
    """A run's name with what its ledger says of its state, and for how long."""
    from hpctrain.base.text import duration
    from hpctrain.history.run_history import RunHistory

    state = RunHistory.read(run, marks="few").state
    since = f" for {duration(clock.now() - state.t)}" if state.t else ""
    asked = {"cancel": ", cancelled", "save": ", asked to save and stop"}.get(state.cancel, "")
    return f"{run.name} ({state.phase.value}{since}{asked})"


def engine_options(function: _Function) -> _Function:
    """`--engine KIND` and `--mesh AXIS=N,...`: how the model is parallelised."""
    with_mesh = click.option(
        "--mesh",
        metavar="AXIS=N[,AXIS=N...]",
        callback=_mesh,
        help="Ranks along tp, pp, ep, dp_replicate: N or MIN-MAX; data-parallel ranks take the "
        "rest. E.g. tp=4,pp=1-2.",
    )(function)
    kinds = keys_of(EngineSettings)["kind"].choices
    return click.option(
        "--engine", type=click.Choice(kinds), help="How the model is spread over the ranks."
    )(with_mesh)


def profile_options(function: _Function) -> _Function:
    """`--profile steps=A:B,ranks=R,R` and `--nsys R`: a look at some steps of some ranks."""
    with_nsys = click.option(
        "--nsys", type=int, metavar="R", help="Start rank R under NVIDIA's nsys."
    )(function)
    return click.option(
        "--profile",
        metavar="STEPS[,RANKS]",
        callback=_profile,
        help="Trace some steps, e.g. steps=100:103,ranks=0,7; rank 0's by default, ranks=all for "
        "all; with ,memory also what holds the GPU's memory.",
    )(with_nsys)


def _profile(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> dict[str, object] | None:
    from hpctrain.settings.check import parse_profile

    return None if value is None else parse_profile(value)


def _mesh(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict[str, str] | None:
    from hpctrain.settings.check import parse_mesh

    return None if value is None else parse_mesh(value)


def since_option(function: _Function) -> _Function:
    """`--since WHEN`: seconds since the epoch, or None."""
    return click.option(
        "--since",
        metavar="WHEN",
        callback=lambda _ctx, _param, value: None if value is None else parse_since(value),
        help="Not what is older: 10m, 2h, 1d12h, or a time like 2026-01-31T04:15 or 04:15.",
    )(function)


def parse_since(text: str, now: float | None = None) -> float:
    """The moment that is meant, seconds since the epoch; without a zone, of this machine's.

    Raises:
        UsageError: neither a span of time nor a time.
    """
    from hpctrain.errors import UsageError

    moment = clock.now() if now is None else now
    if _SPAN.fullmatch(text):
        parts = re.findall(r"([\d.]+)([smhdw])", text)
        return moment - sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            today = datetime.fromtimestamp(moment).astimezone().date().isoformat()
            then = datetime.fromisoformat(f"{today}T{text.zfill(5)}").timestamp()
            return then if then <= moment else then - _UNITS["d"]  # 23:50, asked after midnight
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"--since {text!r} is neither a span like 10m, 2h, 1d nor a time like 2026-01-31T04:15"
        ) from None


def site_argument(function: _Function) -> _Function:
    """`NAME`: a site's name, or the path of its .toml file."""
    return click.argument("name", shell_complete=complete_site)(function)


def complete_site(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Sites whose names begin so; files where it looks like a path."""
    from click.shell_completion import CompletionItem

    from hpctrain.errors import HpctrainError
    from hpctrain.site.load import site_names

    path = [CompletionItem(incomplete, type="file")]
    if "/" in incomplete or incomplete.startswith("."):
        return path
    try:
        names = site_names()
    except HpctrainError:  # a completion has nowhere to say what is wrong
        return path
    return [CompletionItem(name) for name in names if name.startswith(incomplete)] or path
