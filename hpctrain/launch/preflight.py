"""Preflight from the login node: checks before a job, and the preflight job.

`check_login` takes under two seconds and writes nothing; `prepare` raises errors, this adds
warnings. `make`, `start` and `wait` are for the job that probes its nodes; its folder lies beside
the runs, so that their file system is tried, and goes when all is well.
tests/unit/cli/test_preflight.py and tests/slurm/test_preflight.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.cluster.preflight.bounded import Unanswered, bounded
from hpctrain.cluster.preflight.checks import Order, expected_of
from hpctrain.cluster.preflight.checks_between import LOGIN
from hpctrain.cluster.preflight.node import ORDER, PROGRESS, REPORT
from hpctrain.cluster.preflight.report import FAIL, OK, UNKNOWN, WARN, PreflightReport, Result
from hpctrain.cluster.scheduler.base import PreflightJob, get_cluster
from hpctrain.cluster.site.environment import Versions, derive
from hpctrain.core.base import clock
from hpctrain.core.base.files import (
    follow_folder,
    make_runs_folder,
    read_text,
    remove_runs_folder,
    write_private,
)
from hpctrain.core.settings.check import node_range
from hpctrain.launch.checks import MOUNTS, mount_of
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpctrain.cluster.site.schema import Site
    from hpctrain.core.settings.spec import Spec
    from hpctrain.errors import HpctrainError

    Say = Callable[[str], None]


TIMEOUT_S = 1.0
GIB = 1024**3
ROOM_WARN_GIB, ROOM_FAIL_GIB = 20.0, 1.0
SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb", "9p",
             "pvfs", "orangefs", "glusterfs", "fuse", "afs", "cvmfs", "daos", "vast")  # fmt: skip
LOCAL_FS = ("ext", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "ramfs", "f2fs", "vfat")
FOLDER = ".preflight"
POLL_S = 0.1
ASK_EVERY_S = 2.0
LAST_WORDS_S = 3.0
"""A job that is over may have written its report a moment ago: NFS shows it late."""


def check_login(
    spec: Spec, site: Site | None, runs: Path, *, mounts: Path = MOUNTS
) -> list[Result]:
    """Everything but what a script is needed for.

    `spec` is as `prepare` has checked it; `runs` is absolute.
    """
    cluster = get_cluster(spec.cluster)
    return [
        *check_preset(site),
        *([] if cluster.on_this_machine else check_mount(runs, mounts)),
        *check_room(runs),
    ]


def check_preset(site: Site | None) -> list[Result]:
    """The preset, by the rules of `hpctrain sites validate`."""
    if site is None:
        hint = "interfaces and limits are then only held against each other: hpctrain sites list"
        return [Result("preset", WARN, "no site is known", [], hint)]
    from hpctrain.cluster.site.validate import validate

    findings = validate(site)
    levels = {"error": FAIL, "warning": WARN}
    results = [Result("preset", levels[f.level], str(f)) for f in findings if f.level in levels]
    return results or [Result("preset", OK, f"site {site.name}")]


def check_mount(folder: Path, mounts: Path = MOUNTS) -> list[Result]:
    """Whether nodes can see the folder, as far as its file system's type tells."""
    try:
        kind, at = mount_of(folder, mounts)
    except OSError as error:
        return [Result("shared directory", UNKNOWN, f"{mounts} cannot be read: {error.strerror}")]
    if kind.startswith(SHARED_FS):
        return [Result("shared directory", OK, f"{folder} is on {kind} ({at})")]
    if kind.startswith(LOCAL_FS):
        text = f"{folder} is on {kind} ({at}), which other nodes may not see"
        return [Result("shared directory", WARN, text, [], "put runs on a shared disk with --runs")]
    return [
        Result(
            "shared directory", UNKNOWN, f"{folder} is on {kind or 'unknown'}, which may be shared"
        )
    ]


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


def refused(error: HpctrainError) -> Result:
    """What `prepare` found, as a result."""
    return Result("settings", FAIL, str(error))


@dataclass(frozen=True)
class Preflight:
    """A folder that a job can be started on.

    It is laid out as a run's; `script` is None where none is needed.
    """

    run: RunDir
    token: str
    script: Path | None


