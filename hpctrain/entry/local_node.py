"""One node of a local job: ``python -m hpctrain.entry.local_node RUN``; see `local_controller`."""

from __future__ import annotations

from hpctrain.core.base.env import HPCTRAIN_LOCAL_CONTEXT
from hpctrain.node.agent import signals

signals.install()  # before anything heavy is imported

import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from hpctrain.cluster.scheduler.local import LocalControl  # noqa: E402
from hpctrain.core.base.log import configure  # noqa: E402
from hpctrain.core.base.records import JobContext  # noqa: E402
from hpctrain.errors import OF_A_DISK, HpctrainError  # noqa: E402
from hpctrain.ledger.run.layout import RunDir  # noqa: E402
from hpctrain.node.agent.main import run_agent  # noqa: E402

log = logging.getLogger("hpctrain.entry")


def main(argv: list[str]) -> int:
    """Run this node's agent; returns its exit code."""
    configure("agent")
    context = JobContext(**json.loads(os.environ[HPCTRAIN_LOCAL_CONTEXT]))
    try:
        return run_agent(RunDir(Path(argv[0])), context, LocalControl(context.job_id))
    except HpctrainError as error:
        log.error("%s", error)  # noqa: TRY400 - a user's mistake, no bug of ours
        return error.exit_code
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        log.error("%s: %s", argv[0], error)  # noqa: TRY400 - the same
        return HpctrainError.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
