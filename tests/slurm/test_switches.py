"""Copies in memory on a cluster whose nodes hang on two switches: one that dies takes no state."""

from __future__ import annotations

import pytest

from hpctrain.cli.main import main
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import all_fields
from tests.support.scenario import copies_in_memory, submit
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_config import Shape

pytestmark = pytest.mark.slurm

STEPS = 50
EVERY = 4
SETTINGS = copies_in_memory(STEPS, EVERY) | {"alive.shrink": "auto"}
NO_DISK = ";".join(
    f"fail:{at},attempt={attempt},error=EIO"
    for attempt in (2, 3)  # both nodes may be missed in one look, or one after the other
    for at in ("choose.list", "read.manifest")
)
SWITCHES = {"s1": ("n1", "n2"), "s2": ("n3", "n4")}


@pytest.fixture(scope="module")
def slurm_cluster():
    """Four nodes on two switches, which `topology/tree` knows."""
    with SlurmCluster(shape=Shape(switches=SWITCHES)) as cluster:
        yield cluster


@pytest.mark.story(
    proved_by=(
        "tests/unit/memory/test_peer_assignment.py",
        "tests/unit/memory/test_replica_peer.py",
    )
)
def test_a_switch_that_dies_with_its_nodes_leaves_every_copy_on_the_other_one(
    slurm, tmp_path, capsys
):
    run = submit(slurm, tmp_path, "--nodes=2-4", sets=SETTINGS, env={"HPCTRAIN_FAULTS": NO_DISK})
    run.wait("copies", lambda: run.events("memory_copies"))
    slurm.kill_node(*SWITCHES["s2"])
    run.wait_done()

    restored = [all_fields(event) for event in run.events("restored")]
    assert [fact["read_from"] for fact in restored][-1] == "peer", run.story()
    assert [fact["skipped"] for fact in restored] == [[]] * len(restored)
    done = [all_fields(event)["step"] for event in run.events("attempt_ended")]
    again = restored[-1]["step"]
    with capsys.disabled():
        print(f"\nsteps {done} were done, {again} was gone on from")
    assert again > 0
    assert done[0] - again <= EVERY + 2
    first, *_ = [all_fields(event) for event in run.events("attempt_started")]
    assert first["nodes"] == ["n1", "n2", "n3", "n4"]
    assert first["peers"] == ["n3", "n4", "n1", "n2"]
    assert first["switches"] == ["top.s1", "top.s1", "top.s2", "top.s2"]
    history = RunHistory.of(run.events())
    assert [of.nodes for of in attempts(history)][-1] == SWITCHES["s1"]
    assert lineage(history).problems == []
    assert slurm.job(run.job_id)["Restarts"] == "0"


@pytest.mark.story(proved_by="tests/unit/memory/test_peer_assignment.py")
def test_where_a_switch_has_more_than_half_it_is_said_whose_copies_it_takes(
    slurm, tmp_path, capsys
):
    run = submit(slurm, tmp_path, "--nodes=2-3", sets=SETTINGS | {"train.steps": 12})
    run.wait("copies", lambda: run.events("memory_copies"))
    run.wait_done()

    assert main(["status", run.dir.name, "--runs", str(run.dir.root.parent)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "copies of n1 on n3, n2 on n1, n3 on n2; 2 of 3 on another switch" in shown
    said = "copies of n2 stay on their own switch (top.s1)"
    assert any(said in path.read_text() for path in run.dir.jobs.iterdir() if path.is_file())


@pytest.mark.soak  # test_memory_copies.py has the loss of the first node in short
def test_the_switch_of_the_first_node_takes_no_state_with_it_either(slurm, tmp_path, capsys):
    run = submit(slurm, tmp_path, "--nodes=2-4", sets=SETTINGS, env={"HPCTRAIN_FAULTS": NO_DISK})
    run.wait("copies", lambda: run.events("memory_copies"))
    slurm.kill_node(*SWITCHES["s1"])
    run.wait_event("done")
    slurm.wait_job(run.job_id, ("CANCELLED",))

    again = [all_fields(event) for event in run.events("restored")][-1]
    done = [all_fields(event)["step"] for event in run.events("attempt_ended")]
    with capsys.disabled():
        print(f"\nsteps {done} were done, {again['step']} was gone on from")
    assert (again["read_from"], again["skipped"]) == ("peer", []), run.story()
    assert 0 < again["step"] >= done[0] - EVERY - 2
    assert [of.nodes for of in attempts(RunHistory.of(run.events()))][-1] == SWITCHES["s2"]
