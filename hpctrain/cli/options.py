"""Options and arguments that several commands share, so that they are spelled and read alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.run.find_run import RUNS_VARIABLE
from hpctrain.settings.schema import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    _Function = TypeVar("_Function", bound=Callable[..., Any])


def runs_option(function: _Function) -> _Function:
    """`--runs DIR`: the folder of all runs, as an absolute path."""
    return click.option(
        "--runs",
        default="runs",
        envvar=RUNS_VARIABLE,
        show_default=True,
        metavar="DIR",
        callback=lambda _ctx, _param, value: Path.cwd() / value,
        help=f"Folder of all runs (or {RUNS_VARIABLE}).",
    )(function)


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


def engine_options(function: _Function) -> _Function:
    """`--engine KIND` and `--mesh AXIS=N,...`: how the model is parallelised."""
    with_mesh = click.option(
        "--mesh",
        metavar="AXIS=N[,AXIS=N...]",
        callback=_mesh,
        help="Ranks along tp, pp, ep, dp_replicate: N or MIN-MAX; data-parallel ranks take the "
        "rest. E.g. tp=4,pp=1-2.",
    )(function)
    kinds = EngineSettings.__dataclass_fields__["kind"].metadata["choices"]
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
    from hpctrain.settings.check_profile import parse_profile

    return None if value is None else parse_profile(value)


def _mesh(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict[str, str] | None:
    from hpctrain.settings.mesh_flag import parse_mesh

    return None if value is None else parse_mesh(value)
