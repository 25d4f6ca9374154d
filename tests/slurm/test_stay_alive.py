"""A lost node ends no job: a spare takes its place, or the run goes on with fewer nodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import processes
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

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=(
            "tests/unit/agent/test_simulated_rounds.py",
            "tests/unit/agent/test_simulated_stories.py",
        )
    ),
]

STEPS = 60
EVERY = 5
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": EVERY,
    "run.log_every_s": 0,
}


def _trained(run):
    return attempts(RunHistory.of(run.events()))


def _rank_pid(slurm, run, attempt, rank):
    """The process that has this rank's log open."""
    log = str(run.dir.rank_log(attempt, rank))
    pids = slurm.pids_of_job(run.job_id)
    return next(pid for pid in pids if log in map(str, processes.open_files(pid)))


def _next_step(run, attempt, since, capsys, what):
    """The ledger's time of the first step of an attempt that is done, after a moment; printed."""
    first = run.wait(
        f"a step of attempt {attempt}",
        lambda: [e for e in run.events("phase", attempt) if all_fields(e)["name"] == "first_step"],
    )[0]
    with capsys.disabled():
        print(f"\n{what}: the next step was done after {first.t - since:.2f} s")
    return first.t - since


def _assert_every_sample_was_used_once(run):
    used = consumed_by_step(run.dir)
    assert sorted(used) == list(range(1, STEPS + 1))
    for step, indices in used.items():
        assert sorted(indices) == sorted(samples_of_step(run.dir, step)), f"step {step}"
    assert lineage(RunHistory.of(run.events())).problems == []


def test_a_spare_takes_a_dead_nodes_place_and_the_next_one_is_left_out(slurm, tmp_path, capsys):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2-3+1",
        "--ranks-per-node=2",
        sets=SETTINGS | {"alive.shrink": "auto"},
        held={1: 20, 2: 40},
    )
    run.wait_event("saved")

    slurm.kill_node("n2")
    run.let_go(1)
    _next_step(run, 2, time.time(), capsys, "node killed, a spare")
    run.wait_event("saved", attempt=2)
    slurm.kill_node("n4")
    run.let_go(2)
    _next_step(run, 3, time.time(), capsys, "node killed, none left")
    run.wait_done()

    first, second, third = _trained(run)
    assert first.nodes == ("n1", "n2", "n3")
    assert second.nodes == ("n1", "n3", "n4")
    assert third.nodes == ("n1", "n3")
    again = ("node_failed", "restart")
    assert run.ends() == [again, again, ("completed", "stop")], run.story()
    assert slurm.job(run.job_id)["Restarts"] == "0"
    lost = [all_fields(event) for event in run.events("node_lost")]
    assert [(fact["node"], fact["members"]) for fact in lost] == [
        ("n2", ["n1", "n3", "n4"]),
        ("n4", ["n1", "n3"]),
    ]
    _assert_every_sample_was_used_once(run)


@pytest.mark.soak  # tests/engines/test_in_place.py has it in short
def test_a_frozen_node_is_replaced_and_ends_its_ranks_as_it_thaws(slurm, tmp_path, capsys):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2+1",
        "--ranks-per-node=2",
        sets=SETTINGS | {"alive.lease_s": 3},
    )
    run.wait_event("saved")
    pids = slurm.pids_of_job(run.job_id, "n2")

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    frozen = time.time()
    _next_step(run, 2, frozen, capsys, "node frozen, lease 3 s")
    run.wait_event("saved", attempt=2)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == pids
    thawed = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.wait("the end of the old ranks", lambda: not slurm.pids_of_job(run.job_id, "n2"))
    with capsys.disabled():
        print(f"thawed; its processes were gone after {time.time() - thawed:.2f} s")
    run.wait_done()

    assert [one.nodes for one in _trained(run)] == [("n1", "n2"), ("n1", "n3")]
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))
    assert run.events("saved", attempt=1)[-1].t < frozen + 3
    assert slurm.job(run.job_id)["Restarts"] == "0"


@pytest.mark.story(
    proved_by=(
        "tests/engines/test_in_place.py",
        "tests/unit/agent/test_loss_ending.py",
        "tests/unit/agent/test_simulated_stories.py",
    )
)
def test_where_the_first_node_dies_the_others_go_on_and_end_the_job(slurm, tmp_path, capsys):
    """SLURM keeps the job for them, without its batch script and its srun."""
    args = ("--nodes=2+1", "--ranks-per-node=2")
    run = submit(slurm, tmp_path, *args, sets=SETTINGS, held={1: 20})
    run.wait_event("saved")

    (leader, member), (spare,) = run.nodes()
    slurm.kill_node(leader)
    run.let_go(1)
    _next_step(run, 2, time.time(), capsys, "first node killed")
    run.wait_event("done")
    slurm.wait_job(run.job_id, ("CANCELLED",))

    first, last = _trained(run)
    assert (first.reason, first.next) == ("node_failed", "restart")
    assert (first.nodes, last.nodes) == ((leader, member), (member, spare))
    (lost,) = run.events("node_lost")
    assert (lost.fact.node, lost.fact.was_first) == (leader, True)
    assert slurm.job(run.job_id)["Restarts"] == "0"
    assert run.status()["state"] == "done"
    _assert_every_sample_was_used_once(run)


