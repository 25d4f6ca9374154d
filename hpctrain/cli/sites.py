"""`hpctrain sites`: which clusters there are settings for, and what is in force."""

from __future__ import annotations

from typing import Any

import click

from hpctrain.cli.options import json_option


@click.group(name="sites")
def command() -> None:
    """Show the clusters that hpctrain has settings for."""


@command.command(name="list")
@json_option
def list_sites(*, as_json: bool) -> None:
    """Every site, with the file that wins for it."""
    from hpctrain.cli.output import echo_json, table
    from hpctrain.site.load import find_sites, read_site

    sites = [read_site(path) for path in find_sites().values()]
    if as_json:
        keys = ("name", "path", "description")
        echo_json(
            [dict(zip(keys, (s.name, str(s.path), s.description), strict=True)) for s in sites]
        )
        return
    click.echo(table([(s.name, s.description, s.path) for s in sites], header=("SITE", "", "FILE")))


@command.command(name="show")
@click.argument("name")
@click.option("--origin", is_flag=True, help="Show every setting, with where its value comes from.")
@json_option
def show(*, name: str, origin: bool, as_json: bool) -> None:
    """What a site sets: its settings and the environment that it gives to the ranks."""
    from hpctrain.cli.output import echo_json, table
    from hpctrain.settings.merge import DEFAULT, ENV_SECTION, resolve
    from hpctrain.site.load import load_site

    site = load_site(name)
    settings, origins = resolve([site.layer])
    rows: list[tuple[str, Any, str]] = []
    for path, where in origins.items():
        section, _, key = path.partition(".")
        if origin or where != DEFAULT:
            rows.append((path, getattr(getattr(settings, section), key), where))
    rows += [
        (f"{ENV_SECTION}.{key}", value, site.where(ENV_SECTION, key))
        for key, value in site.env.items()
    ]
    if as_json:
        values = {path: {"value": value, "origin": where} for path, value, where in rows}
        echo_json({"name": site.name, "path": str(site.path), "settings": values})
        return
    click.echo(f"{site.name}: {site.description or 'no description'} ({site.path})")
    shown = [row if origin else row[:2] for row in rows]
    if shown:
        click.echo(table(shown, indent="  "))
