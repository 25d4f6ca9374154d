"""How a node's task starts inside a container: words for each runtime. Pure.

The agent runs inside, one container for each node; the batch script and whatever asks SLURM stay
outside, with the host's python. Most runtimes are commands in front of the task's python; Pyxis and
the CSCS engine are options of srun. docs/containers.md says what of each was read where.

The variables are the same for all: what `container.env`, the site and the run's own `[env]` name is
set by `env` in the image, after the image's own, so that no runtime's syntax is in its way.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.schema import ContainerSettings
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir

_MOUNT = re.compile(r"[^:]+(:[^:]+){0,2}", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_AMD = re.compile(r"\bMI\d|AMD|Instinct", re.IGNORECASE)
_EDF_NAME = re.compile(r"[\w.-]+")
_FORBIDDEN = {
    "apptainer": ',:"\\',
    "singularity": ',:"\\',
    "enroot-pyxis": ",:\"'\\$` ",
    "shifter": ":; ",
    "podman-hpc": ":",
    "podman": ":",
    "charliecloud": ":",
    "cscs-ce": ":\"'\\$` ",
}
"""Characters by which a runtime's way to write a mount would be read as something else."""
_OF_THE_IMAGE = frozenset(
    f"/{name}" for name in ("", "bin", "dev", "etc", "lib", "lib64", "opt", "proc", "sbin", "sys",
    "usr", "usr/bin", "usr/lib", "var")
)  # fmt: skip
"""Folders that are the image's own: the host's in their place would leave nothing of it."""
_OUTSIDE = (
    "# What was installed for the host's python must not be found by the image's.",
    "hpctrain_outside=(env)",
    'for hpctrain_name in PYTHONHOME PYTHONPATH VIRTUAL_ENV "${!CONDA_@}"; do',
    '  hpctrain_outside+=(-u "$hpctrain_name")',
    "done",
)
_OF_THE_HOST = frozenset({"HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH", "TMPDIR"})
_NO_READ_ONLY = frozenset({"charliecloud"})


class Mount(NamedTuple):
    """A folder or file of the host, and where the inside sees it."""

    source: str
    target: str
    read_only: bool = False

    def text(self) -> str:
        """`SRC:DST`, or `SRC:DST:ro`, which most runtimes take."""
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


@dataclass(frozen=True)
class ContainerStart:
    """What starts a node's task inside its container.

    Attributes:
        runtime: Which.
        words: The runtime's own command up to the image; empty where srun starts the container.
        srun: Options of srun.
        edf: Text of the environment file that the CSCS engine reads; "" for the others.
    """

    runtime: str
    words: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    edf: str = ""


def runtime_of(
    container: ContainerSettings, site: Site | None, origins: Mapping[str, str] | None = None
) -> str:
    """Return what starts the run's container; "" if it has none.

    Raises:
        UsageError: an image is asked for, and nobody says what is to start it.
    """
    if not container.image:
        return ""
    theirs = site.container.runtime if site else ""
    if runtime := container.runtime or ("" if theirs == "none" else theirs):
        return runtime
    where = (origins or {}).get("container.image", "default")
    why = "no site says what starts containers here"
    if site is not None:
        says = "has none" if theirs == "none" else "does not say what starts them"
        why = f"{site.where('container', 'runtime')} {says}"
    raise UsageError(
        f"{where}: container.image is {container.image}, and {why}: set container.runtime, e.g. "
        "--set container.runtime=apptainer"
    )


def container_start(spec: Spec, run: RunDir, site: Site | None) -> ContainerStart | None:
    """How each node's task starts inside; None for a run without a container.

    Raises:
        UsageError: no runtime is known, or this one cannot take a value.
    """
    container = spec.settings.container
    runtime = runtime_of(container, site, spec.origins)
    if not runtime:
        return None
    if "\n" in container.image:
        raise UsageError(f"container.image is {container.image!r}, which has a line break")
    mounts = mounts_of(spec, run, site, runtime)
    workdir = spec.entry.cwd or str(run.root)
    gpus = _gpus(runtime, site, container.options) if spec.settings.slurm.gpus_per_node else []
    more = [*gpus, *container.options]
    if runtime == "enroot-pyxis":
        return ContainerStart(runtime, srun=_pyxis(container.image, mounts, workdir, spec, site))
    if runtime == "cscs-ce":
        edf = _edf(container.image, mounts, workdir)
        return ContainerStart(runtime, srun=more, edf=edf)
    own = _COMMANDS[runtime](container.image, mounts, workdir, more)
    return ContainerStart(runtime, words=[*_COMMAND_OF.get(runtime, [runtime]), *own])


