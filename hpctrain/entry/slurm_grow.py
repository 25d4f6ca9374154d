"""The process that waits for one more node of a job, and stays with the agent there.

    python -m hpctrain.entry.slurm_grow RUN

The agent of the first node starts it (`scheduler/slurm/growth.py`), with the environment that the
batch script gave it. SIGINT takes back what is still asked for. It ends with the new node's agent.
tests/slurm/test_growth.py holds the promises.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from hpctrain.base.log import configure
from hpctrain.errors import HpctrainError
from hpctrain.run.layout import RunDir
from hpctrain.run.ownership import job_spec
from hpctrain.scheduler.slurm.growth import grow

log = logging.getLogger("hpctrain.entry")


def main(argv: list[str]) -> int:
    """Add a node; returns the exit code."""
    parent = os.getppid()
    configure("batch")
    # Ignored where the batch script's shell started srun in the background: it could not be taken
    # back, and salloc neither, which inherits what is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return grow(job_spec(RunDir(Path(argv[0]))), argv[0], os.environ, parent)
    except HpctrainError as error:
        log.error("%s", error)  # noqa: TRY400 - no bug of ours
        return error.exit_code
    except KeyboardInterrupt:
        log.info("no node is needed any more")
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
