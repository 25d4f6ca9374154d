"""Compare a run's container with what the login node sees, before there is a job.

It checks that the image is there, is for the nodes' machines, and that a runtime starts it. What a
module, a setup line or the site may bring is a note, not a refusal. The machine is read from the
image's own bytes: SIF headers, OCI and docker configurations, the header of a root file system's
shell. SquashFS cannot be read. Bytes that are cut off, nonsense or too large are "not known".
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import stat
import tomllib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

from hpctrain.cluster.scheduler.slurm.container import mounts_of, runtime_of
from hpctrain.cluster.scheduler.slurm.script import module_lines
from hpctrain.core.base.files import is_plain, open_plain, read_plain, read_text
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.errors import ChecksFailed, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from io import FileIO

    from hpctrain.cluster.scheduler.base import Accounting
    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir

    Read: TypeAlias = Callable[[str], bytes | None]
    "A file of the layout by its name; None where there is none of a sensible size."


HEAD_BYTES = 512
JSON_BYTES = 4 << 20
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
_OCI_MACHINES = {
    "amd64": "x86_64",
    "arm64": "aarch64",
    "ppc64": "ppc64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
}
_PROGRAMS = ("bin/sh", "usr/bin/sh", "bin/bash", "usr/bin/env", "bin/busybox")
_DIGEST = re.compile(r"([a-z0-9]{1,16}):([0-9a-f]{32,128})")
_MOST_LINKS = 40
_MOST_MEMBERS = 20_000
_MOST_MANIFESTS = 64


def machines(image: Path) -> frozenset[str]:
    """Return the machines whose programs an image has, as `uname -m` says it; none if not known.

    `image` is a file, or a folder with a root file system or an OCI layout.

    Raises:
        OSError: it is not there, cannot be read, or is neither file nor folder.
    """
    if stat.S_ISDIR(image.stat().st_mode):
        os.scandir(image).close()
        return _of_folder(image)
    with open_plain(image) as file:
        head = file.read(HEAD_BYTES) or b""
        at, magic = _SIF_MAGIC
        if head[at : at + len(magic)] == magic:
            machine = _SIF_MACHINES.get(head[_SIF_CODE])
            return frozenset({machine} if machine else ())
        members = _tar_members(file)
        return _of_layout(lambda name: _read_member(file, members.get(name)))


def _of_folder(root: Path) -> frozenset[str]:
    if is_plain(root / "oci-layout"):
        return _of_layout(lambda name: _read_small(root, name))
    for program in _PROGRAMS:
        try:
            with open_plain(inside(root, program)) as file:
                head = file.read(20) or b""
        except OSError:
            continue
        machine = elf_machine(head)
        if machine:
            return frozenset({machine})
    return frozenset()


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


# ---- OCI and docker


def _of_layout(read: Read) -> frozenset[str]:
    """What an image's configuration says; none as soon as one part of it is not understood."""
    names: list[str] = []
    docker = _json(read("manifest.json"))
    if isinstance(docker, list):
        configs = [_text(entry, "Config") for entry in docker[:_MOST_MANIFESTS]]
        names = [_text(_json(read(config)), "architecture") for config in configs]
    else:
        names = _of_index(read, _json(read("index.json")), set())
    made_for = [_OCI_MACHINES.get(name, "") for name in names]
    return frozenset(made_for) if all(made_for) else frozenset()


def _of_index(read: Read, index: Any, seen: set[str]) -> list[str]:
    """Return the architectures of an index; "" for one that is not understood.

    No blob in `seen` is read again, or a ring would be followed for ever.
    """
    entries = index.get("manifests") if isinstance(index, dict) else None
    if not isinstance(entries, list):
        return [""]
    names: list[str] = []
    for entry in entries[:_MOST_MANIFESTS]:
        platform = entry.get("platform") if isinstance(entry, dict) else None
        name = _text(platform, "architecture")
        again = _text(entry, "digest") in seen  # under two names, or a ring
        if name == "unknown" or again:  # the former is no image: what a builder attests of one
            continue
        names += [name] if name else _of_manifest(read, _blob(read, entry, seen), seen)
    return names


def _of_manifest(read: Read, manifest: Any, seen: set[str]) -> list[str]:
    if isinstance(manifest, dict) and "config" in manifest:
        return [_text(_blob(read, manifest["config"], seen), "architecture")]
    return _of_index(read, manifest, seen)


def _blob(read: Read, descriptor: Any, seen: set[str]) -> Any:
    digest = _DIGEST.fullmatch(_text(descriptor, "digest"))
    if digest is None or len(seen) >= 2 * _MOST_MANIFESTS:
        return None
    seen.add(digest[0])
    return _json(read(f"blobs/{digest[1]}/{digest[2]}"))


def _text(record: Any, key: str) -> str:
    value = record.get(key) if isinstance(record, dict) else None
    return value if isinstance(value, str) else ""


def _json(text: bytes | None) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _read_small(root: Path, name: str) -> bytes | None:
    try:
        return read_plain(inside(root, name), JSON_BYTES)
    except (OSError, ValueError):  # a NUL in the name
        return None


# ---- tar


def _tar_members(file: FileIO) -> dict[str, tuple[int, int]]:
    """Place and size of what may be JSON; up to the first header that is none.

    Written out, since `tarfile` reads as much memory as a header asks for.
    """
    members: dict[str, tuple[int, int]] = {}
    size = os.fstat(file.fileno()).st_size
    at = 0
    for _ in range(_MOST_MEMBERS):
        if at >= size:
            break
        file.seek(at)
        header = file.read(HEAD_BYTES) or b""
        length = _member_bytes(header)
        if length is None:
            break
        name = header[:100].partition(b"\0")[0].decode(errors="replace").removeprefix("./")
        members.setdefault(name, (at + HEAD_BYTES, length))
        at += HEAD_BYTES + -(-length // HEAD_BYTES) * HEAD_BYTES
    return members


def _member_bytes(header: bytes) -> int | None:
    """Size of the member with this header; None where it is no header."""
    if len(header) < HEAD_BYTES or not header[0]:
        return None
    if header[124] & 0x80:  # 8 GiB and more
        return int.from_bytes(header[125:136], "big")
    return _octal(header[124:136])


def _octal(field: bytes) -> int | None:
    digits = field.strip(b" \0")
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _read_member(file: FileIO, member: tuple[int, int] | None) -> bytes | None:
    if member is None or member[1] > JSON_BYTES:
        return None
    file.seek(member[0])
    return file.read(member[1])


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
    """Refuse a container that can start on no node; see `Cluster.check_container`.

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
