"""A run in an allocation with spares that is disturbed at random stays in it, and loses nothing.

    HPCTRAIN_SEED=7 HPCTRAIN_DISTURBANCES=30 pytest -m soak tests/slurm/test_alive_campaign.py

Each round is a run of 2 nodes with 2 spares and some faults; each fault prints a line: what it was,
and how long it took until the next step was done. tests/slurm/test_stay_alive.py has the short
form.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time

import pytest

from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import node_processes, processes
from tests.support.ledger_runs import all_fields
from tests.support.recipe import (
    assert_same_bits,
    consumed_by_step,
    full_state,
    make_run,
    samples_of_step,
    train,
)
from tests.support.scenario import submit

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(0)]

FAULTS = int(os.environ.get("HPCTRAIN_DISTURBANCES", "200"))
A_ROUND = 6
STEPS = 160
LEASE_S = 3
PROCESSES = {
    ("control", signal.SIGKILL): True,
    ("control", signal.SIGSTOP): True,
    ("store", signal.SIGKILL): True,
    ("store", signal.SIGSTOP): True,
    ("replica server", signal.SIGKILL): False,
    ("replica server", signal.SIGSTOP): False,
    ("writer", signal.SIGKILL): False,
}
"""A process of a node and a signal to it: whether ranks start again for it."""
LOSING = [("liveness", signal.SIGKILL), ("liveness", signal.SIGSTOP)]
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": 5,
    "run.log_every_s": 0,
    "run.restarts_in_job": 100,
    "run.restart_pause_s": 0,
    "budget.nodes": 0,
    "budget.crashes": 0,
    "budget.no_progress": 0,
    "alive.lease_s": LEASE_S,
    "alive.hang_s": 4,
    "checkpoint.timeout_s": 15,
    "alive.memory": "auto",
    "alive.memory_steps": 2,
}


class Faults:
    """What may happen to a run that has spares; `again` is whether its ranks start again for it."""

    def __init__(self, run):
        self.run, self.slurm = run, run.slurm
        self.frozen = []
        self.where = ""

    @property
    def round(self):
        """The facts of the attempt that trains."""
        return all_fields(self.run.events("attempt_started")[-1])

    def choose(self):
        """A fault that this round can survive."""
        kinds = [self.kill_a_rank, self.stop_a_rank, self.kill_all_ranks_of_a_node]
        kinds += [self.stop_a_node_for_a_moment, self.hit_a_process, self.hit_a_process]
        if len(self._checkpoints()) > 1:  # with none left the run stops, and says why
            kinds.append(self.tear_the_newest_checkpoint)
        if self.round["spares"]:
            kinds += [self.kill_a_node, self.freeze_a_node, self.kill_an_agent]
            kinds.append(self.hit_a_liveness_process)
        return random.choice(kinds)

    def kill_a_rank(self):
        os.kill(random.choice(self._ranks()), signal.SIGKILL)
        return True

    def stop_a_rank(self):
        os.kill(random.choice(self._ranks()), signal.SIGSTOP)
        return True

    def kill_all_ranks_of_a_node(self):
        processes.kill_all(self._ranks(random.choice(self.round["nodes"])))
        return True

    def stop_a_node_for_a_moment(self):
        pids = self.slurm.pids_of_job(self.run.job_id, random.choice(self.round["nodes"]))
        processes.kill_all(pids, signal.SIGSTOP)
        time.sleep(LEASE_S / 3)
        processes.kill_all(pids, signal.SIGCONT)
        return False

    def tear_the_newest_checkpoint(self):
        newest = max(self.run.dir.checkpoints.glob("step-??????????"))
        shard = random.choice(sorted(newest.glob("shard-*")))
        os.truncate(shard, shard.stat().st_size // 2)
        return self.kill_a_rank()

    def kill_a_node(self):
        self.slurm.kill_node(self._a_node())
        return True

    def freeze_a_node(self):
        pids = self.slurm.pids_of_job(self.run.job_id, self._a_node())
        processes.kill_all(pids, signal.SIGSTOP)
        self.frozen += pids
        return True

    def kill_an_agent(self):
        os.kill(processes.parent(self._ranks(self._a_node())[0]), signal.SIGKILL)
        return True

    def hit_a_process(self):
        hit = random.choice(list(PROCESSES))
        return self._hit(*hit) and PROCESSES[hit]

    def hit_a_liveness_process(self):
        return self._hit(*random.choice(LOSING))

    def _hit(self, kind, signum):
        """Whether a process of that kind was there."""
        node = self._a_node() if kind != "store" else self.round["nodes"][0]
        pids = self.slurm.pids_of_job(self.run.job_id, node)
        found = [pid for pid in pids if node_processes.kind_of(pid) == kind]
        self.where += f" {kind} {signum.name}" if found else f" no {kind}"
        processes.kill_all(found[:1], signum)
        return bool(found)

    def thaw(self):
        """What was frozen goes on, and is to leave."""
        processes.kill_all(self.frozen, signal.SIGCONT)
        self.frozen = []

    def _checkpoints(self):
        return sorted(self.run.dir.checkpoints.glob("step-??????????"))

    def _a_node(self):
        """One that trains: the one whose agent leads, or another."""
        node = random.choice(self.round["nodes"])
        self.where = " that leads" if node == self.round["nodes"][0] else ""
        return node

    def _ranks(self, node=None):
        """Processes of this attempt's ranks: forked from agents, with a rank's log open."""
        attempt = str(self.run.dir.attempt(self.run.events("attempt_started")[-1].attempt))
        found = [
            pid
            for pid in self.slurm.pids_of_job(self.run.job_id, node)
            if "hpctrain.entry.slurm_task" in processes.command(pid)
            and any(
                path.startswith(attempt) and "/rank-" in path for path in processes.open_files(pid)
            )
        ]
        assert found, (attempt, node)
        return found


def disturbed(run, faults, count, tell):
    """So many faults, each behind a save; seconds until the next step was done, by kind."""
    took = []
    run.wait_event("saved")
    for _ in range(count):
        attempt = run.events("attempt_started")[-1].attempt
        run.wait_event("saved", attempt=attempt)
        if run.events("done"):
            break
        last = max(int(all_fields(e)["last"]) for e in run.events("steps"))
        fault, faults.where = faults.choose(), ""
        began = time.time()
        starts_again = fault()
        name = fault.__name__ + faults.where
        if starts_again:
            stepped = run.wait(
                f"attempt {attempt + 1}",
                lambda next_one=attempt + 1: [
                    event
                    for event in run.events("phase", next_one)
                    if all_fields(event)["name"] == "first_step"
                ],
            )
            took.append((name, stepped[0].t - began))
        else:
            run.wait_step(last + 5)
            took.append((name, time.time() - began))
        tell(f"{took[-1][0]}: next step after {took[-1][1]:.2f} s")
    faults.thaw()
    return took


def test_a_run_with_spares_stays_in_its_allocation_through_faults(slurm, tmp_path, capsys):
    seed = int(os.environ.get("HPCTRAIN_SEED", time.time_ns() % 10**9))
    random.seed(seed)

    def tell(text):
        with capsys.disabled():
            print(f"{time.strftime('%T')} {text}", flush=True)

    tell(f"seed {seed}, {FAULTS} faults")
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    took, rounds = [], 0
    while len(took) < FAULTS:
        rounds += 1
        folder = tmp_path / f"round-{rounds}"
        folder.mkdir()
        run = submit(slurm, folder, "--nodes=2+2", "--ranks-per-node=2", sets=SETTINGS)
        took += disturbed(run, Faults(run), min(A_ROUND, FAULTS - len(took)), tell)
        run.wait_event("done")
        # Where the first node was lost the batch script is gone, and another one ends the job.
        slurm.wait_job(run.job_id, ("COMPLETED", "CANCELLED"), timeout=30)
        assert slurm.job(run.job_id)["Restarts"] == "0", run.story()
        assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))
        used = consumed_by_step(run.dir)
        assert sorted(used) == list(range(1, STEPS + 1)), run.story()
        for step, indices in used.items():
            assert sorted(indices) == sorted(samples_of_step(run.dir, step)), f"step {step}"
        assert lineage(RunHistory.of(run.events())).problems == []
        for node in ("n1", "n2", "n3", "n4"):
            slurm.revive_node(node)
        tell(f"round {rounds} ended with the bits of a run in peace")
    for kind in sorted({kind for kind, _ in took}):
        seconds = [s for name, s in took if name == kind]
        tell(
            f"{kind}: {len(seconds)} times, median {statistics.median(seconds):.2f} s, "
            f"longest {max(seconds):.2f} s"
        )
