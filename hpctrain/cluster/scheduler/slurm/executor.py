"""submitit around a run's job: its executor with our own submission, and the task as it calls it.

What is kept of submitit: the executor and job classes, and the callable in its checkpointable form.
Which of its rules are overruled, and why: docs/development/decisions.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import submitit
from submitit.helpers import Checkpointable

from hpctrain.cluster.scheduler.slurm.script import sbatch
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")


class AgentTask(Checkpointable):
    """What every node of the job calls: its agent.

    Checkpointable in submitit's sense too: all state is in the run directory, so the task that
    continues an interrupted one is the same task.
    """

    def __init__(self, run_dir: Path, run_node: Callable[[RunDir], int] | None = None) -> None:
        """Describe the task of a run.

        Args:
            run_dir: The run's directory.
            run_node: Runs a node's agent; None where the task is only submitted, since the batch
                script names the program that has it (`entry.slurm_task`).
        """
        self.run_dir = str(run_dir)
        self._run_node = run_node

    def __call__(self) -> int:
        """Run this node's agent; returns the exit code of the task."""
        if self._run_node is None:
            raise RuntimeError("the batch script starts the agent, by entry.slurm_task")
        return self._run_node(RunDir(Path(self.run_dir)))


class HpctrainExecutor(submitit.SlurmExecutor):
    """Submits one script that is already written.

    Attributes:
        script_path: The script; its name is how a job is found again after a submission that gave
            no answer.
        timeout_s: After this long sbatch is killed, and the job may or may not be in the queue.
        after: Jobs that must have ended well before.
    """

    def __init__(
        self, folder: Path, script_path: Path, timeout_s: float, after: Sequence[str] = ()
    ) -> None:
        super().__init__(folder=folder)
        self.after = after
        self.script_path = script_path
        self.timeout_s = timeout_s

    @classmethod
    def affinity(cls) -> int:
        """Usable where there is an sbatch: a login node may have no srun."""
        return -1 if shutil.which("sbatch") is None else 2

    def submit(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> submitit.Job[R]:
        """Submit the script, which names the run; the callable is what its tasks will call.

        Raises:
            ClusterError: refused; nothing was started.
            ClusterUnreachable: no answer in time; the job may or may not have been accepted.
        """
        job_id = sbatch(self.script_path, self.after, timeout_s=self.timeout_s)
        return self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
