"""The task that srun starts on every node: `python -m hpctrain.entry.slurm_task FOLDER`.

FOLDER is the run's directory. The signal handlers stand before anything that takes time is
imported: tests/slurm/test_early_signals.py.
"""

from __future__ import annotations

import os
import sys

from hpctrain.core.base import VERSION
from hpctrain.core.base.env import HPCTRAIN_BATCH_VERSION, HPCTRAIN_RUN_DIR
from hpctrain.node.agent import signals


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
            return AgentTask(folder)()
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
