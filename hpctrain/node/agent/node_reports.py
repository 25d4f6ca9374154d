"""What each node reports in a round, and what node 0 makes of reports and of silence.

An agent that reports has no rank left. Only a rank that does nothing at all is at its end: it
prints nothing, uses no processor, reads and writes nothing, nor does anything that it has started.
tests/engines/test_node_agent.py, tests/engines/test_mixed_ends.py,
tests/unit/agent/test_lingering_ranks.py, tests/engines/test_lingering_ranks.py and
tests/unit/agent/test_simulated_stories.py hold the promises.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.core.base import clock
from hpctrain.core.base.process import below, processes
from hpctrain.core.base.records import HANG, FailureReport
from hpctrain.core.base.text import count, duration, fold_nodes, fold_ranks
from hpctrain.ledger.run.event_types import RanksAwaited
from hpctrain.ledger.run.layout import failure_path
from hpctrain.node.agent.ranks import collect
from hpctrain.node.agent.rounds import RoundEnd, RoundPart
from hpctrain.node.hangs.verdict import COMPUTES, IO_BYTES, Used

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.distributed.elastic.agent.server.api import RunResult

    from hpctrain.node.agent.control import NodeControl
    from hpctrain.node.agent.rendezvous import Rendezvous
    from hpctrain.node.agent.rounds import AgentRound, RoundHooks

log = logging.getLogger("hpctrain.agent")

ROLL_CALL: dict[str, Any] = {"roll_call": True}
"""News that asks each agent to show that it lives."""
ROLL_CALL_S = 10.0
"""So long may another node's agent take to answer that it is alive: who is held for dead while its
cores are busy costs the run a requeue."""
AWAKE = "awake"
"""News that asks each agent to answer with this number, where some ranks have returned."""
LOOK_ANYWAY_S = 5.0
"""So often node 0 looks for reports whatever their count is, and each agent whether what it has
said still stands there: anybody can change both."""
LOOK_EACH_S = 0.001
"""For each node so long between two looks: a thousand that report one by one are not a million
questions. The last one's report is looked for at once."""
LOOK_ENDS_S = 1.0
"""Between two looks at which ranks have returned."""
LONGEST_LOOK_S = 2.0
"""Between two looks of another node's agent for news: a roll call waits longer."""
LEAST_FIRST_S = 30.0
"""How long node 0's agent may say nothing at least, however short `run.end_wait_s` is."""
LONGEST_GAP_S = 10.0
"""So much of the time between two looks at node 0's agent counts as its silence."""
SAMPLE_S = 5.0
SAY_S = 30.0
"""After so long a silence of all that are left it is said who is waited for."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

AWAIT_ENDS: dict[str, Any] = {"await_ends": True}
"""News: some ranks have returned, and every agent watches whether its own others live."""

Life = Literal["alive", "quiet", "still"]
"""Of the ranks that are left on a node: some do something; none does; none has for too long."""


@dataclass(frozen=True)
class NodeEnds:
    """Which ranks of a node have returned.

    Attributes:
        node: Its name.
        returned: With 0; the processes of some may be there all the same.
        left: All others.
        life: Of all whose processes are there.
    """

    node: str
    returned: tuple[int, ...]
    left: tuple[int, ...]
    life: Life = "alive"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> NodeEnds:
        """As its agent has said it."""
        returned, left = tuple(said["returned"]), tuple(said["left"])
        return cls(said["node"], returned, left, said["life"])


def uses(pids: Collection[int]) -> dict[int, Used]:
    """What these processes have used, each with all that is below it; none for one that is gone."""
    stats = processes()
    parents = {pid: int(stat[1]) for pid, stat in stats.items()}
    used = {}
    for pid in pids:
        tree = {pid} | below(pid, parents)
        # Those it has awaited included.
        ticks = sum(sum(map(int, stats[one][11:15])) for one in tree if one in stats)
        used[pid] = Used(ticks / _TICKS_PER_S, sum(map(_io_bytes, tree)))
    return used


def _io_bytes(pid: int) -> int:
    """Read and written, sockets and pipes included; 0 where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


