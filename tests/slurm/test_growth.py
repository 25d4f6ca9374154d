"""A node is added to the job in the place of a lost one, where the site permits that."""

from __future__ import annotations

import pytest

from hpctrain.history.attempts import attempts
from hpctrain.history.run_history import RunHistory
from hpctrain.scheduler.slurm.growth import request_name
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
        proved_by=("tests/unit/agent/test_simulated_rounds.py", "tests/unit/agent/test_growth.py")
    ),
]

STEPS = 40
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.1,
    "checkpoint.interval_steps": 5,
    "run.log_every_s": 0,
    "alive.shrink": "auto",
    "alive.grow": "auto",
}
EXACT = {"engine.exact": True, "train.micro_batch": 1}


def _jobs(slurm):
    """All jobs that SLURM has in its queue."""
    return slurm.run("squeue", "--noheader", "--format=%i", check=True).stdout.split()


def _asked(slurm, run):
    """Whether a node is asked for, and SLURM has none."""
    name = f"--name={request_name(run.job_id)}"
    return slurm.run("squeue", "--noheader", name, "--states=PENDING", check=True).stdout.split()


# Not on every SLURM: 26.05 can call the lost node "completing" for good, and the tests behind it
# wait for that node in vain; `make soak` has it there.
@pytest.mark.story(
    proved_by=(
        "tests/unit/agent/test_simulated_rounds.py",
        "tests/unit/scheduler/test_slurm_growth.py",
    )
)
def test_another_node_takes_part_where_one_was_lost(slurm, tmp_path, capsys):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2-3",
        "--ranks-per-node=2",
        sets=SETTINGS | EXACT,
        held={1: 20, 2: 28},
    )
    run.wait_event("saved")
    (first, lost, third), _ = run.nodes()

    slurm.kill_node(lost)
    run.let_go(1)
    joined = run.wait_event("node_joined")
    run.let_go(2)
    begun = run.wait_event("attempt_started", attempt=3)
    with capsys.disabled():
        waited = all_fields(joined)["waited_s"]
        print(
            f"\nthe node came after {waited:.1f} s, its round began {begun.t - joined.t:.1f} s on"
        )
    run.wait_done()

    added = all_fields(joined)["node"]
    assert added not in {first, lost, third}
    nodes = [one.nodes for one in attempts(RunHistory.of(run.events()))]
    assert nodes == [(first, lost, third), (first, third), (first, third, added)]
    again = [("node_failed", "restart"), ("grown", "restart"), ("completed", "stop")]
    assert run.ends() == again, run.story()
    assert (run.doctor(1), run.doctor(2)) == ("node_fail", "grown")
    assert slurm.job(run.job_id)["Restarts"] == "0"
    peace = make_run(
        tmp_path / "peace",
        train__steps=STEPS,
        train__dropout=0.0,
        train__micro_batch=1,
        engine__exact=True,
    )
    train(peace, 6)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))
    used = consumed_by_step(run.dir)
    assert {step: sorted(indices) for step, indices in used.items()} == {
        step: sorted(samples_of_step(run.dir, step)) for step in range(1, STEPS + 1)
    }
    slurm.wait_for(lambda: not _jobs(slurm), 20, "an empty queue")


def test_who_goes_on_after_the_first_node_asks_anew_and_takes_it_back_at_the_end(slurm, tmp_path):
    """A node that dies with a request leaves it in SLURM's queue, where it would wait for a node
    for nobody; and a lost node that comes up again is a new one."""
    held = {1: 20, 2: 30, 3: 40, 4: 50}
    run = submit(slurm, tmp_path, "--nodes=2-4", sets=SETTINGS | {"train.steps": 60}, held=held)
    run.wait_event("saved")
    (first, second, *others), _ = run.nodes()
    slurm.kill_node(second)
    run.let_go(1)
    run.wait("a request", lambda: _asked(slurm, run))
    slurm.kill_node(first)
    run.let_go(2)

    slurm.revive_node(second)
    joined = run.wait_event("node_joined")
    run.let_go(3)
    grown = all_fields(run.wait_event("attempt_started", attempt=4))
    assert all_fields(joined)["node"] == second
    assert grown["nodes"] == [*others, second]
    run.wait("another request, for the first node", lambda: _asked(slurm, run))
    run.let_go(4)
    run.wait_event("done")
    slurm.wait_for(lambda: not _jobs(slurm), 30, "an empty queue")
    lost = ("node_failed", "restart")
    assert run.ends() == [lost, lost, ("grown", "restart"), ("completed", "stop")], run.story()