def make(spec: Spec, site: Site | None, runs: Path, *, bandwidth: bool, try_s: float) -> Preflight:
    """Write the folder.

    With `bandwidth` the collective is tried; one all-reduce of a group may take `try_s`.

    Raises:
        OSError: it cannot be written.
        UsageError: a setting that a batch script cannot hold.
    """
    token = f"preflight-{secrets.token_hex(4)}"
    run = RunDir(runs / FOLDER / token)
    make_runs_folder(runs)
    make_runs_folder(run.root.parent)
    run.root.mkdir(mode=0o700)
    follow_folder(run.root)
    run.jobs.mkdir()
    nonce = secrets.token_hex(8)
    order = _order(spec, site, run, nonce, bandwidth=bandwidth, try_s=try_s)
    (run.root / ORDER).write_text(json.dumps(order.plain()))
    (run.root / LOGIN).write_text(nonce)
    (run.root / "@key").write_text(secrets.token_hex(16))
    (run.root / "@key").chmod(0o600)
    own = replace(spec, name="preflight")
    own.dump(run.spec)
    text = get_cluster(spec.cluster).preflight_script(own, run, token)
    if not text:
        return Preflight(run, token, None)
    script = run.script(token)
    write_private(script, text, mode=0o700)
    return Preflight(run, token, script)


def _order(
    spec: Spec, site: Site | None, run: RunDir, nonce: str, *, bandwidth: bool, try_s: float
) -> Order:
    nodes = node_range(spec.settings.slurm.nodes)[1]
    derived = derive(site, nodes=nodes, versions=Versions(), run_dir=str(run.root))
    env = {name: value.value for name, value in derived.values.items()} | spec.env
    slurm = spec.settings.slurm
    expected = expected_of(site, gpus=slurm.gpus_per_node, env=env)
    return Order(expected, nonce, bandwidth=bandwidth, ranks=slurm.ranks(), timeout_s=try_s)


def start(preflight: Preflight, spec: Spec, environ: Mapping[str, str]) -> PreflightJob:
    """Start its job.

    Raises:
        ClusterError: refused.
        ClusterUnreachable: no answer.
    """
    cluster = get_cluster(spec.cluster)
    return cluster.start_preflight(spec, preflight.run, preflight.token, environ)


def wait(preflight: Preflight, job: PreflightJob, *, timeout_s: float, say: Say) -> PreflightReport:
    """The report, once it is there; a job that leaves none is a failed check. Cancels on Ctrl-C.

    The time in the queue does not count for `timeout_s`. `say` gets each news once.
    """
    try:
        return _wait(preflight, job, timeout_s=timeout_s, say=say)
    except BaseException:
        job.cancel()
        raise
    finally:
        job.release()


def _wait(
    preflight: Preflight, job: PreflightJob, *, timeout_s: float, say: Say
) -> PreflightReport:
    root = preflight.run.root
    lines_shown, ask_at, over_at = 0, 0.0, None
    began: float | None = None
    while True:
        with contextlib.suppress(OSError):
            return PreflightReport.load(root / REPORT)
        lines_shown = _show_progress(root / PROGRESS, lines_shown, say)
        now = clock.monotonic()
        began = now if lines_shown and began is None else began
        if over_at is not None and now > over_at + LAST_WORDS_S:
            return _without_report(preflight, f"{job.name} ended without a report")
        if began is not None and now > began + timeout_s:
            job.cancel()
            return _without_report(preflight, f"no report after {timeout_s:g} s")
        if now > ask_at:
            ask_at = now + ASK_EVERY_S
            over_at = (over_at or now) if job.is_over() else None
            if not lines_shown and over_at is None and (why := job.waits_for()):
                say(f"{job.name} waits: {why}")
        clock.sleep(POLL_S)


def _show_progress(path: Path, shown_lines: int, say: Say) -> int:
    """Tell the lines that are new; how many there are."""
    try:
        lines = read_text(path).splitlines()
    except OSError:
        return shown_lines
    for line in lines[shown_lines:]:
        say(line)
    return len(lines)


def _without_report(preflight: Preflight, why: str) -> PreflightReport:
    output = preflight.run.jobs / f"{preflight.token}.out"
    said = ""
    with contextlib.suppress(OSError):
        lines = [line for line in read_text(output).splitlines() if line.strip()]
        said = f"; it said last: {lines[-1]}" if lines else ""
    hint = f"see {output}; where that is not there, the first node does not see {output.parent}"
    return PreflightReport([], [Result("job", FAIL, f"{why}{said}", [], hint)])


def discard(preflight: Preflight) -> None:
    """Remove the folder."""
    shutil.rmtree(preflight.run.root, ignore_errors=True)
    with contextlib.suppress(OSError):
        remove_runs_folder(preflight.run.root.parent)
