"""Check what the login node can see of a job: files, programs, accounts, releases, disk and meshes.

`_refuse_shared` keeps two live runs from one set of checkpoint files (`checkpoint.sealed`): each
would resume from the other's weights. The disk must have flock(2), rename(2), fsync(2), O_APPEND;
locks between nodes are `hpctrain preflight`'s. Releases of torch and DeepSpeed are read from the
interpreter's packages without an import.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shlex
import shutil
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoint.sealed.patterns import may_meet, parse, places, refuse_wrong
from hpctrain.cluster.scheduler.base import Cluster, get_cluster
from hpctrain.core.base.env import HPCTRAIN_OUTPUT_DIR
from hpctrain.core.base.files import absolute
from hpctrain.core.base.records import COPIES_PER_RANK
from hpctrain.core.base.text import size
from hpctrain.core.settings.check import missing_tracker, node_range
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import ChecksFailed, ClusterError, HpctrainError, NotFound, UsageError
from hpctrain.launch.program import seen_saves
from hpctrain.ledger.plan.mesh import ModelShape, meshes, refusal, shape_of_config, untried
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hpctrain.core.base.mesh import Mesh


_INFO = (".dist-info", ".egg-info")


def runs_inside(settings: Settings, cluster: Cluster) -> bool:
    """Whether the ranks run in an image, of which nothing is known here."""
    return bool(settings.container.image) and not cluster.on_this_machine


def ranks_python(settings: Settings, cluster: Cluster, python: str) -> str:
    """What imports the ranks' packages: the image, or a python.

    `python` is the run's interpreter outside of containers.
    """
    return settings.container.image if runs_inside(settings, cluster) else python


def check_hooks_here(
    settings: Settings, origins: Mapping[str, str], folder: Path, *, python: str = sys.executable
) -> list[str]:
    """Refuse a tracker that the run's python lacks and a webhook that is none; what may be wrong.

    Paths are relative to `folder`, the ranks' working directory. Another `python` than ours cannot
    be asked, and is not.

    Raises:
        UsageError: with what to do.
    """
    missing = missing_tracker(settings.track.loggers) if python == sys.executable else ""
    if missing:
        raise UsageError(
            f"{origins.get('track.loggers', 'default')}: track.loggers has {missing}, which "
            f"{python} cannot import; pip install {missing} there, or leave it out"
        )
    return _check_webhook(settings, origins, folder) + _check_command(settings, origins, folder)


def _check_webhook(settings: Settings, origins: Mapping[str, str], folder: Path) -> list[str]:
    if not settings.notify.webhook_file:
        return []
    setting = f"{origins.get('notify.webhook_file', 'default')}: notify.webhook_file"
    path = folder / Path(settings.notify.webhook_file).expanduser()
    try:
        url = path.read_text().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"{setting} {path} cannot be read: {error.strerror}") from None
    if not url.startswith(("http://", "https://")) or len(url.split()) != 1:
        raise UsageError(f"{setting} {path} holds no URL; it takes one line, https://...")
    if url.startswith("http://") and not settings.notify.plain_http:
        raise UsageError(
            f"{setting} {path} holds an http:// URL, which is a secret that everybody on the way "
            "can read; use https://, or set notify.plain_http"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return [f"others can read {path}, which holds a secret; chmod 600 it"]
    return []


def _check_command(settings: Settings, origins: Mapping[str, str], folder: Path) -> list[str]:
    words = shlex.split(settings.notify.command)
    if not words:
        return []
    program = words[0]
    there = os.access(folder / program, os.X_OK) if "/" in program else shutil.which(program)
    if there:
        return []
    place = f"{origins.get('notify.command', 'default')}: notify.command"
    return [f"{place} names {program}, which is not here; it must be on the job's first node"]


OUTPUT, RUN = "{output}", "{run}"
"""In a program's arguments, in [env] and in patterns: the run's output folder, and its name."""


def with_own_places(
    entry: Entry, settings: Settings, env: dict[str, str], run: Path
) -> tuple[Entry, Settings, dict[str, str]]:
    """Put a run's own folder and name in where arguments, patterns and variables ask for them."""

    def own(text: str) -> str:
        return text.replace(OUTPUT, str(RunDir(run).output)).replace(RUN, run.name)

    patterns = settings.checkpoint.sealed
    if (placed := [own(pattern) for pattern in patterns]) != patterns:
        settings = replaced(settings, {"checkpoint.sealed": placed})
    entry = replace(entry, args=[own(word) for word in entry.args])
    return entry, settings, {name: own(value) for name, value in env.items()}


