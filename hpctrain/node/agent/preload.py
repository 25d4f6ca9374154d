"""What an agent does before its first round: import what its forks share, and check the nodes.

The controller of a local job imports the same, and forks its nodes from there
(`entry.local_nodes`). The checks are those of `hpctrain preflight`; a few bad nodes are left out.
tests/unit/agent/test_preload.py and tests/slurm/test_node_check.py hold the promises.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain.cluster.preflight import node as preflight
from hpctrain.cluster.preflight.checks import Order, expected_of
from hpctrain.cluster.preflight.node import NodePlace
from hpctrain.cluster.preflight.report import (
    OK,
    are_known_good,
    bad_nodes_path,
    known_good_path,
    record_bad,
    record_known_good,
)
from hpctrain.core.base.process import PORTS
from hpctrain.core.base.secret import code
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import NodesChecked
from hpctrain.ledger.run.fence import start_without_ranks, take_attempt

if TYPE_CHECKING:
    from hpctrain.cluster.preflight.bounded import Child
    from hpctrain.cluster.preflight.checks import Expected
    from hpctrain.cluster.preflight.node import NodesVerdict
    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.spec import Spec
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.ending import AttemptEnding

OF_AGENTS = (
    "hpctrain.node.agent.main",
    "torch.distributed.elastic.agent.server.api",
    "hpctrain.node.agent.node",
    "hpctrain.node.agent.ranks",
    "hpctrain.node.agent.rendezvous",
    "hpctrain.node.agent.sealing",
    "hpctrain.node.agent.stop_deadline",
    "hpctrain.node.agent.stop_notice",
    "hpctrain.checkpoint.sealed.start",
)
"""What every agent uses, whatever its ranks run."""
OF_RANKS = (
    # Every optimizer imports it as it is made, and hpctrain.engines does.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "hpctrain.train.runtime.joining",
    # 60 ms of CPU in every rank, at every start in place.
    "hpctrain.train.engines.parallelize",
    "hpctrain.train.engines.tensor_parallel",
    "hpctrain.train.engines.step_guard",
    "numpy.ma",  # numpy.unique imports it
)
"""What a rank that runs Python uses."""
PORT = PORTS - 2
"""Of the job's ports, those that only a run with six restarts in one job comes to."""
ANSWER_TIMEOUT_S = 120.0
"""Without an answer the attempt begins: importing torch alone takes up to a minute."""


def is_shared(spec: Spec) -> bool:
    """Return whether the ranks get what their agent has imported.

    Spawned ranks import for themselves. A rank whose program is not Python becomes that program.
    """
    return spec.settings.run.start_method == "fork" and spec.entry.kind != "program"


def modules(spec: Spec) -> tuple[str, ...]:
    """Return the modules to import before the ranks of this run are forked."""
    return (*OF_AGENTS, *OF_RANKS) if is_shared(spec) else OF_AGENTS


def preload(spec: Spec) -> None:
    """Import them.

    Nothing here may initialise CUDA: a forked process could not use it any more.
    """
    gc.disable()  # else it looks through all that torch makes, again and again: 0.8 s of 4
    try:
        for name in modules(spec):
            import_module(name)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()  # so that a collection in a forked process does not copy the shared pages


class NodeCheck:
    """One look at the nodes, for the first attempt of a start of the job."""

    def __init__(self, run: RunDir, spec: Spec, context: JobContext, secret: str) -> None:
        self._secret = code(secret, "preflight")
        self._run = run
        self._spec = spec
        self._context = context
        self._child: Child | None = None

    def begin(self) -> None:
        """Start looking, where the settings want it."""
        asked = self._spec.settings.preflight.enabled
        several = len(self._context.nodes) > 1 and not self._context.on_this_machine
        if asked == "yes" or (asked == "auto" and several):
            first = self._context.node_rank == 0
            self._child = preflight.begin(self._place(), self._order() if first else None)

    def against(self) -> NodesVerdict | None:
        """Why the attempt must not begin on these nodes; None where it may."""
        if self._child is None:
            return None
        verdict, silence = preflight.outcome(self._child, ANSWER_TIMEOUT_S)
        bad = verdict.bad
        leave = bool(verdict.apart) or preflight.to_leave(bad, self._context.nodes)
        if self._context.node_rank == 0:
            collective = preflight.collective(self._place().folder)
            if collective == OK:
                record_known_good(known_good_path(self._run), self._context.nodes)
            checked = NodesChecked(bad=bad, leave=leave, no_answer=silence, collective=collective)
            ledger.append(self._run, checked)
        return verdict if leave else None

    def leave(self, verdict: NodesVerdict, ending: AttemptEnding) -> int:
        """End before an attempt has done anything. Returns the exit code of the task."""
        context = self._context
        if context.node_rank != 0:
            return 0
        if not verdict.apart:
            record_bad(bad_nodes_path(self._run), verdict.bad)
        taken = take_attempt(self._run, job_id=context.job_id, restarts=context.restarts)
        ranks = self._spec.settings.slurm.ranks()
        begun = start_without_ranks(
            *(self._run, taken),
            by="start",
            nodes=context.nodes,
            job_started=context.start_time,
            ranks_per_node=ranks,
        )
        ledger.append(self._run, begun, attempt=taken.number)
        if verdict.apart:
            return ending.end_without_shared_folder(taken.number, verdict.apart)
        return ending.end_for_bad_nodes(taken.number, verdict.bad)

    def _place(self) -> NodePlace:
        context = self._context
        start = f"{context.job_id}.{context.restarts}"
        return NodePlace(
            nodes=list(context.nodes),
            rank=context.node_rank,
            address=context.master_addr,
            port=context.port + PORT,
            key=self._secret,
            folder=self._run.root / "preflight" / start,
        )

    def _order(self) -> Order:
        site = None
        if self._spec.preset is not None:
            from hpctrain.cluster.site.schema import Site

            site = Site.from_plain(self._spec.preset)
        nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        expected = expected_of(site, gpus=self._spec.settings.slurm.gpus_per_node, env=nccl)
        half = ANSWER_TIMEOUT_S / 2
        return Order(
            expected,
            bandwidth=self._tries_collective(expected),
            ranks=self._spec.settings.slurm.ranks(),
            timeout_s=half,
            meet_s=half,
        )

    def _tries_collective(self, expected: Expected) -> bool:
        """Only with a yardstick by itself: without one all pairs must be tried to name anybody.

        What one node alone does is none, since between nodes the network is tried.
        """
        asked = self._spec.settings.preflight
        if asked.bandwidth == "no" or len(self._context.nodes) == 1:
            return False
        if asked.bandwidth == "auto" and not expected.has_yardstick(len(self._context.nodes)):
            return False
        return not are_known_good(known_good_path(self._run), self._context.nodes)
