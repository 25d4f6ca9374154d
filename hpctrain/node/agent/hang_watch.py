"""The agent's watch for hangs: reads its ranks' heartbeats, looks at all ranks at once, judges.

tests/engines/test_hang_watch.py holds the promises.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Self

from hpctrain.core.base import clock
from hpctrain.core.base.files import replace_text
from hpctrain.core.base.records import DESYNC, HANG, FailureReport
from hpctrain.core.base.text import duration
from hpctrain.errors import HpctrainError
from hpctrain.ledger.run.event_types import HangCleared, HangFound, HangSuspected, RanksOutOfStep
from hpctrain.ledger.run.layout import hang_path
from hpctrain.node.agent.node_reports import uses
from hpctrain.node.agent.rounds import RoundPart
from hpctrain.node.agent.slow_watch import JobStragglers, NodeMoments
from hpctrain.node.control import heartbeat
from hpctrain.node.control.board import BOARD, Board, read_counts
from hpctrain.node.hangs import stacks
from hpctrain.node.hangs.evidence import RankEvidence, evidence_of, plain_of, plain_stand, stand_of
from hpctrain.node.hangs.look import look
from hpctrain.node.hangs.outliers import CountsByTick, JobCounts
from hpctrain.node.hangs.standing import Standing, in_words
from hpctrain.node.hangs.verdict import JobLook, Suspicion, Used

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hpctrain.node.agent.rounds import AgentRound, RoundHooks
    from hpctrain.node.control.heartbeat import HeartbeatSeen
    from hpctrain.node.hangs.standing import HangLimits

log = logging.getLogger("hpctrain.agent")

LOOK_S = 0.25
"""So often heartbeats are read, which costs microseconds."""
ASKED_S = 1.0
"""So often node 0 looks whether a user wants to know where the ranks are."""
ANSWERS_S, ANSWER_EACH_S = 4.0, 0.005
"""So long node 0 waits for what all agents' looks have found, and for each node a little."""
COUNTS_S, COUNTS_EACH_S = 1.0, 0.05
"""So often nodes say how many collectives their ranks have called, and node 0 compares; with many
nodes as often as makes twenty words a second."""
LOOK_NOW = "hang_look"
"""News that all agents look at their ranks, with the number of the look."""


def _counts_s(nodes: int) -> float:
    return max(COUNTS_S, COUNTS_EACH_S * nodes)


