"""Lay other settings over a run's spec, checked as a submit checks its own; choose a run's site.

`find_site` reads --site, HPCTRAIN_SITE, hpctrain.toml, then what is detected. `changed` and
`take_locks` list what the user changes of the preset, and hold its locks against that.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.base import Accounting, get_cluster, name_here
from hpctrain.cluster.site.detect import choose as choose_here
from hpctrain.cluster.site.detect import look_around
from hpctrain.cluster.site.environment import Versions, derive, locked_names, paths_of
from hpctrain.cluster.site.load import site_files
from hpctrain.cluster.site.schema import SYSTEM, Site, site_of
from hpctrain.cluster.site.sheet import check_locked, locked_changes
from hpctrain.core.base.env import HPCTRAIN_SITE
from hpctrain.core.settings.check import check, engine_flags, profile_flags, split_spares
from hpctrain.core.settings.layers import AUTO, DEFAULT, Layer, SettingsFile, flag_layer, resolve
from hpctrain.core.settings.schema import Settings, value_at
from hpctrain.core.settings.spec import Spec, secret_warnings, secrets_in
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.launch.checks import (
    check_hooks_here,
    check_versions,
    plan_meshes,
    ranks_python,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


SAME_RUN = (
    *("seed", "seq_len", "layers", "dim", "heads", "experts", "experts_per_token"),
    *("data", "data_limit_mb"),
)
"""Of [train]: another value would be another model, or other samples."""
PROJECT_FILE = "site.toml"
"""A preset beside the settings, which was a layer of its own once: it must not stay silent."""


@dataclass(frozen=True)
class ResumeRequest:
    """What `hpctrain resume` was asked; None stands for "as before"."""

    flags: Mapping[str, tuple[str, object]]
    """As `layers.flag_layer` takes them."""
    sets: Sequence[str] = ()
    """What stood behind each `--set`."""
    from_step: int | None = None
    allow_locked: bool = False
    """The user may change what the site's admins have locked; it is recorded."""
    accounting: Accounting | None = None
    """Whom to ask for the user's accounts."""
    ask_accounting: bool = False
    """Where nobody is named, ask the scheduler's own; otherwise its refusal must do."""
    program: Sequence[str] = ()
    """A program with its arguments, in the place of the run's."""
    new_code: bool = False
    """Run the checkout as it is now, not the copy that the run has."""


FLAGS = {
    **dict.fromkeys(("gpus_per_node", "ranks_per_node", "cpus_per_rank", "mem", "time"), "slurm"),
    **dict.fromkeys(("partition", "account", "qos", "constraint"), "slurm"),
    **dict.fromkeys(("reservation", "exclude"), "slurm"),
    **dict.fromkeys(("prefer", "max_node_hours"), "shape"),
    **dict.fromkeys(("resume_args", "resume_if"), "run"),
}
"""Flags that give the setting of their name, to its section."""


def flags_of(
    *,
    nodes: str | None = None,
    container: str | None = None,
    engine: str | None = None,
    mesh: Mapping[str, str] | None = None,
    profile: Mapping[str, object] | None = None,
    checkpoint: Sequence[str] = (),
    snapshot: bool | None = None,
    **others: object,
) -> dict[str, tuple[str, object]]:
    """Return the flags that were given as `layers.flag_layer` takes them; None was not given.

    `mesh` is what `parse_mesh` made of `--mesh`, and `profile` what `parse_profile` made of
    `--profile`; `others` are of `FLAGS`.
    """
    training, spares = split_spares(nodes)
    copies = None if snapshot is None else "yes" if snapshot else "no"
    flags = {
        "slurm.nodes": ("--nodes", training),
        "alive.spares": ("--nodes", spares),
        "container.image": ("--container", container),
        **engine_flags(engine, mesh),
        **profile_flags(profile),
        "checkpoint.sealed": ("--checkpoint", list(checkpoint) or None),
        "run.snapshot": ("--no-snapshot" if copies == "no" else "--snapshot", copies),
    }
    for name, value in others.items():
        flags[f"{FLAGS[name]}.{name}"] = (f"--{name.replace('_', '-')}", value)
    return {path: flag for path, flag in flags.items() if flag[1] is not None}


