"""The first node's agent without torch and without ranks; the other nodes' are a few lines of bash.

    python -m tests.support.agent_stand_in FOLDER       # as hpctrain.entry.slurm_task FOLDER

More nodes than one machine has memory for, were each an agent with torch, or even a Python. Real on
the first node is: what it asks SLURM and how often, the fence, the ledger, the deadline of a stop,
the decision at an end and the requeue (`agent.ending`). Real on every node: the start by the batch
script's own lines, a connection to the first node as long as the attempt, a rank's log.

What stands in: agents meet over plain sockets instead of torch's store, and nothing that they say
is signed; only the first reads the run's settings; there are no ranks, so no steps and no
checkpoints. An attempt goes on until a signal comes, or the run's folder has a file FINISH.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.slurm.command import job_context
from hpctrain.cluster.scheduler.slurm.control import of_agent
from hpctrain.core.base.process import raise_limit
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run import fence
from hpctrain.ledger.run.event_types import AttemptStarted
from hpctrain.ledger.run.layout import RunDir, rank_log_path
from hpctrain.ledger.run.ownership import job_spec, start_secret
from hpctrain.node.agent import signals
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.stop_deadline import StopDeadline

if TYPE_CHECKING:
    from hpctrain.core.base.records import JobContext

MEET_S = 900.0
LOOK_S = 0.1
"""As often as the agent of the first node looks."""
FINISH = "finish"
OF_OTHER_NODES = """\
cat "$run/secret" >/dev/null
until exec 3<>"/dev/tcp/$HPCTRAIN_MASTER_ADDR/$HPCTRAIN_PORT"; do sleep 0.3; done 2>/dev/null
echo "$SLURM_NODEID" >&3
read -r attempt <&3 || exit 0
mkdir -p "$attempt"
printf 'rank %d is here\\n' "$SLURM_NODEID" >"$attempt/$(printf 'rank-%05d.log' "$SLURM_NODEID")"
read -r over <&3
exit 0
"""
"""The agent of every other node, for bash; $run is the run's directory. Signals are ignored."""


class Others:
    """The connections to the other nodes' agents."""

    def __init__(self, address: str, port: int, size: int) -> None:
        """Wait until all have come."""
        raise_limit()
        self._lines: list[socket.socket] = []
        with socket.create_server((address, port), backlog=4096) as server:
            server.settimeout(MEET_S)
            while len(self._lines) < size - 1:
                line = server.accept()[0]
                line.settimeout(MEET_S)
                line.recv(100)
                self._lines.append(line)

    def tell(self, text: str) -> None:
        """Tell all that live."""
        for line in self._lines:
            with suppress(OSError):
                line.sendall(f"{text}\n".encode())


def main(folder: Path) -> int:
    """The first node's part of one job."""
    signals.install()
    run, context = RunDir(folder), job_context()
    start_secret(run, context.job_id, context.restarts)
    return _first(run, context)


def _first(run: RunDir, context: JobContext) -> int:
    spec, started = job_spec(run), time.time()
    control = of_agent(
        context.job_id,
        restarts=context.restarts,
        nodes=context.nodes,
        kill_wait_s=context.kill_wait_s,
    )
    ending = AttemptEnding(run, spec, context, control)
    ending.record_lost_attempt()
    if why := ending.is_over():
        print(why, flush=True)
        return 75
    deadline = StopDeadline(context, arrivals=signals.arrivals, ask=ending.ask)
    size = len(context.nodes)
    others = Others(context.master_addr, context.port, size)
    attempt = fence.take_attempt(run, job_id=context.job_id, restarts=context.restarts)
    begun = AttemptStarted(
        **fence.identity(run, attempt),
        by="start",
        nodes=tuple(context.nodes),
        world_size=size,
        ranks_per_node=1,
        slurm_cluster=context.cluster,
        job_started=context.start_time,
        agent_started=started,
    )
    folder = run.attempt(attempt.number)
    folder.mkdir(parents=True)
    rank_log_path(folder, 0).write_text("rank 0 is here\n")
    others.tell(str(folder))
    ledger.append(run, begun, attempt=attempt.number)
    while deadline.cause is None and not deadline.look().kill:
        if (run.root / FINISH).exists():
            run.outcome(attempt.number).write_text(json.dumps({"outcome": "done", "step": 1}))
            break
        time.sleep(LOOK_S)
    others.tell("over")
    end = SimpleNamespace(ending="left", restart=False, why="", failure=None, silent_nodes=[])
    try:
        return ending.conclude(attempt.number, end, deadline)  # type: ignore[arg-type]
    finally:
        signals.ignore_all()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
