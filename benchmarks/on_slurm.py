"""On a real SLURM: `submit` against bare sbatch, and from a preemption or a kill to the next step.

    python benchmarks/on_slurm.py [submit] [preempt] [kill]

Starts the tests' own cluster of four nodes on this machine. SLURM's own wait (the requeue delay and
the queue) is shown and taken out of the sum, since no program can shorten it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.scenario import RunHandle
    from tests.support.slurm_cluster import SlurmCluster

sys.path.insert(0, str(Path(__file__).parents[1]))

REPEATS = 5
KILLS = 20
STEP_S = 0.3
_CHANCE = random.Random()  # noqa: S311 - of a benchmark


def main() -> None:
    """What the command line names, or everything, on one cluster."""
    from tests.support.slurm_cluster import SlurmCluster

    parts = {"submit": _submit, "preempt": _restart, "kill": _kills}
    with SlurmCluster() as slurm, tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or parts:
            parts[name](slurm, Path(folder))


def _submit(slurm: SlurmCluster, folder: Path) -> None:
    from tests.support.scenario import submit

    ours, bare = [], []
    for turn in range(REPEATS):
        started = time.perf_counter()
        run = submit(slurm, folder, "--nodes=1", name=f"bench-{turn}")
        ours.append(time.perf_counter() - started)
        script = next(run.dir.jobs.glob("*.sh"))
        slurm.cancel(run.job_id)
        started = time.perf_counter()
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=slurm.env,
            capture_output=True,
            text=True,
            check=True,
        )
        bare.append(time.perf_counter() - started)
        slurm.cancel(done.stdout.strip())
    more = statistics.median(ours) - statistics.median(bare)
    print(
        f"submit {statistics.median(ours):.2f} s, bare sbatch {statistics.median(bare):.2f} s, "
        f"{more:.2f} s more (goal: at most 1 s more)"
    )
    slurm.drain_all()


def _restart(slurm: SlurmCluster, folder: Path) -> None:
    from hpctrain.ledger.run.event_types import AttemptStarted, PhaseReached
    from tests.support.scenario import submit

    sets = {"train.steps": 400, "train.step_delay_s": 0.1}
    run = submit(
        slurm,
        folder,
        "--nodes=4",
        "--ranks-per-node=2",
        "--time=10",
        "--partition=grace",
        sets=sets,
        name="restart",
    )
    run.wait_step(5)
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    run.wait_step(20, attempt=2)
    first = {e.kind: e.t for e in run.events(attempt=1)}
    events = run.events(attempt=2)
    began, second = next((e.t, e.fact) for e in events if isinstance(e.fact, AttemptStarted))
    phases = {e.fact.name: e.t for e in events if isinstance(e.fact, PhaseReached)}
    batch_started, agent_started = second.batch_started or 0.0, second.agent_started or 0.0
    imported = second.imported or 0.0
    marks = [
        ("noticed, saved", first["stop_requested"], first["stopped"]),
        ("ranks gone, decided", first["stopped"], first["attempt_ended"]),
        ("SLURM's own wait", first["attempt_ended"], batch_started),
        ("batch side, srun", batch_started, agent_started),
        ("imports, once per node", agent_started, imported),
        ("rendezvous of the agents", imported, began),
        ("start of the ranks", began, phases["initialised"]),
        ("model, restore", phases["initialised"], run.events("restored", attempt=2)[0].t),
        ("first step", run.events("restored", attempt=2)[0].t, phases["first_step"]),
    ]
    for name, start, end in marks:
        print(f"{name:26} {end - start:6.2f} s")
    ours = sum(end - start for name, start, end in marks if not name.startswith("SLURM"))
    print(f"{'all but SLURM':26} {ours:6.2f} s  (4 agents and 8 ranks on this one machine)")
    with contextlib.suppress(AssertionError):
        run.cli("cancel", "restart")


def _kills(slurm: SlurmCluster, folder: Path) -> None:
    """Ranks killed at random: the others leave the newest step, or a copy of some steps before."""
    from tests.support.local_runs import SCRIPTS
    from tests.support.recipe import TINY
    from tests.support.scenario import submit

    sets = {
        **TINY,
        "train.steps": 100_000,
        "train.audit": False,
        "checkpoint.interval_steps": 100_000,
        "run.restarts_in_job": 1000,
        "run.restart_pause_s": 0,
        "budget.crashes": 0,
        "budget.no_progress": 0,
        "alive.memory": "auto",
        "alive.memory_steps": 10,
    }
    args = ("--nodes=4", "--ranks-per-node=2", "--time=30")
    script = [str(SCRIPTS / "killed_in_step.py")]
    env = {"STEP_S": str(STEP_S)}
    run = submit(slurm, folder, *args, sets=sets, name="kill", script=script, env=env)
    rows = [_killed(run, attempt) for attempt in range(1, KILLS + 1)]
    run.wait_event("memory_copies", attempt=KILLS + 1)
    slurm.cancel(run.job_id)
    slurm.wait_job(run.job_id, ("CANCELLED",))
    slurm.drain_all()
    for name in rows[0][0]:
        seconds = sorted(row[name] for row, _ in rows)
        print(f"{name:26} {statistics.median(seconds):6.2f} s, worst {seconds[-1]:.2f} s")
    lost = [steps for _, steps in rows]
    counted = ", ".join(f"{lost.count(steps)} lost {steps}" for steps in sorted(set(lost)))
    print(f"of {KILLS} kills (load {os.getloadavg()[0]:.1f}), in steps that were done: {counted}")
    facts = [event.fact for event in run.events("memory_copies")]
    waits = statistics.median(getattr(fact, "stall_s", None) or 0.0 for fact in facts)
    whole = statistics.median(getattr(fact, "covered_s", None) or 0.0 for fact in facts)
    print(f"a copy: training waits {waits * 1000:.1f} ms, whole on all after {whole * 1000:.1f} ms")


def _killed(run: RunHandle, attempt: int) -> tuple[dict[str, float], int]:
    """Kill a rank of this attempt.

    Returns:
        Seconds by part, and the steps done that are done again.
    """
    from hpctrain.ledger.run.event_types import CheckpointRestored, PhaseReached
    from tests.support import processes

    run.wait_event("memory_copies", attempt)
    log = str(run.dir.rank_log(attempt, _CHANCE.randrange(8)))
    assert run.slurm is not None
    pids = run.slurm.pids_of_job(run.job_id)
    pid = next(pid for pid in pids if log in map(str, processes.open_files(pid)))
    time.sleep(_CHANCE.uniform(1.0, 1.0 + 2 * STEP_S))  # at any place of a step
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    run.wait_event("memory_copies", attempt + 1)
    first = {event.kind: event.t for event in run.events(attempt=attempt)}
    events = run.events(attempt=attempt + 1)
    began = {event.kind: event.t for event in reversed(events)}
    phases = {e.fact.name: e.t for e in events if isinstance(e.fact, PhaseReached)}
    (restored,) = [e.fact for e in events if isinstance(e.fact, CheckpointRestored)]
    if restored.read_from != "memory":
        raise RuntimeError(f"attempt {attempt + 1} went on from elsewhere: {restored}")
    seconds = {
        "ranks gone, decided": first["attempt_ended"] - killed,
        "the next attempt begins": began["attempt_started"] - first["attempt_ended"],
        "start of the ranks": phases["initialised"] - began["attempt_started"],
        "model, restore": began["restored"] - phases["initialised"],
        "first step": phases["first_step"] - began["restored"],
        "from the kill on": phases["first_step"] - killed,
    }
    return seconds, run.steps_lost()[attempt - 1]


if __name__ == "__main__":
    main()