def change_spec(spec: Spec, request: ResumeRequest) -> tuple[Spec, list[str]]:
    """The run's settings with what was asked laid over them; and what the user should know.

    The preset of the submit holds, whatever the site's files say by now; what was chosen from its
    limits is chosen anew.

    Raises:
        UsageError: an unknown or ill-typed setting, one that would make it another run, nodes
            without a mesh, or a job that the site does not take.
    """
    return resettle(spec, [flag_layer(request.flags, request.sets)], request)


def resettle(spec: Spec, layers: Sequence[Layer], request: ResumeRequest) -> tuple[Spec, list[str]]:
    """The same with layers of any making, lowest first, in the place of the request's flags."""
    below, below_origins = spec.given()
    given, origins = resolve(layers, base=below, origins=below_origins)
    if spec.settings.shape.choose != "no" or AUTO in {given.slurm.time, given.slurm.nodes}:
        from hpctrain.launch.shape import resettle_auto

        given, origins = resettle_auto(spec, given, origins, request.accounting)
    chosen = check(given, origins)
    python = ranks_python(given, get_cluster(spec.cluster), spec.python)
    folder = Path(spec.entry.cwd or Path.cwd())
    notes = chosen.notes + check_hooks_here(given, origins, folder, python=python)
    unlocked, is_recipe = list(spec.unlocked), spec.entry.kind == "recipe"
    site, cluster = site_of(spec), get_cluster(spec.cluster)
    ask = request.accounting or (cluster.accounting() if request.ask_accounting else None)
    if site is not None:
        site_notes, more = _take_locks(spec, site, given, origins, request)
        notes += site_notes
        unlocked += [path for path in more if path not in unlocked]
        now = chosen.upon(given, origins)
        here = cluster.check(*now, site, is_script=not is_recipe, accounting=ask)
        notes += here.notes
        chosen += here
    settings, origins = chosen.upon(given, origins)
    notes += check_versions(settings, cluster.setup_lines(site), python=python)
    settings, container_notes = cluster.check_container(
        settings, origins, site, folder=folder, environ=os.environ, accounting=ask
    )
    notes += container_notes
    _refuse_another_run(spec, settings, origins)
    settings, _, plan_notes = plan_meshes(settings, origins, None, is_recipe=is_recipe)
    changes = list(chosen.changes)
    fresh = replace(spec, settings=settings, origins=origins, chosen=changes, unlocked=unlocked)
    before = {secret[1:] for secret in secrets_in(spec)}
    secrets = [secret for secret in secrets_in(fresh) if secret[1:] not in before]
    return fresh, notes + plan_notes + secret_warnings(secrets)


def _refuse_another_run(spec: Spec, settings: Settings, origins: Mapping[str, str]) -> None:
    for name in SAME_RUN:
        before, now = getattr(spec.settings.train, name), getattr(settings.train, name)
        if before != now:
            raise UsageError(
                f"train.{name} was {before!r} and cannot become {now!r} on the way "
                f"({origins[f'train.{name}']}): weights or sample order would not fit; "
                "start a new run"
            )


def _take_locks(
    spec: Spec, site: Site, given: Settings, origins: Mapping[str, str], request: ResumeRequest
) -> tuple[list[str], list[str]]:
    """What the user should know, and the locked paths that this resume changes."""
    changes = changed(site, given, origins, {}, {})
    new = {path: origin for path, origin in changes.items() if path not in spec.unlocked}
    # Which file overrides which was settled at submit; only what is new can be refused.
    return take_locks(replace(site, overridden={}), new, allow=request.allow_locked)


@dataclass(frozen=True)
class SiteChoice:
    """A site, or none."""

    site: Site | None
    notes: list[str] = field(default_factory=list)
    """How it was chosen, where this command line does not say it itself."""
    named: bool = False
    """Whether the user has named it, or that it shall be none."""


