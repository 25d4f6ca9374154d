"""T0: what the login node can tell before a job is asked for. Under two seconds, nothing written.

Most of it is `prepare`'s and raises there; this adds what is not an error but a warning, and asks
SLURM. tests/unit/test_preflight_login.py holds the promises.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import ClusterError, ClusterUnreachable, HpctrainError
from hpctrain.preflight.bounded import Unanswered, bounded
from hpctrain.preflight.report import FAIL, OK, UNKNOWN, WARN, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

    TestOnly = Callable[[Sequence[str]], str]

MOUNTS = Path("/proc/self/mountinfo")
TIMEOUT_S = 1.0
GIB = 1024**3
ROOM_WARN_GIB, ROOM_FAIL_GIB = 20.0, 1.0
SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb", "9p",
             "pvfs", "orangefs", "glusterfs", "fuse", "afs", "cvmfs", "daos", "vast")  # fmt: skip
LOCAL_FS = ("ext", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "ramfs", "f2fs", "vfat")


def check_login(
    spec: Spec, site: Site | None, runs: Path, *, mounts: Path = MOUNTS
) -> list[Result]:
    """Everything but what a script is needed for.

    Args:
        spec: A run as `prepare` has checked it.
        site: Its preset.
        runs: The folder of all runs, absolute.
        mounts: The kernel's table of mounts.
    """
    slurm = spec.cluster == "slurm"
    return [
        *check_preset(site),
        *(check_mount(runs, mounts) if slurm else []),
        *check_room(runs),
        *(check_options(spec.settings.slurm.extra) if slurm else []),
    ]


def check_preset(site: Site | None) -> list[Result]:
    """The preset, by the rules of `hpctrain sites validate`."""
    if site is None:
        hint = "interfaces and limits are then only held against each other: hpctrain sites list"
        return [Result("preset", WARN, "no site is known", [], hint)]
    from hpctrain.site.validate import validate

    found = validate(site)
    levels = {"error": FAIL, "warning": WARN}
    results = [Result("preset", levels[f.level], str(f)) for f in found if f.level in levels]
    return results or [Result("preset", OK, f"site {site.name}")]


def check_mount(folder: Path, mounts: Path = MOUNTS) -> list[Result]:
    """Whether nodes can see the folder, as far as its file system's type tells."""
    try:
        kind, at = mount_of(folder, mounts.read_text())
    except OSError as error:
        return [Result("shared directory", UNKNOWN, f"{mounts} cannot be read: {error.strerror}")]
    if kind.startswith(SHARED_FS):
        return [Result("shared directory", OK, f"{folder} is on {kind} ({at})")]
    if kind.startswith(LOCAL_FS):
        text = f"{folder} is on {kind} ({at}), which other nodes may not see"
        return [Result("shared directory", WARN, text, [], "put runs on a shared disk with --runs")]
    return [Result("shared directory", UNKNOWN, f"{folder} is on {kind}, which may be shared")]


def mount_of(folder: Path, mountinfo: str) -> tuple[str, str]:
    """Type and mount point of the file system that a folder is on or will be on."""
    best = ("unknown", "")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        at = before.split()[4].encode().decode("unicode_escape")
        inside = str(folder) == at or str(folder).startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best[1]):
            best = (after.split()[0], at)
    return best


def check_room(folder: Path) -> list[Result]:
    """Free space where the runs go. A mount that does not answer is unknown."""
    place = folder
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - as in prepare
        place = place.parent
    try:
        free = bounded(lambda: shutil.disk_usage(place).free / GIB, TIMEOUT_S)
    except Unanswered as error:
        return [Result("space", UNKNOWN, f"{place}: {error}")]
    status = FAIL if free < ROOM_FAIL_GIB else WARN if free < ROOM_WARN_GIB else OK
    hint = "two checkpoints must fit beside each other"
    return [Result("space", status, f"{free:.1f} GiB free in {place}", [], hint)]


def check_options(extra: Sequence[str]) -> list[Result]:
    """Options of the user's own that a run which is started again gets along with badly."""
    results = []
    for option in extra:
        if option.replace(" ", "=") == "--open-mode=truncate":
            text = "slurm.extra: --open-mode=truncate throws a job's output away at each requeue"
            results.append(Result("options", WARN, text, [], "take it out"))
        if option == "--no-requeue":
            text = "slurm.extra: --no-requeue: a run that is preempted does not come back"
            results.append(Result("options", WARN, text, [], "take it out"))
    return results


def check_accepted(script: Path, ask: TestOnly) -> list[Result]:
    """What `sbatch --test-only` says of the script: partition, account, QOS, limits.

    Args:
        script: The batch script.
        ask: Runs a command of SLURM's; see `scheduler.slurm.command.run`.
    """
    try:
        ask(["sbatch", "--test-only", str(script)])
    except ClusterUnreachable as error:
        return [Result("sbatch", UNKNOWN, str(error))]
    except ClusterError as error:
        return [Result("sbatch", FAIL, str(error), [], "change what is asked for")]
    return [Result("sbatch", OK, "accepts the job")]


def refused(error: HpctrainError) -> Result:
    """What `prepare` found, as a result."""
    return Result("settings", FAIL, str(error))
