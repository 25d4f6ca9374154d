"""What sets node 0's agent apart in a round: it begins the attempt, and decides how a round ends.

`LeadSide` is node 0's side of what lies around a round, and `FollowerSide` that of all other nodes;
`node.py` calls either alike. tests/engines/test_node_agent.py, tests/engines/test_in_place.py and
tests/unit/agent/test_simulated_stories.py hold the promises.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.errors import CheckpointError, Fenced
from hpctrain.node.agent.hang_watch import JobHangs
from hpctrain.node.agent.node_reports import (
    ROLL_CALL_S,
    FirstPresence,
    NodeReports,
    WatchOfFirst,
    news_each_s,
)
from hpctrain.node.agent.ranks import first_causal, settle_s
from hpctrain.node.agent.resume import StopHeard, choose
from hpctrain.node.agent.rounds import RoundEnd, RoundPart
from hpctrain.node.agent.stop_notice import STOP, listens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.core.base.records import FailureReport
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.node.agent.node_reports import Presence
    from hpctrain.node.agent.rendezvous import Loss, Rendezvous
    from hpctrain.node.agent.rounds import AgentRound, RoundHooks
    from hpctrain.node.hangs.standing import HangLimits

POLL_S = 0.1
GOODBYE_S = 5.0
"""How long node 0's agent, with which the store ends, stays at most for others' last look at it."""
NO_SIGN = "its agent gave no sign of life after a rank had failed"
AGAIN = "its ranks died twice within an hour"


class RoundCoordinator(RoundPart):
    """Node 0's: is the round over, and how? It publishes the verdict that all agents follow."""

    def __init__(
        self,
        round_: AgentRound,
        hooks: RoundHooks,
        place: Rendezvous,
        hang_limits: HangLimits,
        end_wait_s: float,
    ) -> None:
        """Begin without reports; idle ranks are ended after `end_wait_s`, 0 for never."""
        self._round, self._hooks, self._place = round_, hooks, place
        self._end_wait_s = end_wait_s
        self._reports = NodeReports(round_, place, end_wait_s)
        self._hangs = JobHangs(hang_limits, round_, len(round_.ranks.workers), hooks)
        self._is_stop_sent = False

    def tick(self) -> RoundEnd | None:
        """Return the verdict, once it is published."""
        end = self._judge()
        if end is not None:
            self._round.publish(asdict(end))
        return end

    def _judge(self) -> RoundEnd | None:
        end = self._after_losses(self._place.losses())
        if end is not None:
            return end
        reports, deadline = self._reports, self._hooks.deadline
        reports.gather()
        why_kill = deadline.look()  # before a failure is judged: a signal may be its cause
        self._look_for_stop()
        if len(reports.nodes) == self._round.nodes and not reports.failures:
            return RoundEnd("left")
        self._watch_hangs()
        if reports.first_failure_at is not None:
            end = self._after_failure(reports.first_failure_at)
        elif self._end_wait_s and deadline.cause is None:
            end = reports.judge_silence(self._hooks)
        if end is None and why_kill:
            end = RoundEnd("killed", why=why_kill)
        return end

    def _look_for_stop(self) -> None:
        """Tell all agents, once, that their ranks should leave."""
        if self._is_stop_sent:
            return
        first = self._round.ranks.processes[:1]
        if (
            cause := self._hooks.notice(lambda: any(listens(one.pid) for one in first))
        ) is not None:
            self._is_stop_sent = True
            self._round.publish({STOP: cause})

    def _watch_hangs(self) -> None:
        """Ranks that hang have failed. A stop that was asked for has a clock of its own."""
        if self._reports.failures or self._hooks.deadline.cause is not None:
            return
        failure = self._hangs.watch(self._reports.nodes)
        if failure is not None:
            self._reports.failures.append(failure)
            self._reports.fail_now()

    def _after_failure(self, first_failure_at: float) -> RoundEnd | None:
        """A rank has failed: await the other nodes' word, then restart or end; None meanwhile."""
        failures = self._reports.failures
        waited = clock.monotonic() - first_failure_at
        if len(self._reports.nodes) < self._round.nodes and waited < settle_s(failures):
            return None
        silent = self._reports.without_sign()
        if silent and waited < ROLL_CALL_S:
            return None
        failure = first_causal(failures)
        why = failure.summary if failure else "a rank failed"
        if silent:
            end = self._after_losses(self._place.drop(silent, NO_SIGN))
            return end or RoundEnd("failed", why=why, failure=failure, silent_nodes=silent)
        restart = self._hooks.deadline.cause is None and self._hooks.may_restart(failure)
        if restart and failure is not None:
            self._leave_out_again(failure)
        return RoundEnd("failed", restart=restart, why=why, failure=failure)

    def _after_losses(self, losses: list[Loss]) -> RoundEnd | None:
        """Nodes were lost: continue without them if possible; None if only spares were."""
        if not losses:
            return None
        members = self._place.next_members()
        for loss in losses:
            self._hooks.lost(loss, members)
        # One that was lost while this round began is in none any more, and its word comes only now.
        here = self._place.members
        gone = [loss for loss in losses if loss.was_member and loss.node in here]
        if not gone:
            return None
        why = "; ".join(f"{loss.name} was lost: {loss.why}" for loss in gone)
        may = self._hooks.deadline.cause is None and members is not None
        restart = may and self._hooks.may_go_on(why)
        nodes = [loss.node for loss in gone]
        return RoundEnd("failed", restart=restart, why=why, silent_nodes=nodes)

    def _leave_out_again(self, failure: FailureReport) -> None:
        """A node whose ranks die again and again is left out, where a round can do without it."""
        if failure.kind == "signal" and self._place.note_death(failure.node):
            place = self._place.names().index(failure.node)
            for loss in self._place.drop([place], AGAIN):
                self._hooks.lost(loss, self._place.next_members())