def container_lines(spec: Spec, run: RunDir, token: str, site: Site | None) -> list[str]:
    """The batch script's function that says how a task starts; none without a container.

    It is called after the setup lines, so that it sees what these have exported.

    Raises:
        UsageError: see `container_start`.
    """
    start = container_start(spec, run, site)
    if start is None:
        return []
    lines = ["hpctrain_container() {", *_OUTSIDE, *_inside(spec, site)]
    if start.runtime == "charliecloud":  # starts nothing without it, and SLURM need not set it
        lines += ["export USER=${USER:-$(id -un)}"]
    srun = list(start.srun)
    if start.edf:
        path = shlex.quote(str(run.jobs / f"{token}.toml"))
        lines += [f"(umask 077 && mkdir -p {shlex.quote(str(run.jobs))} && cat >{path}) <<'EDF'"]
        lines += [*start.edf.splitlines(), "EDF"]
        srun = [f"--environment={run.jobs / f'{token}.toml'}", *srun]
    if srun:
        lines += [f'hpctrain_srun_args=({shlex.join(srun)} "${{hpctrain_srun_args[@]}}")']
    python = shlex.quote(spec.settings.container.python)
    words = f"{shlex.join(start.words)} " if start.words else ""
    return [*lines, f'hpctrain_task=({words}"${{hpctrain_inside[@]}}" {python})', "}"]


def mounts_of(spec: Spec, run: RunDir, site: Site | None, runtime: str) -> list[Mount]:
    """What of the host is seen inside, parents before what lies below them.

    The runs' folder, the working directory, the program's folders, those that settings name and the
    runs beside which this one stands, at the same paths; then the site's and the user's, which win.

    Raises:
        UsageError: a mount of another form, or a path that the runtime's syntax cannot hold.
    """
    theirs = spec.settings.container.mounts
    given = [parse_mount(text, _origin(spec, "container.mounts")) for text in theirs]
    if site is not None:
        where = site.where("container", "binds")
        given = [*(parse_mount(text, where) for text in site.container.binds), *given]
    mounts = {mount.target: mount for mount in given}
    for path in sorted(set(_needed(spec, run)), key=lambda path: path.count("/")):
        if not any(_covers(mount, path) for mount in mounts.values()):
            mounts[path] = Mount(path, path)
    ordered = sorted(mounts.values(), key=lambda mount: (mount.target.count("/"), mount.target))
    for mount in ordered:
        _refuse_unwritable(mount, runtime)
    return ordered


def parse_mount(text: str, where: str) -> Mount:
    """`SRC[:DST[:ro]]` as a mount.

    Raises:
        UsageError: another form, or a path that is not absolute.
    """
    source, target, flag = (*text.split(":"), "", "")[:3]
    mount = Mount(_normal(source), _normal(target or source), flag == "ro")
    paths = mount.source.startswith("/") and mount.target.startswith("/") and mount.target != "/"
    if not paths or _MOUNT.fullmatch(text) is None or flag not in {"", "ro", "rw"}:
        raise UsageError(
            f"{where}: {text!r} is no mount; it takes SRC[:DST[:ro]] with absolute paths, e.g. "
            "/scratch/data:/data:ro"
        )
    return mount


def _normal(path: str) -> str:
    return str(PurePosixPath(path)) if path else ""


def _needed(spec: Spec, run: RunDir) -> Iterable[str]:
    """Folders of the host without which the run cannot continue inside."""
    entry, settings = spec.entry, spec.settings
    named = {
        "--runs": str(run.root.parent),
        "the working directory": entry.cwd,
        "the script's folder": str(PurePosixPath(entry.path).parent)
        if entry.kind == "script"
        else "",
        "train.data": settings.train.data if entry.kind == "recipe" else "",
        "engine.pretrained": settings.engine.pretrained,
    }
    for what, path in named.items():
        if path in _OF_THE_IMAGE:
            raise UsageError(
                f"{what} is {path}, and inside a container that is the image's own: submit from "
                "another folder"
            )
    sealed = [str(PurePosixPath(pattern).parent) for pattern in settings.checkpoint.sealed]
    others = [*([spec.evaluates.run] if spec.evaluates else []), *spec.after]
    paths = [*named.values(), *entry.python_path, *sealed, *others]
    return [
        path
        for path in paths
        if path.startswith("/") and path not in _OF_THE_IMAGE and not set("*?[$") & set(path)
    ]


def _covers(mount: Mount, path: str) -> bool:
    """Whether a path of the host is there inside, under its own name, and can be written."""
    same = mount.source == mount.target and not mount.read_only
    return mount.target == path or (same and PurePosixPath(path).is_relative_to(mount.target))


def _refuse_unwritable(mount: Mount, runtime: str) -> None:
    if mount.read_only and runtime in _NO_READ_ONLY:
        raise UsageError(
            f"container.mounts has {mount.text()}: {runtime} has no read-only mounts; leave :ro out"
        )
    wrong = {*_FORBIDDEN[runtime], "\n", "\r"} & {*mount.source, *mount.target}
    if wrong:
        raise UsageError(
            f"{mount.source} has {min(wrong)!r} in its name, which a mount of {runtime} "
            "cannot hold: choose another folder"
        )


# ---- variables


