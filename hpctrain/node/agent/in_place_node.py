"""The agent of one node where the run outlives the nodes of its job.

It is `NodeAgent` with other ends of a round: a lost node ends it, and the next one goes on without
that node. Node 0's agent hears of losses in its rendezvous (`in_place.py`); the others hear there
that the next round was announced, or that they take part in none any more.
tests/engines/test_in_place.py holds the promises.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, cast

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_ATTEMPT
from hpctrain.core.base.records import FailureReport
from hpctrain.errors import ClusterError, ControlLost
from hpctrain.ledger.run.fence import Attempt
from hpctrain.node.agent.copies_to_disk import CopySaver
from hpctrain.node.agent.node import MANY, STORE_GONE, NodeAgent
from hpctrain.node.agent.rendezvous import LeftOut, RoundBroken
from hpctrain.node.agent.rounds import RoundEnd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.agent.server.api import WorkerGroup

    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.hang_watch import RoundHangs
    from hpctrain.node.agent.in_place import InPlaceRendezvous
    from hpctrain.node.agent.node_reports import NodeReports
    from hpctrain.node.agent.rendezvous import Loss
    from hpctrain.node.agent.rounds import RoundHooks

NO_SIGN = "its agent gave no sign of life after a rank had failed"
AGAIN = "its ranks died twice within an hour"


class InPlaceAgent(NodeAgent):
    """An agent whose rendezvous is an `in_place.InPlaceRendezvous`.

    Attributes:
        left_out: Why this node takes part in no round any more; None where it did to the end.
        run_of_copies: The run, where its nodes have copies of the state; else None.
    """

    left_out: LeftOut | None = None
    run_of_copies: RunDir | None = None

    def _start_and_run(self, group: WorkerGroup) -> RoundEnd:
        try:
            return self._copies_saved(self._begin_and_run(group))
        except RoundBroken as broken:  # while it began, or its verdict came later than the next one
            return self._after_break(group, str(broken))
        except LeftOut as left_out:
            self._stop_workers(group)
            if self._hooks is not None:  # the lifeline of node 0 itself
                return RoundEnd("failed", why=str(left_out))
            self.left_out = left_out
            return RoundEnd("failed", why=str(left_out), left_out=str(left_out))
        except RuntimeError as error:  # torch's store does not answer
            self._stop_workers(group)
            out = self._meeting_place.left_out()
            if out is None and self._meeting_place.is_behind:
                return self._after_break(group, "its store has ended: others are rounds ahead")
            if out is None:
                why = str(error).partition("\n")[0]
                raise ClusterError(f"the agents' store does not answer: {why}") from None
            self.left_out = out
            return RoundEnd("failed", why=str(out), left_out=str(out))

    def _without_first(self) -> RoundEnd:
        raise LeftOut(super()._without_first().why, first_is_gone=True)

    def _announce_end(self, group: WorkerGroup) -> None:
        """The liveness channel does so, as this agent leaves."""

    def _after_break(self, group: WorkerGroup, why: str) -> RoundEnd:
        self._stop_workers(group)
        return RoundEnd("failed", restart=True, why=why)

    def _begin_and_run(self, group: WorkerGroup) -> RoundEnd:
        try:
            return super()._start_and_run(group)
        except ControlLost as error:
            if self._hooks is not None:
                raise
            return self._fail_to_start(group, error)

    def _copies_saved(self, end: RoundEnd) -> RoundEnd:
        """Copies go to disk where no round follows; ranks that raised may have bad ones."""
        is_loss = end.silent_nodes or (end.failure is not None and end.failure.kind == "signal")
        if self.run_of_copies is None or self._control is None or end.restart or not is_loss:
            return end
        if end.why == STORE_GONE:  # in which the agents would agree on what they save
            return end
        members, line = self._meeting_place.members, self._control.memory_line(self.attempt_number)
        saver = CopySaver(
            self.run_of_copies,
            Attempt(**json.loads(os.environ[HPCTRAIN_ATTEMPT])),
            place=int(self._worker_group.group_rank or 0),
            living=[place for place, node in enumerate(members) if node not in end.silent_nodes],
            line=line,
            store=self._news_store,
            key=self._key,
            why_not=self._why_no_copies,
        )
        saved = saver.save()
        if line is not None:
            line.close()
        if saved is not None and self._hooks is not None:
            self._hooks.record(saved)
        return end

    def _why_no_copies(self) -> str:
        """Node 0: why copies are not to be written any more, or ""."""
        if self._hooks is not None:
            deadline = self._hooks.deadline
            # Its last seconds are for the requeue, and a write cannot be broken off.
            if deadline.look().kill or deadline.cause is not None:
                return "the job is to end"
        return ", ".join(f"{loss.name} was lost" for loss in self._meeting_place.losses())

    def _fail_to_start(self, group: WorkerGroup, error: ControlLost) -> RoundEnd:
        """The node above is gone: say so, and hear how the round ends."""
        self._stop_workers(group)
        self._pcontext = None
        why = f"ControlLost: {error}"
        first = group.workers[0].global_rank
        failure = FailureReport(first, self._node, "error", why, time=clock.now())
        self._say_report([failure])
        return self._watch_round(reported=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._take_round()
        return super()._start_workers(worker_group)

    def _take_round(self) -> None:
        """A spare that joins has seen none of the rounds before."""
        self._round = self._meeting_place.round
        self._remaining_restarts = MANY - self._round
        port: Any = self._meeting_place.master_port  # torch types the group's as None
        self._worker_group.master_port = port

    def _round_hangs(self) -> RoundHangs | None:
        return None if self._pcontext is None else super()._round_hangs()

    # ---- node 0

    def _coordinate(self, hooks: RoundHooks, reports: NodeReports) -> RoundEnd | None:
        if losses := self._meeting_place.losses():
            end = self._after_losses(hooks, losses)
            if end is not None:
                return end
        return super()._coordinate(hooks, reports)

    def _after_failure(
        self, hooks: RoundHooks, reports: NodeReports, first_failure_at: float
    ) -> RoundEnd | None:
        end = super()._after_failure(hooks, reports, first_failure_at)
        failure = end.failure if end is not None and end.restart else None
        # What a program raises it raises anywhere; a rank that is killed may lie on a bad node.
        if failure is not None and failure.kind == "signal":
            self._leave_out_again(hooks, failure)
        return end

    def _after_no_sign(
        self, hooks: RoundHooks, silent: list[int], why: str, failure: FailureReport | None
    ) -> RoundEnd:
        end = self._after_losses(hooks, self._meeting_place.drop(silent, NO_SIGN))
        return super()._after_no_sign(hooks, silent, why, failure) if end is None else end

    def _after_losses(self, hooks: RoundHooks, losses: list[Loss]) -> RoundEnd | None:
        """Nodes were lost: go on without them, where that can be; None where only spares were."""
        members = self._meeting_place.next_members()
        for loss in losses:
            hooks.lost(loss, members)
        # One that was lost while this round began is in none any more, and its word comes only now.
        here = self._meeting_place.members
        gone = [loss for loss in losses if loss.was_member and loss.node in here]
        if not gone:
            return None
        why = "; ".join(f"{loss.name} was lost: {loss.why}" for loss in gone)
        may = hooks.deadline.cause is None and members is not None
        nodes = [loss.node for loss in gone]
        return RoundEnd("failed", restart=may and hooks.may_go_on(why), why=why, silent_nodes=nodes)

    def leave_out(self, bad: Mapping[str, str]) -> bool:
        """Node 0: end without nodes that guards have named; see `Convictions.leave_out`."""
        losses = cast("InPlaceRendezvous", self._meeting_place).leave_out(bad)
        for loss in losses or []:
            assert self._hooks is not None  # noqa: S101 - node 0 has them
            self._hooks.lost(loss, self._meeting_place.next_members())
        return losses is not None

    def _leave_out_again(self, hooks: RoundHooks, failure: FailureReport) -> None:
        """A node whose ranks die again and again is left out, where a round can do without it."""
        if self._meeting_place.note_death(failure.node):
            place = self._meeting_place.names().index(failure.node)
            for loss in self._meeting_place.drop([place], AGAIN):
                hooks.lost(loss, self._meeting_place.next_members())
