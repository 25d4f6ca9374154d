"""Agents with real ranks, one for each node, in processes of the test's own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.records import JobContext, RankTask
from hpctrain.ledger.run.event_types import RanksAwaited
from hpctrain.ledger.run.fence import Attempt
from hpctrain.node.agent import signals
from hpctrain.node.agent.control import NodeControl
from hpctrain.node.agent.node import NodeAgent
from hpctrain.node.agent.ranks import run_rank
from hpctrain.node.agent.rounds import RoundHooks
from hpctrain.node.agent.stop_deadline import StopDeadline
from hpctrain.node.hangs.stacks import asked
from tests.support import cpus
from tests.support.agent_parts import NO_LOOKS, notice_of
from tests.support.patience import PATIENCE_S
from tests.support.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.core.base.records import FailureReport
    from hpctrain.ledger.run.event_fields import LedgerFact
    from hpctrain.node.hangs.standing import HangLimits


class Agents:
    """Runs scripts on agents that it starts, and ends what is left of them."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._agents: list[Any] = []

    def run(  # noqa: PLR0917
        self,
        script: str,
        nodes: int = 1,
        end_wait_s: float = 1.0,
        patience_s: float = PATIENCE_S,
        starts: int = 1,
        hangs: HangLimits = NO_LOOKS,
    ) -> list[Any]:
        """How each node's round ended: ending, why, who was awaited, failure; None for not yet.

        After a crash the ranks are started again, as often as `starts` allows.
        """
        self.start(script, nodes, end_wait_s, starts, hangs)
        return self.ends(patience_s)

    def start(
        self,
        script: str,
        nodes: int = 1,
        end_wait_s: float = 1.0,
        starts: int = 1,
        hangs: HangLimits = NO_LOOKS,
    ) -> None:
        """Start agents, and do not wait for them."""
        cpus.take(nodes * self._ranks)
        (self._folder / "script.py").write_text(script)
        port = free_port()
        fork = multiprocessing.get_context("fork")
        agents = []
        for node in range(nodes):
            args = node, nodes, port, self._folder, end_wait_s, self._ranks, starts, hangs
            agents.append(fork.Process(target=_agent, args=args))
            agents[-1].start()
        self._agents += agents

    def ends(self, patience_s: float = PATIENCE_S) -> list[Any]:
        """See `run`."""
        began = time.monotonic()
        for agent in self._agents:
            agent.join(max(0.0, began + patience_s - time.monotonic()))
        told = [self._folder / f"end-{node}" for node in range(len(self._agents))]
        return [json.loads(path.read_text()) if path.exists() else None for path in told]

    def close(self) -> None:
        """End the agents that run."""
        for agent in self._agents:
            if agent.is_alive():
                os.killpg(agent.pid, signal.SIGKILL)
            agent.join()


def _agent(  # noqa: PLR0917 - a process gets them by place
    node: int,
    nodes: int,
    port: int,
    folder: Path,
    end_wait_s: float,
    ranks: int,
    starts: int,
    hangs: HangLimits,
) -> None:
    """The agent of a node; writes how its round ended, and what was said meanwhile."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from hpctrain.node.agent.rendezvous import Rendezvous

    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    os.setpgid(0, 0)
    signals.install()
    names = [f"n{number}" for number in range(nodes)]
    context = JobContext("1", 0, node, names, "127.0.0.1", port, "")
    control = NodeControl("127.0.0.1", "of a test")
    awaited: list[Any] = []
    begun: list[int] = []

    def begin(_world_size: int) -> Attempt:
        begun.append(1)
        return Attempt(len(begun), "token", "1", 0, time.time())

    def may_restart(failure: FailureReport | None) -> bool:
        (folder / f"failure-{len(begun)}").write_text(failure.summary if failure else "")
        return len(begun) < starts

    deadline = StopDeadline(context, arrivals=list, ask=None)
    hooks = RoundHooks(
        begin,
        deadline,
        may_restart,
        notice_of(folder, context, deadline),
        record=lambda fact: (
            awaited.append(fact)
            if isinstance(fact, RanksAwaited)
            else _record(folder, len(begun), fact)
        ),
        asked_stacks=lambda: asked(folder / "stacks-request.json", "1"),
    )
    rendezvous = Rendezvous("127.0.0.1", port, node, names, run_id="test", timeout_s=60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=run_rank,
        args=(RankTask("", str(folder / "script.py")),),
        rdzv_handler=rendezvous,
        max_restarts=1_000_000,
        master_addr="127.0.0.1",
        master_port=port,
    )
    agent = NodeAgent(
        spec,
        node=names[node],
        attempt_dir=lambda number: folder / str(number),
        hooks=hooks if node == 0 else None,
        start_method="fork",
        before_ranks=lambda _: None,
        secret="of a test",
        end_wait_s=end_wait_s,
        control=control,
        hang_limits=hangs,
    )
    agent.run()
    rendezvous.close()
    control.stop()
    end = agent.end
    said = [(fact.returned, fact.left, fact.ended) for fact in awaited]
    failure = end.failure and [end.failure.kind, end.failure.rank, end.failure.node]
    staged = folder / f"end-{node}.new"
    staged.write_text(json.dumps([end.ending, end.why, said, failure]))
    staged.rename(folder / f"end-{node}")
    os._exit(0)


def _record(folder: Path, attempt: int, fact: LedgerFact) -> None:
    """As the ledger would have it, with the second in which it came."""
    with (folder / "events").open("a") as file:
        row = {"kind": fact.kind, "attempt": attempt, "at": time.monotonic(), **fact.fields_set()}
        file.write(json.dumps(row) + "\n")
