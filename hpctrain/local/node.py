"""One node of a local job: ``python -m hpctrain.local.node RUN_DIR``, started by the controller."""

from __future__ import annotations

from hpctrain.agent import signals

signals.install()  # before anything heavy is imported

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from hpctrain.agent.main import run_agent  # noqa: E402
from hpctrain.local.control import LocalControl  # noqa: E402
from hpctrain.records import JobContext  # noqa: E402
from hpctrain.rundir.layout import RunDir  # noqa: E402

if __name__ == "__main__":
    context = JobContext(**json.loads(os.environ["HPCTRAIN_LOCAL_CONTEXT"]))
    sys.exit(run_agent(RunDir(Path(sys.argv[1])), context, LocalControl(context.job_id)))