@pytest.mark.soak
def test_a_job_that_has_lost_its_first_node_is_requeued_at_a_preemption(slurm, tmp_path):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2+1",
        "--ranks-per-node=2",
        "--partition=grace",
        sets=SETTINGS,
        held={1: 20, 2: 40},
    )
    run.wait_event("saved")
    (leader, *_), _ = run.nodes()
    slurm.kill_node(leader)
    run.let_go(1)
    run.wait_event("saved", attempt=2)

    urgent = slurm.submit_urgent(run.nodes()[0])
    run.wait_preempted()
    run.let_go(2)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    slurm.revive_node(leader)
    run.wait_done()

    assert run.ends()[1:] == [("preempted", "requeue"), ("completed", "stop")], run.story()
    assert slurm.job(run.job_id)["Restarts"] == "1"
    _assert_every_sample_was_used_once(run)


@pytest.mark.soak
def test_a_job_whose_first_node_dies_before_its_first_attempt_is_requeued(slurm, tmp_path):
    run = submit(slurm, tmp_path, "--nodes=2+1", "--ranks-per-node=2", sets=SETTINGS)

    def lives():
        """Lifelines are there, and nothing has begun: imports take seconds from here on."""
        names = {
            node
            for node in ("n1", "n2", "n3", "n4")
            for pid in slurm.pids_of_job(run.job_id, node)
            if len(processes.descendants(pid)) > 1
            and "hpctrain.entry.slurm_task" in processes.command(pid)
        }
        return len(names) == 3 and names

    nodes = run.wait("agents", lives)
    assert not run.events("attempt_started")
    first = min(nodes)
    slurm.kill_node(first)
    run.wait_done()

    assert run.ends() == [("node_failed", "requeue"), ("completed", "stop")], run.story()
    assert first not in run.nodes()[0]
    assert slurm.job(run.job_id)["Restarts"] == "1"


def _last_words_of_batch_script(run):
    """What the batch script has printed, once it has ended."""
    if any(run.slurm.pids_of_job(run.job_id)):
        return None
    return "".join(path.read_text() for path in run.dir.jobs.glob("*.out"))


@pytest.mark.soak
def test_a_first_node_that_thaws_ends_its_ranks_and_leaves_the_others_their_job(
    slurm, tmp_path, capsys
):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2+1",
        "--ranks-per-node=2",
        sets=SETTINGS | {"alive.lease_s": 3},
    )
    run.wait_event("saved")
    (leader, member), (spare,) = run.nodes()
    pids = slurm.pids_of_job(run.job_id, leader)
    ranks = [
        pid
        for pid in pids
        if str(run.dir.rank_log(1, 0).parent) in " ".join(processes.open_files(pid))
    ]

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    frozen = time.time()
    _next_step(run, 2, frozen, capsys, "first node frozen, lease 3 s")
    thawed = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.wait("the end of the old ranks", lambda: not any(map(processes.alive, ranks)))
    with capsys.disabled():
        print(f"thawed; its ranks were gone after {time.time() - thawed:.2f} s")
    run.wait_event("done")
    slurm.wait_job(run.job_id, ("CANCELLED",))

    told = run.wait("the batch script's end", lambda: _last_words_of_batch_script(run))
    assert "may start once more" not in told
    assert len(ranks) >= 2
    assert [one.nodes for one in _trained(run)] == [(leader, member), (member, spare)]
    assert run.events("saved", attempt=1)[-1].t < frozen + 3
    assert slurm.job(run.job_id)["Restarts"] == "0"
    assert run.status()["state"] == "done"
    _assert_every_sample_was_used_once(run)


@pytest.mark.soak  # tests/engines/test_in_place.py has it in short
def test_a_rank_that_dies_costs_no_node_once_and_its_node_the_second_time(slurm, tmp_path, capsys):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2+1",
        "--ranks-per-node=2",
        sets=SETTINGS | {"run.restart_pause_s": 0},
        held={1: 20, 2: 40},
    )
    for attempt in (1, 2):
        run.wait_event("saved", attempt=attempt)
        os.kill(_rank_pid(slurm, run, attempt, 3), signal.SIGKILL)
        run.let_go(attempt)
        _next_step(run, attempt + 1, time.time(), capsys, "rank killed")
    run.wait_done()

    assert [one.nodes for one in _trained(run)] == [("n1", "n2"), ("n1", "n2"), ("n1", "n3")]
    (lost,) = run.events("node_lost")
    assert all_fields(lost)["why"] == "its ranks died twice within an hour"
    assert slurm.job(run.job_id)["Restarts"] == "0"