class NodeHangs(RoundPart):
    """One node's side of a round: its heartbeats and looks.

    Attributes:
        moments: What is read for slow ranks; None where nobody minds.
    """

    def __init__(self, limits: HangLimits, folder: Path, round_: AgentRound) -> None:
        """Watch this round's ranks, whose board is in `folder`."""
        self._folder, self._round = folder, round_
        self._standing = Standing(limits, clock.monotonic) if limits.watches else None
        self._counts, self._counted_s = (CountsByTick() if limits.desync != "off" else None), 0.0
        self._looked_s = 0.0
        self._stands_over = False
        self.moments = NodeMoments(folder, round_) if limits.stragglers != "off" else None
        self._board: Board | None = None

    def __enter__(self) -> Self:
        try:
            self._board = Board.open(self._folder / BOARD)
        except (OSError, HpctrainError) as error:
            log.warning("the ranks' heartbeats cannot be read: %s", error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None

    def tick(self) -> None:
        """Tell node 0 where a rank has begun or ceased to stand for too long."""
        now_s = clock.monotonic()
        if self._board is None or now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        if self._counts is not None:
            self._look_at_counts(self._counts, self._board, now_s)
        if self.moments is not None:
            self.moments.look(self._board)
        if self._standing is None:
            return
        stands_over = any(stand.is_over for stand in self._standing.look(self._heartbeats()))
        if stands_over != self._stands_over:
            self._stands_over = stands_over
            self._round.store.count(self._round.key("hangs"), 1)

    def hear(self, news: Mapping[str, Any]) -> None:
        """Look at the ranks where all agents do."""
        if LOOK_NOW in news:
            self._look(news[LOOK_NOW])

    def _look_at_counts(self, counts: CountsByTick, board: Board, now_s: float) -> None:
        counts.look(read_counts(board))
        if now_s >= self._counted_s + _counts_s(self._round.nodes):
            self._counted_s = now_s
            self._round.say("counts", counts.plain())

    def _look(self, number: int) -> None:
        heartbeats = self._heartbeats()
        where = {seen.rank: seen for seen in heartbeats}
        ranks: list[tuple[int, RankEvidence]] = []
        for worker, process in self._round.ranks.pairs():
            rank, seen = worker.global_rank, where.get(worker.global_rank)
            evidence = RankEvidence(
                rank,
                self._round.node,
                "",
                # Without its heartbeat, where it is stays unknown.
                step=seen.step if seen is not None and seen.phase else None,
                phase=seen.phase if seen is not None else "",
                has_returned=self._round.ranks.has_returned(worker, process),
            )
            # The process that runs the program may be below the one that was started.
            ranks.append(((seen and seen.process) or process.pid, evidence))
        stands = self._standing.look(heartbeats) if self._standing is not None else []
        used = uses([pid for pid, one in ranks if not one.has_returned])
        said = {
            "number": number,
            "stands": [plain_stand(stand) for stand in stands],
            "evidence": [plain_of(one) for one in look(self._folder, ranks)],
            "used": {one.rank: used[pid] for pid, one in ranks if pid in used},
        }
        self._round.say(f"hangs/{number % 2}", said)  # over what it said of the one before the last

    def _heartbeats(self) -> list[HeartbeatSeen]:
        return heartbeat.read(self._board) if self._board is not None else []


class JobHangs:
    """Node 0's side of a round: what all nodes' looks come to.

    Attributes:
        slow: Who is slow; None where nobody minds.
    """

    def __init__(
        self, limits: HangLimits, round_: AgentRound, ranks_per_node: int, hooks: RoundHooks
    ) -> None:
        """Watch this round."""
        each = ranks_per_node
        self._limits, self._store, self._key = limits, round_.store, round_.key
        self._round, self._hooks = round_, hooks
        self._nodes = {one: range(one * each, (one + 1) * each) for one in range(round_.nodes)}
        self._suspicion = Suspicion()
        self._counts, self._compared_s = JobCounts(), 0.0
        watches_slow = limits.stragglers != "off"
        self.slow = JobStragglers(round_, self._nodes, hooks.record) if watches_slow else None
        self._said = 0
        self._looked_s = self._asked_s = 0.0
        self._number, self._asked_at_s = 0, 0.0
        self._heard: dict[int, dict[str, Any]] = {}
        self._is_due = False
        self._token = ""
        self._answered = ""

    def watch(self, done: set[int]) -> FailureReport | None:
        """Return the failure of a hung round, else None; poll it. `done`: nodes that have ended."""
        now_s = clock.monotonic()
        if now_s >= self._asked_s + ASKED_S:
            self._asked_s = now_s
            self._hear_user()
        if self._asked_at_s:
            return self._gather(now_s, done)
        if (failure := self._compare(now_s)) is not None:
            return failure
        is_said = self._limits.watches or self.slow is not None
        if is_said and now_s >= self._looked_s + LOOK_S:
            self._looked_s = now_s
            if self.slow is not None:
                self.slow.watch()
            said = self._store.count(self._key("hangs"))
            self._is_due |= said != self._said
            self._said = said
        if self._is_due or self._token or now_s >= self._suspicion.look_again_s:
            self._is_due = False
            self._number += 1
            self._asked_at_s, self._heard = now_s, {}
            self._round.publish({LOOK_NOW: self._number})
        return None

    def _compare(self, now_s: float) -> FailureReport | None:
        """Whether ranks are out of step, and the round ends by that."""
        limits, each_s = self._limits, _counts_s(len(self._nodes))
        if limits.desync == "off" or now_s < self._compared_s + each_s:
            return None
        self._compared_s = now_s
        said = [
            (len(ranks), self._store.get(self._key(f"counts/{node}")))
            for node, ranks in self._nodes.items()
        ]
        if any(counts is None for _, counts in said):
            return None
        odd = self._counts.hear(said)
        if odd is None:
            return None
        ends = limits.desync == "restart"
        log.warning("%s%s", odd.summary, "; the round ends" if ends else "")
        self._hooks.record(RanksOutOfStep(ranks=odd.ranks, summary=odd.summary, ended=ends))
        others = list(odd.ranks[1:])
        report = FailureReport(
            odd.ranks[0], "", DESYNC, odd.summary, time=clock.now(), others=others
        )
        return report if ends else None

    def _hear_user(self) -> None:
        if not self._token and (token := self._hooks.asked_stacks()) != self._answered:
            self._token = token

    def _gather(self, now_s: float, done: set[int]) -> FailureReport | None:
        for node in set(self._nodes) - set(self._heard) - done:
            said = self._store.get(self._key(f"hangs/{self._number % 2}/{node}"))
            if said is not None and said["number"] == self._number:
                self._heard[node] = said
        silent = set(self._nodes) - set(self._heard) - done
        wait_s = ANSWERS_S + ANSWER_EACH_S * len(self._nodes)
        if silent and now_s < self._asked_at_s + wait_s:
            return None
        self._asked_at_s = 0.0
        heard = self._heard.values()
        job_look = JobLook(
            now_s,
            [stand_of(stand) for said in heard for stand in said["stands"]],
            [evidence_of(plain) for said in heard for plain in said["evidence"]],
            {int(rank): Used(*used) for said in heard for rank, used in said["used"].items()},
            [rank for node in sorted(silent) for rank in self._nodes[node]],
        )
        if self._token:
            self._answer(job_look)
        return self._judge(job_look) if self._limits.watches else None

    def _answer(self, job_look: JobLook) -> None:
        """Tell the user who has asked."""
        self._answered, self._token = self._token, ""
        self._write(
            stacks.path_of(self._round.directory), self._described(job_look, self._answered)
        )

    def _judge(self, job_look: JobLook) -> FailureReport | None:
        stood_s = self._suspicion.stood_s
        finding = self._suspicion.hear(job_look)
        ruling, stands = self._suspicion.verdict, self._suspicion.stands
        if finding == "cleared":
            log.warning("the ranks go on, after they had stood for %s", duration(stood_s))
            self._hooks.record(HangCleared(seconds=round(stood_s, 1)))
        if ruling is None or finding not in {"suspected", "hang"}:
            return None
        ends = finding == "hang" and self._limits.ends_round
        words = f"{ruling.summary} (stood at {in_words(stands)})"
        fields: dict[str, Any] = {
            "kind_of": ruling.kind,
            "ranks": ruling.ranks,
            "summary": ruling.summary,
            "stood_s": round(self._suspicion.stood_s, 1),
            "limit_s": round(self._suspicion.limit_s, 1),
        }
        self._write(hang_path(self._round.directory), self._described(job_look, ""))
        if finding == "suspected":
            log.warning("the ranks may hang: %s", words)
            self._hooks.record(HangSuspected(**fields))
            return None
        log.warning("the ranks hang%s: %s", "; the round ends" if ends else "", words)
        self._hooks.record(HangFound(**fields, ended=ends))
        return self._failure(job_look, words) if ends else None

    def _failure(self, job_look: JobLook, words: str) -> FailureReport:
        ruling = self._suspicion.verdict
        named = ruling.ranks if ruling is not None else ()
        ranks = named or tuple(stand.rank for stand in self._suspicion.stands)
        nodes = {one.rank: one.node for one in job_look.evidence}
        text = "\n".join(ruling.details) if ruling is not None else ""
        return FailureReport(
            ranks[0],
            nodes.get(ranks[0], ""),
            HANG,
            words,
            text,
            time=clock.now(),
            others=list(ranks[1:]),
        )

    def _described(self, job_look: JobLook, token: str) -> dict[str, Any]:
        return stacks.document_of(
            job_look, token=token, t=clock.now(), hang=self._suspicion.verdict
        )

    def _write(self, path: Path, document: dict[str, Any]) -> None:
        try:
            replace_text(path, json.dumps(document))
        except OSError as error:  # a full disk costs the file, never the verdict
            log.warning("cannot write what the ranks do: %s", error)
