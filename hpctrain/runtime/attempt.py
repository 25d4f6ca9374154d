"""The attempt that these ranks are: how it begins without an agent, and the outcome it leaves."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpctrain.base.env import HPCTRAIN_ATTEMPT
from hpctrain.base.files import follow_folder, replace_text
from hpctrain.run import events as ledger
from hpctrain.run.event_types import AttemptStarted
from hpctrain.run.fence import Attempt, identity, take_attempt
from hpctrain.world import broadcast

if TYPE_CHECKING:
    from hpctrain.base.records import StopCause
    from hpctrain.run.layout import RunDir
    from hpctrain.world import World

log = logging.getLogger("hpctrain.runtime")


def join_attempt(run: RunDir | None, world: World) -> Attempt | None:
    """The attempt that the agent took; without an agent rank 0 takes one itself. Collective."""
    if HPCTRAIN_ATTEMPT in os.environ:
        return Attempt(**json.loads(os.environ[HPCTRAIN_ATTEMPT]))
    if run is None:
        return None
    follow_folder(run.root)
    taken = None
    if world.rank == 0:
        attempt = take_attempt(run, job_id=f"pid-{os.getpid()}", restarts=0)
        run.attempt(attempt.number).mkdir(parents=True, exist_ok=True)
        begun = AttemptStarted(
            **identity(run, attempt),
            by="start",
            nodes=(os.uname().nodename,),
            world_size=world.world_size,
            ranks_per_node=world.world_size,
        )
        ledger.append(run, begun, attempt=attempt.number)
        taken = asdict(attempt)
    return Attempt(**broadcast(world, taken))


def write_outcome(
    run: RunDir, attempt: Attempt, outcome: str, *, step: int | None, cause: StopCause | None
) -> None:
    """Leave word for the agent. Rank 0 calls it.

    Args:
        run: The run.
        attempt: The attempt.
        outcome: "done"; "stopped" because of something; "failed" for good: no other start would go
            better; or "left": the program left its loop, or has one of its own, which need not say
            when it ends.
        step: The step it came to; None where that is for the ledger to tell.
        cause: Of a stop.
    """
    path = run.outcome(attempt.number)
    text = {"outcome": outcome, "step": step, "cause": cause.value if cause else None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(text))
    except OSError as error:  # the agent knows as much of a program that never leaves word
        log.warning("no word for the agent: %s", error)
