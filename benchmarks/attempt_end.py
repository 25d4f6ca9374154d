"""What the end of an attempt costs in a run with a long ledger: 3 s are kept for all of it.

    python -m benchmarks.attempt_end

From the moment at which the ranks have left to the decision in the ledger, by node 0's agent; and
the batch side as a process of its own, from its start to its exit, with a scontrol that answers at
once. Beside it what one pass over the ledger takes that parses every line. CPU time, the best of
several; the ratios hold on any machine.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.ledger_read import ATTEMPTS, many_attempts, one_attempt, parse_all
from hpctrain.core.base.records import JobContext, JobFacts, JobState, StopCause
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.ending import AttemptEnding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROUNDS = 5
GOAL_S = 0.5
SCONTROL = """#!/bin/sh
[ "$1" = requeue ] || echo "JobId=17 JobState=RUNNING Reason=None Restarts=${SLURM_RESTART_COUNT}" \
    "PreemptTime=2025-11-21T05:00:00 EndTime=2025-11-21T06:00:00"
"""


class Scheduler:
    """A job in its grace time; remembers when it was asked to run it again."""

    requeued_at = 0.0

    def facts(self) -> JobFacts:
        """Preempted."""
        return JobFacts(JobState.RUNNING, preempt_time=1.0)

    def requeue(self) -> None:
        """The decision has been written."""
        self.requeued_at = time.process_time()


def main() -> None:
    """Print what each ledger costs."""
    with tempfile.TemporaryDirectory() as folder:
        scontrol = Path(folder) / "bin" / "scontrol"
        scontrol.parent.mkdir()
        scontrol.write_text(SCONTROL)
        scontrol.chmod(0o755)
        empty = _run(folder, "empty", 1, list(one_attempt())[:3])
        alone_s = _best(lambda: _batch_side(empty, 1, scontrol), empty)
        print(f"no step marks: batch side {alone_s:.3f} s")
        for name, attempt, lines in (
            ("one attempt", 1, one_attempt()),
            ("1,000 attempts", ATTEMPTS, list(many_attempts())[:-4]),
        ):
            run = _run(folder, name, attempt, lines)
            parse_s = _best(functools.partial(_pass, run), run)
            agent_s = _best(functools.partial(_agent, run, attempt), run)
            batch_s = _best(functools.partial(_batch_side, run, attempt, scontrol), run)
            print(
                f"{name}: {run.events.stat().st_size / 1e6:.0f} MB; every line parsed "
                f"{parse_s:.3f} s, decided {agent_s:.3f} s (goal: below {GOAL_S:g}), "
                f"ratio {agent_s / parse_s:.2f}; batch side {batch_s:.3f} s, "
                f"ratio {batch_s / parse_s:.2f}"
            )


def _run(folder: str, name: str, attempt: int, lines: Iterable[str]) -> RunDir:
    """A run whose newest attempt is in its last start."""
    run = RunDir(Path(folder) / name.replace(",", "").replace(" ", "-"))
    run.attempt(attempt).mkdir(parents=True)
    Spec(run.name, "id", 0.0, "slurm", "", Entry("recipe", cwd=folder)).dump(run.spec)
    start = {"job_id": "17", "restarts": attempt - 1}
    fence = {"number": attempt, "token": "x", "started": 0.0, **start}
    run.fence.write_text(json.dumps(fence))
    run.events.write_text("".join(lines))
    return run


def _best(call: Callable[[], float], run: RunDir) -> float:
    size, taken = run.events.stat().st_size, []
    for _ in range(ROUNDS):
        taken.append(call())
        os.truncate(run.events, size)
    return min(taken)


def _pass(run: RunDir) -> float:
    started = time.process_time()
    parse_all(run)
    return time.process_time() - started


def _agent(run: RunDir, attempt: int) -> float:
    scheduler: Any = Scheduler()
    context = JobContext("17", attempt - 1, 0, ["a", "b"], "a", 20000, "")
    ending = AttemptEnding(run, load_spec(run.spec), context, scheduler)
    deadline: Any = SimpleNamespace(cause=StopCause.TERM, is_stop_requested=lambda: True)
    end: Any = SimpleNamespace(ending="left", failure=None, why="", silent_nodes=[])
    started = time.process_time()
    ending.conclude(attempt, end, deadline)
    return float(scheduler.requeued_at) - started


def _batch_side(run: RunDir, attempt: int, scontrol: Path) -> float:
    """The seconds of the process and of those that it waits for."""
    command = [sys.executable, "-m", "hpctrain.entry.slurm_batch", "after", str(run.root), ""]
    job = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(attempt - 1)}
    env = {**os.environ, **job, "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--rc", "137", "--term", "1"], check=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if b'"requeued"' not in run.events.read_bytes()[-4096:]:
        raise SystemExit("the batch side has not requeued the job")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
