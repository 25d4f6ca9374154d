"""On a real SLURM: `submit` against bare sbatch, and the time from a preemption to the next step.

Starts the tests' own cluster of four nodes on this machine. SLURM's own wait (the requeue delay and
the queue) is shown and taken out of the sum, since no program can shorten it.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.slurm_cluster import SlurmCluster

sys.path.insert(0, str(Path(__file__).parents[1]))

REPEATS = 5


def main() -> None:
    """Both measurements on one cluster."""
    from tests.support.slurm_cluster import SlurmCluster

    with SlurmCluster() as slurm, tempfile.TemporaryDirectory() as folder:
        _submit(slurm, Path(folder))
        _restart(slurm, Path(folder))


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
    from hpctrain.run.event_types import AttemptStarted, PhaseReached
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
    slurm.wait_job(run.job_id, "PENDING", timeout=30)
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


if __name__ == "__main__":
    main()