def check_sealed(settings: Settings, cwd: str, run: Path, after: Sequence[str] = ()) -> None:
    """Look at the patterns of the program's own checkpoints.

    `cwd` is the program's working directory, "" where it has none of its own. `after` has
    directories of runs that are done before this one begins.

    Raises:
        UsageError: one of them would seal nothing, the run's own files, or another run's.
    """
    if settings.checkpoint.sealed:
        refuse_wrong(settings.checkpoint.sealed, Path(cwd) if cwd else None, run)
        _refuse_shared(settings, cwd, run, after)


def plan_meshes(
    settings: Settings,
    origins: Mapping[str, str],
    cwd: Path | None,
    *,
    is_recipe: bool,
) -> tuple[Settings, dict[int, Mesh], list[str]]:
    """The meshes at the fewest and at the most nodes, within what is known of the model.

    `engine.pretrained` is relative to `cwd`; None stands for a run that continues, which may do so
    without that folder. The recipe makes its own model.

    Returns:
        The settings with the folder's whole path, the meshes, and what the user should know.

    Raises:
        NotFound: there is no such folder.
        UsageError: it is no model's, or some number of nodes has no mesh.
    """
    settings, shape, notes = _pretrained(settings, origins, cwd, is_recipe=is_recipe)
    planned = meshes(settings, origins, is_recipe=is_recipe, shape=shape)
    return settings, planned, notes


def _pretrained(
    settings: Settings, origins: Mapping[str, str], cwd: Path | None, *, is_recipe: bool
) -> tuple[Settings, ModelShape | None, list[str]]:
    """The settings with the folder's whole path, its model's shape if it is there, and notes."""
    if not settings.engine.pretrained:
        return settings, None, []
    setting = f"{origins.get('engine.pretrained', 'default')}: engine.pretrained"
    if is_recipe:
        raise UsageError(f"{setting} has no effect in the recipe, which makes a model of its own")
    named = Path(settings.engine.pretrained).expanduser()
    folder = absolute(cwd or Path.cwd(), named)
    settings = replaced(settings, {"engine.pretrained": str(folder)})
    if not folder.is_dir():
        if cwd is None:
            return settings, None, [f"{folder} is gone: the ranks will see whether the mesh fits"]
        raise NotFound(f"{setting} is {folder}, and no such folder is here; download it first")
    from hpctrain.checkpoint.exchange.safetensors import files, read_config

    config, where = read_config(folder), str(folder / "config.json")
    files(folder)  # or one says what is missing
    return settings, shape_of_config(config, where), []


