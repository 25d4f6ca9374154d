"""The choice of a run's site, and what its user changes of the preset.

`find_site` goes through --site, HPCTRAIN_SITE, hpctrain.toml and what is detected here. `changed`
and `take_locks` list what the user changes, and hold the preset's locks against that.
tests/unit/submit/test_site_submit.py and test_site_lock.py hold the promises.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.base.env import HPCTRAIN_SITE
from hpctrain.errors import HpctrainError
from hpctrain.scheduler.base import name_here
from hpctrain.settings.layers import DEFAULT
from hpctrain.settings.schema import value_at
from hpctrain.site.detect import choose as choose_here
from hpctrain.site.detect import look_around
from hpctrain.site.environment import Versions, derive, locked_names, paths_of
from hpctrain.site.load import site_files
from hpctrain.site.preset import SYSTEM
from hpctrain.site.sheet import check_locked, locked_changes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.settings.layers import SettingsFile
    from hpctrain.settings.schema import Settings
    from hpctrain.site.preset import Site


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

    Args:
        given: What stood behind --site.
        environ: The submitting shell's.
        config: The settings file.
        project: Its folder.
        default: The site where none is named; "" where it is detected.

    Raises:
        NotFound: there is no site of that name.
        UsageError: its preset is wrong or not for use as it is, or several sites match here.
    """
    name, by = _named(given, environ, config)
    named = name is not None
    name = name or default or None
    here = look_around(environ, lambda: name_here(environ))
    site, how = choose_here(name, environ, here, project=project)
    if name is None:
        # Most clusters have no preset: that nothing matched is no news.
        return SiteChoice(site, [how] if site is not None or "matches (" in how else [])
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

    Args:
        site: The preset.
        settings: As they were given.
        origins: Setting to its place.
        env: What hpctrain.toml and flags set for the ranks.
        env_origins: Variable to its place.
    """
    changes: dict[str, str] = {}
    for path, origin in origins.items():
        section, _, key = path.partition(".")
        theirs = site.settings.get(section, {}).get(key)
        now = value_at(settings, path)
        by_user = not origin.startswith((DEFAULT, f"site {site.name}"))
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
