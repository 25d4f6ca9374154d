"""A rank that is killed in a SLURM job of two nodes: no step is lost, and the disk is not read."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import processes
from tests.support.ledger_runs import all_fields
from tests.support.local_runs import SCRIPTS
from tests.support.recipe import TINY, assert_same_bits, full_state, make_run, train
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

STEPS = 40
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.2,
    "checkpoint.interval_steps": 1000,
    "run.log_every_s": 0,
    "run.restart_pause_s": 0,
    "alive.memory": "auto",
    "alive.memory_steps": 20,
}
NO_DISK = ";".join(f"fail:{at},attempt=2,error=EIO" for at in ("choose.list", "read.manifest"))


def _kill_rank(slurm, run, attempt, rank):
    log = str(run.dir.rank_log(attempt, rank))
    pids = slurm.pids_of_job(run.job_id)
    pid = next(pid for pid in pids if log in map(str, processes.open_files(pid)))
    os.kill(pid, signal.SIGKILL)


def _wait_for_copies_and_a_step(run, attempt):
    run.wait("copies", lambda: run.events("memory_copies", attempt))
    seen = run.events("steps", attempt)[-1]
    after = all_fields(seen)["last"] + 4
    run.wait("steps", lambda: all_fields(run.events("steps", attempt)[-1])["last"] >= after)


@pytest.mark.story(
    proved_by="tests/engines/test_last_will.py::test_no_step_is_lost_wherever_a_rank_is_killed"
)
@pytest.mark.parametrize("nodes", ["2", "2+1"])
def test_a_killed_rank_costs_no_step_that_was_done(slurm, tmp_path, capsys, nodes):
    args = (f"--nodes={nodes}", "--ranks-per-node=2")
    run = submit(slurm, tmp_path, *args, sets=SETTINGS, env={"HPCTRAIN_FAULTS": NO_DISK})
    _wait_for_copies_and_a_step(run, 1)
    _kill_rank(slurm, run, 1, 3)
    run.wait_done()

    _, again = [all_fields(event) for event in run.events("restored")]
    done = all_fields(run.events("attempt_ended")[0])["step"]
    with capsys.disabled():
        print(f"\nstep {done} was done, goes on from {again['step']}; {again['seconds']} s")
    assert (again["read_from"], again["skipped"]) == ("will", []), run.story()
    assert again["step"] == done
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))
    assert slurm.job(run.job_id)["Restarts"] == "0"


def _submit_whose_agent_dies_over_a_will(slurm, tmp_path, killed):
    return submit(
        slurm,
        tmp_path,
        *("--nodes=2+1", "--ranks-per-node=2"),
        sets={**TINY, "train.dropout": 0.0, **SETTINGS, "alive.memory_steps": 4},
        script=[str(SCRIPTS / "killed_at.py")],
        env={"HPCTRAIN_FAULTS": NO_DISK, "KILLED": killed},
    )


def _assert_that_it_went_on_from_the_copy_before(run, tmp_path, capsys):
    """Of the will there is a header; of the node's ranks the next node has a copy."""
    _, again = [all_fields(event) for event in run.events("restored")]
    done = all_fields(run.events("attempt_ended")[0])["step"]
    with capsys.disabled():
        print(f"\nstep {done} was done, goes on from {again['step']} of {again['read_from']}")
    assert (again["read_from"], again["skipped"]) == ("buddy", []), run.story()
    assert 0 < again["step"] < 24
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))
    assert run.slurm.job(run.job_id)["Restarts"] == "0"


@pytest.mark.story(
    proved_by="tests/engines/test_last_will.py::test_where_its_agent_is_killed_over_a_will_the_run_goes_on_from_a_whole_checkpoint"
)
def test_where_an_agent_is_killed_over_a_will_the_others_go_on_from_the_copy_before(
    slurm, tmp_path, capsys
):
    run = _submit_whose_agent_dies_over_a_will(slurm, tmp_path, "1:3:25:backward,1:2:25:agent")
    run.wait_done()

    (lost,) = [all_fields(event) for event in run.events("node_lost")]
    assert (lost["node"], lost["members"]) == ("n2", ["n1", "n3"])
    _assert_that_it_went_on_from_the_copy_before(run, tmp_path, capsys)


@pytest.mark.soak
def test_where_it_is_the_first_nodes_agent_another_one_leads_them(slurm, tmp_path, capsys):
    run = _submit_whose_agent_dies_over_a_will(slurm, tmp_path, "1:1:25:backward,1:0:25:agent")
    run.wait_event("done")
    slurm.wait_job(run.job_id, ("CANCELLED",), timeout=30)

    (lost,) = [all_fields(event) for event in run.events("node_lost")]
    assert (lost["node"], lost["was_first"]) == ("n1", True)
    _assert_that_it_went_on_from_the_copy_before(run, tmp_path, capsys)
