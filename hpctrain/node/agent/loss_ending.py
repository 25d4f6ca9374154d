"""The end of an attempt by the loss of a node, where the run stays alive in its allocation.

Node 0's agent decides whether ranks start again without the node. Where node 0 itself is lost with
its batch script nobody would end or requeue the job (SLURM keeps it running for its other nodes),
so the agents that are left go on without it, or requeue the job, one after another.
tests/unit/agent/test_loss_ending.py holds the promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.base.records import Next
from hpctrain.errors import ClusterError, Fenced, HpctrainError
from hpctrain.ledger.plan.decide import decide_end, is_cancelled, is_requeued
from hpctrain.ledger.run import event_types as kinds
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import read_fence, start_without_ranks, take_attempt
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.notify import notify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.node.agent.rendezvous import Loss
    from hpctrain.node.agent.succession import Generation, Succession

log = logging.getLogger("hpctrain.agent")

TURN_S = 5.0
"""Between two agents that would requeue the job: the first one's requeue ends the others."""
LOOK_S = 0.2
"""So often it is looked whether another agent goes on."""
PROOF_S = 5.0
"""So long has a first node that lives to show it: by a new round, or by a word that we are lost."""


class LossEnding(AttemptEnding):
    """The end of attempts, losses of nodes included.

    Attributes:
        succession: How the agents that are left go on without node 0; None where they do not.
    """

    succession: Succession | None = None

    def after_loss(self, attempt: int, why: str) -> bool:
        """Write down a round that a node's loss has ended; whether another may follow it here."""
        self._look(attempt)
        facts = self._facts(attempt, "crashed", why=why, nodes_failed=True, in_place=True)
        decision = decide_end(facts, self._end.history, self._settings.budget)
        if decision.next is not Next.RESTART or self._is_left_behind(attempt):
            return False
        self.convictions.are_out(self._end.history)  # where others can do without such nodes
        self._end.carry_out(facts, decision)
        self.pause_s = 0.0
        notify(self._run, self._settings.notify, attempt)
        return True

    def record_loss(self, attempt: int | None, loss: Loss, members: Sequence[str]) -> None:
        """Record which node was lost, and the members of the next round; none if there is none.

        `attempt` is None before the first.
        """
        fact = kinds.NodeLost(
            node=loss.name, why=loss.why, was_spare=not loss.was_member, members=tuple(members)
        )
        log.warning("%s was lost: %s", loss.name, loss.why)
        if attempt is None:
            ledger.record(self._run, fact)
        elif self._is_current(attempt):  # not by a first node that thaws: the others go on
            self.record(attempt, fact)

    def after_first_node(
        self,
        why: str,
        node: str,
        attempt: int,
        turn: int,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> Generation | None:
        """Requeue or continue the job after node 0 was lost.

        If others continue without this node, it is this node that was lost. A node that thaws, or
        whose network was cut, hears of the first one as little as after its death. `attempt` is the
        last one of this node, 0 for none; `turn` is how many of the agents left come first.

        Returns:
            The generation of agents that this one goes on with; None to leave.
        """
        try:
            begun = self._next_generation(why, node, attempt, turn, sleep)
        except Fenced as error:  # the first one lives, and has begun another attempt meanwhile
            log.warning("the job goes on without %s: %s", node, error)
            return None
        # It thaws, and was lost before the first one.
        if begun is not None and node not in begun.nodes:
            log.warning("the job goes on without %s", node)
            return None
        return begun

    def _next_generation(
        self, why: str, node: str, attempt: int, turn: int, sleep: Callable[[float], None]
    ) -> Generation | None:
        for _ in range(round((PROOF_S + turn * TURN_S) / LOOK_S)):
            if (begun := _claimed(self.succession)) is not None:
                return begun
            sleep(LOOK_S)
        fence = read_fence(self._run)
        own = self._context.job_id, self._context.restarts
        if fence is None or (fence.job_id, fence.restarts) != own:
            self._end_unbegun(fence, why)
            return None
        if not self._is_left_alone(fence, node, attempt):
            return None
        first = self._context.nodes[0]
        log.warning("%s was lost: %s; what follows is decided here", first, why)
        self.record(fence.number, kinds.NodeLost(node=first, why=why, was_first=True))
        lost = f"{first} was lost: {why}"
        if self.succession is not None and self.after_loss(fence.number, lost):
            try:
                return self.succession.claim(fence.number, self._lost_nodes())
            except Fenced:
                raise
            except (HpctrainError, OSError) as error:
                log.warning("nobody can lead the agents that are left: %s", error)
        if (begun := _claimed(self.succession)) is not None:  # while this one looked
            return begun
        facts = self._facts(fence.number, "crashed", why=lost, nodes_failed=True)
        self._decide(facts)
        return None

    def _end_unbegun(self, fence: Attempt | None, why: str) -> None:
        """Requeue a job whose first node was lost before its first attempt: nobody else would.

        `fence` is the newest attempt, of another start.
        """
        context, scheduler = self._context, self._ask()
        own = context.job_id, context.restarts
        if scheduler is None or is_requeued(scheduler, own[1]) or is_cancelled(scheduler, own[1]):
            return
        began = context.start_time
        if fence is not None and fence.job_id != own[0] and (not began or fence.started > began):
            return  # as far as anybody can tell the run has gone on in that job
        try:
            taken = take_attempt(self._run, job_id=own[0], restarts=own[1])
        except (HpctrainError, OSError) as error:
            log.warning("the job is left as it is: %s", error)
            return
        begun = start_without_ranks(
            self._run, taken, by="start", nodes=context.nodes, job_started=began
        )
        ledger.record(self._run, begun, attempt=taken.number)
        fact = kinds.NodeLost(node=context.nodes[0], why=why, was_first=True)
        ledger.record(self._run, fact, attempt=taken.number)
        lost = f"{context.nodes[0]} was lost before a rank had started: {why}"
        log.warning("%s; what follows is decided here", lost)
        self._decide(self._facts(taken.number, "crashed", why=lost, nodes_failed=True))

    def _is_left_alone(self, fence: Attempt, node: str, attempt: int) -> bool:
        """Whether nobody has seen to the job of this start."""
        own = self._context.job_id, self._context.restarts
        if (attempt and fence.number > attempt) or node in self._lost_nodes():
            log.warning("the job goes on without %s", node)
            return False
        end = self._look(fence.number).last(kinds.AttemptEnded, fence.number)
        if end is not None and end.next not in {Next.RESTART, Next.ASK_BATCH}:
            return False
        scheduler = self._ask()
        return scheduler is None or not (
            is_requeued(scheduler, own[1]) or is_cancelled(scheduler, own[1])
        )

    def check_leads(self) -> None:
        """Before an attempt begins: whether another agent leads those that are left by now.

        Raises:
            Fenced: one does.
        """
        if (begun := _claimed(self.succession)) is not None:
            raise Fenced(f"{begun.leader} leads the agents of this job that are left")

    def _is_current(self, attempt: int) -> bool:
        # A first node that thaws must not end what others go on with, also before they take part
        # in their first attempt.
        return super()._is_current(attempt) and _claimed(self.succession) is None

    def end_without_nodes(self, why: str) -> int:
        """End a new generation of agents for which too few nodes came; return the exit code."""
        fence = read_fence(self._run)
        number = None if fence is None else fence.number
        self._look(number)
        return self._decide(self._facts(number or 0, "crashed", why=why, nodes_failed=True))

    def end_job(self) -> None:
        """End the job where the run is over: its batch script, which would end it, may be gone."""
        fence = read_fence(self._run)
        number = None if fence is None else fence.number
        end = self._look(number).last(kinds.AttemptEnded, number)
        if end is None or end.next is not Next.STOP:
            return
        try:
            self._control.end()
        except ClusterError as error:
            log.warning("the run is over, and its job could not be ended: %s", error)

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


def _claimed(succession: Succession | None) -> Generation | None:
    try:
        return None if succession is None else succession.claimed()
    except OSError as error:
        log.warning("whether another agent goes on cannot be read: %s", error)
        return None
