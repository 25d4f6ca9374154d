"""The attempt that these ranks are: how it begins without an agent, and the outcome it leaves."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpctrain.core.base.env import HPCTRAIN_ATTEMPT
from hpctrain.core.base.files import follow_folder, replace_text
from hpctrain.core.world import broadcast
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import AttemptStarted
from hpctrain.ledger.run.fence import Attempt, identity, take_attempt

if TYPE_CHECKING:
    from hpctrain.core.base.records import StopCause
    from hpctrain.core.world import World
    from hpctrain.ledger.run.layout import RunDir

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
    """Leave the outcome for the agent. Rank 0 calls it.

    `outcome` is "done", "stopped", "failed" or "left". "failed" means that no other start would do
    better. "left" means that the program left its loop, or has one of its own, which need not
    report its end. `step` is None if the ledger knows it. `cause` is that of a stop.
    """
    path = run.outcome(attempt.number)
    text = {"outcome": outcome, "step": step, "cause": cause.value if cause else None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(text))
    except OSError as error:  # the agent knows as much of a program that never leaves word
        log.warning("no word for the agent: %s", error)