def find_site(
    given: str | None,
    environ: Mapping[str, str],
    config: SettingsFile | None,
    project: Path,
    default: str,
) -> SiteChoice:
    """The site of a new run.

    `given` stood behind --site; `project` is the folder of the settings file; `default` is the site
    where none is named, "" where it is detected. A site.toml in `project` must be named.

    Raises:
        NotFound: there is no site of that name.
        UsageError: its preset is wrong or not for use as it is, or several sites match here.
    """
    name, by = _named(given, environ, config)
    named = name is not None
    name = name or default or None
    here = look_around(environ, lambda: name_here(environ))
    site, how = choose_here(name, environ, here)
    if name is None:
        # Most clusters have no preset: that nothing matched is no news.
        notes = [how] if site is not None or "matches (" in how else []
        if (project / PROJECT_FILE).is_file():
            notes.append(
                f"{PROJECT_FILE} is not used: name it, by --site or `site` in hpctrain.toml"
            )
        return SiteChoice(site, notes)
    return SiteChoice(site, [f"site {name}, as {by} says"] if by else [], named)


def dropped_locks(environ: Mapping[str, str], chosen: SiteChoice) -> list[str]:
    """Locks of the site that this is, which do not hold because another one was named.

    Empty where no admin's file locks anything: nothing is asked then.
    """
    if not chosen.named or not _anybody_locks(environ):
        return []
    try:
        here, _ = choose_here(None, environ, look_around(environ, lambda: name_here(environ)))
    except HpctrainError:  # several match, or one is wrong: nobody can say which it would be
        return []
    if here is None:
        return []
    held = set(chosen.site.lock.keys) if chosen.site is not None else set()
    return [f"{here.about.name}: {key}" for key in here.lock.keys if key not in held]


def _anybody_locks(environ: Mapping[str, str]) -> bool:
    for files in site_files(environ).values():
        for layer, path in files:
            with contextlib.suppress(OSError):
                if layer == SYSTEM and b"lock" in path.read_bytes():
                    return True
    return False


def _named(
    given: str | None, environ: Mapping[str, str], config: SettingsFile | None
) -> tuple[str | None, str]:
    """The site that was named, and by what; "" where it was the command line itself."""
    if given:
        return given, ""
    if by_shell := environ.get(HPCTRAIN_SITE):
        return by_shell, HPCTRAIN_SITE
    if config is not None and (given := config.top.get("site")):
        return given, config.layer.where("site", "")
    return None, ""


def changed(
    site: Site,
    settings: Settings,
    origins: Mapping[str, str],
    env: Mapping[str, str],
    env_origins: Mapping[str, str],
) -> dict[str, str]:
    """Settings and variables of the ranks to which the user gives another value, with the places.

    `env` is what hpctrain.toml and flags set for the ranks.
    """
    changes: dict[str, str] = {}
    for path, origin in origins.items():
        section, _, key = path.partition(".")
        theirs = site.settings.get(section, {}).get(key)
        now = value_at(settings, path)
        of_site = origin == f"site {site.name}" or origin.startswith(f"site {site.name} (")
        by_user = not of_site and origin.partition(",")[0] != DEFAULT
        if by_user and now != theirs:
            changes[f"settings.{path}"] = origin
    for name, value in env.items():
        if _differs(site, name, value):
            changes[f"env.{name}"] = env_origins[name]
    return changes


def changed_by_shell(
    site: Site, environ: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    """Locked variables of the preset that the submitting shell has, and would hand to the job."""
    if site.slurm.export == "none" or not site.lock.keys:
        return {}
    return {
        f"env.{name}": f"{name} of your shell"
        for name in locked_names(site)
        if name in environ
        and name not in env
        and name not in site.env.unset
        and paths_of(site, name)
        and _differs(site, name, environ[name])
    }


def take_locks(
    site: Site, changes: Mapping[str, str], *, allow: bool
) -> tuple[list[str], list[str]]:
    """Lines for the user, and the locked paths that are changed; both empty where none is.

    Raises:
        UsageError: one is changed and `allow` is False.
    """
    return check_locked(site, changes, allow=allow), list(locked_changes(site, changes))


def _differs(site: Site, name: str, value: str) -> bool:
    """Whether a variable's value is another than the preset's, for one node or for several."""
    for nodes in (1, 2):
        theirs = derive(site, nodes=nodes, versions=Versions(), run_dir="").values.get(name)
        if theirs is not None and theirs.value != value:
            return True
    return not paths_of(site, name) or any(name in when.set for when in site.env.when.values())
