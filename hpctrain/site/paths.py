"""Where the files lie that come with hpctrain, and where sites are looked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Mapping

SITE_PATH_VARIABLE = "HPCTRAIN_SITE_PATH"
SYSTEM_SITES = Path("/etc/hpctrain/sites")


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


def site_search(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Folders with site files, in the order in which they win.

    First those of HPCTRAIN_SITE_PATH (as PATH, for module trees), then the machine's own, then
    those that come with hpctrain.
    """
    text = (os.environ if environ is None else environ).get(SITE_PATH_VARIABLE, "")
    named = [Path(entry) for entry in text.split(os.pathsep) if entry]
    return [*named, SYSTEM_SITES, data_dir("site-configs")]
