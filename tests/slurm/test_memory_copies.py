"""Copies in the nodes' memory in a job that outlives its nodes: a dead rank, then a dead node."""

from __future__ import annotations

import os
import signal

import pytest

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import processes
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train
from tests.support.scenario import copies_in_memory, submit

pytestmark = pytest.mark.slurm

STEPS = 50
EVERY = 4
SETTINGS = copies_in_memory(STEPS, EVERY)
NO_DISK = ";".join(f"fail:{at},attempt=3,error=EIO" for at in ("choose.list", "read.manifest"))


def _kill_rank(slurm, run, attempt, rank):
    log = str(run.dir.rank_log(attempt, rank))
    pids = slurm.pids_of_job(run.job_id)
    pid = next(pid for pid in pids if log in map(str, processes.open_files(pid)))
    os.kill(pid, signal.SIGKILL)


@pytest.mark.story(
    proved_by=(
        "tests/engines/test_memory.py::test_nodes_have_each_their_ranks_copies",
        "tests/unit/memory/test_replica_peer.py",
    )
)
def test_a_dead_rank_goes_on_from_its_node_and_a_dead_node_from_its_peer(slurm, tmp_path, capsys):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2+1",
        "--ranks-per-node=2",
        sets=SETTINGS,
        env={"HPCTRAIN_FAULTS": NO_DISK},
    )
    for attempt in (1, 2):
        run.wait(f"copies of attempt {attempt}", lambda of=attempt: run.events("memory_copies", of))
        if attempt == 1:
            _kill_rank(slurm, run, attempt, 3)
    slurm.kill_node("n2")
    run.wait_done()

    restored = [all_fields(event) for event in run.events("restored")]
    assert [fact["read_from"] for fact in restored] == ["", "memory", "peer"], run.story()
    assert [fact["skipped"] for fact in restored] == [[], [], []]
    done = [all_fields(event)["step"] for event in run.events("attempt_ended")]
    for again, step in zip(restored[1:], done[:2], strict=True):
        lost = step - again["step"]
        with capsys.disabled():
            print(f"\nstep {step} was done, {lost} are done again; {again['seconds']} s")
        assert again["step"] > 0
        assert lost <= EVERY + 2  # of short steps some more: all ranks agree on the step first
    assert [of.nodes for of in attempts(RunHistory.of(run.events()))][-1] == ("n1", "n3")
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))
    assert slurm.job(run.job_id)["Restarts"] == "0"


@pytest.mark.story(
    proved_by=(
        "tests/unit/memory/test_replica_peer.py",
        "tests/unit/memory/test_replica_server_process.py",
    )
)
def test_the_first_nodes_part_is_had_from_its_peer_by_those_that_go_on(slurm, tmp_path, capsys):
    run = submit(slurm, tmp_path, "--nodes=2+1", "--ranks-per-node=2", sets=SETTINGS)
    run.wait("copies", lambda: run.events("memory_copies"))
    slurm.kill_node(run.nodes()[0][0])
    run.wait_event("done")
    slurm.wait_job(run.job_id, ("CANCELLED",))

    (_, again) = [all_fields(event) for event in run.events("restored")]
    assert (again["read_from"], again["skipped"]) == ("peer", []), run.story()
    (done, _) = [all_fields(event)["step"] for event in run.events("attempt_ended")]
    with capsys.disabled():
        print(f"\nstep {done} was done, {done - again['step']} are done again")
    assert 0 < again["step"] >= done - EVERY - 2
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))


@pytest.mark.story(proved_by="tests/unit/agent/test_copies_to_disk.py")
def test_where_no_round_can_follow_a_loss_copies_go_to_disk_before_the_requeue(
    slurm, tmp_path, capsys
):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2",
        "--ranks-per-node=2",
        sets=SETTINGS | {"alive.shrink": "auto"},
    )
    run.wait("copies", lambda: run.events("memory_copies"))
    slurm.kill_node(run.nodes()[0][1])
    run.wait_done()

    assert run.ends() == [("node_failed", "requeue"), ("completed", "stop")], run.story()
    (saved, *_) = [all_fields(event) for event in run.events("saved")]
    (_, again) = [all_fields(event) for event in run.events("restored")]
    (done, _) = [all_fields(event)["step"] for event in run.events("attempt_ended")]
    with capsys.disabled():
        print(f"\nstep {done} was done, {done - again['step']} are done again: {saved}")
    assert (saved["mode"], saved["step"]) == ("memory", again["step"])
    assert (again["read_from"], again["skipped"]) == ("", [])
    assert 0 < again["step"] >= done - EVERY - 2
    assert slurm.job(run.job_id)["Restarts"] == "1"
    peace = make_run(tmp_path / "peace", train__steps=STEPS, train__dropout=0.0)
    train(peace, 4)
    assert_same_bits(full_state(run.dir, STEPS), full_state(peace, STEPS))


@pytest.mark.soak  # tests/unit/memory/test_replica_peer.py has what is brought from where in short
def test_fewer_nodes_bring_each_other_what_they_lack(slurm, tmp_path):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2-3",
        "--ranks-per-node=2",
        sets=SETTINGS | {"alive.shrink": "auto"},
    )
    run.wait("copies", lambda: run.events("memory_copies"))
    slurm.kill_node("n2")
    run.wait_done()

    (_, again) = [all_fields(event) for event in run.events("restored")]
    assert (again["read_from"], again["skipped"]) == ("peer", []), run.story()
    assert (again["from_world_size"], again["world_size"]) == (6, 4)
    (done, _) = [all_fields(event)["step"] for event in run.events("attempt_ended")]
    assert 0 < again["step"] >= done - EVERY - 2
    assert lineage(RunHistory.of(run.events())).problems == []
