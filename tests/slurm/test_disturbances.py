"""A run that is disturbed at random loses nothing that it need not lose, and ends once.

    HPCTRAIN_SEED=7 HPCTRAIN_DISTURBANCES=20 pytest -m soak tests/slurm/test_disturbances.py

Without them the seed is the clock's, and a soak disturbs 200 times. Each disturbance prints a line:
what it was, how long it took until the run was on its way again, and what was wrong with it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from hpctrain.ledger.run.events import Tail
from tests.support import client_disk, processes
from tests.support.ledger_runs import all_fields
from tests.support.scenario import RunHandle, submit

pytestmark = [pytest.mark.slurm, pytest.mark.fuse]

SETTINGS = {
    "train.steps": 100_000,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": 10,
    "budget.nodes": 0,
    "budget.crashes": 0,
    "budget.storage": 0,
    "budget.no_progress": 0,
}
LIMIT_MIN = 24 * 60
"""A limit is one of the disturbances; none other may come."""
TWO_BY_ONE = ("--nodes=2", "--ranks-per-node=1", f"--time={LIMIT_MIN}")
MANY = int(os.environ.get("HPCTRAIN_DISTURBANCES", "200"))
PARTITIONS = ("work", "grace")
SAVES_AFTER_A_FAULT = 2
"""The first may have begun before it."""


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


@pytest.fixture
def tell(slurm, capsys, request):
    """Prints a line; of a soak at once, into whatever log it has."""
    is_soak = request.node.get_closest_marker("soak") is not None
    year, month = slurm.version

    def line(text):
        with capsys.disabled() if is_soak else contextlib.nullcontext():
            print(f"{time.strftime('%T')} SLURM {year}.{month:02} {text}", flush=True)

    return line


class Followed(RunHandle):
    """A run whose ledger becomes long: only what is new of it is read."""

    def follow(self):
        self._tail, self._known = Tail(self.dir.events), []
        return self

    def events(self, kind=None, attempt=None):
        self._known += self._tail.new()
        return [e for e in self._known if kind in (None, e.kind) and attempt in (None, e.attempt)]

    def newest_step(self):
        return max((int(all_fields(e)["last"]) for e in self.events("steps")), default=0)

    def attempt(self):
        return self.events("attempt_started")[-1].attempt


class Disturber:
    """What may happen to a run; each method waits until SLURM, or the run, has taken it in."""

    def __init__(self, run, rules):
        self.run, self.rules, self.slurm = run, rules, run.slurm
        self.graceful = set()
        self.cancelled = {}

    def preempt(self):
        self._graceful()
        nodes = all_fields(self.run.events("attempt_started")[-1])["nodes"]
        urgent = self.slurm.submit_urgent(nodes)
        self.slurm.start_now(self.run.job_id)
        self.slurm.cancel(urgent)

    def reach_the_limit(self):
        self._graceful()
        self.slurm.end_in(self.run.job_id, 5)
        self.slurm.wait_job(self.run.job_id, "PENDING")
        whole = ["scontrol", "update", f"jobid={self.run.job_id}", f"TimeLimit={LIMIT_MIN}"]
        self.slurm.run(*whole, check=True)
        self.slurm.start_now(self.run.job_id)

    def kill_a_node(self):
        node = random.choice(all_fields(self.run.events("attempt_started")[-1])["nodes"])
        self.slurm.kill_node(node)
        self.slurm.start_now(self.run.job_id)
        self.slurm.revive_node(node)

    def cancel_and_resume(self):
        job_id = self.run.job_id
        ways = [lambda: self.slurm.cancel(job_id), lambda: self.run.cli("cancel", "run")]
        random.choice(ways)()
        self.slurm.wait_job(job_id, "CANCELLED")
        self.run.wait("its end", lambda: not self.slurm.pids_of_job(job_id))
        self.cancelled[job_id] = self.run.attempt()
        self._resume()

    def save_leave_and_resume(self, *words):
        self._graceful()
        self.run.cli("cancel", "run", "--save")
        self.slurm.wait_job(self.run.job_id, "COMPLETED")
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
        before = len(self.run.events("attempt_started"))
        os.kill(self.run.wait("rank 1", self._rank_1), signal.SIGKILL)
        # Else the next disturbance would meet an attempt that is lost already.
        self.run.wait_event("attempt_started", count=before + 1)

    def _rank_1(self):
        """It is forked and so has its agent's environment, but its own log."""
        for pid in self.slurm.pids_of_job(self.run.job_id):
            if any(path.endswith("/rank-00001.log") for path in processes.open_files(pid)):
                return pid
        return None

    def fail_the_disk(self):
        do = random.choice(["ESTALE", "EIO", "EDQUOT", "delay 1"])
        op = random.choice(["create", "write", "fsync", "rename", "readdir", "open"])
        self.rules.set({"op": op, "path": "run/checkpoints*", "do": do, "count": 1})
        until = self.run.newest_step() + 3 * SETTINGS["checkpoint.interval_steps"]
        self.run.wait("a fault", lambda: self.rules.hits() or self.run.newest_step() >= until)
        self.rules.set()
        saves = len(self.run.events("saved")) + SAVES_AFTER_A_FAULT
        self.run.wait_event("saved", count=saves)

    def _graceful(self):
        self.graceful.add(self.run.attempt())


