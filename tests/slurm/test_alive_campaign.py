"""A run in an allocation with spares that is disturbed at random stays in it, and loses nothing.

    HPCTRAIN_SEED=7 HPCTRAIN_DISTURBANCES=30 pytest --tier soak -m soak FILE

Each round is a run of 2 nodes with 2 spares and some faults; each fault prints a line: what it was,
and how long it took until the next step was done. `HPCTRAIN_SEED=7/4` begins with round 4 of
seed 7. tests/slurm/test_stay_alive.py has the short form.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from hpctrain.core.base.locks import MEMORY
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import node_processes, patience, processes, small_disk
from tests.support.ledger_runs import all_fields
from tests.support.node_faults import lost_beyond, with_full_disk
from tests.support.recipe import (
    assert_same_bits,
    consumed_by_step,
    full_state,
    make_run,
    samples_of_step,
    train,
)
from tests.support.scenario import submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.soak,
    pytest.mark.two_users,
    pytest.mark.timeout(0),
]

FAULTS = int(os.environ.get("HPCTRAIN_DISTURBANCES", "200"))
A_ROUND = 6
STEPS = 160
DISK_BYTES = 24 << 20
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
BESIDE_A_FULL_DISK = ("rank", "writer", "control", "store", "replica server", "")
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
    "budget.storage": 0,
    "alive.lease_s": LEASE_S,
    "alive.hang_s": 4,
    "alive.first_step_s": 40,
    "checkpoint.timeout_s": 15,
    "alive.memory": "auto",
    "alive.memory_steps": 2,
}


class Faults:
    """What may happen to a run that has spares; each tells whether its ranks start again for it.

    None stands for either. `seen` has the files and folders in memory that processes of the job
    had, with their nodes; `torn` the steps of damaged checkpoints.
    """

    def __init__(self, run, disk):
        self.run, self.slurm, self.disk = run, run.slurm, disk
        self.frozen, self.done = [], []
        self.where = ""
        self.torn = set()
        self.seen = {}
        self.has_filled = False

    @property
    def round(self):
        """The facts of the attempt that trains."""
        return all_fields(self.run.events("attempt_started")[-1])

    def choose(self):
        """A fault that this round can survive."""
        kinds = [self.kill_a_rank, self.stop_a_rank, self.kill_all_ranks_of_a_node]
        kinds += [self.stop_a_node_for_a_moment, self.hit_a_process, self.hit_a_process]
        kinds.append(self.fill_the_disk)
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
        self.torn.add(int(newest.name.removeprefix("step-")))
        whole = bytearray(shard.read_bytes())
        if random.random() < 0.5:
            os.truncate(shard, len(whole) // 2)
        else:
            whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
            shard.write_bytes(whole)
        who = [self.kill_a_rank, self.kill_all_ranks_of_a_node]
        if self.round["spares"]:
            who += [self.kill_a_node, self.kill_an_agent]
        then = random.choice(who)
        self.where += f" {then.__name__}"
        return then()

    def fill_the_disk(self):
        self.has_filled = True
        kind = random.choice(BESIDE_A_FULL_DISK)
        if kind == "rank":
            self.where = " rank"
            with_full_disk(self.disk, random, self.kill_a_rank)
        else:
            kill = partial(self._hit, kind, signal.SIGKILL) if kind else int
            with_full_disk(self.disk, random, kill)

    def kill_a_node(self):
        node = self._a_node()
        self.look()
        self.slurm.kill_node(node)
        for path in [path for path, where in self.seen.items() if where == node]:
            del self.seen[path]  # of a node without power nobody can remove them
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
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

    def look(self):
        """Note what the job's processes have in memory."""
        for node in ("n1", "n2", "n3", "n4"):
            for pid in self.slurm.pids_of_job(self.run.job_id, node):
                for path in processes.open_files(pid):
                    if path.startswith(f"{MEMORY}/hpctrain"):
                        self.seen.setdefault(path.removesuffix(" (deleted)"), node)

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


def _has_saved_since(run, saves):
    """Whether the newest attempt has saved since there were so many saves, or the run is done.

    What a full disk has delayed is over then: no fault meets an attempt before its first step.
    """
    newest = run.events("attempt_started")[-1:]
    later = run.events("saved")[saves:]
    return run.events("done") or (newest and any(one.attempt == newest[0].attempt for one in later))


