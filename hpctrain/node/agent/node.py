"""The agent of one node, on torch's elastic agent: starts ranks, ends a round as all nodes agree.

A round is one start of the ranks and is one attempt of the run. The agent of node 0 coordinates:
it takes the attempt's number, gathers what the nodes report, and publishes one verdict that all
agents follow, since agents that each decided for themselves would wait for each other in the next
rendezvous for ever. tests/engines/test_node_agent.py holds the promises.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.connection
import os
import signal
from contextlib import nullcontext, suppress
from dataclasses import asdict
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
    HPCTRAIN_STOP_FILE,
)
from hpctrain.core.base.records import FailureReport, StopCause
from hpctrain.core.base.text import duration
from hpctrain.errors import CheckpointError, ClusterError, Fenced
from hpctrain.ledger.run.layout import failure_path, rank_log_path, torch_error_path
from hpctrain.node.agent.hang_watch import (
    LOOK_NOW,
    JobHangHooks,
    JobHangs,
    NodeHangs,
    NodeRank,
    RoundHangs,
)
from hpctrain.node.agent.lingering_ranks import FirstAgent, LifeWatch, NodeEnds
from hpctrain.node.agent.log_index import LogIndexer
from hpctrain.node.agent.node_reports import (
    AWAIT_ENDS,
    AWAKE,
    LOOK_ANYWAY_S,
    LOOK_EACH_S,
    ROLL_CALL,
    ROLL_CALL_S,
    NodeReports,
)
from hpctrain.node.agent.notify import telling
from hpctrain.node.agent.ranks import collect, first_causal, settle_s
from hpctrain.node.agent.rendezvous import SignedStore
from hpctrain.node.agent.resume_choice import StopHeard, choose
from hpctrain.node.agent.rounds import NothingToResume, RoundEnd, RoundHooks
from hpctrain.node.agent.signals import Orphans, arrivals, kept
from hpctrain.node.agent.stop_notice import StopFile, listens, send_term
from hpctrain.node.control.node_server import TreePlace
from hpctrain.node.memory.pairing import buddies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.node.agent.control import NodeControl
    from hpctrain.node.agent.lingering_ranks import Life
    from hpctrain.node.agent.rendezvous import Rendezvous
    from hpctrain.node.agent.sealing import SealWatch
    from hpctrain.node.agent.stop_notice import StopNotice
    from hpctrain.node.hangs.standing import HangLimits

log = logging.getLogger("hpctrain.agent")

POLL_S = 0.1
STORE_GONE = "the process that serves the agents' store has ended, or does not answer"
STOP = "stop"
"""News that the ranks should leave, with the cause."""
LEAST_FIRST_S = 30.0
"""How long node 0's agent may say nothing at least, however short `run.end_wait_s` is."""
LONGEST_LOOK_S = 2.0
"""Between two looks of another node's agent for news: a roll call waits longer."""
GOODBYE_S = 5.0
"""How long node 0's agent, with which the store ends, stays at most for others' last look at it."""
MANY = 1_000_000
RESUME_S = 6 * 3600.0
"""So long may node 0 take to prove what the ranks go on from."""


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

    _life: LifeWatch | None = None
    _hangs: RoundHangs | None = None
    _ends_said: NodeEnds | None = None
    _signed: SignedStore | None = None
    _refused: CheckpointError | None = None

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
        end_wait_s: float = 0.0,
        control: NodeControl | None = None,
        hang_limits: HangLimits | None = None,
    ) -> None:
        """Make the agent of this node; `run()` starts it.

        The rendezvous of `spec` must be ours; `hooks` are node 0's only. `before_ranks` gets an
        attempt's number on every node before its ranks start. It must not be collective: nodes come
        there at their own pace. If some ranks have returned, idle others are ended after
        `end_wait_s`; 0 for never. `control` is None if ranks have nothing from their agents,
        `hang_limits` None for no looks.
        """
        super().__init__(spec, NoRedirect(attempt_dir(0)), start_method=start_method)
        self.attempt_number = 0
        self.end: RoundEnd | None = None
        self._node, self._attempt_dir = node, attempt_dir
        self._hooks = hooks
        self._before_ranks = before_ranks
        self._secret = secret
        self._end_wait_s = end_wait_s
        self._control, self._hang_limits = control, hang_limits
        self._sealing: AbstractContextManager[SealWatch | None] = nullcontext()
        self._stop_file = StopFile()
        self._stop_told = False
        self._to_signal: set[int] = set()
        self._round = 0
        self._news = self._published = 0
        self._news_looked_at = float("-inf")
        self._meeting_place = cast("Rendezvous", spec.rdzv_handler)
        self._remaining_restarts = MANY

    # ---- torch's hooks

    def _invoke_run(self, role: str = "default") -> RunResult:
        del role
        try:
            return self._run_rounds()
        finally:
            self._stop_file.remove()

    def _run_rounds(self) -> RunResult:
        group = self._worker_group
        orphans = Orphans()
        while True:
            self.end = self._start_and_run(group)
            orphans.end(spare={*telling(), *self._own_pids()})
            if self.end.restart:
                self._next_round()
                continue
            is_left = self.end.ending == "left"
            group.state = WorkerState.SUCCEEDED if is_left else WorkerState.FAILED
            if not self.end.left_out:
                self._say_goodbye()
            return RunResult(state=group.state)

    def _own_pids(self) -> list[int]:
        own = [] if self._control is None else self._control.pids
        return [*own, *self._meeting_place.pids()]

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
            return self._worker_group.store is None or bool(self._news_store.count("there", 1))
        except RuntimeError:
            return False

    def _after_store_loss(self, group: WorkerGroup) -> RoundEnd:
        """The next round has a new store; node 0 alone decides whether there is one.

        The others see no more than that nothing answers, and go where a new store would be.
        """
        self._stop_workers(group)
        log.warning("%s", STORE_GONE)
        failure, restart = None, True
        if self._hooks is not None:
            first = group.workers[0].global_rank
            failure = FailureReport(first, self._node, "signal", STORE_GONE, time=clock.now())
            restart = self._hooks.deadline.cause is None and self._hooks.may_restart(failure)
            if not restart:
                self._announce_end(group)
        return RoundEnd("failed", restart=restart, why=STORE_GONE, failure=failure)

    def _announce_end(self, group: WorkerGroup) -> None:
        """Node 0: meet the other agents in a new store, and tell them that no round follows.

        Without it they would wait for that store until the scheduler ends the job.
        """
        self._next_round()
        self._meeting_place.hasten()
        try:
            self._rendezvous(group)
            self._news_store.set(f"attempt/{self._round}", {"refused": STORE_GONE})
            self._say_goodbye()
        except (ClusterError, RuntimeError) as error:
            log.warning("the other agents do not hear that the job ends: %s", error)

    def _run_round(self, group: WorkerGroup) -> RoundEnd:
        ranks, pids = group.workers[0].world_size, [one.pid for one in self._processes()]
        with LogIndexer(self._logs(), in_all=ranks, pids=pids), self._sealing as seal:
            try:
                end = self._watch_round()
            finally:
                self._stop_watching()
                self._stop_workers(group)
                self._remove_error_files()
            if seal is not None:
                seal.returned = end.ending == "left"
        return end

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._control is not None:
            place, switches = self._tree_place(worker_group), self._meeting_place.switches()
            self._control.begin(place, self._news_store, self._key, buddies_of(switches))
        attempt = self._begin_attempt(worker_group)
        self.attempt_number = int(attempt["number"])
        directory = self._attempt_dir(self.attempt_number)
        directory.mkdir(parents=True, exist_ok=True)
        self._logs_specs = NoRedirect(directory)
        self._before_ranks(self.attempt_number)
        os.environ[HPCTRAIN_ATTEMPT] = json.dumps(attempt)
        os.environ[HPCTRAIN_ATTEMPT_DIR] = str(directory)
        self._set_resume()
        self._prepare_stop()
        if self._control is not None:
            timeout_s = self._meeting_place.timeout.total_seconds()
            self._control.join(self._news_store, self._key, timeout_s)
        with kept():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        # Torch has ranks that returned wait for the others of their node. They end at once instead:
        # who has returned is seen, and one that never returns keeps no other one.
        getattr(self._pcontext, "_worker_finished_event").set()  # noqa: B009 - mypy: torch's own
        if self._stop_file.cause is not None:  # of a SIGTERM that came before there were ranks
            self._to_signal = {process.pid for process in self._processes()}
        for process in self._processes():
            # Ranks ignore SIGTERM on purpose, and torch would wait 30 s for it before it kills.
            process.terminate = process.kill
        return pids

    def _tree_place(self, group: WorkerGroup) -> TreePlace:
        first = group.workers[0]
        return TreePlace(
            node=int(group.group_rank or 0),
            nodes=self._node_count,
            first_rank=int(first.global_rank),
            ranks=len(group.workers),
            ranks_in_all=int(first.world_size),
            name=self._node,
        )

    def _remove_error_files(self) -> None:
        """Of torch's multiprocessing, in the node's temporary folder; nobody else removes them."""
        for path in getattr(getattr(self._pcontext, "_pc", None), "error_files", []):
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - torch gives text

    def _logs(self) -> list[Path]:
        """The logs of this node's ranks."""
        directory, workers = self._attempt_dir(self.attempt_number), self._worker_group.workers
        return [rank_log_path(directory, one.global_rank) for one in workers]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Torch before 2.10 knows no time-out here; what is killed leaves without one.
        del death_sig, timeout
        super()._shutdown(signal.SIGKILL)

    def _record_worker_events(self, result: RunResult) -> None:
        """The run's ledger records what happened; torch's own event handlers are not used."""

    # ---- one round

    def _next_round(self) -> None:
        self._round += 1
        self._life = self._ends_said = None
        self._news = self._published = 0
        self._remaining_restarts -= 1
        self._meeting_place.next_round()
        self._worker_group.spec.master_port = self._meeting_place.master_port

    def _begin_attempt(self, group: WorkerGroup) -> dict[str, Any]:
        key = f"attempt/{self._round}"
        if self._hooks is not None:
            try:
                attempt = self._hooks.begin(group.workers[0].world_size)
            except OSError as error:  # a full disk; the others would wait for the store that ends
                self._news_store.set(key, {"refused": str(error)})
                self._say_goodbye()
                raise
            self.attempt_number = attempt.number  # also of a round that never has ranks
            self._news_store.set(key, asdict(attempt))
            if self._hooks.sealing is not None:
                self._sealing = self._hooks.sealing(attempt)
            self._news_store.set(f"resume/{self._round}", self._chosen(self._hooks, attempt))
        limit_s = self._meeting_place.timeout.total_seconds()
        taken: dict[str, Any] = self._news_store.wait(key, limit_s)
        if "refused" in taken:
            log.warning("no other attempt begins in this job: %s", taken["refused"])
            self._say_goodbye()
            raise NothingToResume(CheckpointError(taken["refused"]))
        return taken

    def _chosen(self, hooks: RoundHooks, attempt: Attempt) -> dict[str, Any]:
        try:
            path = choose(
                lambda on_bytes: hooks.resume(attempt, on_bytes), lambda: self._why_leave(hooks)
            )
            start = hooks.starts()
            return {"path": path, "start": start, "more": asdict(hooks.more_args(start, path))}
        except Fenced:
            raise
        except CheckpointError as error:
            self._refused = error
            return {"refused": str(error)}
        except StopHeard as stop:
            return {"stopped": str(stop)}

    def _set_resume(self) -> None:
        """Set what to resume from, on every node; raise NothingToResume or StopHeard.

        Node 0 may read terabytes first; if it dies, the store dies, and this raises.
        """
        said = self._news_store.wait(f"resume/{self._round}", RESUME_S)
        if said.get("refused"):
            self._say_goodbye()
            raise NothingToResume(self._refused or CheckpointError(said["refused"]))
        if said.get("stopped"):
            raise StopHeard(said["stopped"])
        os.environ[HPCTRAIN_STARTS] = str(said["start"])
        os.environ[HPCTRAIN_RESUME_ARGS] = json.dumps(said["more"])
        if said["path"]:
            os.environ[HPCTRAIN_RESUME] = said["path"]
        else:
            os.environ.pop(HPCTRAIN_RESUME, None)

    def _watch_round(self, *, reported: bool = False) -> RoundEnd:
        reports = self._node_reports()
        said_at, first = clock.monotonic(), FirstAgent(self._first_wait_s)
        self._hangs = self._round_hangs()
        while True:
            if clock.monotonic() > said_at + LOOK_ANYWAY_S:
                self._say_again()
                said_at = clock.monotonic()
                if self._has_lost_first(first) and reported:
                    return self._without_first()
            multiprocessing.connection.wait(  # those of ended ranks are always ready
                [one.sentinel for one in self._processes() if one.exitcode is None], timeout=POLL_S
            )
            self._hear_term()
            self._send_term()
            if self._control is not None:
                self._control.failure()  # said at once, also where no rank minds
            if self._hangs is not None:
                self._hangs.look_at_pulses()
            if not reported:
                reported = self._report_if_over()
                self._tell_ends()
            self._look()
            verdict = self._read_news()
            if verdict is None and self._hooks is not None:
                verdict = self._coordinate(self._hooks, reports)
                if verdict is not None:
                    self._publish(asdict(verdict))
            if verdict is not None:
                return verdict

    def _has_lost_first(self, first: FirstAgent) -> bool:
        """Whether node 0's agent, which shows here that it runs, has not done so for too long."""
        if self._hooks is not None:
            self._news_store.set(self._key("first"), clock.monotonic())
            return False
        return first.is_silent(self._news_store.get(self._key("first")))

    @property
    def _first_wait_s(self) -> float:
        return max(self._end_wait_s, LEAST_FIRST_S) if self._end_wait_s else 0.0

    def _without_first(self) -> RoundEnd:
        """Nobody says how the round ends: leave, and have the scheduler see to the job."""
        name, for_s = self._meeting_place.names()[0], duration(self._first_wait_s)
        why = f"all ranks of this node ended, and the agent of {name} said nothing for {for_s}"
        log.warning("%s", why)
        return RoundEnd("hung", why=why, left_out=why)

    def _round_hangs(self) -> RoundHangs | None:
        """What watches this round for hangs; None where its ranks have no board."""
        if self._control is None:
            return None
        place = int(self._worker_group.group_rank or 0), self._node
        folder, store, limits = self._control.folder, self._news_store, self._hang_limits
        node = NodeHangs(limits, folder, place, store, self._key, nodes=self._node_count)
        if self._hooks is None:
            return RoundHangs(node, None)
        each = self._worker_group.spec.local_world_size
        nodes = {one: range(one * each, (one + 1) * each) for one in range(self._node_count)}
        hooks = JobHangHooks(
            self._publish,
            self._hooks.record,
            self._attempt_dir(self.attempt_number),
            self._hooks.asked_stacks,
        )
        return RoundHangs(node, JobHangs(limits, store, self._key, nodes, hooks))

    def _stop_watching(self) -> None:
        if self._hangs is not None:
            self._hangs.close()
            self._hangs = None

    def _node_ranks(self) -> list[NodeRank]:
        pairs = zip(self._worker_group.workers, self._processes(), strict=True)
        return [
            NodeRank(worker.global_rank, process.pid, self._has_returned(worker, process))
            for worker, process in pairs
        ]

    def _prepare_stop(self) -> None:
        """No stop is told of so far; but one whose SIGTERM has come already is."""
        self._stop_file.renew()
        self._stop_told = False
        self._to_signal = set()
        os.environ[HPCTRAIN_STOP_FILE] = str(self._stop_file.path)
        self._hear_term()

    def _hear_term(self) -> None:
        """The scheduler's SIGTERM: it has reached the ranks too."""
        if any(arrival.signum == signal.SIGTERM for arrival in arrivals()):
            self._stop_file.tell(StopCause.TERM)

    def _look_for_stop(self, notice: StopNotice) -> None:
        """Node 0: tell all agents, once, that their ranks should leave."""
        if not self._stop_told and (cause := notice.look(self._rank_0_listens)) is not None:
            self._stop_told = True
            self._publish({STOP: cause})

    @staticmethod
    def _why_leave(hooks: RoundHooks) -> str:
        """Why ranks should not be started any more; "" while nothing says so."""
        is_late, cause = hooks.deadline.look().kill, hooks.deadline.cause
        if hooks.notice is not None:
            cause = hooks.notice.look(lambda: False)
        if cause is None and not is_late:
            return ""
        named = f" ({cause})" if cause is not None else ""
        return f"the job is to end{named}, and no rank had started"

    def _send_term(self) -> None:
        """To ranks that catch it by now; the number of one that has ended may be another's."""
        if self._to_signal:
            self._to_signal &= {rank.pid for rank in self._processes() if rank.exitcode is None}
            send_term(self._to_signal)

    def _rank_0_listens(self) -> bool:
        return any(listens(process.pid) for process in self._processes()[:1])

    def _tell_of_stop(self, cause: StopCause) -> None:
        if self._stop_file.cause is None and cause is not StopCause.TERM:
            self._to_signal = {process.pid for process in self._processes()}
        self._stop_file.tell(cause)

    def _say_again(self) -> None:
        """Say again what was written over, and have node 0 look at once.

        It looks by itself as seldom as this is called. Somebody who writes over a report in between
        would be seen by each of its looks, and the run held until its time limit.
        """
        if self._news_store.say_again():
            self._news_store.count(self._key("reports"), 1)

    def _report_if_over(self) -> bool:
        # Torch waits without a limit for the processes of ranks that have returned, and for the
        # value of one that has ended itself with 0: it is asked about failures only.
        codes = [process.exitcode for process in self._processes()]
        if not any(codes) and None in codes:
            return False
        failures = []
        if any(codes):
            failures = self._failures(self._monitor_workers(self._worker_group), codes)
            if self._control is not None and (failure := self._control.failure()) is not None:
                failures.append(failure)
        self._say_report(failures)
        return True

    def _say_report(self, failures: list[FailureReport]) -> None:
        plain = [asdict(failure) for failure in failures]
        self._news_store.set(self._key(f"report/{self._worker_group.group_rank}"), plain)
        self._news_store.count(self._key("reports"), 1)

    def _tell_ends(self) -> None:
        """Tell node 0 which ranks have returned, and whether the others live."""
        if not self._end_wait_s:
            return
        ends = self._ends()
        if ends is None or ends == self._ends_said or not (ends.returned or self._life):
            return
        self._ends_said = ends
        self._news_store.set(self._key(f"ends/{self._worker_group.group_rank}"), asdict(ends))
        self._news_store.count(self._key("ends"), 1)

    def _ends(self) -> NodeEnds | None:
        """Which ranks of this node have returned, and how the others do; None where all ended."""
        returned: list[int] = []
        left: list[int] = []
        logs, pids = [], []
        for worker, process in zip(self._worker_group.workers, self._processes(), strict=True):
            if process.exitcode is None:
                pids.append(process.pid)
                log = rank_log_path(self._attempt_dir(self.attempt_number), worker.global_rank)
                logs.append(log)
            has_returned = self._has_returned(worker, process)
            (returned if has_returned else left).append(worker.global_rank)
        if not pids:
            return None
        life: Life = "alive" if self._life is None else self._life.look(pids, logs)
        return NodeEnds(self._node, tuple(returned), tuple(left), life)

    def _has_returned(self, worker: Any, process: Any) -> bool:
        """Its program may have come to its end before its process has: a thread goes on."""
        value = getattr(self._pcontext, "_ret_vals", {}).get(worker.local_rank)
        came_back = process.exitcode is None and value is not None and not value.empty()
        return came_back or process.exitcode == 0

    def _failures(self, result: RunResult, ended: Sequence[int | None]) -> list[FailureReport]:
        """Return what failed: torch names one rank of those that ended, and has ended the others.

        `ended` has the exit code that each rank had before.
        """
        directory = self._attempt_dir(self.attempt_number)
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        for worker, code in zip(self._worker_group.workers, ended, strict=True):
            if code or failure_path(directory, worker.global_rank).exists():
                codes.setdefault(worker.global_rank, code or 1)
        return collect(directory, codes, self._node)

    def _node_reports(self) -> NodeReports:
        return NodeReports(
            self._news_store,
            self._key,
            nodes=self._node_count,
            ranks_per_node=self._worker_group.spec.local_world_size,
            end_wait_s=self._end_wait_s,
            publish=self._publish,
            place=self._meeting_place,
        )

    def _coordinate(self, hooks: RoundHooks, reports: NodeReports) -> RoundEnd | None:
        """Node 0: is the round over, and how? None while it goes on."""
        reports.gather()
        verdict = hooks.deadline.look()  # before a failure is judged: a signal may be its cause
        if hooks.notice is not None:
            self._look_for_stop(hooks.notice)
        if len(reports.nodes) == self._node_count and not reports.failures:
            return RoundEnd("left")
        self._watch_hangs(hooks, reports)
        if reports.first_failure_at is not None:
            end = self._after_failure(hooks, reports, reports.first_failure_at)
            if end is not None:
                return end
        elif self._end_wait_s and hooks.deadline.cause is None:
            end = reports.judge_silence(hooks)
            if end is not None:
                return end
        return RoundEnd("killed", why=verdict.why) if verdict.kill else None

    def _watch_hangs(self, hooks: RoundHooks, reports: NodeReports) -> None:
        """Ranks that hang have failed. A stop that was asked for has a clock of its own."""
        if self._hangs is None or reports.failures or hooks.deadline.cause is not None:
            return
        failure = self._hangs.failure(reports.nodes)
        if failure is not None:
            reports.failures.append(failure)
            reports.fail_now()

    def _after_failure(
        self, hooks: RoundHooks, reports: NodeReports, first_failure_at: float
    ) -> RoundEnd | None:
        """A rank has failed: wait for the other nodes' word, then restart or end; None meanwhile.

        A node of which nothing is heard is dead, and ranks that were started again would wait for
        it in the rendezvous.
        """
        waited = clock.monotonic() - first_failure_at
        if len(reports.nodes) < self._node_count and waited < settle_s(reports.failures):
            return None
        silent = reports.without_sign()
        if silent and waited < ROLL_CALL_S:
            return None
        failure = first_causal(reports.failures)
        why = failure.summary if failure else "a rank failed"
        if silent:
            return self._after_no_sign(hooks, silent, why, failure)
        restart = hooks.deadline.cause is None and hooks.may_restart(failure)
        return RoundEnd("failed", restart=restart, why=why, failure=failure)

    def _after_no_sign(
        self, hooks: RoundHooks, silent: list[int], why: str, failure: FailureReport | None
    ) -> RoundEnd:
        """A rank has failed, and these nodes are dead, by their places in the round."""
        del hooks
        return RoundEnd("failed", why=why, failure=failure, silent_nodes=silent)

    def _publish(self, news: dict[str, Any]) -> None:
        """Node 0: tell all agents; they read the news in order, one look each time round."""
        self._news_store.set(self._key(f"news/{self._published}"), news)
        self._published += 1

    def _read_news(self) -> RoundEnd | None:
        """The verdict, if it has come; a roll call is answered, a stop is told to the ranks."""
        now, each_s = clock.monotonic(), min(self._node_count * LOOK_EACH_S, LONGEST_LOOK_S)
        if self._hooks is None and each_s > POLL_S and now < self._news_looked_at + each_s:
            return None  # all ask one store; node 0's agent hears itself at once
        raw = self._news_store.get(self._key(f"news/{self._news}"))
        if raw is None:
            self._news_looked_at = now
            return None
        self._news += 1
        if self._heed(raw):
            return None
        raw["failure"] = FailureReport(**raw["failure"]) if raw["failure"] else None
        return RoundEnd(**raw)

    def _heed(self, raw: dict[str, Any]) -> bool:
        """Do what news ask for; False where they are the verdict."""
        if raw == ROLL_CALL:
            self._news_store.set(self._key(f"present/{self._worker_group.group_rank}"), "here")
        elif AWAKE in raw:
            self._news_store.set(self._key(f"awake/{self._worker_group.group_rank}"), raw[AWAKE])
        elif raw == AWAIT_ENDS:
            self._life = LifeWatch(self._end_wait_s)
        elif LOOK_NOW in raw and self._hangs is not None:
            self._hangs.hear(raw[LOOK_NOW], self._node_ranks())
        elif STOP in raw:
            self._tell_of_stop(StopCause(raw[STOP]))
        return "ending" not in raw

    def _say_goodbye(self) -> None:
        """Node 0 goes last, and sees to it meanwhile that its verdict stands where others look."""
        with suppress(RuntimeError):  # the store has ended: nobody hears it
            self._last_words()

    def _last_words(self) -> None:
        self._news_store.set(self._key(f"goodbye/{self._worker_group.group_rank}"), "gone")
        if self._hooks is None:
            return
        deadline = clock.monotonic() + GOODBYE_S
        here = set(range(self._node_count))
        while here and clock.monotonic() < deadline:
            self._news_store.say_again()
            while here and self._news_store.get(self._key(f"goodbye/{min(here)}")) is not None:
                here.remove(min(here))
            if here:
                clock.sleep(POLL_S / 2)

    @property
    def _news_store(self) -> SignedStore:
        """The agents' store of this round; torch types it as None until the rendezvous."""
        store: Any = self._worker_group.store
        if self._signed is None or self._signed.of is not store:
            self._signed = SignedStore(store, self._secret, self._look)
        return self._signed

    def _look(self) -> None:
        """Whether this node still takes part; raises where it does not."""
        self._meeting_place.look()

    @property
    def _node_count(self) -> int:
        count = self._worker_group.group_world_size
        return 1 if count is None else count

    def _key(self, name: str) -> str:
        return f"round/{self._round}/{name}"

    def _processes(self) -> list[Any]:
        """The ranks' process objects, whose sentinels are awaited; torch keeps them to itself."""
        context = getattr(self._pcontext, "_pc", None)
        return [] if context is None else list(context.processes)
