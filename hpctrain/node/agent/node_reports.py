"""What the nodes have reported in a round, and what follows where they say nothing; node 0 only.

An agent that reports has no rank left. Of the others it is known which ranks have returned and
whether the rest live. tests/engines/test_node_agent.py, tests/engines/test_mixed_ends.py and
tests/unit/agent/test_simulated_stories.py hold the promises.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.records import HANG, FailureReport
from hpctrain.core.base.text import duration, fold_nodes
from hpctrain.ledger.run.event_types import RanksAwaited
from hpctrain.node.agent.lingering_ranks import SAY_S, NodeEnds, in_words
from hpctrain.node.agent.rounds import RoundEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.node.agent.rendezvous import Rendezvous, SignedStore
    from hpctrain.node.agent.rounds import RoundHooks

log = logging.getLogger("hpctrain.agent")

ROLL_CALL: dict[str, Any] = {"roll_call": True}
"""News that asks each agent to show that it lives."""
ROLL_CALL_S = 10.0
"""So long may another node's agent take to answer that it is alive: who is held for dead while its
cores are busy costs the run a requeue."""
AWAKE = "awake"
"""News that asks each agent to answer with this number, where some ranks have returned."""
AWAIT_ENDS: dict[str, Any] = {"await_ends": True}
"""Some ranks have returned: every agent watches whether its own others live."""
LOOK_ANYWAY_S = 5.0
"""So often node 0 looks for reports whatever their count is, and each agent whether what it has
said still stands there: anybody can change both."""
LOOK_EACH_S = 0.001
"""For each node so long between two looks: a thousand that report one by one are not a million
questions. The last one's report is looked for at once."""
LOOK_ENDS_S = 1.0
"""Between two looks at which ranks have returned."""


