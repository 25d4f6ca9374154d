"""Makes `import torch` wait in an agent's first start until it has heard the stop signals.

Stands for the minute that the import takes from a busy shared file system. In effect only where
HPCTRAIN_TEST_GATE names a file, which is made when the wait begins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

AWAITED = {signal.SIGUSR2, signal.SIGTERM}


class Gate:
    """Stands before all finders; finds nothing."""

    def find_spec(self, name: str, *_: object) -> None:
        if name != "torch":
            return
        sys.meta_path.remove(self)
        from hpctrain.node.agent.signals import arrivals

        Path(os.environ["HPCTRAIN_TEST_GATE"]).touch()
        while not {arrival.signum for arrival in arrivals()} >= AWAITED:
            time.sleep(0.05)  # in which handlers run, as they do between the lines of an import


is_agent = "SLURM_NODEID" in os.environ
is_first_start = "SLURM_RESTART_COUNT" not in os.environ
if "HPCTRAIN_TEST_GATE" in os.environ and is_agent and is_first_start:
    sys.meta_path.insert(0, Gate())
