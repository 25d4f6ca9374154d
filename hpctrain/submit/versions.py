"""Torch and DeepSpeed as the ranks will import them, told on the login node without an import.

Only their names in the interpreter's packages are read. tests/unit/test_versions.py holds the
promises.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import UsageError
from hpctrain.plan.versions import refusal, untried
from hpctrain.scheduler.slurm.site_options import module_lines

if TYPE_CHECKING:
    from hpctrain.settings.schema import Settings
    from hpctrain.site.preset import Site

_INFO = (".dist-info", ".egg-info")


def check_versions(settings: Settings, site: Site | None = None, *, python: str = "") -> list[str]:
    """Refuse an engine that cannot train with what is installed; returns what to know.

    Where the job loads modules or runs lines of its own first, these may bring another torch: then
    a refusal is only a note, and the ranks decide.

    Args:
        settings: The run's.
        site: Its preset.
        python: The interpreter that the ranks will run; where it is another than this one nothing
            is known of its packages.

    Raises:
        UsageError: they are too old.
    """
    if python and python != sys.executable:
        return []
    versions = {name: installed_version(name) for name in ("torch", "deepspeed")}
    why = refusal(versions, settings.engine)
    if why is None:
        return untried(versions, settings.engine)
    if settings.slurm.setup or module_lines(site):
        return [f"{why} (unless the job's modules or slurm.setup bring another)"]
    raise UsageError(why)


def installed_version(package: str) -> str:
    """Its version; "" where it is not installed here, which a job's module may make up for.

    Told by the name of its folder in the first place that Python would import it from.
    `importlib.metadata` says the same, and brings the parsers of e-mail: 30 ms at each submit.
    """
    for place in sys.path:
        try:
            found = list(Path(place).iterdir())
        except OSError:
            continue  # Python passes over it as well
        for path in found:
            if path.suffix in _INFO and path.stem.lower().startswith(f"{package}-"):
                return path.stem[len(package) + 1 :].partition("-")[0]
    return ""
