"""A run that is disturbed at random loses nothing that it need not lose, and ends once.

The seed is HPCTRAIN_SEED, or the clock; a failure tells it.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.support import client_disk, processes
from tests.support.scenario import submit

pytestmark = [pytest.mark.slurm, pytest.mark.fuse]

SETTINGS = {
    "train.steps": 100_000,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": 10,
    "budget.crashes": 0,
}
TWO_BY_ONE = ("--nodes=2", "--ranks-per-node=1", "--time=60")
LONG_S = 180
PARTITIONS = ("work", "grace")


@pytest.fixture
def rules(slurm, tmp_path):
    """The faults of the disk, as the nodes see it; it caches, too."""
    behind, runs = tmp_path / "behind", tmp_path / "runs"
    behind.mkdir()
    runs.mkdir()
    found = client_disk.Rules(tmp_path / "faults")
    words = client_disk.command(behind, runs, cache_s=60.0, rules=found.path)
    with slurm.own_mounts(lambda _: words), client_disk.mounted(behind, runs, cache_s=60.0):
        yield found


class Disturber:
    """What may happen to a run; each method waits until SLURM has taken it in."""

    def __init__(self, run, rules):
        self.run, self.rules, self.slurm = run, rules, run.slurm
        self.graceful = set()
        self.cancelled = {}

    def preempt(self):
        self._graceful()
        nodes = self.run.events("attempt_started")[-1].data["nodes"]
        urgent = self.slurm.submit_urgent(nodes)
        self.slurm.start_now(self.run.job_id)
        self.slurm.cancel(urgent)

    def reach_the_limit(self):
        self._graceful()
        self.slurm.end_in(self.run.job_id, 5)
        self.slurm.wait_job(self.run.job_id, "PENDING", timeout=LONG_S)
        whole = ["scontrol", "update", f"jobid={self.run.job_id}", "TimeLimit=60"]
        self.slurm.run(*whole, check=True)
        self.slurm.start_now(self.run.job_id)

    def kill_a_node(self):
        node = random.choice(self.run.events("attempt_started")[-1].data["nodes"])
        self.slurm.kill_node(node)
        self.slurm.start_now(self.run.job_id)
        self.slurm.revive_node(node)

    def cancel_and_resume(self):
        job_id = self.run.job_id
        ways = [lambda: self.slurm.cancel(job_id), lambda: self.run.cli("cancel", "run")]
        random.choice(ways)()
        self.slurm.wait_job(job_id, "CANCELLED", timeout=LONG_S)
        self.run.wait("its end", lambda: not self.slurm.pids_of_job(job_id))
        self.cancelled[job_id] = self.attempt()
        self._resume()

    def save_leave_and_resume(self, *words):
        self._graceful()
        self.run.cli("cancel", "run", "--save")
        self.slurm.wait_job(self.run.job_id, "COMPLETED", timeout=LONG_S)
        self._resume(*words)

    def _resume(self, *words):
        where = f"--partition={random.choice(PARTITIONS)}"
        told = self.run.cli("resume", "run", where, *words)
        self.run.job_id = told.split("job ")[1].split()[0]

    def restart_slurmctld(self):
        self.slurm.kill_slurmctld()
        self.slurm.start_slurmctld()

    def take_munge_away(self):
        self.slurm.kill_munged()
        self.slurm.start_munged()

    def kill_a_rank(self):
        for pid in self.slurm.pids_of_job(self.run.job_id):
            if processes.environment(pid).get("RANK") == "1":
                os.kill(pid, signal.SIGKILL)

    def fail_the_disk(self):
        do = random.choice(["ESTALE", "EIO", "EDQUOT", "delay 1"])
        op = random.choice(["create", "write", "fsync", "rename", "readdir", "open"])
        self.rules.set({"op": op, "path": "run/checkpoints*", "do": do, "count": 1})

    def _graceful(self):
        self.rules.set()
        self.graceful.add(self.attempt())

    def attempt(self):
        return self.run.events("attempt_started")[-1].attempt


def disturb(run, rules, count):
    """So many disturbances, each after some steps of the attempt that the one before has left."""
    disturber = Disturber(run, rules)
    kinds = [disturber.preempt, disturber.save_leave_and_resume, disturber.restart_slurmctld]
    kinds += [disturber.take_munge_away, disturber.kill_a_rank, disturber.fail_the_disk]
    kinds += [disturber.cancel_and_resume, disturber.kill_a_node]
    if count > len(kinds):
        kinds.append(disturber.reach_the_limit)  # SLURM looks at limits every 30 s
    for number in range(count):
        before = max((int(e.data["last"]) for e in run.events("steps")), default=0)
        run.wait_step(before + random.randint(1, 15), timeout_s=LONG_S)
        kind = kinds[number % len(kinds)] if count >= len(kinds) else random.choice(kinds)
        kind()
    rules.set()
    last = run.wait_step(
        1 + max(int(e.data["last"]) for e in run.events("steps")), timeout_s=LONG_S
    )
    disturber.save_leave_and_resume(f"--set=train.steps={last + 50}")
    run.wait_done(timeout_s=LONG_S)
    return disturber


@pytest.mark.parametrize(
    "count", [3, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(0)])]
)
def test_a_run_that_is_disturbed_at_random_ends_once_and_forgets_nothing(
    slurm, rules, tmp_path, count
):
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    random.seed(seed)
    where = f"--partition={random.choice(PARTITIONS)}"
    run = submit(slurm, tmp_path, *TWO_BY_ONE, where, sets=SETTINGS)

    disturber = disturb(run, rules, count)

    story = f"seed {seed}\n{run.story()}"
    saved = 0
    for event in run.events():
        if event.kind == "restored":
            # Never an older one, never a bad one. A node may die between a commit and its fact.
            assert event.data["step"] >= saved, story
        elif event.kind == "saved":
            saved = int(event.data["step"])
    started = [e.attempt for e in run.events("restored")]
    lost = dict(zip(started, run.steps_lost(), strict=False))
    assert {attempt: lost[attempt] for attempt in disturber.graceful if lost[attempt]} == {}, story
    starts = [(e.data["job_id"], e.attempt) for e in run.events("attempt_started")]
    risen = [a for job, a in starts if job in disturber.cancelled and a > disturber.cancelled[job]]
    assert risen == [], story
    assert len(run.events("done")) == 1, story
    assert slurm.job(run.job_id)["JobState"] == "COMPLETED", story