def other_environment(environ: Mapping[str, str], entry: Entry) -> list[str]:
    """A note where the shell's environment is another than that of this Python, as with pipx.

    Only Python of ours is meant.
    """
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX") or ""
    here = {os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
    if entry.kind == "program" or not active or os.path.realpath(active) in here:
        return []
    own = f"the ranks run with {sys.executable}, where hpctrain is installed"
    use = f"install hpctrain there too, and submit with {active}/bin/hpctrain"
    return [f"{own}, and not with the active environment {active}: to use that, {use}"]


def memory_notes(settings: Settings, cluster: Cluster, state_bytes: int | None = None) -> list[str]:
    """Return a line on what copies take of each node's memory; none if none are made.

    `state_bytes` is of all ranks together, None if not known. On the fewest nodes each has the
    largest part. If the job outlives a node, copies lie on two nodes.
    """
    alive = settings.alive
    if alive.memory == "no":
        return []
    on_two = alive.memory_peer == "auto" and alive.is_on() and not cluster.on_this_machine
    copies = COPIES_PER_RANK * (2 if on_two else 1)
    too = ", those for the next node included" if on_two else ""
    part = f"{copies} times its part of the"
    if state_bytes is None:
        amount = "what copies take of a node's memory is not known before the first checkpoint: "
        amount += f"{part} state"
    else:
        share = -(-state_bytes // node_range(settings.slurm.nodes)[0])
        amount = f"copies take about {size(copies * share)} of each node's memory, "
        amount += f"{part} newest checkpoint"
    return [f"alive.memory: {amount}{too}; where that does not fit, none are made"]


def check_versions(settings: Settings, setup: Sequence[str] = (), *, python: str = "") -> list[str]:
    """Refuse an engine that cannot train with what is installed; returns what to know.

    Where the job loads modules or runs lines of its own first, these may bring another torch: then
    a refusal is only a note, and the ranks decide.

    `setup` has lines that a job of its site runs first. Of another `python` than this one nothing
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
    if settings.slurm.setup or setup:
        return [f"{why} (unless the job's modules or slurm.setup bring another)"]
    raise UsageError(why)


def installed_version(package: str) -> str:
    """Its version; "" where it is not installed here, which a job's module may make up for.

    Told by the name of its folder in the first place that Python would import it from.
    `importlib.metadata` says the same, and brings the parsers of e-mail: 30 ms at each submit.
    """
    for place in sys.path:
        try:
            entries = list(Path(place).iterdir())
        except OSError:
            continue  # Python passes over it as well
        for path in entries:
            if path.suffix in _INFO and path.stem.lower().startswith(f"{package}-"):
                return path.stem[len(package) + 1 :].partition("-")[0]
    return ""


def _refuse_shared(settings: Settings, cwd: str, run: Path, after: Sequence[str] = ()) -> None:
    """Refuse a run whose checkpoints would be another live run's too."""
    if not settings.checkpoint.sealed:
        return
    own = _places(settings.checkpoint.sealed, cwd, run)
    for other, spec in _others(run):
        if str(other.root) in after:
            continue
        theirs = _places(_saved_by(other, spec), spec.entry.cwd, other.root)
        for text, parts in own:
            if any(may_meet(parts, there) for _, there in theirs) and _may_write(other, spec):
                name = Path(text).name
                raise UsageError(
                    f"checkpoint.sealed {text!r} takes in files that {other.name} saves too, and "
                    "each would resume from the other's weights: have each run save into a folder "
                    f"of its own, e.g. --set 'checkpoint.sealed={{output}}/{name}' with {{output}} "
                    f"in the program's arguments (or {HPCTRAIN_OUTPUT_DIR} in its code); wait for "
                    f"{other.name}; or `hpctrain cancel {other.typed}`"
                )


def _places(patterns: list[str], cwd: str, run: Path) -> list[tuple[str, tuple[str, ...]]]:
    folders = [Path(cwd)] if cwd else []
    return [
        (pattern.text, parts)
        for pattern in parse(patterns)
        for parts in places(pattern, [*folders, RunDir(run).output])
    ]


def _others(run: Path) -> Iterator[tuple[RunDir, Spec]]:
    """Other runs of programs. One that cannot be read is nobody's rival here."""
    from hpctrain.ledger.run.find_run import indexed

    try:
        folders = sorted(run.parent.iterdir())
    except OSError:  # none so far
        folders = []
    folders += [one.run.root for one in indexed() if not one.is_over]
    for folder in dict.fromkeys(folder for folder in folders if folder != run):
        other = RunDir(folder)
        if not other.spec.is_file():
            continue
        try:
            spec = load_spec(other.spec)
        except (OSError, HpctrainError):
            continue
        if spec.entry.kind != "recipe":
            yield other, spec


def _saved_by(run: RunDir, spec: Spec) -> list[str]:
    """What a run registers; of one that registers nothing, where its program is seen to save."""
    if spec.settings.checkpoint.sealed or _is_over(run):
        return spec.settings.checkpoint.sealed
    return seen_saves(spec.entry)


def _is_over(run: RunDir) -> bool:
    # History takes a third of a submit's start, and few runs register checkpoints.
    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_state import OVER

    return RunHistory.read(run, marks="few").state.phase in OVER


def _may_write(run: RunDir, spec: Spec) -> bool:
    """Whether a job of the run may still save; one that is ending is waited for a while."""
    from hpctrain.launch.live_job import outlasting

    if _is_over(run):
        return False
    try:
        return outlasting(run, get_cluster(spec.cluster)) is not None
    except ClusterError:  # nobody can say that it may not
        return True


MOUNTS = Path("/proc/self/mountinfo")
NAME_BYTES = 128
"""Longer than any name that a run gives a file."""
COPIES = frozenset(
    {
        *("fuse.s3fs", "fuse.goofys", "fuse.mountpoint-s3", "fuse.gcsfuse", "fuse.geesefs"),
        *("fuse.rclone", "fuse.blobfuse", "fuse.blobfuse2", "fuse.davfs", "davfs"),
    }
)
"""Object stores: renaming a folder there is copying it, file by file."""
_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "rb+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""
_HELD = 3
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def check_disk(folder: Path) -> None:
    """Refuse a folder whose disk does not do what a run's promises stand on.

    The folder exists and can be written; what is tried in it is taken away again. On a full disk
    nothing is reported: the caller that needs the room names its purpose.

    Raises:
        ChecksFailed: names the file system, what it lacks, and what to do.
    """
    kind = file_system(folder)
    if kind in COPIES:
        raise _unfit(folder, kind, "renaming a folder there is not one change")
    with _trial(folder, kind) as trial:
        if trial is None:
            return
        for what, tried in _TRIALS.items():
            try:
                holds = tried(trial)
            except OSError as error:
                if error.errno in _FULL:
                    return
                raise _unfit(folder, kind, f"{what} ({error.strerror})") from None
            if not holds:
                raise _unfit(folder, kind, what)


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """The name of the file system that a folder lies on, "" where nobody can tell."""
    with contextlib.suppress(OSError):
        return mount_of(folder, mounts)[0]
    return ""


def mount_of(folder: Path, mounts: Path = MOUNTS) -> tuple[str, str]:
    """Type and mount point of the file system that a folder is on or will be on.

    Both are "" if the kernel's table `mounts` has no such file system.

    Raises:
        OSError: the table cannot be read.
    """
    path, best, length = str(folder.resolve()), ("", ""), -1
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        at = before.split()[4].encode().decode("unicode_escape")
        mount = at.rstrip("/")
        if f"{path}/".startswith(f"{mount}/") and len(mount) >= length:
            best, length = (after.split()[0], at), len(mount)
    return best


def _unfit(folder: Path, kind: str, what: str) -> ChecksFailed:
    on = f" ({kind})" if kind else ""
    return ChecksFailed(
        f"{folder}{on} cannot hold a run: {what}; have it mounted otherwise (Lustre: -o flock), or "
        "choose another disk with --runs"
    )


@contextlib.contextmanager
def _trial(folder: Path, kind: str) -> Iterator[Path | None]:
    """A folder to try things in, gone afterwards; None where there is no room for one."""
    try:
        trial = Path(tempfile.mkdtemp(prefix=".hpctrain-disk-", dir=folder))
    except OSError as error:
        if error.errno in _FULL:
            yield None
            return
        raise _unfit(folder, kind, f"no folder can be made there ({error.strerror})") from None
    try:
        yield trial
    finally:
        shutil.rmtree(trial, ignore_errors=True)


def _locks(trial: Path) -> bool:
    path = trial / "lock"
    path.touch()
    with path.open("rb+") as holder, path.open("rb+") as other:
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        # Where flock is made of locks that belong to a process: another process must be kept out.
        import subprocess  # slow to import, and rarely needed

        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        words = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)]
        return subprocess.run(words, capture_output=True, check=False).returncode == _HELD


