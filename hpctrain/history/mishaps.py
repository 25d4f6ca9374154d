"""What a run has survived, and what guards it: lost nodes, skipped batches, memory copies. Pure.

From its history alone. What newest ranks said of themselves (copies in memory, out of step) is of
the newest attempt; members are of the newest job. tests/unit/history/test_mishaps.py holds the
promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.history.run_history import RunHistory
    from hpctrain.history.run_records import AttemptRecord
    from hpctrain.run import event_types as facts


@dataclass(frozen=True)
class Guarded:
    """What guards have seen, and done.

    Attributes:
        not_finite: Steps whose numbers were not finite.
        spikes: Steps that jumped.
        left_out: Batches whose update was left out, as far as no restore went back behind them.
        newest_left_out: The last of them.
        rewinds: How often training was to go back.
        newest_rewind: The last time.
        differing: Whose copies of the weights were last found to differ.
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
    """The nodes of the newest job's newest round.

    Attributes:
        training: Host names, by node rank.
        waiting: Spares that are there.
        lost: Nodes that the job lost and went on without, in order.
        rounds: How often its ranks were started.
        buddies: By node rank, the host that has copies of each node's state; none without copies.
        switches: By node rank, what each hangs on; "" for not known, none where none is.
    """

    training: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    lost: tuple[facts.NodeLost, ...] = ()
    rounds: int = 0
    buddies: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mishaps:
    """All of it.

    Attributes:
        guarded: By guards.
        members: Who trains, waits and was lost.
        memory: How the newest attempt copies its state into memory; None where it does not.
        out_of_step: Which of its ranks do not call equally many collectives; None for none.
    """

    guarded: Guarded = Guarded()
    members: JobMembers = JobMembers()
    memory: facts.MemoryCopiesSet | None = None
    out_of_step: facts.RanksOutOfStep | None = None


def mishaps(history: RunHistory) -> Mishaps:
    """What a run has survived, and what guards it."""
    newest = history.newest
    if newest is None:
        return Mishaps(_guarded(history))
    return Mishaps(_guarded(history), _members(history), newest.memory, newest.out_of_step)


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
        buddies=newest.buddies,
        switches=newest.switches,
    )


def _rounds(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """The attempts of the newest start of the newest job, in order; at least the newest."""
    ordered = sorted(attempts, key=lambda attempt: attempt.number)
    newest = ordered[-1]
    rounds = [newest]
    for attempt in reversed(ordered[:-1]):
        if (attempt.job_id, attempt.restarts) != (newest.job_id, newest.restarts):
            break
        rounds.insert(0, attempt)
    return rounds
