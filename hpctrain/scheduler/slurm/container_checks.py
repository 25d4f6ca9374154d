"""A run's container held against what the login node can see, before there is a job.

Whether the image is there and for the nodes' machines, and whether anything here starts containers
in that way. What a module or a setup line may bring is a note and no refusal, and so is what a site
says of its nodes. tests/unit/scheduler/test_container_checks.py holds the promises.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import tomllib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hpctrain.base.files import read_text
from hpctrain.errors import ChecksFailed, NotFound, UsageError
from hpctrain.scheduler.slurm.container import mounts_of, runtime_of
from hpctrain.scheduler.slurm.image_file import inside, machines
from hpctrain.scheduler.slurm.script import module_lines
from hpctrain.settings.schema import replaced

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import Accounting
    from hpctrain.settings.schema import Settings
    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

COMMANDS = {
    "apptainer": "apptainer",
    "singularity": "singularity",
    "podman": "podman",
    "podman-hpc": "podman-hpc",
    "charliecloud": "ch-run",
    "shifter": "shifter",
}
SRUN_OPTIONS = {"enroot-pyxis": "--container-image", "cscs-ce": "--environment"}
"""By these srun starts the container; a plugin of SLURM's adds them."""
_FILES = (".sif", ".simg", ".sqsh", ".sqfs", ".squashfs", ".img", ".tar", ".toml")
_ARCHIVE = re.compile(r"(docker-archive|oci-archive|oci|dir):(?!//)([^:]+)(:.*)?")
_WRITABLE = frozenset({"-w", "--write", "-W", "--write-fake", "--home"})
"""With these ch-run makes a mount's place by itself, or may have it."""
_HOSTS = ("/dev", "/proc", "/sys", "/tmp")  # noqa: S108 - ch-run's own
"""Of the host, or writable, in each of ch-run's containers."""
_EDF_BYTES = 1 << 20


def check_container(
    settings: Settings,
    origins: Mapping[str, str],
    site: Site | None,
    *,
    folder: Path,
    environ: Mapping[str, str],
    accounting: Accounting | None,
) -> tuple[Settings, list[str]]:
    """Refuse a container that can start on no node.

    Args:
        settings: The run's.
        origins: Where each was set.
        site: The preset.
        folder: What paths are relative to.
        environ: Of the shell on the login node.
        accounting: Who knows the nodes; None asks nobody.

    Returns:
        The settings with the image's whole path, and what the user should know.

    Raises:
        NotFound: there is no such image.
        ChecksFailed: it cannot be read, is for other machines, or nothing here starts it.
        UsageError: nobody says what is to start it, or its EDF is none.
    """
    runtime = runtime_of(settings.container, site, origins)
    if not runtime:
        return settings, []
    where = f"{origins.get('container.runtime', 'default')}: container.runtime"
    if site is not None and not settings.container.runtime:
        where = site.where("container", "runtime")
    lines = [*module_lines(site), *settings.slurm.setup]
    missing = _lacks(runtime, environ, accounting)
    notes = _check_runtime(runtime, where, site, lines, missing)
    setting = f"{origins.get('container.image', 'default')}: container.image"
    image = settings.container.image
    path = image_path(image, runtime, folder)
    if path is None:
        return settings, notes
    if not image.startswith("/") and path.name and not _ARCHIVE.fullmatch(image):
        settings = replaced(settings, {"container.image": str(path)})
    if path.suffix == ".toml":
        path, setting = _image_of_edf(path, f"{setting} {path}")
    if path is not None:
        partition = settings.slurm.partition
        notes += _check_image(path, setting, partition, settings.slurm.setup, accounting)
    return settings, notes


def check_mount_points(spec: Spec, run: RunDir, site: Site | None) -> None:
    """Refuse a folder as image in which a mount has no place, where none can be made.

    Charliecloud's images are read-only, and ch-run makes no folder in them.

    Raises:
        ChecksFailed: names the place, and what makes it.
    """
    container = spec.settings.container
    runtime = runtime_of(container, site, spec.origins)
    image = Path(container.image)
    options = {option.partition("=")[0] for option in container.options}
    if runtime != "charliecloud" or not image.is_dir() or options & _WRITABLE:
        return
    made: list[str] = [*_HOSTS]
    for target in (mount.target for mount in mounts_of(spec, run, site, runtime)):
        if not any(PurePosixPath(target).is_relative_to(above) for above in made):
            if not _has(image, target):
                raise ChecksFailed(
                    f"container.image is {image}, and {target} has no place there to be mounted "
                    f"on: mkdir -p {image}{target}, or set container.options = ['--write-fake'], "
                    "which newer versions of Charliecloud know"
                )
            made.append(target)