def _inside(spec: Spec, site: Site | None) -> list[str]:
    """Shell lines that make `hpctrain_inside`: `env` with what is set inside.

    TMPDIR names a folder of the host. Packages below ~/.local would be mixed into the image's.
    What the user sets for the ranks stands above the image's own, and below what the job has,
    unless that speaks of the host's folders.
    """
    container = spec.settings.container
    values: list[str] = []
    for text in container.env:
        name, sign, _ = text.partition("=")
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{_origin(spec, 'container.env')}: container.env has {text!r}; it takes "
                "NAME=VALUE, or the NAME of a variable that the job has"
            )
        values += [text] if sign else []
    lines = ["hpctrain_inside=(env -u TMPDIR PYTHONNOUSERSITE=1)"]
    for name, value in spec.env.items():
        lines += [f"hpctrain_value={shlex.quote(value)}"]
        ours = "$hpctrain_value" if name in _OF_THE_HOST else f"${{{name}-$hpctrain_value}}"
        lines += [f'hpctrain_inside+=("{name}={ours}")']
    lines += [f'hpctrain_inside+=(${{{name}+"{name}=${name}"}})' for name in _passed(spec, site)]
    return [*lines, *([f"hpctrain_inside+=({shlex.join(values)})"] if values else [])]


def _passed(spec: Spec, site: Site | None) -> list[str]:
    """Names of the host's variables that win over the image's."""
    own = [text for text in spec.settings.container.env if "=" not in text]
    return list(dict.fromkeys([*(site.container.env_pass if site else ()), *own]))


# ---- runtimes


def _apptainer(image: str, mounts: Sequence[Mount], workdir: str, more: Sequence[str]) -> list[str]:
    binds = [f"--bind={mount.text()}" for mount in mounts]
    return ["exec", *binds, f"--pwd={workdir}", *more, image]


def _podman(image: str, mounts: Sequence[Mount], workdir: str, more: Sequence[str]) -> list[str]:
    """Of all runtimes it alone separates what a job needs: network, memory, processes, user."""
    shared = ["--rm", "--network=host", "--ipc=host", "--pid=host", "--userns=keep-id"]
    volumes = [f"--volume={mount.text()}" for mount in mounts]
    return ["run", *shared, "--env-host", "--entrypoint=", *volumes, f"--workdir={workdir}", *more,
            image]  # fmt: skip


def _charliecloud(
    image: str, mounts: Sequence[Mount], workdir: str, more: Sequence[str]
) -> list[str]:
    binds = [f"--bind={mount.source}:{mount.target}" for mount in mounts]
    return [*binds, f"--cd={workdir}", *more, image, "--"]


def _shifter(image: str, mounts: Sequence[Mount], workdir: str, more: Sequence[str]) -> list[str]:
    volumes = [f"--volume={mount.text()}" for mount in mounts]
    return [f"--image={image}", *volumes, f"--workdir={workdir}", *more, "--"]


_COMMANDS = {
    "apptainer": _apptainer,
    "singularity": _apptainer,
    "podman": _podman,
    "podman-hpc": _podman,
    "charliecloud": _charliecloud,
    "shifter": _shifter,
}
_COMMAND_OF = {"charliecloud": ["ch-run"]}


def _pyxis(
    image: str, mounts: Sequence[Mount], workdir: str, spec: Spec, site: Site | None
) -> list[str]:
    """The options of `srun --help` where Pyxis is installed."""
    passed = _passed(spec, site)
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(mount.text() for mount in mounts)}",
        f"--container-workdir={workdir}",
        "--no-container-remap-root",
        *([f"--container-env={','.join(passed)}"] if passed else []),
        *spec.settings.container.options,
    ]


def _edf(image: str, mounts: Sequence[Mount], workdir: str) -> str:
    """An environment definition file: upon the user's own where the image is the name of one."""
    is_edf = image.endswith(".toml") or _EDF_NAME.fullmatch(image) is not None
    lines = [f"{'base_environment' if is_edf else 'image'} = {_toml(image)}"]
    lines += ["mounts = ["]
    lines += [f"    {_toml(mount.text())}," for mount in mounts]
    return "\n".join([*lines, "]", f"workdir = {_toml(workdir)}"]) + "\n"


def _toml(text: str) -> str:
    """As a TOML string. Variables in an image's path are the engine's to expand."""
    return json.dumps(text, ensure_ascii=False)


def _gpus(runtime: str, site: Site | None, options: Sequence[str]) -> list[str]:
    """What makes the node's GPUs seen inside; nothing where the user's own words do it."""
    gpus = [partition.gpu for partition in (site.partitions if site else {}).values()]
    amd = bool(gpus) and all(_AMD.search(gpu) for gpu in gpus if gpu) and any(gpus)
    nvidia = {
        "apptainer": ["--nv"],
        "singularity": ["--nv"],
        "podman": ["--device=nvidia.com/gpu=all"],
        "podman-hpc": ["--gpu"],
        "shifter": ["--module=gpu"],
    }
    rocm = {
        "apptainer": ["--rocm"],
        "singularity": ["--rocm"],
        "podman": ["--device=/dev/kfd", "--device=/dev/dri"],
    }
    ours = (rocm if amd else nvidia).get(runtime, [])
    theirs = {"--nv", "--nvccli", "--rocm", "--gpu", "--gpus", "--device", "--module", "-m"}
    return [] if theirs & {option.partition("=")[0] for option in options} else ours


def _origin(spec: Spec, path: str) -> str:
    return spec.origins.get(path, "default")
