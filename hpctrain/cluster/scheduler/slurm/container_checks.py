"""Compare a run's container with what the login node sees, before there is a job.

It checks that the image is there, is for the nodes' machines, and that a runtime starts it. What a
module, a setup line or the site may bring is a note, not a refusal. The machine is read from the
image's own bytes: a SIF's header, or that of a root file system's shell. That of other images, and
of bytes that are cut off or nonsense, is "not known".
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler.slurm.container import mounts_of, runtime_of
from hpctrain.cluster.scheduler.slurm.script import module_lines
from hpctrain.core.base.files import absolute, open_plain
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.errors import ChecksFailed, NotFound

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hpctrain.cluster.scheduler.base import Accounting
    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir


HEAD_BYTES = 512
_SIF_MAGIC = (32, b"SIF_MAGIC\0")
_SIF_MACHINES = {
    b"02": "x86_64", b"04": "aarch64", b"05": "ppc64", b"06": "ppc64le", b"11": "s390x",
    b"12": "riscv64",
}  # fmt: skip
_SIF_CODE = slice(45, 47)
_ELF_MACHINES = {
    (62, "little"): "x86_64",
    (183, "little"): "aarch64",
    (21, "little"): "ppc64le",
    (21, "big"): "ppc64",
    (22, "big"): "s390x",
    (243, "little"): "riscv64",
}
_PROGRAMS = ("bin/sh", "usr/bin/sh", "bin/bash", "usr/bin/env", "bin/busybox")
_MOST_LINKS = 40


def machine_of(image: Path) -> str:
    """The machine whose programs an image has, as `uname -m` says it; "" if not known.

    `image` is a file, or a folder with a root file system.

    Raises:
        OSError: it is not there, cannot be read, or is neither file nor folder.
    """
    if stat.S_ISDIR(image.stat().st_mode):
        os.scandir(image).close()
        return _of_folder(image)
    with open_plain(image) as file:
        head = file.read(HEAD_BYTES) or b""
    at, magic = _SIF_MAGIC
    return _SIF_MACHINES.get(head[_SIF_CODE], "") if head[at : at + len(magic)] == magic else ""


def _of_folder(root: Path) -> str:
    for program in _PROGRAMS:
        try:
            with open_plain(inside(root, program)) as file:
                head = file.read(20) or b""
        except OSError:
            continue
        if machine := elf_machine(head):
            return machine
    return ""


def inside(root: Path, name: str) -> Path:
    """Return where a path of a root file system lies outside of it; no link leads out of the root.

    Raises:
        OSError: too many links.
    """
    done: list[str] = []
    ahead = name.split("/")[::-1]
    links = 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            done = done[:-1]
        elif part not in {"", "."}:
            place = root.joinpath(*done, part)
            if not place.is_symlink():
                done.append(part)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise OSError(f"{root / name}: too many links")
            target = str(place.readlink())
            done = [] if target.startswith("/") else done
            ahead += target.split("/")[::-1]
    return root.joinpath(*done)


def elf_machine(head: bytes) -> str:
    """The machine of a 64-bit program by its first 20 bytes; "" for anything else."""
    if len(head) < 20 or head[:5] != b"\x7fELF\x02":  # noqa: PLR2004 - the machine ends there
        return ""
    order: Any = {1: "little", 2: "big"}.get(head[5], "")
    code = int.from_bytes(head[18:20], order) if order else 0
    return _ELF_MACHINES.get((code, order), "")


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


def check_container(
    settings: Settings,
    origins: Mapping[str, str],
    site: Site | None,
    *,
    folder: Path,
    environ: Mapping[str, str],
    accounting: Accounting | None,
) -> tuple[Settings, list[str]]:
    """Refuse a container that can start on no node; see `Cluster.check_container`.

    Raises:
        NotFound: there is no such image.
        ChecksFailed: it cannot be read, is for other machines, or nothing here starts it.
        UsageError: nobody says what is to start it.
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
    path = absolute(folder, Path(image).expanduser())
    is_path = image.startswith(("/", "./", "../", "~")) or image.endswith(_FILES)
    by_path = runtime in {"apptainer", "singularity"} or archive is not None
    at_hand = runtime == "charliecloud" and _exists(path)  # else it names one of ch-image's store
    return path if is_path or by_path or at_hand else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


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
        made_for = machine_of(path)
    except (OSError, ValueError) as error:
        if any(str(path) in line for line in setup):
            return [f"{setting} is {path}, which is not here: slurm.setup must bring it"]
        raise _unreadable(setting, path, error) from None
    if not made_for:
        return []
    nodes = frozenset((accounting and accounting.machines(partition)) or ())
    if not nodes:
        here = platform.machine()
        unsure = (
            f"{setting} is for {made_for} and this machine is {here}: nobody could say of the nodes"
        )
        return [] if here == made_for else [unsure]
    there = f"of partition {partition}" if partition else "of the default partition"
    if made_for not in nodes:
        raise ChecksFailed(
            f"{setting} is {path}, made for {made_for}, and the nodes {there} are {_words(nodes)}: "
            "take an image for these, or another partition"
        )
    others = nodes - {made_for}
    return (
        [f"{setting} is for {made_for}; some nodes {there} are {_words(others)}"] if others else []
    )


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
