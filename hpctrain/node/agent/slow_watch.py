"""The agent's watch for slow ranks: when each came to the collectives that all ranks call.

All agents read their ranks' flight recorders at the same moments of one clock, without the ranks'
help and without a word to each other. tests/engines/test_slow_watch.py holds the promises.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections import deque
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.text import duration
from hpctrain.ledger.run.event_types import StragglerFound, StragglerGone
from hpctrain.node.control import heartbeat
from hpctrain.node.control.board import shown
from hpctrain.node.hangs.look import calls_of_all
from hpctrain.node.hangs.outliers import (
    WINDOW,
    StragglerJudge,
    Straggling,
    own_work,
    period_of,
    straggling_in_words,
    window_of,
)
from hpctrain.node.hangs.verdict import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.node.agent.rounds import AgentRound
    from hpctrain.node.control.board import Board
    from hpctrain.node.hangs.evidence import Collective
    from hpctrain.node.hangs.outliers import Cleared, OwnWork

log = logging.getLogger("hpctrain.agent")

SAID, LOOK = "slow/said", "slow/look"
"""How often nodes have said something, and the last look of node 0."""
EVERY_S, EACH_S = 10.0, 0.1
"""So often the recorders are read, and for each node a little: it takes a rank's native thread some
30 ms, and node 0 reads what all ranks have come to."""
MOST_MOMENTS, MOST_IN_ALL, FEWEST_MOMENTS = 2000, 200_000, 200
"""Of a rank, as torch keeps them; of all ranks together; and of a rank where there are many."""
DATA_LOOKS = 6
"""So many looks back it is asked how much of the time a rank has waited for its data."""


def every_s(nodes: int) -> float:
    """So often the recorders are read."""
    return max(EVERY_S, EACH_S * nodes)


class NodeMoments:
    """One node's side of a round."""

    def __init__(self, folder: Path, round_: AgentRound) -> None:
        """Watch this round's ranks, whose recorders answer in `folder`."""
        self._folder, self._round = folder, round_
        self._every_s = every_s(round_.nodes)
        self._look = 0
        self._in_data: deque[tuple[float, list[float]]] = deque(maxlen=DATA_LOOKS + 1)

    def look(self, board: Board) -> None:
        """Read the recorders if it is time; call this some times a second."""
        ahead_ns = shown(board)
        if ahead_ns is None:
            return
        number = int((clock.now() - ahead_ns / 1e9) / self._every_s)
        if number == self._look:
            return
        is_first, self._look = not self._look, number
        data = self._data_share(board)
        if is_first:  # nobody knows how long it has been so
            return
        ranks = range(board.first_rank, board.first_rank + board.ranks)
        most = max(FEWEST_MOMENTS, min(MOST_MOMENTS, MOST_IN_ALL // board.ranks_in_all))
        calls = calls_of_all(self._folder, ranks, board.ranks_in_all)
        if calls is not None:
            said = self._said(calls, most, ahead_ns) | {"data": data}
            self._round.say(f"slow/{number % 2}", said)  # over that of the look before the last
            if self._round.place == 0:
                self._round.store.set(self._round.key(LOOK), number)
            self._round.store.count(self._round.key(SAID), 1)

    def _data_share(self, board: Board) -> list[float]:
        """How much of the time each rank has waited for its data, in the last looks; first none."""
        now_s, now = clock.monotonic(), [seen.in_data_s for seen in heartbeat.read(board)]
        self._in_data.append((now_s, now))
        then_s, then = self._in_data[0]
        passed_s = now_s - then_s
        return [(after - before) / (passed_s or 1) for before, after in zip(then, now, strict=True)]

    def _said(
        self, calls: Sequence[Sequence[Collective]], most: int, ahead_ns: int
    ) -> dict[str, Any]:
        moments = [[(call.started_ns - ahead_ns) // 1000 for call in one[-most:]] for one in calls]
        said: dict[str, Any] = {
            "look": self._look,
            "name": self._round.node,
            "group": calls[0][-1].group,
            "first": [one[-most:][0].number for one in calls],
            "begun_us": [one[0] for one in moments],
            "us": [list(map(operator.sub, one[1:], one)) for one in moments],
        }
        if self._round.place == 0:
            signatures: dict[Any, int] = {}
            said["signatures"] = [
                signatures.setdefault((call.name, call.sizes, call.dtypes), len(signatures))
                for call in calls[0][-most:]
            ]
        return said


class JobStragglers:
    """Node 0's side of a round: who is slow.

    Attributes:
        judge: What was found so far.
        names: Of the nodes, by their numbers in the round.
    """

    def __init__(
        self,
        round_: AgentRound,
        nodes: Mapping[int, Sequence[int]],
        record: Callable[[LedgerFact], None],
    ) -> None:
        """Watch this round; `nodes` has the ranks by node, `record` writes into the ledger."""
        self._store, self._key, self._nodes, self._record = round_.store, round_.key, nodes, record
        self.judge = StragglerJudge(nodes)
        self.names: dict[int, str] = {}
        self._count, self._look = 0, 0
        self._said: dict[int, dict[str, Any]] = {}
        self._group, self._last = "", 0
        self._steps: list[OwnWork] = []
        self._heard_s = clock.monotonic()

    def watch(self) -> None:
        """Hear what nodes have read, and judge it. To be called all the time."""
        count = self._store.count(self._key(SAID))
        if count == self._count:
            return
        self._count = count
        look = self._store.get(self._key(LOOK)) or 0
        if look != self._look:
            self._look, self._said = look, {}
        for node in set(self._nodes) - set(self._said):
            said = self._store.get(self._key(f"slow/{look % 2}/{node}"))
            if said is not None and said["look"] == look:
                self._said[node] = said
        if self._said and len(self._said) == len(self._nodes):
            heard, self._said = self._said, {}
            self.names = {node: said["name"] for node, said in heard.items()}
            self._hear([heard[node] for node in self._nodes])

    def _hear(self, said: Sequence[Mapping[str, Any]]) -> None:
        if len({one["group"] for one in said}) > 1:
            return
        group = said[0]["group"]
        if group != self._group:
            self._group, self._last, self._steps = group, 0, []
        rows = [row for one in said for row in _moments(one)]
        first = max(self._last, *(min(row) for row in rows))
        last = min(max(row) for row in rows)
        if last <= first:
            return
        self._last = last
        signatures = said[0]["signatures"][first - said[0]["first"][0] :][: last - first + 1]
        period = period_of(signatures)
        if not period:
            return
        arrivals = [[row[number] for number in range(first, last + 1)] for row in rows]
        steps = own_work(arrivals, period)
        now_s = clock.monotonic()
        seen_s, passed_s = sum(step.step_s for step in steps), now_s - self._heard_s
        self._heard_s = now_s
        # Of short steps a recorder keeps the last ones; those before were as slow.
        seen_of_all = min(1.0, seen_s / passed_s) if steps else 1.0
        self._steps += steps
        data = {
            rank: share
            for (node, ranks), one in zip(self._nodes.items(), said, strict=True)
            for rank, share in zip(ranks, one["data"], strict=True)
        }
        while len(self._steps) >= WINDOW:
            window, self._steps = window_of(self._steps[:WINDOW]), self._steps[WINDOW:]
            all_lost_s = tuple(seconds / seen_of_all for seconds in window.lost_s)
            lost_s = dict(self.judge.lost_s)
            for finding in self.judge.hear(window._replace(lost_s=all_lost_s), data):
                self._report(finding, lost_s)

    def _report(self, finding: Straggling | Cleared, lost_before_s: Mapping[int, float]) -> None:
        if not isinstance(finding, Straggling):
            lost_s = max((lost_before_s.get(rank, 0.0) for rank in finding.ranks), default=0.0)
            who = ranks_in_words(finding.ranks) if finding.ranks else "the steps"
            log.warning("%s: as quick as before, after %s were lost", who, duration(lost_s))
            self._record(StragglerGone(ranks=finding.ranks, lost_s=round(lost_s, 1)))
            return
        lost_s = max((self.judge.lost_s.get(rank, 0.0) for rank in finding.ranks), default=0.0)
        nodes = tuple(self.names[node] for node in finding.nodes)
        words = straggling_in_words(finding, nodes)
        log.warning("%s", words)
        self._record(
            StragglerFound(
                kind_of=finding.kind,
                ranks=finding.ranks,
                nodes=nodes,
                by=round(finding.by, 3),
                lost_s=round(lost_s, 1),
                growing=finding.is_growing,
                summary=words,
            )
        )


def _moments(said: Mapping[str, Any]) -> list[dict[int, float]]:
    """Of each rank of a node, by the number of a collective, when it came to it, in seconds."""
    rows = zip(said["first"], said["begun_us"], said["us"], strict=True)
    return [
        {
            number: us / 1e6
            for number, us in enumerate(itertools.accumulate(changes, initial=begun_us), first)
        }
        for first, begun_us, changes in rows
    ]
