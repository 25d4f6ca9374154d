"""T1 and T2: one job that looks at its nodes, on SLURM or as processes of this machine.

The folder that the nodes write into lies beside the runs, so that it is the file system of the runs
that is tried. It is removed when all is well.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from hpctrain.base.files import read_text
from hpctrain.base.modes import follow_folder, make_runs_folder
from hpctrain.errors import AccountingSilent, ClusterUnreachable
from hpctrain.preflight.checks_between import LOGIN
from hpctrain.preflight.expect import Order, expected_of
from hpctrain.preflight.node import ORDER, PROGRESS, REPORT
from hpctrain.preflight.report import FAIL, Report, Result
from hpctrain.run.layout import RunDir
from hpctrain.scheduler.base import get_cluster
from hpctrain.scheduler.local.preflight_nodes import LocalNodes
from hpctrain.scheduler.slurm.cluster_name import submitted_here
from hpctrain.scheduler.slurm.command import run as run_command
from hpctrain.scheduler.slurm.header import export_arguments
from hpctrain.scheduler.slurm.script import body_path, render_script
from hpctrain.settings.check import node_range
from hpctrain.site.environment import Versions, derive
from hpctrain.site.paths import data_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hpctrain.settings.spec import Spec
    from hpctrain.site.preset import Site

    Say = Callable[[str], None]

FOLDER = ".preflight"
BODY = "preflight.sh"
POLL_S = 0.1
ASK_EVERY_S = 2.0
LAST_WORDS_S = 3.0
"""A job that is over may have written its report a moment ago: NFS shows it late."""
SUBMIT_TIMEOUT_S = 60.0


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
            if job is not None and job.state in {"PENDING", "CONFIGURING"}:
                return job.reason or job.state.lower()
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


def wait(preflight: Preflight, job: Started, *, timeout_s: float, say: Say) -> Report:
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


def _wait(preflight: Preflight, job: Started, *, timeout_s: float, say: Say) -> Report:
    root = preflight.run.root
    told, ask_at, over_at = 0, 0.0, None
    began: float | None = None
    while True:
        with contextlib.suppress(OSError):
            return Report.load(root / REPORT)
        told = _tell_progress(root / PROGRESS, told, say)
        now = time.monotonic()
        began = now if told and began is None else began
        if over_at is not None and now > over_at + LAST_WORDS_S:
            return _without_report(preflight, f"{job.name} ended without a report")
        if began is not None and now > began + timeout_s:
            job.cancel()
            return _without_report(preflight, f"no report after {timeout_s:g} s")
        if now > ask_at:
            ask_at = now + ASK_EVERY_S
            over_at = (over_at or now) if job.is_over() else None
            if not told and over_at is None and (why := job.waits_for()):
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


def _without_report(preflight: Preflight, why: str) -> Report:
    output = preflight.run.jobs / f"{preflight.token}.out"
    said = ""
    with contextlib.suppress(OSError):
        lines = [line for line in read_text(output).splitlines() if line.strip()]
        said = f"; it said last: {lines[-1]}" if lines else ""
    hint = f"see {output}; where that is not there, the first node does not see {output.parent}"
    return Report([], [Result("job", FAIL, f"{why}{said}", [], hint)])


def discard(preflight: Preflight) -> None:
    """Remove the folder."""
    shutil.rmtree(preflight.run.root, ignore_errors=True)
    with contextlib.suppress(OSError):
        preflight.run.root.parent.rmdir()
