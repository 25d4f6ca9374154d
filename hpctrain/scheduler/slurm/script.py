"""A run's batch script as text: header, exports, and sbatch/body.sh word for word."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from hpctrain.scheduler.slurm.header import header_lines
from hpctrain.scheduler.slurm.site_options import module_lines, srun_options_of
from hpctrain.site.paths import data_dir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.schema import SlurmSettings
    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

BODY = "body.sh"


def render_script(spec: Spec, run: RunDir, token: str) -> str:
    """The batch script of one submission.

    Args:
        spec: The resolved run.
        run: Where it lies; an absolute path that every node sees.
        token: Unique for this submission; the script is to be saved as ``run.script(token)``.

    Raises:
        UsageError: a setting that a batch script cannot hold.
    """
    settings = spec.settings.slurm
    site = site_of(spec)
    exports = {
        "HPCTRAIN_RUN_DIR": str(run.root),
        "HPCTRAIN_TOKEN": token,
        "HPCTRAIN_PYTHON": spec.python,
    }
    lines = [
        "#!/bin/bash",
        *header_lines(settings, spec.name, run, token, site),
        "",
        "# Written by hpctrain; it is what was submitted, so change settings and resume instead.",
        *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        f"hpctrain_srun_args=({_join(srun_options(settings, site))})",
        *_setup([*module_lines(site), *settings.setup]),
        "",
        body_path().read_text().rstrip("\n"),
    ]
    return "\n".join(lines) + "\n"


def body_path() -> Path:
    """Where the common part of all batch scripts lies, for `source` in a hand-written one."""
    return data_dir("sbatch") / BODY


def site_of(spec: Spec) -> Site | None:
    """The preset that the run was submitted with.

    Raises:
        UsageError: another version of hpctrain wrote it.
    """
    if spec.preset is None:
        return None
    from hpctrain.site.preset import Site

    return Site.from_plain(spec.preset)


def srun_options(settings: SlurmSettings, site: Site | None = None) -> list[str]:
    """What the run adds to the srun line; srun takes the last of equal options, so the user's win.

    CPUs for all ranks of a node, then the site's, then the user's own.

    Raises:
        UsageError: the site starts tasks by something else than srun.
    """
    cpus = settings.cpus_per_rank * settings.ranks()
    own = [f"--cpus-per-task={cpus}"] if cpus else []
    return [*own, *srun_options_of(site), *settings.srun_args]


def _setup(lines: Sequence[str]) -> list[str]:
    """The site's and the user's shell lines, as a function: the body calls it once it has traps."""
    if not lines:
        return []
    return ["hpctrain_setup() {", *lines, "}"]


def _join(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