class NodeReports:
    """The reports of one round.

    Attributes:
        nodes: Places in the round of those that have reported.
        failures: What failed there.
        first_failure_at: When the first failure was seen, by the monotonic clock; None before.
    """

    def __init__(
        self,
        store: SignedStore,
        key: Callable[[str], str],
        *,
        nodes: int,
        ranks_per_node: int,
        end_wait_s: float,
        publish: Callable[[dict[str, Any]], None],
        place: Rendezvous,
    ) -> None:
        """Begin without any. `publish` tells all agents something; `end_wait_s` is 0 for never."""
        self.nodes: set[int] = set()
        self.failures: list[FailureReport] = []
        self.first_failure_at: float | None = None
        self._store, self._key, self._publish, self._place = store, key, publish, place
        self._node_count, self._ranks_per_node = nodes, ranks_per_node
        self._end_wait_s = end_wait_s
        self._count, self._looked_at = 0, 0.0
        self._ends_looked_at = 0.0
        self._returned, self._returned_at = 0, 0.0
        self._is_awaited = self._is_said = False
        self._asked, self._asked_at = 0, float("-inf")

    def gather(self) -> None:
        """Take what has been reported since; the first failure calls the roll."""
        count, now = self._store.count(self._key("reports")), clock.monotonic()
        if count == self._count and now < self._looked_at + LOOK_ANYWAY_S:
            return
        if count < self._node_count and now < self._looked_at + self._node_count * LOOK_EACH_S:
            return
        self._count, self._looked_at = count, now
        for node in self._waited_for():
            said = self._store.get(self._key(f"report/{node}"))
            if said is not None:
                self.nodes.add(node)
                self.failures += [FailureReport(**one) for one in said]
        if self.failures and self.first_failure_at is None:
            self.fail_now()

    def fail_now(self) -> None:
        """Note that the round has failed, and call the roll."""
        self.first_failure_at = clock.monotonic()
        self._publish(ROLL_CALL)

    def without_sign(self) -> list[int]:
        """Return nodes that have neither reported nor answered the roll call."""
        waited_for = self._waited_for()
        return [n for n in waited_for if self._store.get(self._key(f"present/{n}")) is None]

    def judge_silence(self, hooks: RoundHooks) -> RoundEnd | None:
        """Some ranks have returned: end the round where nothing is to be expected of the others."""
        now, each_s = clock.monotonic(), max(LOOK_ENDS_S, self._node_count * LOOK_EACH_S)
        if now < self._ends_looked_at + min(each_s, self._end_wait_s / 4):
            return None
        self._ends_looked_at = now
        if not (self.nodes or self._is_awaited or self._store.count(self._key("ends"))):
            return None
        said = self._said_ends()
        of_others = len(self.nodes) * self._ranks_per_node
        returned = of_others + sum(len(ends.returned) for ends in said)
        if returned > self._returned:
            self._returned, self._returned_at = returned, now
        if returned and not self._is_awaited:
            self._is_awaited = True
            self._publish(AWAIT_ENDS)
        if returned and (silent := self._silent_agents(now)):
            return self._after_silent_agents(silent)
        waited_for = self._node_count - len(self.nodes)
        if not returned or len(said) < waited_for or any(ends.life == "alive" for ends in said):
            return None
        is_still = all(ends.life == "still" for ends in said)
        is_over = is_still and now - self._returned_at >= self._end_wait_s
        return self._report_awaited(hooks, said, is_over=is_over)

    def _waited_for(self) -> list[int]:
        return sorted(set(range(self._node_count)) - self.nodes)

    def _said_ends(self) -> list[NodeEnds]:
        """What the nodes that have not reported say of their ranks."""
        said = [self._store.get(self._key(f"ends/{node}")) for node in self._waited_for()]
        return [NodeEnds.of(raw) for raw in said if raw is not None]

    def _silent_agents(self, now: float) -> list[int]:
        """Nodes whose agents have not answered the last question; asks the next one in time.

        What such an agent has said of its ranks before it was stopped stays, and holds for ever.
        """
        if now < self._asked_at + self._end_wait_s:
            return []
        said = {n: self._store.get(self._key(f"awake/{n}")) for n in self._waited_for()}
        silent = [node for node in said if self._asked and said[node] != self._asked]
        self._asked, self._asked_at = self._asked + 1, now
        self._publish({AWAKE: self._asked})
        return silent

    def _after_silent_agents(self, silent: list[int]) -> RoundEnd:
        each = self._ranks_per_node
        ranks = [rank for node in silent for rank in range(node * each, (node + 1) * each)]
        names = self._place.names()
        silent_names = fold_nodes([names[node] for node in silent])
        for_s = duration(self._end_wait_s)
        why = f"ranks returned, and the agents of {silent_names} said nothing for {for_s}"
        log.warning("%s", why)
        node, now = names[silent[0]], clock.now()
        failure = FailureReport(ranks[0], node, HANG, why, time=now, others=ranks[1:])
        nodes = [self._place.members[place] for place in silent]
        return RoundEnd("hung", why=why, failure=failure, silent_nodes=nodes)

    def _report_awaited(
        self, hooks: RoundHooks, said: list[NodeEnds], *, is_over: bool
    ) -> RoundEnd | None:
        if self._is_said and not is_over:
            return None
        self._is_said = True
        left = sorted((rank, ends.node) for ends in said for rank in ends.left)
        ranks = tuple(rank for rank, _ in left)
        quiet_s = self._end_wait_s if is_over else min(SAY_S, self._end_wait_s / 2)
        why, limit_s = in_words(self._returned, ranks, quiet_s), self._end_wait_s
        log.warning("%s; %s", why, "ended" if is_over else f"ended after {limit_s:g} s of that")
        fact = RanksAwaited(
            returned=self._returned, left=ranks, quiet_s=quiet_s, limit_s=limit_s, ended=is_over
        )
        hooks.awaited(fact)
        if not is_over:
            return None
        if not left:
            return RoundEnd("left", why=why)
        (first, node), *_ = left
        failure = FailureReport(first, node, HANG, why, time=clock.now(), others=list(ranks[1:]))
        restart = hooks.may_restart(failure)
        return RoundEnd("hung", restart=restart, why=why, failure=failure)
