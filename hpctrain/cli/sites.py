"""`hpctrain sites`: list, show, detect, check, draft and probe presets of clusters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.options import complete_site, echo_table, json_option
from hpctrain.cluster.scheduler.base import get_cluster, name_here
from hpctrain.cluster.site.load import identities, load_site, site_files
from hpctrain.cluster.site.schema import PACKAGED, PresetFinding, Site, dotted
from hpctrain.cluster.site.sheet import WrongPreset
from hpctrain.cluster.site.validate import validate
from hpctrain.core.base import clock
from hpctrain.core.base.text import count
from hpctrain.core.settings.fields import shown
from hpctrain.core.terminal import echo_json, echo_note, echo_warning
from hpctrain.errors import ChecksFailed, HpctrainError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.cluster.preflight.facts import NodeFacts
    from hpctrain.cluster.site.detect import Detected, Match
    from hpctrain.cluster.site.environment import Environment


BROKEN = "broken"
_RUN_DIR = "RUN/attempts/N"
_ABOUT = ("description", "stability", "reviewed", "contact", "url", "extends")
_COLORS = {"error": "red", "warning": "yellow", "debug": "cyan"}
"""Levels of findings, the worst first."""
_COUNTED = {
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "debug": ("value without a reason", "values without a reason"),
}


@click.group(name="sites")
def command() -> None:
    """Presets of clusters: show, detect, check and write them.

    \b
    hpctrain sites detect                          which site is this?
    hpctrain sites show frontier --env --nodes 2   the ranks' environment there
    hpctrain sites init --from-slurm >mine.toml    a draft for your own cluster
    hpctrain sites validate mine.toml              is it right?

    Presets are TOML files: those that come with hpctrain, then /etc/hpctrain/sites and
    HPCTRAIN_SITE_PATH, then ~/.config/hpctrain/sites.
    A file is laid on those of the same name in the layers below.
    """  # noqa: D301 - click wants the control character


@command.command("list")
@click.option("--all", "with_bases", is_flag=True, help="Bases for other presets too.")
@json_option
def list_command(*, with_bases: bool, as_json: bool) -> None:
    """List all presets.

    \b
    reference   every value has a public source
    local       written at the site
    unverified  a skeleton, refused until an admin has completed it
    base        only for other presets to extend (--all)
    broken      its file cannot be read; stderr has the reason
    """  # noqa: D301 - click wants the control character
    rows = [_listed(name, files) for name, files in site_files().items()]
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
    echo_table(cells, header=("SITE", "STABILITY", "REVIEWED", "", "FILES"))


def _listed(name: str, files: list[tuple[str, Path]]) -> dict[str, Any]:
    """The row of a site; one that cannot be read hides none of the others."""
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
    return ", ".join(
        PACKAGED if one["layer"] == PACKAGED else str(one["path"]) for one in row["files"]
    )


@command.command("show")
@click.argument("name", shell_complete=complete_site)
@click.option("--origin", is_flag=True, help="Show file, line and source of each value.")
@click.option(
    "--env",
    "with_env",
    is_flag=True,
    help="Show the ranks' environment, without what a condition adds.",
)
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes of the job, for --env. [1]")
@json_option
def show_command(
    *,
    name: str,
    origin: bool,
    with_env: bool,
    nodes: int | None,
    as_json: bool,
) -> None:
    """Show a preset: NAME is a site or a .toml file.

    \b
    hpctrain sites show frontier --origin
    hpctrain sites show frontier --env --nodes 2
    hpctrain sites show ./mine.toml --json
    """  # noqa: D301 - click wants the control character
    if nodes is not None and not with_env:
        raise click.UsageError("--nodes is for --env; add it.")
    site = load_site(name)
    derived = None
    if with_env:
        from hpctrain.cluster.site.environment import Versions, derive

        derived = derive(site, nodes=nodes or 1, versions=Versions(), run_dir=_RUN_DIR)
    if as_json:
        echo_json(_site_plain(site, derived))
        return
    _echo_head(site)
    if derived is None:
        _echo_values(site, origin=origin)
    else:
        _echo_environment(derived, origin=origin)


def _site_plain(site: Site, derived: Environment | None) -> dict[str, Any]:
    from dataclasses import asdict

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
    click.echo(f"{site.name}: {site.about.description or 'no description'}")
    rows = [(key, value) for key in _ABOUT[1:] if (value := getattr(site.about, key))]
    rows += [("" if n else "files", one.path) for n, one in enumerate(site.files)]
    echo_table(rows, indent=2)


def _echo_values(site: Site, *, origin: bool) -> None:
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


@command.command("detect")
@json_option
def detect_command(*, as_json: bool) -> None:
    """Detect this site, with the reasons.

    Every site whose [detect] fits is listed with its reasons; the highest priority wins, then a
    variable over a marker file over SLURM's ClusterName over the host's name. Exit code 2 where
    nothing decides between two.

    \b
    hpctrain sites detect
    hpctrain sites detect --json | jq -r .site
    """  # noqa: D301 - click wants the control character
    from hpctrain.cluster.site.detect import detect, look_around

    here = look_around(os.environ, lambda: name_here(os.environ))
    detected = detect(identities(os.environ), here)
    if as_json:
        echo_json(_detected_plain(detected))
    elif detected is None:
        click.echo("no site matches here; --site NAME names one (`hpctrain sites list`)")
    else:
        cells = [
            (_mark(match, detected), match.name, _reasons(match)) for match in detected.matches
        ]
        echo_table(cells)
    if detected is not None:
        detected.require_one()


def _mark(match: Match, detected: Detected) -> str:
    if match in detected.tied:
        return "?"
    return "*" if match == detected.chosen else " "


def _reasons(match: Match) -> str:
    passed_over = f" (passed over: {match.passed_over})" if match.passed_over else ""
    return "; ".join(match.reasons) + passed_over


def _detected_plain(detected: Detected | None) -> dict[str, Any]:
    from dataclasses import asdict

    chosen = detected.chosen if detected else None
    return {
        "site": chosen.name if chosen else None,
        "tied": [match.name for match in detected.tied] if detected else [],
        "matches": [
            asdict(match) | {"signal": match.signal.name.lower()}
            for match in (detected.matches if detected else ())
        ],
    }


@command.command("validate")
@click.argument(
    "sites", nargs=-1, required=True, metavar="FILE|NAME...", shell_complete=complete_site
)
@click.option(
    "--strict", is_flag=True, help="Treat warnings and values without a reason as failures."
)
@json_option
def validate_command(*, sites: Sequence[str], strict: bool, as_json: bool) -> None:
    """Validate presets against NCCL, libfabric, torch and SLURM.

    For each doubtful value, prints its place, its effect, and what to write instead.

    \b
    error    the value has no or another effect
    warning  it may well not
    debug    one of NVIDIA's debugging variables, without `why = "..."` beside it

    \b
    hpctrain sites validate mine.toml
    hpctrain sites validate frontier lumi-g --strict

    Exit code 3 for an error; with --strict, for anything. Exit code 2 if a file is no preset.
    """  # noqa: D301 - click wants the control character
    try:
        read = [load_site(one) for one in sites]
    except WrongPreset as error:
        if len(error.faults) == 1:
            raise
        for place, text in error.faults:
            click.echo(f"{_short(place)}: {text}", err=True)
        raise UsageError(
            f"{count(len(error.faults), 'fault')} in a preset: it cannot be read"
        ) from None
    by_site = [(site.name, validate(site)) for site in read]
    every = _once(finding for _, findings in by_site for finding in findings)
    failing = [one for one in every if strict or one.level == "error"]
    if as_json:
        from dataclasses import asdict

        echo_json(
            [{"site": name, "findings": [asdict(one) for one in found]} for name, found in by_site]
        )
    else:
        if every:
            _echo_findings(every)
        many = "site" if len(by_site) == 1 else "sites"
        click.echo(f"{len(by_site)} {many} checked: {_counts(every)}")
    if failing:
        names = [name for name, findings in by_site if any(one in failing for one in findings)]
        raise ChecksFailed(f"{_counts(failing)} in {', '.join(names)}")


def _once(findings: Iterable[PresetFinding]) -> list[PresetFinding]:
    """Each finding once: what a base says is found in every preset that extends it."""
    return list({(one.where, one.path, one.message): one for one in findings}.values())


def _echo_findings(findings: Sequence[PresetFinding]) -> None:
    """The findings as a table."""
    from rich.text import Text

    rows = [
        (_short(one.where), Text(one.level, _COLORS[one.level]), one.path, one.message)
        for one in findings
    ]
    echo_table(rows, header=("WHERE", "LEVEL", "VALUE", ""))


def _short(where: str) -> str:
    """A place without the part of its path that is this directory's."""
    here = f"{os.getcwd()}/"  # noqa: PTH109 - compared as text, and may be gone
    return where.removeprefix(here)


