"""A preemption of a local job at a step of its first attempt, for programs in this folder."""

from __future__ import annotations

import json
import os
import time

from hpctrain.cluster.scheduler import local as client

GRACE_S = 60.0
STEP_S = 0.02


def after(step: int, at: int) -> None:
    """`step` updates are applied: the first attempt is preempted at one, and then takes its time.

    Training is not at its end before the notice has come, however the machine is loaded.
    """
    attempt = json.loads(os.environ.get("HPCTRAIN_ATTEMPT", '{"number": 0}'))
    if attempt["number"] != 1 or step < at:
        return
    if step == at and os.environ["RANK"] == "0":
        client.request(attempt["job_id"], "preempt", leave=1, grace_s=GRACE_S)
    time.sleep(STEP_S)
