"""What sets node 0's agent apart in a round: it begins the attempt, and decides how a round ends.

`RoundSide` is what lies around a round, on every node. tests/engines/test_node_agent.py,
tests/engines/test_in_place.py and tests/unit/agent/test_simulated_stories.py hold the promises.
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


class RoundSide:
    """What an agent does around a round: on node 0 by its hooks; all others wait for its word.

    Attributes:
        refused: On node 0: why there is nothing to resume from.
        sealing: What registers the program's files in this round.
    """

    def __init__(
        self,
        hooks: RoundHooks | None,
        place: Rendezvous,
        hang_limits: HangLimits,
        end_wait_s: float,
    ) -> None:
        """See `NodeAgent`."""
        self.refused: CheckpointError | None = None
        self.sealing = RoundPart()
        self._hooks, self._place = hooks, place
        self._hang_limits, self._end_wait_s = hang_limits, end_wait_s
        self._attempt: Attempt

    def begin_attempt(self, round_: AgentRound) -> int | None:
        """Take the attempt, and publish it; return its number, None where node 0 does that.

        Raises:
            OSError: e.g. a full disk; the other nodes know that no attempt begins.
        """
        if self._hooks is None:
            return None
        key = f"attempt/{round_.number}"
        try:
            self._attempt = self._hooks.begin(round_.ranks.in_all)
        except OSError as error:  # the others would wait for the store that ends
            round_.store.set(key, {"refused": str(error)})
            self.say_goodbye(round_)
            raise
        round_.store.set(key, asdict(self._attempt))
        self.sealing = self._hooks.sealing(self._attempt)
        return self._attempt.number

    def choose_resume(self, round_: AgentRound) -> None:
        """Publish what the ranks resume from; it may take long."""
        if self._hooks is not None:
            round_.store.set(f"resume/{round_.number}", self._chosen(self._hooks))

    def _chosen(self, hooks: RoundHooks) -> dict[str, Any]:
        def why_leave() -> str:
            is_late, cause = hooks.deadline.look(), hooks.notice(lambda: False)
            if cause is None and not is_late:
                return ""
            named = f" ({cause})" if cause is not None else ""
            return f"the job is to end{named}, and no rank had started"

        try:
            path = choose(lambda on_bytes: hooks.resume(self._attempt, on_bytes), why_leave)
            start = hooks.starts()
            return {"path": path, "start": start, "more": asdict(hooks.more_args(start, path))}
        except Fenced:
            raise
        except CheckpointError as error:
            self.refused = error
            return {"refused": str(error)}
        except StopHeard as stop:
            return {"stopped": str(stop)}

    def presence(self, round_: AgentRound) -> Presence:
        """Return what shows that node 0's agent lives, or watches that."""
        if self._hooks is not None:
            return FirstPresence(round_)
        return WatchOfFirst(round_, self._place, self._end_wait_s)

    def news_each_s(self, nodes: int) -> float:
        """Return how long to wait between two looks for news; node 0 hears itself at once."""
        return 0.0 if self._hooks is not None else news_each_s(nodes, POLL_S)

    def coordinator(self, round_: AgentRound) -> RoundPart:
        """Return what decides how the round ends."""
        if self._hooks is None:
            return RoundPart()
        return RoundCoordinator(
            round_, self._hooks, self._place, self._hang_limits, self._end_wait_s
        )

    def after_store_loss(self, failure: FailureReport) -> RoundEnd:
        """Return how a round ends whose store is gone."""
        if self._hooks is None:
            return RoundEnd("failed", restart=True, why=failure.summary)
        restart = self._hooks.deadline.cause is None and self._hooks.may_restart(failure)
        return RoundEnd("failed", restart=restart, why=failure.summary, failure=failure)

    def is_job_to_end(self) -> bool:
        """Return whether a stop has been asked for, as node 0 knows it."""
        if self._hooks is None:
            return False
        return bool(self._hooks.deadline.look()) or self._hooks.deadline.cause is not None

    def record(self, fact: LedgerFact) -> None:
        """Write an event into the ledger, which is node 0's affair."""
        if self._hooks is not None:
            self._hooks.record(fact)

    def note_losses(self, losses: Sequence[Loss]) -> None:
        """Record that nodes are left out of further rounds."""
        if self._hooks is not None:
            for loss in losses:
                self._hooks.lost(loss, self._place.next_members())

    def say_goodbye(self, round_: AgentRound) -> None:
        """Take leave of the other agents of a round."""
        with suppress(RuntimeError):  # the store has ended: nobody hears it
            round_.say("goodbye", "gone")
            if self._hooks is not None:
                _await_others(round_)


def _await_others(round_: AgentRound) -> None:
    """Node 0 goes last, and sees to it that its verdict stands where others look."""
    deadline = clock.monotonic() + GOODBYE_S
    here = set(range(round_.nodes))
    while here and clock.monotonic() < deadline:
        round_.store.say_again()
        while here and round_.store.get(round_.key(f"goodbye/{min(here)}")) is not None:
            here.remove(min(here))
        if here:
            clock.sleep(POLL_S / 2)
