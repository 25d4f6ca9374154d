"""The executor of submitit with our own submission: our script and sbatch call, no pickle.

What is kept of submitit: the executor and job classes, and the callable in its checkpointable form.
Which of its rules are overruled, and why: docs/development/decisions.md.
tests/unit/scheduler/test_slurm_executor.py holds the promises.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import submitit
from submitit.helpers import Checkpointable

from hpctrain.cluster.scheduler.slurm.command import run, submitted_here
from hpctrain.cluster.scheduler.slurm.control import of_agent, outside
from hpctrain.cluster.scheduler.slurm.environment import job_context
from hpctrain.cluster.scheduler.slurm.script import dependency_arguments, export_arguments
from hpctrain.core.base.env import HPCTRAIN_RELAY
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.cluster.scheduler.base import JobControl
    from hpctrain.core.base.records import JobContext

log = logging.getLogger("hpctrain.agent")

R = TypeVar("R")


class AgentTask(Checkpointable):
    """What every node of the job calls: its agent.

    Checkpointable in submitit's sense too: all state is in the run directory, so the task that
    continues an interrupted one is the same task.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)

    def __call__(self) -> int:
        """Run this node's agent; returns the exit code of the task."""
        from hpctrain.node.agent.main import run_agent

        context = job_context()
        run = RunDir(Path(self.run_dir))
        if why := _outside_of_image(run):
            log.warning("%s", why)
        return run_agent(run, context, _control(run, context))


def _outside_of_image(run: RunDir) -> str:
    """What to say of a task that a script of the user's own has not started in the run's image."""
    from hpctrain.core.settings.spec import load_spec

    image = load_spec(run.spec).settings.container.image
    if not image or os.environ.get(HPCTRAIN_RELAY):
        return ""
    return (
        f"container.image is {image}, and this task runs in no container: its batch script has no "
        "function hpctrain_container, as `hpctrain submit --dry-run` prints it"
    )


def _control(run: RunDir, context: JobContext) -> JobControl:
    """Who asks SLURM: this process, or one outside of its container."""
    control = of_agent(
        context.job_id,
        restarts=context.restarts,
        nodes=context.nodes,
        kill_wait_s=context.kill_wait_s,
    )
    return outside(run, control)


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
        del fn, args, kwargs
        export = export_arguments(self.script_path.read_text())
        waits = dependency_arguments(self.after)
        command = ["sbatch", "--parsable", *export, *waits, str(self.script_path)]
        job_id = submitted_here(run(command, timeout_s=self.timeout_s, query=False))
        return self.job_class(folder=self.folder, job_id=job_id, tasks=[0])
