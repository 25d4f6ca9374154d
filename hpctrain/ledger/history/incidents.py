"""What a run survived, what guards it, and which nodes were slow in several runs. Pure.

Waits for data never count against a node.
tests/unit/history/test_incidents_of_run.py and test_slow_nodes.py hold the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.ledger.run import event_types as facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run.events import Event


@dataclass(frozen=True)
class Guarded:
    """What guards have seen and done; see `RunHistory` for `not_finite`, `spikes`, `differing`.

    Attributes:
        left_out: Batches whose update was left out, as far as no restore went back behind them.
        rewinds: How often training was to go back.
    """

    not_finite: int = 0
    spikes: int = 0
    left_out: int = 0
    newest_left_out: facts.BatchSkipped | None = None
    rewinds: int = 0
    newest_rewind: facts.TrainingRewound | None = None
    differing: facts.ReplicasDiffer | None = None


@dataclass(frozen=True)
class JobMembers:
    """The nodes of the newest job's newest round; `peers`, `switches`: see `AttemptRecord`.

    Attributes:
        training: Host names, by node rank.
        waiting: Spares that are there.
        lost: Nodes that the job lost and continued without, in order.
        rounds: How often its ranks were started.
    """

    training: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    lost: tuple[facts.NodeLost, ...] = ()
    rounds: int = 0
    peers: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survived:
    """What a run survived; `memory` and `out_of_step` are the newest attempt's."""

    guarded: Guarded = Guarded()
    members: JobMembers = JobMembers()
    memory: facts.MemoryCopiesSet | None = None
    out_of_step: facts.RanksOutOfStep | None = None


def survived(history: RunHistory) -> Survived:
    """What a run has survived, and what guards it."""
    newest = history.newest
    if newest is None:
        return Survived(_guarded(history))
    return Survived(_guarded(history), _members(history), newest.memory, newest.out_of_step)


def _guarded(history: RunHistory) -> Guarded:
    holes, rewinds = history.holes, history.rewinds
    return Guarded(
        not_finite=len(history.not_finite),
        spikes=history.spikes,
        left_out=len(holes),
        newest_left_out=holes[-1].fact if holes else None,
        rewinds=len(rewinds),
        newest_rewind=rewinds[-1].fact if rewinds else None,
        differing=history.differing,
    )


def _members(history: RunHistory) -> JobMembers:
    rounds = _rounds(history.attempts)
    lost = tuple(fact for attempt in rounds for fact in attempt.lost_nodes)
    newest = rounds[-1]
    gone = {fact.node for fact in newest.lost_nodes}
    return JobMembers(
        training=newest.nodes,
        waiting=tuple(node for node in newest.spares if node not in gone),
        lost=lost,
        rounds=len(rounds),
        peers=newest.peers,
        switches=newest.switches,
    )


def _rounds(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    ordered = sorted(attempts, key=lambda attempt: attempt.number)
    newest = ordered[-1]
    rounds = [newest]
    for attempt in reversed(ordered[:-1]):
        if (attempt.job_id, attempt.restarts) != (newest.job_id, newest.restarts):
            break
        rounds.insert(0, attempt)
    return rounds


MARKERS = (b'"attempt_started"', b'"straggler"', b'"submitted"')
"""Of the lines of a ledger that are needed."""
OF_NODES = frozenset({"rank", "node"})
ON_ONE_MACHINE = "local"
"""Nodes of the embedded cluster are processes of one machine, and none is slow by itself."""


@dataclass
class NodePast:
    """What runs say of one node.

    Attributes:
        cluster: The scheduler's name for its cluster; "" for none. Two clusters may both have
            an n1.
        served: In how many runs it trained.
        slow: The runs in which it was found slow, by name, in the order in which they were
            given.
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

    `runs` has the name of each run and the events of its ledger, or of its lines with `MARKERS`.
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