def disturbed(faults, count, tell):
    """So many faults, each behind a save; seconds until the next step was done, by kind."""
    run, took, saves = faults.run, [], 0
    for _ in range(count):
        run.wait("a save", partial(_has_saved_since, run, saves))
        attempt = run.events("attempt_started")[-1].attempt
        if run.events("done"):
            break
        faults.look()
        last = run.wait_step(0)
        fault, faults.where = faults.choose(), ""
        began = time.time()
        starts_again = fault()
        name = fault.__name__ + faults.where
        faults.done.append(f"{name} at step {last}")

        def steps_on(attempt=attempt, last=last, starts_again=starts_again):
            newer = [
                event
                for event in run.events("phase")
                if event.attempt > attempt and all_fields(event)["name"] == "first_step"
            ]
            if newer and starts_again is not False:
                return newer[0].t
            if any(reason == "completed" for reason, _ in run.ends()):
                return time.time()  # it came to its end meanwhile
            steps = [e for e in run.events("steps", attempt) if all_fields(e)["last"] >= last + 5]
            return time.time() if steps and not starts_again else None

        stepped = run.wait(f"steps after {name} in attempt {attempt}", steps_on)
        took.append((name, stepped - began))
        tell(f"{name}: next step after {took[-1][1]:.2f} s")
        saves = len(run.events("saved"))
    faults.look()
    faults.thaw()
    return took


def wrong_with(faults, peace):
    """What is wrong with a run that has come to its end, in words."""
    run, slurm, wrong = faults.run, faults.run.slurm, lost_beyond(faults)
    if slurm.job(run.job_id)["Restarts"] != "0" and not faults.has_filled:
        wrong.append("the job was requeued")
    try:
        assert_same_bits(full_state(run.dir, STEPS), peace)
    except AssertionError as error:
        wrong.append(f"other weights: {error}")
    used = consumed_by_step(run.dir)
    for step in range(1, STEPS + 1):
        if sorted(used.get(step, [])) != sorted(samples_of_step(run.dir, step)):
            wrong.append(f"step {step} used other samples")
    if not faults.has_filled:  # what happened while the ledger had no room is not in it
        wrong += [str(one) for one in lineage(RunHistory.of(run.events())).problems]
    told = "".join(path.read_text() for path in run.dir.jobs.glob("*.out"))
    if count := told.count("Traceback (most recent call last)"):
        wrong.append(f"{count} tracebacks in the job's output")
    with suppress(AssertionError):
        patience.until(lambda: not slurm.pids_of_job(run.job_id), str)
    left = slurm.pids_of_job(run.job_id)
    wrong += [f"process {pid}: {processes.command(pid)}" for pid in left]
    return wrong + [f"in memory {path}" for path in faults.seen if Path(path).exists()]


def played(slurm, folder, count, peace, tell):
    """A round: what its faults took, and what is wrong with it."""
    disk = folder / "disk"
    sets = ("--nodes=2+2", "--ranks-per-node=2")
    temporary = folder / "tmp"
    temporary.mkdir()
    run = submit(slurm, disk, *sets, sets=SETTINGS, env={"TMPDIR": str(temporary)})
    faults, took = Faults(run, disk), []
    try:
        took = disturbed(faults, count, tell)
        run.wait_event("done")
        # Where the first node was lost the batch script is gone, and another one ends the job.
        slurm.wait_job(run.job_id, ("COMPLETED", "CANCELLED"))
        wrong = wrong_with(faults, peace)
        wrong += [f"file {path}" for path in temporary.iterdir()]
    except AssertionError as error:
        wrong = [str(error)]
        faults.thaw()
        slurm.end_job(run.job_id)
    for node in ("n1", "n2", "n3", "n4"):
        slurm.revive_node(node)
    if wrong:  # the disk goes with its mount
        shutil.copytree(run.dir.root, folder / "kept", symlinks=True)
    return took or [("none", 0.0)] * len(faults.done), wrong


def test_a_run_with_spares_stays_in_its_allocation_through_faults(slurm, tmp_path, capsys):
    seed, _, first = os.environ.get("HPCTRAIN_SEED", f"{time.time_ns() % 10**9}").partition("/")

    def tell(text):
        with capsys.disabled():
            print(f"{time.strftime('%T')} {text}", flush=True)

    tell(f"seed {seed}, {FAULTS} faults")
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    state = full_state(peace, STEPS)
    took, bad, rounds = [], [], int(first or 1) - 1
    while len(took) < FAULTS:
        rounds += 1
        random.seed(f"{seed}/{rounds}")
        folder = tmp_path / f"round-{rounds}"
        with small_disk.mounted(folder / "disk", DISK_BYTES):
            some, wrong = played(slurm, folder, min(A_ROUND, FAULTS - len(took)), state, tell)
        took += some
        bad += [f"round {rounds}: {one}" for one in wrong]
        tell(f"round {rounds}: {[one[:300] for one in wrong] or 'the bits of a run in peace'}")
    for kind in sorted({kind for kind, _ in took}):
        seconds = [s for name, s in took if name == kind]
        tell(
            f"{kind}: {len(seconds)} times, median {statistics.median(seconds):.2f} s, "
            f"longest {max(seconds):.2f} s"
        )
    tell(f"{len(took)} faults in {rounds} rounds, {len(bad)} wrong")
    assert bad == []