class FollowerSide:
    """What an agent does around a round on all nodes but the first: it waits for node 0's word."""

    refused: CheckpointError | None = None
    """Why there is nothing to resume from, as node 0 itself has found."""

    def __init__(self, place: Rendezvous, end_wait_s: float) -> None:
        """`end_wait_s` is as for `WatchOfFirst`."""
        self._place, self._end_wait_s = place, end_wait_s

    def begin_attempt(self, round_: AgentRound) -> int | None:
        """Take an attempt and publish it; return its number, None where node 0 does that."""

    def choose_resume(self, round_: AgentRound) -> None:
        """Publish what the ranks of this attempt resume from."""

    def sealing(self) -> RoundPart:
        """Return what registers the program's files in this round."""
        return RoundPart()

    def presence(self, round_: AgentRound) -> Presence:
        """Return what shows that node 0's agent lives, or watches that."""
        return WatchOfFirst(round_, self._place, self._end_wait_s)

    def news_each_s(self, nodes: int) -> float:
        """Return how long to wait between two looks for news."""
        return news_each_s(nodes, POLL_S)

    def coordinator(self, round_: AgentRound) -> RoundPart:
        """Return what decides how the round ends."""
        del round_
        return RoundPart()

    def after_store_loss(self, failure: FailureReport) -> RoundEnd:
        """Return how a round ends whose store is gone."""
        return RoundEnd("failed", restart=True, why=failure.summary)

    def is_job_to_end(self) -> bool:
        """Return whether a stop has been asked for, as node 0 knows it."""
        return False

    def record(self, fact: LedgerFact) -> None:
        """Write an event into the ledger, which is node 0's affair."""

    def note_losses(self, losses: Sequence[Loss]) -> None:
        """Record that nodes are left out of further rounds."""

    def stay(self, round_: AgentRound) -> None:
        """Stay until others have read the verdict."""


