"""Where the files lie that come with hpctrain, and the layers in which sites are looked for.

tests/unit/site/test_site.py holds the promises.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpctrain.base.env import HPCTRAIN_SITE_PATH
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM_SITES = Path("/etc/hpctrain/sites")
PROJECT_FILE = "site.toml"
"""Beside the settings file: the project's own layer."""

PACKAGED, SYSTEM, USER, PROJECT = "packaged", "system", "user", "project"
GIVEN = "file"
"""The layer of a site that was named by its file."""
ADMINS = (PACKAGED, SYSTEM, GIVEN)
"""Layers whose [lock] counts where the file is root's. One given by its path may be a draft."""


def data_dir(kind: Literal["site-configs", "sbatch"]) -> Path:
    """The folder that comes with hpctrain: inside an installed wheel, or at the top of a checkout.

    Raises:
        HpctrainError: it is in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "_data" / kind, package.parent / kind)
    for place in places:
        if place.is_dir():
            return place
    raise HpctrainError(f"{places[0]} is missing from this installation; install hpctrain again")


def layers(environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    """Name and folder of each layer of site files, lowest first. A folder need not be there.

    HPCTRAIN_SITE_PATH is read like PATH (for module trees): its first folder wins over the next,
    and all of them over /etc.
    """
    text = environ.get(HPCTRAIN_SITE_PATH, "")
    named = [Path(entry) for entry in text.split(os.pathsep) if entry]
    system = [SYSTEM_SITES, *reversed(named)]
    folders = [(PACKAGED, data_dir("site-configs")), *((SYSTEM, path) for path in system)]
    home = environ.get("HOME")
    config = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")
    if config.startswith("/"):
        folders.append((USER, Path(config, "hpctrain", "sites")))
    return folders