def wrong(run, disturber):
    """What must not be, of all that has happened so far: a line for each."""
    found, saved = [], 0
    for event in run.events():
        if event.kind == "restored":
            # Never an older one, never a bad one. A node may die between a commit and its fact.
            if all_fields(event)["step"] < saved:
                found.append(f"attempt {event.attempt} began below the save of step {saved}")
        elif event.kind == "saved":
            saved = int(all_fields(event)["step"])
    begun = [e.attempt for e in run.events("restored")]
    found += [
        f"attempt {attempt} left in peace and {lost} steps were lost"
        for attempt, lost in zip(begun, run.steps_lost(), strict=False)
        if lost and attempt in disturber.graceful
    ]
    for event in run.events("attempt_started"):
        job_id = all_fields(event)["job_id"]
        if event.attempt > disturber.cancelled.get(job_id, event.attempt):
            found.append(f"attempt {event.attempt} is of job {job_id}, which was cancelled before")
    return found


def kinds_of(disturber, count):
    """So many disturbances: each kind once, in any order, before one comes again."""
    kinds = [disturber.preempt, disturber.save_leave_and_resume, disturber.restart_slurmctld]
    kinds += [disturber.take_munge_away, disturber.kill_a_rank, disturber.fail_the_disk]
    kinds += [disturber.cancel_and_resume, disturber.kill_a_node]
    if count > len(kinds):
        kinds.append(disturber.reach_the_limit)  # SLURM looks at limits every 30 s
    for number in range(count):
        if number % len(kinds) == 0:
            random.shuffle(kinds)
        yield kinds[number % len(kinds)]


def disturb(run, rules, count, tell):
    """So many disturbances, each after some steps of the attempt that the one before has left."""
    disturber = Disturber(run, rules)
    run.wait_step(random.randint(1, 15))
    known = []
    for number, kind in enumerate(kinds_of(disturber, count), start=1):
        began, verdict = time.monotonic(), "the run did not go on"
        try:
            kind()
            run.wait_step(run.newest_step() + random.randint(1, 15))
            now = wrong(run, disturber)
            verdict = "; ".join(what for what in now if what not in known) or "ok"
            known = now
        finally:
            where = f"job {run.job_id} attempt {run.attempt()} step {run.newest_step()}"
            took = f"{time.monotonic() - began:.1f} s"
            tell(f"{number}/{count} {kind.__name__} {took}, {where}: {verdict}")
    rules.set()
    disturber.save_leave_and_resume(f"--set=train.steps={run.newest_step() + 50}")
    run.wait_done()
    return disturber


@pytest.mark.story(
    proved_by=(
        "tests/stories/test_stories.py::test_a_preempted_run_comes_back_and_loses_nothing",
        "tests/slurm/test_cancel.py",
        "tests/unit/plan/test_decide.py",
    )
)
@pytest.mark.parametrize(
    "count", [3, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(0)])]
)
def test_a_run_that_is_disturbed_at_random_ends_once_and_forgets_nothing(
    slurm, rules, tmp_path, tell, count
):
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    random.seed(seed)

    tell(f"seed {seed}, {count} disturbances")
    where = f"--partition={random.choice(PARTITIONS)}"
    made = submit(slurm, tmp_path, *TWO_BY_ONE, where, sets=SETTINGS)
    run = Followed(made.slurm, made.cwd, made.dir, made.job_id).follow()

    disturber = disturb(run, rules, count, tell)

    story = f"seed {seed}\n{run.story()}"
    assert wrong(run, disturber) == [], story
    assert len(run.events("done")) == 1, story
    assert slurm.job(run.job_id)["JobState"] == "COMPLETED", story
