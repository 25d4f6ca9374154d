"""The controller of one local job, in SLURM's place: starts nodes, signals, ends, starts again.

It keeps to what SLURM was seen to do with jobs, their signals, limits and requeues, so that the
agents meet the same order of events here as there: tests/unit/entry/test_local_contract.py compares
them. `local_nodes` starts the nodes. Run as ``python -m hpctrain.entry.local_controller JOB_ID``.
tests/unit/entry/test_local_controller.py holds the other promises.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.scheduler import local as client
from hpctrain.cluster.scheduler.local import LocalControl
from hpctrain.core.base import clock
from hpctrain.core.base.locks import remove_left_over
from hpctrain.core.base.log import configure
from hpctrain.core.base.process import free_port, own_program
from hpctrain.core.base.records import NODE_DOWN, JobContext, JobState
from hpctrain.entry.evaluations import at_the_end_of
from hpctrain.entry.local_nodes import NodeStarter
from hpctrain.errors import HpctrainError
from hpctrain.ledger.plan.decide import EXIT_STOPPED
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import job_spec
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts, held_back

if TYPE_CHECKING:
    from hpctrain.entry.local_nodes import Node

log = logging.getLogger("hpctrain.entry")

TICK_S = 0.05
LOOK_S = 0.5
"""Between two looks at the jobs that are waited for."""
_WHILE_PENDING = frozenset({"cancel", "follow", "free"})
KILL_WAIT_S = 15.0


class Controller:
    """One local job."""

    def __init__(self, job_id: str) -> None:
        record = client.read(job_id)
        if record is None:
            raise SystemExit(f"there is no local job {job_id}")
        self.record = record
        self.run = RunDir(Path(record.run_dir))
        self._starter = NodeStarter(self.run)
        self._nodes: list[Node] = []
        self._requeue = self._cancelled = False
        self._dead: set[int] = set()
        self._kill_at: float | None = None
        self._warned = False
        self._available = record.max_nodes
        self._own_restarts = 0

    def serve(self) -> int:
        """Start the job again and again until nobody asks for more. Returns the last exit code."""
        self.record.controller_pid = os.getpid()
        self.record.controller_started = client.process_start(os.getpid())
        self._write()
        if not self._may_begin():
            return self._over(JobState.CANCELLED, 0)
        if held_back(self.run, job_spec(self.run).after, self.record.job_id):
            return self._over(JobState.FAILED, EXIT_STOPPED)
        while True:
            self._start()
            watcher = self._watch()
            code = self._supervise()
            if watcher is not None:
                watcher.send_signal(signal.SIGINT)
            self._let_go()
            self._take_requests()
            if not self._cancelled:
                code = self._conclude(code)
                self._take_requests()
            if self._cancelled:
                return self._over(JobState.CANCELLED, code)
            if not self._requeue:
                return self._over(self._final_state(code), code)

    def _final_state(self, code: int) -> JobState:
        """The state of a job that is not run again, after its batch side ended with this code."""
        if self.record.reason == "TimeLimit":
            return JobState.TIMED_OUT
        return JobState.COMPLETED if code == 0 else JobState.FAILED

    def _watch(self) -> subprocess.Popen[bytes] | None:
        """Start what looks after the run's evaluations, where there are any; see body.sh."""
        if "evaluate" not in job_spec(self.run).beside:
            return None
        command = own_program("hpctrain.entry.evaluations", str(self.run.root), "watch")
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def give_up(self, code: int) -> int:
        """The job cannot continue; returns its exit code."""
        self._signal(signal.SIGKILL)
        return self._over(JobState.FAILED, code)

    def _may_begin(self) -> bool:
        """Wait for other jobs as SLURM does; False where this one is cancelled meanwhile."""
        while True:
            self._take_requests(_WHILE_PENDING)
            if self.record.state != JobState.PENDING:
                return False
            states = {_state_of(job_id) for job_id in self.record.after}
            if states <= {JobState.COMPLETED}:
                return True
            never = states & (client.OVER - {JobState.COMPLETED})
            reason = "DependencyNeverSatisfied" if never else "Dependency"
            if reason != self.record.reason:
                self.record.reason = reason
                self._write()
            clock.sleep(LOOK_S)

    def _let_go(self) -> None:
        """The nodes are free: what follows is the scheduler's own time."""
        index, start, _, nodes = self.record.starts[-1]
        self.record.starts[-1] = index, start, self.record.previous_stop, nodes
        remove_left_over()

    def _conclude(self, code: int) -> int:
        """What the batch script does under SLURM; returns the job's exit code."""
        start = JobStartFacts(
            job_id=self.record.job_id,
            restarts=self._own_restarts,
            token=self.record.token,
            nodes=list(self.record.nodes),
            rc=code,
            term=self.record.state == JobState.COMPLETING,
        )
        code = BatchScriptSide(self.run, start, LocalControl(self.record.job_id)).finish()
        at_the_end_of(self.run, os.environ)
        return code

    def _start(self) -> None:
        record = self.record
        count = max(record.min_nodes, min(record.max_nodes, self._available))
        record.nodes = [f"local{i}" for i in range(count)]
        record.state, record.reason = JobState.RUNNING, None
        record.start_time = clock.now()
        record.end_time = record.start_time + record.time_s
        record.preempt_time = None
        self._own_restarts = record.restarts
        record.starts.append((record.restarts, record.start_time, None, count))
        self._requeue, self._kill_at, self._warned = False, None, False
        self._dead.clear()
        self._write()
        spec = job_spec(self.run)
        self._starter.prepare(spec, self._context(0, port=0))
        # Other folders have jobs of the same number, and a port counts as free until it is used.
        port = free_port(f"{client.root()}/{record.job_id}", record.restarts)
        self._nodes = [self._starter.start(self._context(rank, port)) for rank in range(count)]

    def _context(self, rank: int, port: int) -> JobContext:
        record = self.record
        return JobContext(
            job_id=record.job_id,
            restarts=record.restarts,
            node_rank=rank,
            nodes=record.nodes,
            master_addr="127.0.0.1",
            port=port,
            token=record.token,
            end_time=record.end_time,
            kill_wait_s=KILL_WAIT_S,
            on_this_machine=True,
        )

    def _supervise(self) -> int:
        """Until every node's agent has left; the worst of their exit codes."""
        while None in (codes := [_code(node) for node in self._nodes]):
            self._take_requests()
            self._enforce_limits()
            if any(code for node, code in enumerate(codes) if node not in self._dead):
                self._signal(signal.SIGKILL)  # as srun --kill-on-bad-exit does
            clock.sleep(TICK_S)
        self._signal(signal.SIGKILL)  # what a dead agent left behind
        for node in self._nodes:
            node.wait()
        self.record.previous_stop = clock.now()  # for the start that may follow
        return max((code for code in codes if code is not None), default=0)

    def _take_requests(self, taken: frozenset[str] | None = None) -> None:
        for request in client.take_requests(self.record.job_id):
            operation = request.pop("operation")
            if taken is None or operation in taken:
                getattr(self, f"_on_{operation}")(**request)
                self._write()

    def _on_follow(self, after: list[str]) -> None:
        """Without effect on a job that has begun."""
        self.record.after = after

    def _on_cancel(self) -> None:
        self._cancelled = True
        self._end(reason=None)

    def _on_requeue(self, reason: str | None = None) -> None:
        """Run the job again, even one that is being cancelled: SLURM does."""
        if self._requeue:
            return
        self._requeue, self._cancelled = True, False
        self.record.restarts += 1
        self.record.preempt_time = None
        self._end(reason=reason)

    def _on_preempt(self, leave: int, grace_s: float) -> None:
        """A more important job takes nodes: `leave` of them are left for the next start."""
        if self._cancelled:
            return
        self._available = leave
        self.record.previous_end = "preempted"
        if grace_s <= 0:
            self._on_requeue()
            return
        self.record.preempt_time = clock.now()
        self.record.end_time = clock.now() + grace_s
        self._write()
        self._signal(signal.SIGTERM)

    def _on_end_in(self, seconds: float) -> None:
        """Move the time limit, as `scontrol update EndTime=` does."""
        self.record.end_time = clock.now() + seconds

    def _on_free(self) -> None:
        self._available = self.record.max_nodes

    def _on_fail_node(self, node: int) -> None:
        """A node dies: the job is run again, and the other nodes have `KILL_WAIT_S` to leave."""
        self._available = max(self.record.min_nodes, len(self._nodes) - 1)
        self.record.previous_end = "node_failed"
        self._dead.add(node)
        _kill_group(self._nodes[node], signal.SIGKILL)
        if not self._cancelled:
            self._on_requeue(NODE_DOWN)

    def _enforce_limits(self) -> None:
        now = clock.now()
        end = self.record.end_time or float("inf")
        if not self._warned and now >= end - self.record.signal_lead_s:
            self._warned = True
            if self.record.preempt_time is None:
                self._signal(signal.SIGUSR2)
        if now >= end and self._kill_at is None:
            if self.record.preempt_time is None:
                self._end(reason="TimeLimit")
            else:
                self._on_requeue()
        if self._kill_at is not None and now >= self._kill_at:
            self._signal(signal.SIGKILL)

    def _end(self, *, reason: str | None) -> None:
        self.record.state, self.record.reason = JobState.COMPLETING, reason
        self._write()  # before the signal: its receiver asks at once
        self._kill_at = clock.now() + KILL_WAIT_S
        self._signal(signal.SIGTERM)

    def _signal(self, signum: signal.Signals) -> None:
        for node in self._nodes:
            _kill_group(node, signum)

    def _write(self) -> None:
        """Publish the record. A full disk must not leave the nodes without a controller."""
        try:
            client.write(self.record)
        except OSError as error:
            log.warning("the record of %s cannot be written: %s", self.record.job_id, error)

    def _over(self, state: JobState, code: int) -> int:
        self.record.state, self.record.reason = state, None
        self._write()
        return code


def _state_of(job_id: str) -> str:
    """Where a job stands; one whose controller has died has failed, and a removed one has ended."""
    record = client.read(job_id)
    if record is None:
        return JobState.COMPLETED  # as SLURM takes a job that it has forgotten
    lost = record.state not in client.OVER and not client.is_controlled(record)
    return JobState.FAILED if lost else record.state


def _code(node: Node) -> int | None:
    """How a node's agent ended, 0 for well; None while it lives.

    It is not reaped: until it is, its number, which its group has too, is nobody else's.
    """
    if node.returncode is not None:
        return abs(int(node.returncode))
    ended = os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else int(ended.si_status)


def _kill_group(node: Node, signum: signal.Signals) -> None:
    """Signal every process of a node; the agent leads the group, its ranks are in it."""
    if node.returncode is not None:
        return  # reaped: the number may be another's by now
    try:
        os.killpg(node.pid, signum)
    except ProcessLookupError:
        return  # all gone already


def main(arguments: list[str]) -> Any:
    """Serve one job."""
    configure("batch")
    controller = Controller(arguments[0])
    try:
        return controller.serve()
    except HpctrainError as error:
        log.error("%s", error)  # noqa: TRY400 - a user's mistake, no bug of ours
        return controller.give_up(error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