def _counts(findings: Sequence[PresetFinding]) -> str:
    counts = [(sum(one.level == level for one in findings), level) for level in _COLORS]
    parts = [f"{number} {_COUNTED[level][number != 1]}" for number, level in counts if number]
    return ", ".join(parts) or "nothing found"


@command.command("init")
@click.option("--from-slurm", "source", flag_value="slurm", help="Query SLURM.")
@click.option("--name", metavar="NAME", help="The site's name.  [default: SLURM's ClusterName]")
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(path_type=Path), help="Output file."
)
def init_command(*, source: str | None, name: str | None, output: Path | None) -> None:
    """Draft this cluster's preset from SLURM's configuration.

    Partitions with their limits, GPUs and usable CPUs, preemption with grace and signal, KillWait.
    `hpctrain sites probe` finds interfaces and adapters.

    \b
    hpctrain sites init --from-slurm                      print it
    hpctrain sites init --from-slurm -o mycluster.toml    write it
    hpctrain sites validate mycluster.toml
    hpctrain check --site mycluster.toml
    """  # noqa: D301 - click wants the control character
    from datetime import date

    from hpctrain.cluster.site.detect import draft, site_name

    if source is None:
        raise click.UsageError("nothing to draft from; say --from-slurm.")
    facts = get_cluster(source).facts()
    chosen = name or (output.stem if output else site_name(facts.name))
    today = date.fromtimestamp(clock.now())  # noqa: DTZ012 - a day
    text = draft(facts, name=chosen, today=today.isoformat())
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {output} exists; name another file, or delete it") from None
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from None
    click.echo(f"{output}: a draft for {facts.name}; next: hpctrain sites validate {output}")


