"""A round of ranks, as the agents speak of it: what node 0's does around it, and how it ended.

tests/engines/test_node_agent.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hpctrain.node.agent.resume_args import ResumeArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.core.base.records import FailureReport
    from hpctrain.errors import CheckpointError
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.event_types import RanksAwaited
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.node.agent.rendezvous import Loss
    from hpctrain.node.agent.sealing import SealWatch
    from hpctrain.node.agent.stop_deadline import StopDeadline
    from hpctrain.node.agent.stop_notice import StopNotice

Ending = Literal["left", "failed", "killed", "hung"]


@dataclass
class RoundEnd:
    """How a round of ranks ended, the same on every node.

    Attributes:
        ending: All ranks returned; one failed; they were killed because a stop took too long; or
            some had returned, and the others did nothing any more.
        restart: The agents start the ranks again in this allocation.
        why: In words.
        failure: The first causal failure.
        silent_nodes: Nodes that are dead, by their numbers in the job: their agents did not answer
            after it, or they were lost.
        left_out: Why this node takes part in no round any more; then nobody else waits for it.
    """

    ending: Ending
    restart: bool = False
    why: str = ""
    failure: FailureReport | None = None
    silent_nodes: list[int] = field(default_factory=list)
    left_out: str = ""


class NothingToResume(Exception):
    """Before any rank was started: the run has sealed checkpoints, and none can be had."""

    def __init__(self, why: CheckpointError) -> None:
        super().__init__(str(why))
        self.why = why


@dataclass
class RoundHooks:
    """What node 0's agent does around a round; None on the other nodes.

    Attributes:
        begin: Takes the attempt's number; called before the ranks start, with their number.
        resume: What the ranks of this attempt go on from; may take long, since it reads what it
            names, and calls what it is given for each part of that. A CheckpointError of it ends
            the round before any rank is started.
        sealing: Seals what the program saves, beside the ranks of an attempt.
        deadline: When the ranks must be gone, once a stop has been asked for.
        may_restart: Whether the ranks may start again here after this failure.
        awaited: Told which ranks are waited for where others have returned.
        starts: How often ranks of the run were started, this time included.
        more_args: What the program gets beside its own arguments at this start, which goes on from
            a path or None.
        notice: Whether ranks that ask nobody should leave.
        record: Writes an event into the ledger.
        asked_stacks: The token of a user's request to know where the ranks are; "" for none.
        may_go_on: Whether ranks may start again after nodes were lost, where others can go on.
        lost: Told of each node that was lost, also of spares.
    """

    begin: Callable[[int], Attempt]
    deadline: StopDeadline
    may_restart: Callable[[FailureReport | None], bool]
    resume: Callable[[Attempt, Callable[[int], None]], str | None] = lambda _attempt, _on_bytes: (
        None
    )
    sealing: Callable[[Attempt], SealWatch] | None = None
    awaited: Callable[[RanksAwaited], None] = lambda _: None
    starts: Callable[[], int] = lambda: 1
    more_args: Callable[[int, str | None], ResumeArgs] = lambda _start, _resume: ResumeArgs()
    notice: StopNotice | None = None
    record: Callable[[LedgerFact], None] = lambda _: None
    asked_stacks: Callable[[], str] = lambda: ""
    may_go_on: Callable[[str], bool] = lambda _why: False
    lost: Callable[[Loss, tuple[int, ...] | None], None] = lambda _loss, _members: None
