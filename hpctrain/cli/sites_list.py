"""`hpctrain sites list`: the presets that there are, and where each comes from.

tests/unit/cli/test_sites.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import json_option

if TYPE_CHECKING:
    from pathlib import Path

BROKEN = "broken"


@click.command("list")
@click.option("--all", "with_bases", is_flag=True, help="Bases for other presets too.")
@json_option
def command(*, with_bases: bool, as_json: bool) -> None:
    """List every site that there is a preset for.

    \b
    reference   every value has a public source
    local       written at the site
    unverified  a skeleton, refused until an admin has completed it
    base        only for other presets to extend (--all)
    broken      its file cannot be read; what is wrong is told on stderr
    """  # noqa: D301 - click wants the control character
    from hpctrain.site.load import site_files
    from hpctrain.terminal import echo_json, echo_warning

    rows = [_row(name, files) for name, files in site_files().items()]
    rows = sorted(
        (row for row in rows if with_bases or row["stability"] != "base"),
        key=lambda row: str(row["name"]),
    )
    if as_json:
        echo_json(rows)
        return
    for row in rows:
        if row["error"]:
            echo_warning(row["error"])
    cells = [
        (row["name"], row["stability"], row["reviewed"] or None, row["description"], _files(row))
        for row in rows
    ]
    from hpctrain.drawing import echo_table

    echo_table(cells, header=("SITE", "STABILITY", "REVIEWED", "", "FILES"))


def _row(name: str, files: list[tuple[str, Path]]) -> dict[str, Any]:
    """What is told of a site; one that cannot be read hides none of the others."""
    from hpctrain.errors import HpctrainError
    from hpctrain.site.load import load_site

    row: dict[str, Any] = {
        "name": name,
        "stability": BROKEN,
        "description": "",
        "reviewed": "",
        "contact": "",
        "files": [{"layer": layer, "path": str(path)} for layer, path in files],
        "error": "",
    }
    try:
        about = load_site(name).about
    except HpctrainError as error:
        return row | {"error": str(error)}
    keys = ("stability", "description", "reviewed", "contact")
    return row | {key: getattr(about, key) for key in keys}


def _files(row: dict[str, Any]) -> str:
    """The packaged file by its name, others by their path: they are what an admin looks for."""
    from hpctrain.site.paths import PACKAGED

    return ", ".join(
        PACKAGED if one["layer"] == PACKAGED else str(one["path"]) for one in row["files"]
    )
