"""What a run survived, and what guards it. Pure.

tests/unit/history/test_incidents_of_run.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.ledger.history.run_history import RunHistory
    from hpctrain.ledger.history.run_records import AttemptRecord
    from hpctrain.ledger.run import event_types as facts


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
