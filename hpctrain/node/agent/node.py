"""The agent of one node, on torch's elastic agent: rounds of ranks, with parts that watch them.

A round is one start of the ranks and is one attempt of the run. Node 0's agent begins the attempt,
gathers what the nodes report, and publishes one verdict that all agents follow, since agents that
each decided for themselves would wait for each other in the next rendezvous for ever.

`NodeAgent` forks the ranks, calls the parts of the round, and ends the ranks. A part has one job
and is always there; one that has nothing to do is a plain `rounds.RoundPart`. Its moments:

    enter        the ranks have been forked
    tick         about ten times a second; the first part that returns a `RoundEnd` ends the round
    hear(news)   node 0's agent has published something
    verdict(end) it is known how the round ends; then the agent ends the ranks that are left
    leave        no rank is left

In their order, by modules of this room:

    node_reports     a sign of life from node 0, or the watch for it
    stop_notice      passes a stop on to the ranks
    control          the process of the ranks' agreement: does it live?
    sealing          files of the program that are registered (node 0)
    log_index        when the ranks wrote their logs
    hang_watch       ranks that stand still or are out of step, and (slow_watch) slow ones
    node_reports     which ranks have returned, the report that none is left, answers, the news
    coordinator      the verdict (node 0)

`coordinator.LeadSide` and `FollowerSide` are what differs between node 0 and the others.
tests/engines/test_node_agent.py holds the promises.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_ATTEMPT,
    HPCTRAIN_ATTEMPT_DIR,
    HPCTRAIN_RESUME,
    HPCTRAIN_RESUME_ARGS,
    HPCTRAIN_STARTS,
)
from hpctrain.core.base.records import FailureReport
from hpctrain.errors import CheckpointError, ClusterError, ControlLost
from hpctrain.ledger.run.fence import Attempt
from hpctrain.ledger.run.layout import torch_error_path
from hpctrain.node.agent.coordinator import POLL_S, FollowerSide, LeadSide, say_goodbye
from hpctrain.node.agent.copies_to_disk import CopySaver
from hpctrain.node.agent.hang_watch import NodeHangs
from hpctrain.node.agent.log_index import LogIndexer
from hpctrain.node.agent.node_reports import News, RankEnds, RankReport, RollCall
from hpctrain.node.agent.notify import notifying
from hpctrain.node.agent.rendezvous import LeftOut, RoundBroken, SignedStore
from hpctrain.node.agent.resume import StopHeard
from hpctrain.node.agent.rounds import (
    AgentRound,
    NodeRanks,
    NothingToResume,
    RoundEnd,
    RoundHooks,
    RoundPart,
)
from hpctrain.node.agent.signals import Orphans, kept
from hpctrain.node.agent.stop_notice import RankStop
from hpctrain.node.control.node_server import TreePlace
from hpctrain.node.memory.replica_peer import replica_peers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.control import NodeControl
    from hpctrain.node.agent.in_place import InPlaceRendezvous
    from hpctrain.node.agent.rendezvous import Rendezvous
    from hpctrain.node.hangs.standing import HangLimits

log = logging.getLogger("hpctrain.agent")

STORE_GONE = "the process that serves the agents' store has ended, or does not answer"
MANY = 1_000_000
RESUME_S = 6 * 3600.0
"""So long may node 0 take to prove what the ranks resume from."""


class NoRedirect(LogsSpecs):
    """Ranks redirect their own output (`agent/ranks.py`): one file for each rank and attempt."""

    def __init__(self, attempt_dir: Path) -> None:
        super().__init__(log_dir=str(attempt_dir))
        self._dir = attempt_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """No redirection; ranks leave torch's error files beside ours, and we read them."""
        empty = dict.fromkeys(envs, "")
        for env in envs.values():
            path = torch_error_path(self._dir, int(env["RANK"]))
            env["TORCHELASTIC_ERROR_FILE"] = str(path)
        return LogsDest(dict(empty), dict(empty), {}, {}, dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """The attempt's directory."""
        return str(self._dir)


class NodeAgent(LocalElasticAgent):
    """torch's elastic agent with one verdict for all nodes, and attempts that the run counts."""

    _signed: SignedStore | None = None
    _round: AgentRound

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        node: str,
        attempt_dir: Callable[[int], Path],
        hooks: RoundHooks | None,
        start_method: str,
        before_ranks: Callable[[int], None],
        secret: str,
        control: NodeControl,
        hang_limits: HangLimits,
        end_wait_s: float = 0.0,
    ) -> None:
        """Make the agent of this node; `run()` starts it.

        The rendezvous of `spec` must be ours; `hooks` are node 0's only. `before_ranks` gets an
        attempt's number on every node before its ranks start. It must not be collective: nodes come
        there at their own pace. If some ranks have returned, idle others are ended after
        `end_wait_s`; 0 for never.
        """
        super().__init__(spec, NoRedirect(attempt_dir(0)), start_method=start_method)
        self.attempt_number = 0
        self.end: RoundEnd | None = None
        self._node, self._attempt_dir = node, attempt_dir
        self._before_ranks = before_ranks
        self._secret = secret
        self._end_wait_s = end_wait_s
        self._control, self._hang_limits = control, hang_limits
        self._meeting_place = cast("Rendezvous", spec.rdzv_handler)
        self._side = (
            FollowerSide(self._meeting_place, end_wait_s)
            if hooks is None
            else LeadSide(hooks, self._meeting_place, hang_limits, end_wait_s)
        )
        self._stop = RankStop()
        self._remaining_restarts = MANY

    # ---- torch's hooks

    def _invoke_run(self, role: str = "default") -> RunResult:
        del role
        try:
            return self._run_rounds()
        finally:
            self._stop.remove()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        round_ = self._begin_round(worker_group)
        place = TreePlace(
            node=round_.place,
            nodes=round_.nodes,
            first_rank=round_.ranks.first,
            ranks=len(round_.ranks.workers),
            ranks_in_all=round_.ranks.in_all,
            name=self._node,
        )
        peers = replica_peers_of(self._meeting_place.switches())
        self._control.begin(place, round_.store, round_.key, peers)
        attempt = self._begin_attempt(round_)
        round_.directory.mkdir(parents=True, exist_ok=True)
        self._logs_specs = NoRedirect(round_.directory)
        self._before_ranks(self.attempt_number)
        os.environ[HPCTRAIN_ATTEMPT] = json.dumps(attempt)
        os.environ[HPCTRAIN_ATTEMPT_DIR] = str(round_.directory)
        self._set_resume(round_)
        self._stop.prepare(round_)
        self._control.join(round_.store, round_.key, self._meeting_place.timeout.total_seconds())
        with kept():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        round_.ranks.context = self._pcontext
        # Torch has ranks that returned wait for the others of their node. They end at once instead:
        # who has returned is seen, and one that never returns keeps no other one.
        getattr(self._pcontext, "_worker_finished_event").set()  # noqa: B009 - mypy: torch's own
        for process in round_.ranks.processes:
            # Ranks ignore SIGTERM on purpose, and torch would wait 30 s for it before it kills.
            process.terminate = process.kill
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Torch before 2.10 knows no time-out here; what is killed leaves without one.
        del death_sig, timeout
        super()._shutdown(signal.SIGKILL)

    def _record_worker_events(self, result: RunResult) -> None:
        """The run's ledger records what happened; torch's own event handlers are not used."""

    # ---- rounds

    def _run_rounds(self) -> RunResult:
        group = self._worker_group
        orphans = Orphans()
        while True:
            self.end = self._start_and_run(group)
            orphans.end(spare={*notifying(), *self._control.pids, *self._meeting_place.pids()})
            if self.end.restart:
                self._meeting_place.next_round()
                continue
            is_left = self.end.ending == "left"
            group.state = WorkerState.SUCCEEDED if is_left else WorkerState.FAILED
            if not self.end.left_out:
                say_goodbye(self._side, self._round)
            return RunResult(state=group.state)

    def _start_and_run(self, group: WorkerGroup) -> RoundEnd:
        try:
            self._initialize_workers(group)
            return self._run_round(group)
        except StopHeard as stop:
            return RoundEnd("killed", why=str(stop))
        except RuntimeError:
            if self._is_store_there():
                raise
            return self._after_store_loss(group)

    def _is_store_there(self) -> bool:
        try:
            return self._worker_group.store is None or bool(self._signed_store.count("there", 1))
        except RuntimeError:
            return False

    def _after_store_loss(self, group: WorkerGroup) -> RoundEnd:
        """The next round has a new store; node 0 alone decides whether there is one."""
        self._stop_workers(group)
        log.warning("%s", STORE_GONE)
        first = group.workers[0].global_rank
        end = self._side.after_store_loss(
            FailureReport(first, self._node, "signal", STORE_GONE, time=clock.now())
        )
        if not end.restart:
            self._announce_end(group)
        return end

    def _announce_end(self, group: WorkerGroup) -> None:
        """Node 0: meet the other agents in a new store, and tell them that no round follows.

        Without it they would wait for that store until the scheduler ends the job.
        """
        self._meeting_place.next_round()
        self._meeting_place.hasten()
        try:
            self._rendezvous(group)
            round_ = self._begin_round(group)
            round_.store.set(f"attempt/{round_.number}", {"refused": STORE_GONE})
            say_goodbye(self._side, round_)
        except (ClusterError, RuntimeError) as error:
            log.warning("the other agents do not hear that the job ends: %s", error)

    # ---- one round

    def _begin_round(self, group: WorkerGroup) -> AgentRound:
        """The agents have met: what the parts of the round share."""
        # A spare that joins has seen none of the rounds before.
        self._remaining_restarts = MANY - self._meeting_place.round
        port: Any = self._meeting_place.master_port  # torch types the group's as None
        group.master_port = port
        nodes = group.group_world_size
        self._round = AgentRound(
            number=self._meeting_place.round,
            node=self._node,
            place=int(group.group_rank or 0),
            nodes=1 if nodes is None else nodes,
            store=self._signed_store,
            ranks=NodeRanks(group.workers),
        )
        return self._round

    def _begin_attempt(self, round_: AgentRound) -> dict[str, Any]:
        self.attempt_number = self._side.begin_attempt(round_) or self.attempt_number
        limit_s = self._meeting_place.timeout.total_seconds()
        taken: dict[str, Any] = round_.store.wait(f"attempt/{round_.number}", limit_s)
        if "refused" in taken:
            log.warning("no other attempt begins in this job: %s", taken["refused"])
            say_goodbye(self._side, round_)
            raise NothingToResume(CheckpointError(taken["refused"]))
        self.attempt_number = int(taken["number"])
        round_.directory = self._attempt_dir(self.attempt_number)
        self._side.choose_resume(round_)
        return taken

    def _set_resume(self, round_: AgentRound) -> None:
        """Set what to resume from, on every node; raise NothingToResume or StopHeard.

        Node 0 may read terabytes first; if it dies, the store dies, and this raises.
        """
        said = round_.store.wait(f"resume/{round_.number}", RESUME_S)
        if said.get("refused"):
            say_goodbye(self._side, round_)
            raise NothingToResume(self._side.refused or CheckpointError(said["refused"]))
        if said.get("stopped"):
            raise StopHeard(said["stopped"])
        os.environ[HPCTRAIN_STARTS] = str(said["start"])
        os.environ[HPCTRAIN_RESUME_ARGS] = json.dumps(said["more"])
        if said["path"]:
            os.environ[HPCTRAIN_RESUME] = said["path"]
        else:
            os.environ.pop(HPCTRAIN_RESUME, None)

    def _run_round(self, group: WorkerGroup) -> RoundEnd:
        with ExitStack() as stack:
            parts = self._parts(self._round, self._parts_of_ranks(self._round))
            for part in parts:
                stack.enter_context(part)
            stack.callback(self._remove_error_files)
            stack.callback(self._stop_workers, group)
            return self._watch_round(parts)

    def _parts(self, round_: AgentRound, of_ranks: Sequence[RoundPart] = ()) -> list[RoundPart]:
        """Return the parts of a round; those `of_ranks` are left out where no rank has started."""
        parts = [
            self._side.presence(round_),
            self._stop,
            self._control,
            *of_ranks,
            RollCall(round_),
        ]
        each_s = self._side.news_each_s(round_.nodes)
        return [*parts, News(round_, parts, each_s=each_s), self._side.coordinator(round_)]

    def _parts_of_ranks(self, round_: AgentRound) -> list[RoundPart]:
        pids = [process.pid for process in round_.ranks.processes]
        ends = RankEnds(round_, self._end_wait_s) if self._end_wait_s else RoundPart()
        return [
            LogIndexer(round_.logs(), in_all=round_.ranks.in_all, pids=pids),
            self._side.sealing(),
            NodeHangs(self._hang_limits, self._control.folder, round_),
            ends,
            RankReport(round_, self._control, lambda: self._monitor_workers(self._worker_group)),
        ]

    def _watch_round(self, parts: Sequence[RoundPart]) -> RoundEnd:
        while True:
            self._round.ranks.wait(POLL_S)
            for part in parts:
                end = part.tick()
                if end is not None:
                    for each in parts:
                        each.verdict(end)
                    return end

    def _remove_error_files(self) -> None:
        """Of torch's multiprocessing, in the node's temporary folder; nobody else removes them."""
        for path in getattr(getattr(self._pcontext, "_pc", None), "error_files", []):
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - torch gives text

    @property
    def _signed_store(self) -> SignedStore:
        """The agents' store of this round; torch types it as None until the rendezvous."""
        store: Any = self._worker_group.store
        if self._signed is None or self._signed.of is not store:
            self._signed = SignedStore(store, self._secret, self._meeting_place.look)
        return self._signed


