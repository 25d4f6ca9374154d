"""What an agent sets up where its run outlives the nodes of its job.

Only where the batch script has said so (`HPCTRAIN_ALIVE`): under a scheduler that ends the job with
the first lost node it would be in vain. tests/engines/test_in_place.py holds the promises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpctrain.core.base.env import HPCTRAIN_ALIVE
from hpctrain.core.settings.check import node_range
from hpctrain.ledger.plan.mesh import Planner, shape_of
from hpctrain.node.agent.lifeline import LIFELINE_PORT, Lifeline, LifelinePlace
from hpctrain.node.agent.members import round_size

if TYPE_CHECKING:
    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.spec import Spec
    from hpctrain.node.agent.in_place import InPlaceRendezvous
    from hpctrain.node.agent.succession import Generation

RENDEZVOUS_S = 600
"""So long may the nodes take to meet at first."""
GATHER_S = 15.0
"""Agents that go on after others have seen the same claim, and start at once."""
EARLY_END_S = 30.0
"""Agents that have yet to come are waited for so long, to be told that there is nothing to do."""


def lifeline_of(spec: Spec, context: JobContext, secret: str) -> Lifeline | None:
    """Return this node's liveness process; None if the run does not outlive a node.

    Call it while this process has one thread.
    """
    alive = spec.settings.alive
    if not (alive.is_on() and os.environ.get(HPCTRAIN_ALIVE) and len(context.nodes) > 1):
        return None
    place = LifelinePlace(
        context.node_rank,
        len(context.nodes),
        context.master_addr,
        context.port + LIFELINE_PORT,
        alive.lease_s,
    )
    return Lifeline(place, secret)


def rendezvous_of(
    lifeline: Lifeline,
    spec: Spec,
    context: JobContext,
    *,
    run_id: str,
    generation: Generation | None = None,
) -> InPlaceRendezvous:
    """Return where this node's agent meets the others.

    Agents that continue after others pass their `generation`: some nodes may be lost.
    """
    from hpctrain.node.agent.in_place import InPlaceRendezvous  # with torch

    settings, nodes = spec.settings, context.nodes
    least, most = node_range(settings.slurm.nodes)
    at_start = len(nodes) + (0 if generation is None else len(generation.lost))
    size = round_size(
        least,
        most,
        allocated=at_start,
        spares=settings.alive.spares,
        shrinks=settings.alive.shrink == "auto",
    )
    shape = shape_of(settings.train) if spec.entry.kind == "recipe" else None
    planner = Planner(settings.engine, settings.slurm.ranks(), shape)
    return InPlaceRendezvous(
        lifeline,
        nodes,
        port=context.port,
        run_id=run_id,
        timeout_s=RENDEZVOUS_S,
        size=size,
        fits=lambda count: planner.at(count) is not None,
        gather_s=None if generation is None else GATHER_S,
        switch=context.switch,
    )
