"""`hpctrain sites validate`: presets held against what NCCL, SLURM and they themselves say.

tests/unit/cli/test_sites_validate.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import json_option
from hpctrain.errors import ChecksFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from click.shell_completion import CompletionItem

    from hpctrain.site.preset import PresetFinding

_LEVELS = ("error", "warning", "debug")
_COLORS = {"error": "red", "warning": "yellow", "debug": "cyan"}
_COUNTED = {
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "debug": ("value without a reason", "values without a reason"),
}


def _complete(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem | str]:
    from click.shell_completion import CompletionItem

    from hpctrain.site.load import site_names

    items: list[CompletionItem | str] = [
        name for name in site_names() if name.startswith(incomplete)
    ]
    return items or [CompletionItem(incomplete, type="file")]


@click.command("validate")
@click.argument("sites", nargs=-1, required=True, metavar="FILE|NAME...", shell_complete=_complete)
@click.option(
    "--strict", is_flag=True, help="Warnings and values without a reason fail the check too."
)
@json_option
def command(*, sites: Sequence[str], strict: bool, as_json: bool) -> None:
    """Hold presets against what NCCL, libfabric, torch and SLURM make of their values.

    Says of each doubtful value where it stands, what its reader would do with it, and what to
    write instead.

    \b
    error    the value does not do what it says
    warning  it may well not
    debug    one of NVIDIA's debugging variables, without `why = "..."` beside it

    \b
    hpctrain sites validate mine.toml
    hpctrain sites validate frontier lumi-g --strict

    Exit code 3 where there is an error; with --strict, where there is anything. A file that cannot
    be read as a preset at all is exit code 2.
    """  # noqa: D301 - click wants the control character
    from hpctrain.site.load import load_site
    from hpctrain.site.validate import validate
    from hpctrain.terminal import echo_json

    found = [(site.name, validate(site)) for site in [load_site(one) for one in sites]]
    every = _once(finding for _, findings in found for finding in findings)
    failing = [one for one in every if strict or one.level == "error"]
    if as_json:
        echo_json([_plain(name, findings) for name, findings in found])
    else:
        if every:
            _show(every)
        many = "site" if len(found) == 1 else "sites"
        click.echo(f"{len(found)} {many} checked: {_counts(every)}")
    if failing:
        names = [name for name, findings in found if any(one in failing for one in findings)]
        raise ChecksFailed(f"{_counts(failing)} in {', '.join(names)}")


def _once(found: Iterable[PresetFinding]) -> list[PresetFinding]:
    """Each finding once: what a base says is found in every preset that extends it."""
    return list({(one.where, one.path, one.message): one for one in found}.values())


def _show(found: Sequence[PresetFinding]) -> None:
    """The findings as a table."""
    from rich.text import Text

    from hpctrain.drawing import echo_table

    rows = [
        (_short(one.where), Text(one.level, _COLORS[one.level]), one.path, one.message)
        for one in found
    ]
    echo_table(rows, header=("WHERE", "LEVEL", "VALUE", ""))


def _short(where: str) -> str:
    """A place without the part of its path that is this directory's."""
    import os

    here = f"{os.getcwd()}/"  # noqa: PTH109 - compared as text, and may be gone
    return where.removeprefix(here)


def _counts(findings: Sequence[PresetFinding]) -> str:
    counts = [(sum(one.level == level for one in findings), level) for level in _LEVELS]
    told = [f"{number} {_COUNTED[level][number != 1]}" for number, level in counts if number]
    return ", ".join(told) or "nothing found"


def _plain(name: str, findings: Sequence[PresetFinding]) -> dict[str, Any]:
    keys = ("level", "path", "value", "where", "message")
    return {
        "site": name,
        "findings": [{key: getattr(one, key) for key in keys} for one in findings],
    }