class InPlaceAgent(NodeAgent):
    """An agent whose rendezvous is an `in_place.InPlaceRendezvous`.

    Attributes:
        left_out: Why this node takes part in no round any more; None where it did to the end.
        run_of_copies: The run, where its nodes have copies of the state; else None.
        has_successor: Whether another node's agent may lead the job after node 0's.
    """

    left_out: LeftOut | None = None
    run_of_copies: RunDir | None = None
    has_successor = False
    _meeting_place: InPlaceRendezvous

    def _run_rounds(self) -> RunResult:
        result = super()._run_rounds()
        if self._meeting_place.node != 0 and self.left_out is None:
            # Until node 0 has recorded the end, the job needs somebody to replace it.
            self.left_out = self._meeting_place.lost_first()
        return result

    def _start_and_run(self, group: WorkerGroup) -> RoundEnd:
        try:
            return self._copies_saved(self._begin_and_run(group))
        except RoundBroken as broken:  # while it began, or its verdict came later than the next one
            return self._after_break(group, str(broken))
        except LeftOut as left_out:
            self._stop_workers(group)
            if self._meeting_place.node == 0 and not self._may_be_replaced():
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

    def _may_be_replaced(self) -> bool:
        """Node 0, whose liveness process has ended: whether the others continue without it."""
        if not self.has_successor or self._side.is_job_to_end():
            return False
        return self._meeting_place.can_do_without([0])

    def _announce_end(self, group: WorkerGroup) -> None:
        """The liveness channel does so, as this agent leaves."""

    def _after_break(self, group: WorkerGroup, why: str) -> RoundEnd:
        self._stop_workers(group)
        return RoundEnd("failed", restart=True, why=why)

    def _begin_and_run(self, group: WorkerGroup) -> RoundEnd:
        try:
            return super()._start_and_run(group)
        except ControlLost as error:
            if self._meeting_place.node == 0:
                raise
            return self._fail_to_start(group, error)

    def _copies_saved(self, end: RoundEnd) -> RoundEnd:
        """Copies go to disk where no round follows; ranks that raised may have bad ones."""
        is_loss = end.silent_nodes or (end.failure is not None and end.failure.kind == "signal")
        if self.run_of_copies is None or end.restart or not is_loss:
            return end
        if end.why == STORE_GONE:  # in which the agents would agree on what they save
            return end
        members, line = self._meeting_place.members, self._control.memory_line(self.attempt_number)
        saver = CopySaver(
            self.run_of_copies,
            Attempt(**json.loads(os.environ[HPCTRAIN_ATTEMPT])),
            place=self._round.place,
            living=[place for place, node in enumerate(members) if node not in end.silent_nodes],
            line=line,
            store=self._round.store,
            key=self._round.key,
            why_not=self._why_no_copies,
        )
        saved = saver.save()
        if line is not None:
            line.close()
        if saved is not None:
            self._side.record(saved)
        return end

    def _why_no_copies(self) -> str:
        """Why copies are not to be written any more, or ""; node 0's answer counts."""
        # The job's last seconds are for the requeue, and a write cannot be broken off.
        if self._side.is_job_to_end():
            return "the job is to end"
        return ", ".join(f"{loss.name} was lost" for loss in self._meeting_place.losses())

    def _fail_to_start(self, group: WorkerGroup, error: ControlLost) -> RoundEnd:
        """The node above is gone: say so, and hear how the round ends."""
        self._stop_workers(group)
        self._pcontext = None
        why = f"ControlLost: {error}"
        first = group.workers[0].global_rank
        failure = FailureReport(first, self._node, "error", why, time=clock.now())
        self._round.report([failure])
        self._round.ranks.context = None
        return self._watch_round(self._parts(self._round))

    def leave_out(self, bad: Mapping[str, str]) -> bool:
        """Node 0: end without nodes that guards have named; see `ExcludedNodes.leave_out`."""
        losses = self._meeting_place.leave_out(bad)
        self._side.note_losses(losses or [])
        return losses is not None
