"""The task that srun starts on every node: `python -m hpctrain.entry.slurm_task FOLDER`.

FOLDER is the run's directory. The signal handlers stand before anything that takes time is
imported: tests/slurm/test_early_signals.py.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hpctrain.core.base import VERSION
from hpctrain.core.base.env import HPCTRAIN_BATCH_VERSION, HPCTRAIN_RELAY, HPCTRAIN_RUN_DIR
from hpctrain.node.agent import signals

if TYPE_CHECKING:
    from hpctrain.ledger.run.layout import RunDir


def main(argv: list[str]) -> int:
    """Run this node's part of the run; returns the exit code of the task."""
    signals.install()
    import logging
    from pathlib import Path

    from hpctrain.core.base.log import configure
    from hpctrain.errors import OF_A_DISK, HpctrainError, UsageError

    configure("agent")
    log = logging.getLogger("hpctrain.entry")
    folder = Path(argv[0])
    try:
        outside = os.environ.get(HPCTRAIN_BATCH_VERSION, VERSION)
        if outside != VERSION:
            raise UsageError(
                f"{sys.executable} here has hpctrain {VERSION}, and the batch script's python has "
                f"{outside}: a container's image needs the version that submits"
            )
        from hpctrain.cluster.scheduler.slurm.executor import AgentTask
        from hpctrain.ledger.run.layout import RunDir

        if RunDir(folder).spec.exists():
            return AgentTask(folder, run_node)()
        raise UsageError(
            f"{folder} holds no spec.json: {HPCTRAIN_RUN_DIR} must be a run's directory, seen "
            "under the same path on every node"
        )
    except HpctrainError as error:
        log.error("%s", error)  # noqa: TRY400 - a user's mistake, no bug of ours
        return error.exit_code
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        log.error("%s: %s", folder, error)  # noqa: TRY400 - the same
        return HpctrainError.exit_code


def run_node(run: RunDir) -> int:
    """Run this node's agent; returns the exit code of the task."""
    import logging

    from hpctrain.cluster.scheduler.slurm.command import job_context
    from hpctrain.cluster.scheduler.slurm.control import control_of_agent
    from hpctrain.node.agent.main import run_agent

    context = job_context()
    if why := outside_of_image(run):
        logging.getLogger("hpctrain.agent").warning("%s", why)
    return run_agent(run, context, control_of_agent(run, context))


def outside_of_image(run: RunDir) -> str:
    """Return a warning if a script of the user's own started this task outside the run's image."""
    from hpctrain.core.settings.spec import load_spec

    image = load_spec(run.spec).settings.container.image
    if not image or os.environ.get(HPCTRAIN_RELAY):
        return ""
    return (
        f"container.image is {image}, and this task runs in no container: its batch script has no "
        "function hpctrain_container, as `hpctrain submit --dry-run` prints it"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
