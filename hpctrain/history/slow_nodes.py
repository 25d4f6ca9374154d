"""Which nodes were found slow again and again, over many runs. Pure.

One run that names a node may have had uneven work there, or a bad day; a node that is named in
several runs is one to be told to an administrator, or left out. The runs' ledgers are what is
remembered: nothing else is written down. Ranks that wait for data, and steps that take longer with
nobody behind, are no node's. tests/unit/history/test_slow_nodes.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.run import event_types as facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.run.events import Event

MARKERS = (b'"attempt_started"', b'"straggler"', b'"submitted"')
"""Of the lines of a ledger that are needed."""
OF_NODES = frozenset({"rank", "node"})
ON_ONE_MACHINE = "local"
"""Nodes of the embedded cluster are processes of one machine, and none is slow by itself."""


@dataclass
class NodePast:
    """What runs say of one node.

    Attributes:
        cluster: The scheduler's name for its cluster; "" where it has none. Two clusters may both
            have an n1.
        node: Its name.
        served: In how many runs it trained.
        slow: The runs in which it was found slow, by name, in the order in which they were given.
        findings: How often: it may be as quick as the others for a while, and be found again.
        worst: By how much of a step it was later than the others at most; None for not told.
        newest_t: When it was last found slow, seconds since the epoch; None for never.
    """

    cluster: str
    node: str
    served: int = 0
    slow: list[str] = field(default_factory=list)
    findings: int = 0
    worst: float | None = None
    newest_t: float | None = None

    def was_slow(self, run: str, t: float, by: float | None) -> None:
        """It was slow in a run, at a moment, by so much of a step."""
        self.findings += 1
        if run not in self.slow:
            self.slow.append(run)
        self.newest_t = max(t, self.newest_t or t)
        if by is not None:
            self.worst = max(by, self.worst or by)


def node_pasts(runs: Iterable[tuple[str, Sequence[Event]]]) -> list[NodePast]:
    """Every node that trained, those that were found slow in most runs first.

    Args:
        runs: The name of each run and the events of its ledger, or of its lines with `MARKERS`.
    """
    pasts: dict[tuple[str, str], NodePast] = {}
    for run, events in runs:
        served, verdicts = _of_run(events)
        for place in served:
            pasts.setdefault(place, NodePast(*place)).served += 1
        for place, t, by in verdicts:
            pasts[place].was_slow(run, t, by)
    return sorted(pasts.values(), key=lambda past: (-len(past.slow), past.served, past.node))


Place = tuple[str, str]
"""A cluster and a node of it."""


def _of_run(events: Iterable[Event]) -> tuple[set[Place], list[tuple[Place, float, float | None]]]:
    """Where a run trained, and where something was slow, when, and by how much."""
    clusters: dict[int | None, str] = {}
    served: set[Place] = set()
    verdicts: list[tuple[Place, float, float | None]] = []
    is_local = False
    for event in events:
        match event.fact:
            case facts.Submitted(cluster=cluster):
                is_local = cluster == ON_ONE_MACHINE
            case facts.AttemptStarted(nodes=nodes, slurm_cluster=cluster) if not is_local:
                clusters[event.attempt] = cluster
                served |= {(cluster, node) for node in nodes}
            case facts.StragglerFound(kind_of=kind, nodes=nodes, by=by) if kind in OF_NODES:
                cluster = clusters.get(event.attempt, "")
                places = [(cluster, node) for node in nodes]
                # A ledger may be torn, or written by anybody: who has not served was not slow.
                verdicts += [(place, event.t, by) for place in places if place in served]
    return served, verdicts
