"""One run on 2 nodes, on 1, on 2 again, then under the other engine, has one curve."""

from __future__ import annotations

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import all_fields
from tests.support.recipe import consumed_by_step, losses, make_run, samples_of_step, train
from tests.support.scenario import submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.story(
        proved_by=(
            "tests/slurm/test_shapes.py",
            "tests/unit/plan/test_mesh.py",
            "tests/unit/data/test_order.py",
        )
    ),
]

STEPS = 50


@pytest.fixture(scope="module")
def in_peace(tmp_path_factory):
    """The same training on one rank, never stopped."""
    root = tmp_path_factory.mktemp("in-peace") / "run"
    run = make_run(root, train__steps=STEPS, train__dropout=0.0)
    train(run, 1)
    return run


def test_a_run_takes_the_nodes_that_there_are_at_each_start(slurm, tmp_path, in_peace):
    settings = {"train.steps": STEPS, "train.step_delay_s": 0.2}
    run = submit(slurm, tmp_path, "--nodes=1-2", sets=settings, held={1: 12, 2: 24, 3: 36})
    run.wait_step(5, attempt=1)

    urgent = slurm.submit_urgent(["n1", "n3", "n4"])
    run.wait_preempted()
    run.let_go(1)
    run.wait_step(10, attempt=2)
    slurm.cancel(urgent)
    slurm.wait_job(urgent, "CANCELLED")
    slurm.run("scontrol", "requeue", run.job_id, check=True)
    run.let_go(2)
    run.wait_step(15, attempt=3)
    run.cli("cancel", "run", "--save")
    run.let_go(3)
    slurm.wait_job(run.job_id, "COMPLETED")
    plan = run.cli("resume", "run", "--nodes=3", "--set=engine.kind=fsdp2")
    run.job_id = plan.split("job ")[1].split()[0]
    run.wait_done()

    views = attempts(RunHistory.of(run.events()))
    assert [view.nodes for view in views[:3]] == [("n1", "n2"), ("n2",), ("n1", "n2")]
    assert [view.world_size for view in views] == [2, 1, 2, 3]
    engines = [found.manifest.engine for found in find.candidates(run.dir)]
    assert engines[:2] == ["fsdp2", "ddp"]
    assert [all_fields(e)["from_world_size"] for e in run.events("restored")] == [None, 2, 1, 2]
    assert "saved by     2 ranks, ddp" in plan
    assert "3 nodes x 1 rank: fsdp2, dp_shard=3" in plan
    assert [view.next for view in views] == ["leave", "leave", "stop", "stop"]
    # A requeue by hand comes with the same signal, and the run goes on all the same.
    causes = ["preempted", "preempted", "stopped", "completed"]
    assert [view.cause for view in views] == causes
    assert [run.doctor(number) for number in range(1, 5)] == causes
    assert run.steps_lost() == [0, 0, 0]
    assert lineage(RunHistory.of(run.events())).problems == []
    for step, indices in consumed_by_step(run.dir).items():
        assert sorted(indices) == sorted(samples_of_step(run.dir, step)), f"step {step}"
    assert losses(run.dir) == pytest.approx(losses(in_peace), rel=1e-4)