class LeadSide(FollowerSide):
    """What node 0's agent does around a round."""

    def __init__(
        self, hooks: RoundHooks, place: Rendezvous, hang_limits: HangLimits, end_wait_s: float
    ) -> None:
        """See `NodeAgent`."""
        super().__init__(place, end_wait_s)
        self._hooks, self._hang_limits = hooks, hang_limits
        self._attempt: Attempt
        self._sealing = RoundPart()

    def begin_attempt(self, round_: AgentRound) -> int:
        """Take the attempt, and publish it.

        Raises:
            OSError: e.g. a full disk; the other nodes know that no attempt begins.
        """
        key = f"attempt/{round_.number}"
        try:
            self._attempt = self._hooks.begin(round_.ranks.in_all)
        except OSError as error:  # the others would wait for the store that ends
            round_.store.set(key, {"refused": str(error)})
            say_goodbye(self, round_)
            raise
        round_.store.set(key, asdict(self._attempt))
        self._sealing = self._hooks.sealing(self._attempt)
        return self._attempt.number

    def choose_resume(self, round_: AgentRound) -> None:
        """Publish what the ranks resume from; it may take long."""
        round_.store.set(f"resume/{round_.number}", self._chosen(self._attempt))

    def _chosen(self, attempt: Attempt) -> dict[str, Any]:
        hooks = self._hooks
        try:
            path = choose(lambda on_bytes: hooks.resume(attempt, on_bytes), self._why_leave)
            start = hooks.starts()
            return {"path": path, "start": start, "more": asdict(hooks.more_args(start, path))}
        except Fenced:
            raise
        except CheckpointError as error:
            self.refused = error
            return {"refused": str(error)}
        except StopHeard as stop:
            return {"stopped": str(stop)}

    def _why_leave(self) -> str:
        """Why ranks should not be started any more; "" while nothing says so."""
        is_late = self._hooks.deadline.look()
        cause = self._hooks.notice(lambda: False)
        if cause is None and not is_late:
            return ""
        named = f" ({cause})" if cause is not None else ""
        return f"the job is to end{named}, and no rank had started"

    def sealing(self) -> RoundPart:
        """See `FollowerSide`."""
        return self._sealing

    def presence(self, round_: AgentRound) -> Presence:
        """See `FollowerSide`."""
        return FirstPresence(round_)

    def news_each_s(self, nodes: int) -> float:
        """Always: node 0's agent hears itself at once."""
        del nodes
        return 0.0

    def coordinator(self, round_: AgentRound) -> RoundPart:
        """See `FollowerSide`."""
        return RoundCoordinator(
            round_, self._hooks, self._place, self._hang_limits, self._end_wait_s
        )

    def after_store_loss(self, failure: FailureReport) -> RoundEnd:
        """See `FollowerSide`."""
        restart = self._hooks.deadline.cause is None and self._hooks.may_restart(failure)
        return RoundEnd("failed", restart=restart, why=failure.summary, failure=failure)

    def is_job_to_end(self) -> bool:
        """See `FollowerSide`."""
        deadline = self._hooks.deadline
        return bool(deadline.look()) or deadline.cause is not None

    def record(self, fact: LedgerFact) -> None:
        """See `FollowerSide`."""
        self._hooks.record(fact)

    def note_losses(self, losses: Sequence[Loss]) -> None:
        """See `FollowerSide`."""
        for loss in losses:
            self._hooks.lost(loss, self._place.next_members())

    def stay(self, round_: AgentRound) -> None:
        """Node 0 goes last, and sees to it that its verdict stands where others look."""
        deadline = clock.monotonic() + GOODBYE_S
        here = set(range(round_.nodes))
        while here and clock.monotonic() < deadline:
            round_.store.say_again()
            while here and round_.store.get(round_.key(f"goodbye/{min(here)}")) is not None:
                here.remove(min(here))
            if here:
                clock.sleep(POLL_S / 2)


def say_goodbye(side: FollowerSide, round_: AgentRound) -> None:
    """Take leave of the other agents of a round."""
    with suppress(RuntimeError):  # the store has ended: nobody hears it
        round_.say("goodbye", "gone")
        side.stay(round_)
