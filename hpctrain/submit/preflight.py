"""Preflight from the login node: what can be told before a job, and the job that looks at nodes.

`check_login` asks before a job does: under two seconds, nothing written. Most of it is `prepare`'s
and raises there; this adds what is not an error but a warning, and asks SLURM.

`make`, `start` and `wait` are for one job that looks at its nodes, on SLURM or as processes of this
machine. The folder that the nodes write into lies beside the runs, so that it is the file system of
the runs that is tried. It is removed when all is well.

tests/unit/cli/test_preflight.py and tests/slurm/test_preflight.py hold the promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpctrain.base.files import follow_folder, make_runs_folder, read_text
from hpctrain.base.records import JobState
from hpctrain.errors import AccountingSilent, ClusterError, ClusterUnreachable, HpctrainError
from hpctrain.preflight.bounded import Unanswered, bounded
from hpctrain.preflight.checks import Order, expected_of
from hpctrain.preflight.checks_between import LOGIN
from hpctrain.preflight.node import ORDER, PROGRESS, REPORT
from hpctrain.preflight.report import FAIL, OK, UNKNOWN, WARN, PreflightReport, Result
from hpctrain.run.layout import RunDir
from hpctrain.scheduler.base import get_cluster
from hpctrain.scheduler.local.preflight_nodes import LocalNodes
from hpctrain.scheduler.slurm.command import run as run_command
from hpctrain.scheduler.slurm.facts import submitted_here
from hpctrain.scheduler.slurm.script import body_path, export_arguments, render_script
from hpctrain.settings.check import node_range
from hpctrain.site.environment import Versions, derive
from hpctrain.site.paths import data_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

    Say = Callable[[str], None]
    TestOnly = Callable[[Sequence[str]], str]

MOUNTS = Path("/proc/self/mountinfo")
TIMEOUT_S = 1.0
GIB = 1024**3
ROOM_WARN_GIB, ROOM_FAIL_GIB = 20.0, 1.0
SHARED_FS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb", "9p",
             "pvfs", "orangefs", "glusterfs", "fuse", "afs", "cvmfs", "daos", "vast")  # fmt: skip
LOCAL_FS = ("ext", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "ramfs", "f2fs", "vfat")
FOLDER = ".preflight"
BODY = "preflight.sh"
POLL_S = 0.1
ASK_EVERY_S = 2.0
LAST_WORDS_S = 3.0
"""A job that is over may have written its report a moment ago: NFS shows it late."""
SUBMIT_TIMEOUT_S = 60.0


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

    findings = validate(site)
    levels = {"error": FAIL, "warning": WARN}
    results = [Result("preset", levels[f.level], str(f)) for f in findings if f.level in levels]
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


class Started(Protocol):
    """A job that is under way."""

    name: str

    def waits_for(self) -> str:
        """Why it does not run yet, "" where it runs."""

    def is_over(self) -> bool:
        """Whether nothing of it is left."""

    def cancel(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Preflight:
    """A folder that a job can be started on.

    Attributes:
        run: The folder, laid out as a run's.
        token: The job's name.
        script: The batch script; None on this machine.
    """

    run: RunDir
    token: str
    script: Path | None


def make(spec: Spec, site: Site | None, runs: Path, *, bandwidth: bool, try_s: float) -> Preflight:
    """Write the folder.

    Args:
        spec: What a run here would be.
        site: Its preset.
        runs: The folder of all runs.
        bandwidth: Whether the collective is tried.
        try_s: So long may one all-reduce of a group take.

    Raises:
        OSError: it cannot be written.
        UsageError: a setting that a batch script cannot hold.
    """
    token = f"preflight-{secrets.token_hex(4)}"
    run = RunDir(runs / FOLDER / token)
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
    quiet = replace(spec.settings.slurm, signal_lead_s=0)
    quiet.extra = [*quiet.extra, "--no-requeue"]
    own = replace(spec, name="preflight", settings=replace(spec.settings, slurm=quiet))
    own.dump(run.spec)
    if spec.cluster != "slurm":
        return Preflight(run, token, None)
    body = body_path().read_text().rstrip("\n")
    text = render_script(own, run, token).replace(body, _body(), 1)
    script = run.script(token)
    script.write_text(text)
    script.chmod(0o700)
    return Preflight(run, token, script)


def _body() -> str:
    return (data_dir("sbatch") / BODY).read_text().rstrip("\n")


def _order(
    spec: Spec, site: Site | None, run: RunDir, nonce: str, *, bandwidth: bool, try_s: float
) -> Order:
    nodes = node_range(spec.settings.slurm.nodes)[1]
    derived = derive(site, nodes=nodes, versions=Versions(), run_dir=str(run.root))
    env = {name: value.value for name, value in derived.values.items()} | spec.env
    slurm = spec.settings.slurm
    expected = expected_of(site, gpus=slurm.gpus_per_node, env=env)
    return Order(expected, nonce, bandwidth=bandwidth, ranks=slurm.ranks(), timeout_s=try_s)


def start(preflight: Preflight, spec: Spec, environ: Mapping[str, str]) -> Started:
    """Start its job.

    Raises:
        ClusterError: SLURM refused.
        ClusterUnreachable: SLURM gave no answer.
    """
    if preflight.script is None:
        count = node_range(spec.settings.slurm.nodes)[1]
        return LocalNodes(preflight.run, preflight.token, count, spec.python, environ)
    return SlurmJob(preflight.script)


class SlurmJob:
    """A job of SLURM's."""

    def __init__(self, script: Path) -> None:
        arguments = export_arguments(script.read_text())
        command = ["sbatch", "--parsable", *arguments, str(script)]
        self._job_id = submitted_here(run_command(command, timeout_s=SUBMIT_TIMEOUT_S, query=False))
        self._cluster = get_cluster("slurm")
        self.name = f"job {self._job_id}"

    def waits_for(self) -> str:
        """SLURM's reason while it pends."""
        with contextlib.suppress(ClusterUnreachable):  # asked again soon
            job = self._cluster.job(self._job_id)
            if job is not None and job.state in {JobState.PENDING, JobState.CONFIGURING}:
                return job.reason or job.shown.lower()
        return ""

    def is_over(self) -> bool:
        """Whether SLURM says so."""
        try:
            job = self._cluster.job(self._job_id)
        except AccountingSilent:  # slurmctld itself has forgotten it
            return True
        except ClusterUnreachable:
            return False
        return job is None or not job.alive

    def cancel(self) -> None:
        """Cancel it."""
        self._cluster.cancel(self._job_id)


