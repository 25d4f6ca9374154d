"""Which site counts: --site, HPCTRAIN_SITE, hpctrain.toml, what is detected here, or none.

tests/unit/test_site_submit.py holds the promises.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.errors import HpctrainError
from hpctrain.site.detect import choose as choose_here
from hpctrain.site.detect import look_around
from hpctrain.site.load import site_files
from hpctrain.site.paths import SYSTEM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.settings.layers import Source
    from hpctrain.site.preset import Site
    from hpctrain.submit.prepare import SubmitRequest

SITE_VARIABLE = "HPCTRAIN_SITE"
LOCAL_SITE = "local"


@dataclass(frozen=True)
class Chosen:
    """A site, or none."""

    site: Site | None
    notes: list[str] = field(default_factory=list)
    """How it was chosen, where this command line does not say it itself."""


def choose(request: SubmitRequest, config: Source | None, cluster: str) -> Chosen:
    """The site of a new run.

    Raises:
        NotFound: there is no site of that name.
        UsageError: its preset is wrong or not for use as it is, or several sites match here.
    """
    name, by = _named(request, config)
    if name is None and cluster == "local":
        name = LOCAL_SITE
    environ = request.environ
    site, how = choose_here(
        name,
        environ,
        look_around(environ, lambda: _cluster_name(environ)),
        project=(request.cwd / request.config).parent if request.config else request.cwd,
    )
    if name is None:
        # Most clusters have no preset: that nothing matched is no news.
        return Chosen(site, [how] if site is not None or "matches (" in how else [])
    return Chosen(site, [f"site {name}, as {by} says"] if by else [])


def dropped_locks(request: SubmitRequest, config: Source | None, chosen: Chosen) -> list[str]:
    """Locks of the site that this is, which do not hold because another one was named.

    Empty where no admin's file locks anything: nothing is asked then.
    """
    name, _ = _named(request, config)
    environ = request.environ
    if name is None or not _anybody_locks(environ):
        return []
    try:
        here, _ = choose_here(None, environ, look_around(environ, lambda: _cluster_name(environ)))
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


def _cluster_name(environ: Mapping[str, str]) -> str | None:
    """SLURM's ClusterName; None where the user's shell has no scontrol, or no answer came."""
    if shutil.which("scontrol", path=environ.get("PATH", "")) is None:
        return None
    from hpctrain.scheduler.slurm.cluster_name import cluster_name

    return cluster_name()


def _named(request: SubmitRequest, config: Source | None) -> tuple[str | None, str]:
    """The site that was named, and by what; "" where it was the command line itself."""
    if request.site:
        return request.site, ""
    if by_shell := request.environ.get(SITE_VARIABLE):
        return by_shell, SITE_VARIABLE
    if config is not None and (given := config.top.get("site")):
        return given, config.layer.where("site", "")
    return None, ""