@command.command("probe")
@click.option("--toml", "as_toml", is_flag=True, help="A draft of [network], [expect], [storage].")
@json_option
def probe_command(*, as_toml: bool, as_json: bool) -> None:
    """Read this node: interfaces, adapters, GPUs, limits, versions.

    Run it on a compute node, as in `srun -N1 hpctrain sites probe`. Changes nothing.
    """
    from hpctrain.cluster.preflight.facts import draft, probe

    if as_toml and as_json:
        raise UsageError("--toml and --json: choose one")
    facts = probe(os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    if as_json:
        echo_json(facts.plain())
    elif as_toml:
        click.echo(draft(facts), nl=False)
    else:
        _echo_facts(facts)


def _echo_facts(facts: NodeFacts) -> None:
    """One line for each fact; what could not be read says why."""
    by_name = facts.plain()
    unreadable: dict[str, str] = by_name.pop("unreadable")
    rows: list[tuple[str, str]] = []
    for name, value in by_name.items():
        if isinstance(value, dict):
            rows += [(f"{name} {key}", _in_words(one)) for key, one in value.items()]
        else:
            rows += [
                (name, _in_words(one)) for one in (value if isinstance(value, list) else [value])
            ]
    rows = [row for row in rows if row[1]]
    echo_table([*rows, *((name, f"unknown: {why}") for name, why in unreadable.items())])


def _in_words(value: Any) -> str:
    """A fact; of one with several parts "NAME VALUE" of each that is known."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text}" for key, one in value.items() if (text := _in_words(one)))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")