def _has(image: Path, target: str) -> bool:
    try:
        return inside(image, target).exists()
    except OSError:  # links in a ring
        return False


def image_path(image: str, runtime: str, folder: Path) -> Path | None:
    """The file or folder that an image's name means; None for one of a registry or a store."""
    if archive := _ARCHIVE.fullmatch(image):
        image = archive[2]
    elif runtime == "shifter" or "://" in image or "$" in image:
        return None
    path = Path(os.path.normpath(folder / Path(image).expanduser()))
    is_path = image.startswith(("/", "./", "../", "~")) or image.endswith(_FILES)
    by_path = runtime in {"apptainer", "singularity"} or archive is not None
    at_hand = runtime == "charliecloud" and _exists(path)  # else it names one of ch-image's store
    return path if is_path or by_path or at_hand else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _image_of_edf(path: Path, setting: str) -> tuple[Path | None, str]:
    """The image that the CSCS engine's environment file names, where that is a path."""
    try:
        table = tomllib.loads(read_text(path, _EDF_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError):
            raise _unreadable(setting, path, error) from None
        raise UsageError(f"{setting} is no environment file: it cannot be read as TOML") from None
    image = table.get("image")
    if not isinstance(image, str) or not image.startswith("/") or "$" in image:
        return None, setting
    return Path(image), f"{setting} has image"


def _unreadable(setting: str, path: Path, error: OSError | ValueError) -> NotFound | ChecksFailed:
    number = getattr(error, "errno", None)
    if number in {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG} or isinstance(error, ValueError):
        return NotFound(
            f"{setting} is {str(path)!r}, and nothing is there: check the path, or pull the image "
            "there first"
        )
    why = getattr(error, "strerror", None) or str(error)
    return ChecksFailed(f"{setting} is {path}, which cannot be read: {why}")


def _check_image(
    path: Path,
    setting: str,
    partition: str,
    setup: Sequence[str],
    accounting: Accounting | None,
) -> list[str]:
    try:
        made_for = machines(path)
    except (OSError, ValueError) as error:
        if any(str(path) in line for line in setup):
            return [f"{setting} is {path}, which is not here: slurm.setup must bring it"]
        raise _unreadable(setting, path, error) from None
    if not made_for:
        return []
    nodes = frozenset((accounting and accounting.machines(partition)) or ())
    its = _words(made_for)
    if not nodes:
        here = platform.machine()
        unsure = f"{setting} is for {its} and this machine is {here}: nobody could say of the nodes"
        return [] if here in made_for else [unsure]
    there = f"of partition {partition}" if partition else "of the default partition"
    if not made_for & nodes:
        raise ChecksFailed(
            f"{setting} is {path}, made for {its}, and the nodes {there} are {_words(nodes)}: take "
            "an image for these, or another partition"
        )
    others = nodes - made_for
    return [f"{setting} is for {its}; some nodes {there} are {_words(others)}"] if others else []


def _words(names: Collection[str]) -> str:
    return " and ".join(sorted(names))


def _check_runtime(
    runtime: str,
    where: str,
    site: Site | None,
    lines: Sequence[str],
    missing: tuple[str, Sequence[str]],
) -> list[str]:
    """Refuse what starts no container here, unless something may bring it."""
    lacking, here = missing
    theirs = site.container.runtime if site else ""
    notes = []
    if site is not None and theirs not in {"", runtime}:
        has = "has none" if theirs == "none" else f"has {theirs}"
        notes.append(f"{where} is {runtime}, and {site.where('container', 'runtime')} {has}")
    if not lacking:
        return notes
    if runtime == theirs and site is not None:
        return [*notes, f"{lacking}; {site.where('container', 'runtime')} says that nodes have it"]
    if lines:
        return [*notes, f"{lacking}: the job's modules or slurm.setup must bring it"]
    raise ChecksFailed(
        f"{where} is {runtime}, and {lacking} ({', '.join(here) or 'nothing'} is here): choose "
        "another, or, where only the nodes have it, load or look for it by a line of slurm.setup"
    )


def _lacks(
    runtime: str, environ: Mapping[str, str], accounting: Accounting | None
) -> tuple[str, list[str]]:
    """What is not here of the runtime, in words, "" where nobody can say; and those that are."""
    path = environ.get("PATH", "")
    here = [name for name, command in COMMANDS.items() if shutil.which(command, path=path)]
    if command := COMMANDS.get(runtime):
        return "" if runtime in here else f"there is no {command} on PATH here", here
    option = SRUN_OPTIONS[runtime]
    text = accounting.srun_help() if accounting is not None else None
    return "" if text is None or option in text else f"srun has no {option} here", here