class LifeWatch:
    """Watches the ranks that are left on one node, from its first look on."""

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = clock.monotonic,
        look_at: Callable[[Collection[int]], Mapping[int, Used]] = uses,
    ) -> None:
        """Watch from now on; ranks without a sign of life for `limit_s` are still."""
        self._limit_s = limit_s
        self._clock = clock
        self._look_at = look_at
        self._sample_s = min(SAMPLE_S, limit_s / 4)
        self._life_at = self._looked_at = clock()
        self._used: dict[int, Used] = {}
        self._written: dict[Path, int] = {}

    def look(self, pids: Collection[int], logs: Sequence[Path]) -> Life:
        """Return whether a rank or its log shows life; look no more often than necessary."""
        now = self._clock()
        if set(pids) != set(self._used):
            self._life_at = now  # another has returned
        elif now - self._looked_at < self._sample_s:
            return self._judge(now)
        used, written = dict(self._look_at(pids)), {log: _length(log) for log in logs}
        if written != self._written or self._has_worked(used, now - self._looked_at):
            self._life_at = now
        self._used, self._written, self._looked_at = used, written, now
        return self._judge(now)

    def _judge(self, now: float) -> Life:
        quiet_s = now - self._life_at
        if quiet_s >= self._limit_s:
            return "still"
        return "quiet" if quiet_s >= min(SAY_S, self._limit_s / 2) else "alive"

    def _has_worked(self, used: Mapping[int, Used], seconds: float) -> bool:
        for pid, now in used.items():
            before = self._used.get(pid)
            if before is None or now.cpu_s < before.cpu_s:  # what it had started has ended
                return True
            if now.cpu_s - before.cpu_s > COMPUTES * seconds:
                return True
            if abs(now.io_bytes - before.io_bytes) > IO_BYTES:
                return True
        return False


class RankEnds(RoundPart):
    """Tells node 0 which ranks of this node have returned, and whether the others live."""

    def __init__(self, round_: AgentRound, limit_s: float) -> None:
        """Ranks without a sign of life for `limit_s` are still."""
        self._round, self._limit_s = round_, limit_s
        self._life: LifeWatch | None = None
        self._said: NodeEnds | None = None

    def hear(self, news: Mapping[str, Any]) -> None:
        """Watch for life from now on, where some ranks of the round have returned."""
        if news == AWAIT_ENDS:
            self._life = LifeWatch(self._limit_s)

    def tick(self) -> None:
        """Tell what has changed."""
        if self._round.has_reported:
            return
        ends = self._look()
        if ends is None or ends == self._said or not (ends.returned or self._life):
            return
        self._said = ends
        self._round.say("ends", asdict(ends))
        self._round.store.count(self._round.key("ends"), 1)

    def _look(self) -> NodeEnds | None:
        ranks = self._round.ranks
        returned: list[int] = []
        left: list[int] = []
        pids: list[int] = []
        logs: list[Path] = []
        for (worker, process), log in zip(ranks.pairs(), self._round.logs(), strict=True):
            if process.exitcode is None:
                pids.append(process.pid)
                logs.append(log)
            has_returned = ranks.has_returned(worker, process)
            (returned if has_returned else left).append(worker.global_rank)
        if not pids:
            return None
        life: Life = "alive" if self._life is None else self._life.look(pids, logs)
        return NodeEnds(self._round.node, tuple(returned), tuple(left), life)


def in_words(returned: int, left: Sequence[int], seconds: float) -> str:
    """Say who has returned; `left` is empty if processes outlive programs that have ended."""
    if not left:
        why = "all ranks returned, and processes of theirs do not end"
        return f"{why}: nothing printed and nothing done for {duration(seconds)}"
    those = "it" if len(left) == 1 else "they"
    return (
        f"{count(returned, 'rank')} returned and {fold_ranks(left)} did not: {those} printed "
        f"nothing and did nothing for {duration(seconds)}"
    )


