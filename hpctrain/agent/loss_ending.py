"""The end of an attempt by the loss of a node, where the run stays alive in its allocation.

Node 0's agent decides whether ranks start again without the node. Where node 0 itself is lost with
its batch script nobody would end or requeue the job (SLURM keeps it running for its other nodes),
so the agents that are left do it, one after another. tests/unit/agent/test_loss_ending.py holds the
promises.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from hpctrain.agent.ending import AttemptEnding
from hpctrain.agent.notify import notify
from hpctrain.base.records import Next
from hpctrain.plan.decide import decide_end, is_cancelled, is_requeued
from hpctrain.run import event_types as kinds
from hpctrain.run import events as ledger
from hpctrain.run.fence import read_fence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.agent.rendezvous import Loss

log = logging.getLogger("hpctrain.agent")

TURN_S = 5.0
"""Between two agents that would requeue the job: the first one's requeue ends the others."""
PROOF_S = 5.0
"""So long has a first node that lives to show it: by a new round, or by a word that we are lost."""


class LossEnding(AttemptEnding):
    """The end of attempts, losses of nodes included."""

    def after_loss(self, attempt: int, why: str) -> bool:
        """Write down a round that a node's loss has ended; whether another may follow it here."""
        self._look(attempt)
        facts = self._facts(attempt, "crashed", why=why, nodes_failed=True, in_place=True)
        decision = decide_end(facts, self._end.history, self._settings.budget)
        if decision.next is not Next.RESTART or self._is_left_behind(attempt):
            return False
        self._end.carry_out(facts, decision)
        self.pause_s = 0.0
        notify(self._run, self._settings.notify, attempt)
        return True

    def record_loss(self, attempt: int | None, loss: Loss, members: Sequence[str]) -> None:
        """Write down which node was lost, and who goes on.

        Args:
            attempt: The attempt; None before the first.
            loss: The node.
            members: Names of the next round's nodes; none where there can be none.
        """
        fact = kinds.NodeLost(
            node=loss.name, why=loss.why, was_spare=not loss.was_member, members=tuple(members)
        )
        log.warning("%s was lost: %s", loss.name, loss.why)
        ledger.record(self._run, fact, attempt=attempt)

    def after_first_node(
        self,
        why: str,
        node: str,
        attempt: int,
        turn: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> int:
        """See to the job after node 0 was lost; returns the exit code of the task.

        It is this node that was lost, and not the first one, where others go on without it: a node
        that thaws, or whose network was cut, hears of the first one as little as after its death.

        Args:
            why: What was heard of it.
            node: This node.
            attempt: The last one that this node has taken part in; 0 for none.
            turn: How many of the agents that are left come before this one.
            sleep: Lets seconds go by.
        """
        sleep(PROOF_S + turn * TURN_S)
        fence, own = read_fence(self._run), (self._context.job_id, self._context.restarts)
        if fence is None or (fence.job_id, fence.restarts) != own:
            return 0
        if (attempt and fence.number > attempt) or node in self._lost_nodes():
            log.warning("the job goes on without %s", node)
            return 0
        end = self._look(fence.number).last(kinds.AttemptEnded, fence.number)
        if end is not None and end.next not in {Next.RESTART, Next.ASK_BATCH}:
            return 0
        scheduler = self._ask()
        if scheduler is not None and (
            is_requeued(scheduler, own[1]) or is_cancelled(scheduler, own[1])
        ):
            return 0
        first = self._context.nodes[0]
        log.warning("%s was lost: %s; the job is requeued from here", first, why)
        fact = kinds.NodeLost(node=first, why=why, was_first=True)
        ledger.record(self._run, fact, attempt=fence.number)
        lost = f"{first} was lost: {why}"
        facts = self._facts(fence.number, "crashed", why=lost, nodes_failed=True)
        self._decide(facts)
        return 0

    def _lost_nodes(self) -> set[str]:
        """Nodes that this start of the job has lost, as its first node has written them down."""
        start: tuple[str, int | None] = ("", None)
        lost: set[str] = set()
        for event in ledger.read(self._run):
            if isinstance(event.fact, kinds.AttemptStarted):
                before, start = start, (event.fact.job_id, event.fact.restarts)
                if start != before:
                    lost.clear()
            elif isinstance(event.fact, kinds.NodeLost) and not event.fact.was_first:
                lost.add(event.fact.node)
        return lost