def _renames(trial: Path) -> bool:
    old, new = trial / "old", trial / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    staged, committed = trial / "staged", trial / "committed"
    staged.mkdir()
    (staged / "shard").write_text("1")
    staged.rename(committed)
    there = sorted(path.name for path in trial.iterdir() if path.name != "lock")
    whole = old.read_text() == "new" and (committed / "shard").read_text() == "1"
    return whole and there == ["committed", "old"]


def _flushes(trial: Path) -> bool:
    for path in (trial / "old", trial):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return True


def _appends(trial: Path) -> bool:
    path = trial / "facts"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    first, second = os.open(path, flags), os.open(path, flags)
    try:
        for descriptor in (first, second, first):
            os.write(descriptor, b"fact\n")
    finally:
        os.close(first)
        os.close(second)
    return path.read_bytes() == b"fact\n" * 3


def _names(trial: Path) -> bool:
    (trial / ("n" * NAME_BYTES)).touch()
    return True


def _maps(trial: Path) -> bool:
    with (
        (trial / "old").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        return mapped[:] == b"new"


_TRIALS: dict[str, Callable[[Path], bool]] = {
    "flock does not keep a second process out": _locks,
    "a rename is not one change": _renames,
    "fsync does not work on files and folders": _flushes,
    "appends of two writers overwrite each other": _appends,
    f"names of {NAME_BYTES} bytes are too long for it": _names,
    "files cannot be mapped into memory": _maps,
}
"""What is wrong where it does not hold, in the order in which it is tried."""
