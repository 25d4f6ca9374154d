"""What the user changes of a site's preset, so that its locks can be held against it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.settings.layers import DEFAULT
from hpctrain.site.environment import Versions, derive, locked_names, paths_of
from hpctrain.site.lock import check_locked
from hpctrain.site.preset import dotted
from hpctrain.submit.site_checks import CHOSEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.schema import Settings
    from hpctrain.site.preset import Site


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
        settings: As they were merged.
        origins: Setting to its place.
        env: What hpctrain.toml and flags set for the ranks.
        env_origins: Variable to its place.
    """
    found: dict[str, str] = {}
    for path, origin in origins.items():
        section, _, key = path.partition(".")
        theirs = site.settings.get(section, {}).get(key)
        now = getattr(getattr(settings, section), key)
        by_user = not origin.startswith((DEFAULT, CHOSEN, f"site {site.name}"))
        if by_user and now != theirs:
            found[f"settings.{path}"] = origin
    for name, value in env.items():
        if _differs(site, name, value):
            found[f"env.{name}"] = env_origins[name]
    return found


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
    told = check_locked(site, changes, allow=allow)
    alone = replace(site, overridden={})
    of_files = {dotted(path): place for path, place in site.overridden.items()}
    every = of_files | dict(changes)
    paths = [path for path in every if check_locked(alone, {path: every[path]}, allow=True)]
    return told, paths


def _differs(site: Site, name: str, value: str) -> bool:
    """Whether a variable's value is another than the preset's, for one node or for several."""
    for nodes in (1, 2):
        theirs = derive(site, nodes=nodes, versions=Versions(), run_dir="").values.get(name)
        if theirs is not None and theirs.value != value:
            return True
    return not paths_of(site, name) or any(name in when.set for when in site.env.when.values())
