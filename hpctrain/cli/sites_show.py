"""`hpctrain sites show`: one preset, its values and where each stands.

tests/unit/cli/test_sites.py holds the promises.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import json_option
from hpctrain.cli.sites_names import site_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.site.environment import Environment
    from hpctrain.site.preset import Site

_RUN_DIR = "RUN/attempts/N"
_ABOUT = ("description", "stability", "reviewed", "contact", "url", "extends")


def _versions(
    _ctx: click.Context, _param: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    """`KEY=VERSION`s by key, refused where no condition of a preset asks for that key."""
    names = ("nccl", "torch", "plugin", "gpu")
    versions: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if key not in names or not equals or not value:
            raise click.BadParameter(f"{text}: write {', '.join(f'{k}=...' for k in names)}")
        versions[key] = value
    return versions


@click.command("show")
@site_argument
@click.option("--origin", is_flag=True, help="Where each value stands: file, line and source.")
@click.option("--env", "with_env", is_flag=True, help="The environment that ranks get.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes of the job, for --env. [1]")
@click.option(
    "--assume",
    metavar="KEY=VERSION",
    multiple=True,
    callback=_versions,
    help="For --env: versions of nccl, torch or plugin, or the gpu's name; unknown ones hold for "
    "no condition.",
)
@json_option
def command(
    *,
    name: str,
    origin: bool,
    with_env: bool,
    nodes: int | None,
    assume: dict[str, str],
    as_json: bool,
) -> None:
    """Show what a preset says: NAME is a site or a .toml file.

    \b
    hpctrain sites show frontier --origin
    hpctrain sites show frontier --env --nodes 2 --assume nccl=2.27
    hpctrain sites show ./mine.toml --json
    """  # noqa: D301 - click wants the control character
    from hpctrain.site.load import load_site
    from hpctrain.terminal import echo_json

    if not with_env and (nodes is not None or assume):
        raise click.UsageError(f"{'--nodes' if nodes else '--assume'} is for --env; add it.")
    site = load_site(name, project=Path.cwd())
    derived = _derived(site, nodes or 1, assume) if with_env else None
    if as_json:
        echo_json(_plain(site, derived))
        return
    _echo_head(site)
    if derived is None:
        _echo_values(site, origin=origin)
    else:
        _echo_environment(derived, origin=origin)


def _derived(site: Site, nodes: int, assume: dict[str, str]) -> Environment:
    from hpctrain.site.environment import Versions, derive

    return derive(site, nodes=nodes, versions=Versions(**assume), run_dir=_RUN_DIR)


def _plain(site: Site, derived: Environment | None) -> dict[str, Any]:
    from dataclasses import asdict

    from hpctrain.site.preset import dotted

    plain: dict[str, Any] = {"name": site.name}
    plain |= {key: getattr(site.about, key) for key in _ABOUT}
    plain["sources"] = site.about.sources
    plain["files"] = [asdict(one) for one in site.files]
    plain["values"] = {
        dotted(path): asdict(leaf) | {"origin": site.where(*path)}
        for path, leaf in site.leaves.items()
        if len(path) > 1 and path[0] != "sources"
    }
    if derived is not None:
        plain["environment"] = {name: asdict(one) for name, one in derived.values.items()}
        plain["unset"] = list(derived.unset)
        plain["notes"] = list(derived.notes)
    return plain


def _echo_head(site: Site) -> None:
    """Who the site is: one line, and one for each fact that it has of itself."""
    from hpctrain.drawing import echo_table

    click.echo(f"{site.name}: {site.about.description or 'no description'}")
    rows = [(key, value) for key in _ABOUT[1:] if (value := getattr(site.about, key))]
    rows += [("" if n else "files", one.path) for n, one in enumerate(site.files)]
    echo_table(rows, indent=2)


def _echo_values(site: Site, *, origin: bool) -> None:
    from hpctrain.drawing import echo_table
    from hpctrain.settings.fields import shown
    from hpctrain.site.preset import dotted

    rows: list[tuple[object, ...]] = []
    for path, leaf in site.leaves.items():
        if len(path) == 1 or path[0] == "sources":
            continue
        place = (f"{leaf.layer} {leaf.place}", leaf.source, leaf.why) if origin else ()
        rows.append((dotted(path), shown(leaf.value), *place))
    if rows:
        click.echo()
        header = ("KEY", "VALUE", "PLACE", "SOURCE", "WHY") if origin else ()
        echo_table(rows, header=header)
    if origin and site.about.sources:
        click.echo()
        echo_table(list(site.about.sources.items()), header=("SOURCE", ""))


def _echo_environment(derived: Environment, *, origin: bool) -> None:
    from hpctrain.drawing import echo_table
    from hpctrain.terminal import echo_note

    click.echo()
    rows = [
        (f"{name}={variable.value}", *([variable.origin] if origin else []))
        for name, variable in sorted(derived.values.items())
    ]
    echo_table(rows)
    for name in derived.unset:
        click.echo(f"unset {name}")
    for note in derived.notes:
        echo_note(note)
