"""What SLURM has to do with a preflight: its job, and what sbatch says before there is one.

tests/unit/cli/test_preflight.py and tests/slurm/test_preflight.py hold the promises.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from hpctrain.base.files import data_dir
from hpctrain.base.records import JobState
from hpctrain.errors import AccountingSilent, ClusterError, ClusterUnreachable
from hpctrain.preflight.report import FAIL, OK, UNKNOWN, WARN, Result
from hpctrain.scheduler.slurm.command import run as run_command
from hpctrain.scheduler.slurm.command import submitted_here
from hpctrain.scheduler.slurm.script import body_path, export_arguments, render_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import Cluster
    from hpctrain.settings.spec import Spec

BODY = "preflight.sh"
SUBMIT_TIMEOUT_S = 60.0


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


def check_accepted(script: Path, ask: Callable[[Sequence[str]], str]) -> list[Result]:
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


def render_preflight(spec: Spec, run: RunDir, token: str) -> str:
    """A run's batch script with another body; the job is started once."""
    once = replace(spec.settings.slurm, signal_lead_s=0)
    once = replace(once, extra=[*once.extra, "--no-requeue"])
    own = replace(spec, settings=replace(spec.settings, slurm=once))
    of_run, body = (
        path.read_text().rstrip("\n") for path in (body_path(), data_dir("sbatch") / BODY)
    )
    return render_script(own, run, token).replace(of_run, body, 1)


class SlurmPreflight:
    """The job of a preflight."""

    def __init__(self, cluster: Cluster, script: Path) -> None:
        arguments = export_arguments(script.read_text())
        command = ["sbatch", "--parsable", *arguments, str(script)]
        self._job_id = submitted_here(run_command(command, timeout_s=SUBMIT_TIMEOUT_S, query=False))
        self._cluster = cluster
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

    def release(self) -> None:
        """Nothing: a job whose report is there ends by itself."""