def _length(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


class RankReport(RoundPart):
    """Reports to node 0, once: all ranks of this node have ended, or one failed."""

    def __init__(
        self,
        round_: AgentRound,
        control: NodeControl,
        end_failed: Callable[[], RunResult],
    ) -> None:
        """`end_failed` has torch end all ranks where one has failed, and name that one."""
        self._round, self._control, self._end_failed = round_, control, end_failed

    def tick(self) -> None:
        """Report where it is time.

        Torch waits without a limit for the processes of ranks that have returned, and for the value
        of one that has ended itself with 0: it is asked about failures only.
        """
        if self._round.has_reported:
            return
        codes = [process.exitcode for process in self._round.ranks.processes]
        if not any(codes) and None in codes:
            return
        failures = []
        if any(codes):
            failures = self._failures(self._end_failed(), codes)
            if (failure := self._control.failure()) is not None:
                failures.append(failure)
        self._round.report(failures)

    def _failures(self, result: RunResult, ended: Sequence[int | None]) -> list[FailureReport]:
        """Return what failed: torch names one rank of those that ended, and has ended the others.

        `ended` has the exit code that each rank had before.
        """
        directory = self._round.directory
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        for worker, code in zip(self._round.ranks.workers, ended, strict=True):
            if code or failure_path(directory, worker.global_rank).exists():
                codes.setdefault(worker.global_rank, code or 1)
        return collect(directory, codes, self._round.node)


class RollCall(RoundPart):
    """Shows node 0 that this agent lives, where it is asked to."""

    def __init__(self, round_: AgentRound) -> None:
        self._round = round_

    def hear(self, news: Mapping[str, Any]) -> None:
        """Answer a roll call, or a numbered question."""
        if news == ROLL_CALL:
            self._round.say("present", "here")
        elif AWAKE in news:
            self._round.say("awake", news[AWAKE])


class Presence(RoundPart):
    """Says again what was written over in the store, and what a subclass does as often."""

    def __init__(self, round_: AgentRound) -> None:
        self._round = round_
        self._said_s = clock.monotonic()

    def tick(self) -> RoundEnd | None:
        """Look whether it is time."""
        if clock.monotonic() <= self._said_s + LOOK_ANYWAY_S:
            return None
        self._round.say_again()
        self._said_s = clock.monotonic()
        return self._look()

    def _look(self) -> RoundEnd | None:
        raise NotImplementedError


class FirstPresence(Presence):
    """Node 0's: shows that its agent runs."""

    def _look(self) -> None:
        self._round.store.set(self._round.key("first"), clock.monotonic())


class WatchOfFirst(Presence):
    """Another node's: whether the agent of node 0 still runs, once this node has no rank left.

    Only time counts that this agent has seen pass: a suspended job stands still as a whole.
    """

    def __init__(self, round_: AgentRound, place: Rendezvous, end_wait_s: float) -> None:
        """Begin without a sign of it; where `end_wait_s` is 0 it may be silent for any time."""
        super().__init__(round_)
        self._place = place
        self._wait_s = max(end_wait_s, LEAST_FIRST_S) if end_wait_s else 0.0
        self._heard: object = self
        self._quiet_s = 0.0
        self._looked_s = clock.monotonic()

    def _look(self) -> RoundEnd | None:
        heard, now = self._round.store.get(self._round.key("first")), clock.monotonic()
        gap_s, self._looked_s = min(now - self._looked_s, LONGEST_GAP_S), now
        self._quiet_s = self._quiet_s + gap_s if heard == self._heard else 0.0
        self._heard = heard
        if not self._wait_s or self._quiet_s <= self._wait_s or not self._round.has_reported:
            return None
        name, for_s = self._place.names()[0], duration(self._wait_s)
        why = f"all ranks of this node ended, and the agent of {name} said nothing for {for_s}"
        log.warning("%s", why)
        self._place.leave_silent_first(why)
        return RoundEnd("hung", why=why, left_out=why)


class News(RoundPart):
    """Reads what node 0's agent publishes, in order, and gives it to the parts of this node."""

    def __init__(self, round_: AgentRound, parts: Sequence[RoundPart], *, each_s: float) -> None:
        """Begin with the first; look every `each_s` seconds, 0 for always."""
        self._round, self._parts, self._each_s = round_, parts, each_s
        self._read = 0
        self._looked_s = float("-inf")

    def tick(self) -> RoundEnd | None:
        """Return the verdict, if it has come; raise where this node takes part no more."""
        self._round.store.look()
        now = clock.monotonic()
        if now < self._looked_s + self._each_s:
            return None
        raw = self._round.store.get(self._round.key(f"news/{self._read}"))
        if raw is None:
            self._looked_s = now
            return None
        self._read += 1
        if "ending" in raw:
            raw["failure"] = FailureReport(**raw["failure"]) if raw["failure"] else None
            return RoundEnd(**raw)
        for part in self._parts:
            part.hear(raw)
        return None


def news_each_s(nodes: int, poll_s: float) -> float:
    """Return how long an agent of so many nodes waits between two looks: all ask one store."""
    each_s = min(nodes * LOOK_EACH_S, LONGEST_LOOK_S)
    return each_s if each_s > poll_s else 0.0


class NodeReports:
    """The reports of one round.

    Attributes:
        nodes: Places in the round of those that have reported.
        failures: What failed there.
        first_failure_at: When the first failure was seen, by the monotonic clock; None before.
    """

    def __init__(self, round_: AgentRound, place: Rendezvous, end_wait_s: float) -> None:
        """Begin without any; `end_wait_s` is 0 for never."""
        self.nodes: set[int] = set()
        self.failures: list[FailureReport] = []
        self.first_failure_at: float | None = None
        self._round, self._store, self._key = round_, round_.store, round_.key
        self._node_count, self._place = round_.nodes, place
        self._ranks_per_node = len(round_.ranks.workers)
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
        self._round.publish(ROLL_CALL)

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
            self._round.publish(AWAIT_ENDS)
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
        self._round.publish({AWAKE: self._asked})
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
        hooks.record(fact)
        if not is_over:
            return None
        if not left:
            return RoundEnd("left", why=why)
        (first, node), *_ = left
        failure = FailureReport(first, node, HANG, why, time=clock.now(), others=list(ranks[1:]))
        restart = hooks.may_restart(failure)
        return RoundEnd("hung", restart=restart, why=why, failure=failure)