def wait(preflight: Preflight, job: Started, *, timeout_s: float, say: Say) -> PreflightReport:
    """The report, once it is there; a job that leaves none is a failed check. Cancels on Ctrl-C.

    Args:
        preflight: The folder.
        job: Its job.
        timeout_s: So long may it run; the time in the queue does not count.
        say: Told how far it is, each news once.
    """
    try:
        return _wait(preflight, job, timeout_s=timeout_s, say=say)
    except BaseException:
        job.cancel()
        raise
    finally:
        if isinstance(job, LocalNodes):
            job.cancel()


def _wait(preflight: Preflight, job: Started, *, timeout_s: float, say: Say) -> PreflightReport:
    root = preflight.run.root
    lines_told, ask_at, over_at = 0, 0.0, None
    began: float | None = None
    while True:
        with contextlib.suppress(OSError):
            return PreflightReport.load(root / REPORT)
        lines_told = _tell_progress(root / PROGRESS, lines_told, say)
        now = time.monotonic()
        began = now if lines_told and began is None else began
        if over_at is not None and now > over_at + LAST_WORDS_S:
            return _without_report(preflight, f"{job.name} ended without a report")
        if began is not None and now > began + timeout_s:
            job.cancel()
            return _without_report(preflight, f"no report after {timeout_s:g} s")
        if now > ask_at:
            ask_at = now + ASK_EVERY_S
            over_at = (over_at or now) if job.is_over() else None
            if not lines_told and over_at is None and (why := job.waits_for()):
                say(f"{job.name} waits: {why}")
        time.sleep(POLL_S)


def _tell_progress(path: Path, told: int, say: Say) -> int:
    """Tell the lines that are new; how many there are."""
    try:
        lines = read_text(path).splitlines()
    except OSError:
        return told
    for line in lines[told:]:
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
        preflight.run.root.parent.rmdir()
