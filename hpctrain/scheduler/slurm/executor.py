"""The executor of submitit with our own submission: our script and sbatch call, no pickle.

What is kept of submitit: the executor and job classes, and the callable in its checkpointable form.
What is not used is `submitit.core._submit`: its rules (timed out at 10 minutes or less, checkpoint
on rank 0 only, result pickles, `.save_tmp`) must not decide over a run. The callable is not pickled
either: all of its state is the run's directory, and a pickle runs whatever others put into it.
tests/unit/scheduler/test_slurm_executor.py holds the promises.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import submitit
from submitit.helpers import Checkpointable
from submitit.slurm.slurm import SlurmJob

from hpctrain.run.layout import RunDir
from hpctrain.scheduler.slurm.command import QUERY_TIMEOUT_S, run
from hpctrain.scheduler.slurm.control import SlurmControl
from hpctrain.scheduler.slurm.environment import job_context
from hpctrain.scheduler.slurm.facts import submitted_here
from hpctrain.scheduler.slurm.script import export_arguments

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

SUBMIT_TIMEOUT_S = 60.0


class AgentTask(Checkpointable):
    """What every node of the job calls: its agent.

    Checkpointable in submitit's sense too: all state is in the run directory, so the task that
    continues an interrupted one is the same task.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)

    def __call__(self) -> int:
        """Run this node's agent; returns the exit code of the task."""
        from hpctrain.agent.main import run_agent

        context = job_context()
        # Half of KillWait at most: where slurmctld is silent, the batch side needs the other half.
        control = SlurmControl(
            context.job_id,
            restarts=context.restarts,
            nodes=context.nodes,
            timeout_s=min(QUERY_TIMEOUT_S, context.kill_wait_s / 2),
        )
        return run_agent(RunDir(Path(self.run_dir)), context, control)


class HpctrainExecutor(submitit.SlurmExecutor):
    """Submits one script that is already written.

    Attributes:
        script_path: The script; its name is how a job is found again after a submission that gave
            no answer.
        timeout_s: After this long sbatch is killed, and the job may or may not be in the queue.
    """

    def __init__(
        self, folder: Path, script_path: Path, timeout_s: float = SUBMIT_TIMEOUT_S
    ) -> None:
        super().__init__(folder=folder)
        self.script_path = script_path
        self.timeout_s = timeout_s

    @classmethod
    def affinity(cls) -> int:
        """Usable where there is an sbatch: a login node may have no srun."""
        return -1 if shutil.which("sbatch") is None else 2

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit.Job[Any]]:
        """Submit the script, which names the run."""
        del delayed_submissions
        return [self._submit_command(self._submitit_command_str)]

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
        """The script as it is; submitit's own has the task layout in its header."""
        return self.script_path.read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        export = export_arguments(Path(submission_file_path).read_text())
        return ["sbatch", "--parsable", *export, str(submission_file_path)]

    def _submit_command(self, command: str) -> submitit.Job[Any]:  # noqa: ARG002
        output = run(
            self._make_submission_command(self.script_path), timeout_s=self.timeout_s, query=False
        )
        job_id = self._get_job_id_from_submission_command(output)
        return SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """The id that `sbatch --parsable` prints, of a job on this cluster."""
        return submitted_here(string.decode() if isinstance(string, bytes) else string)


def submit_agent(folder: Path, run_dir: Path, script_path: Path, timeout_s: float) -> str:
    """Submit the run's agent task and return the job's id.

    Raises:
        ClusterError: refused; nothing was started.
        ClusterUnreachable: no answer in time; the job may or may not have been accepted.
    """
    executor = HpctrainExecutor(folder, script_path, timeout_s)
    return str(executor.submit(AgentTask(run_dir)).job_id)
