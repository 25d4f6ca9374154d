"""Every third checkpoint is evaluated once, whatever SLURM does to the run and its evaluations."""

from __future__ import annotations

import pytest

from hpctrain.core.base.host_list import expand_nodes
from hpctrain.ledger.history.evaluations import due
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.scenario import RunHandle, submit

pytestmark = pytest.mark.slurm

EVALUATE = """#!/bin/sh
# A preemption ends it at once, as SIGTERM does; it begins anew.
step=$(basename "$HPCTRAIN_CHECKPOINT" | sed 's/step-0*//')
until [ -e go ]; do sleep 0.1; done
[ -e "$HPCTRAIN_CHECKPOINT/MANIFEST.json" ] || exit 1
echo "{\\"step\\": $step, \\"nodes\\": $SLURM_NNODES}" > "$HPCTRAIN_RESULTS"
"""
SETTINGS = {
    "train.steps": 45,
    "train.step_delay_s": 0.25,
    "checkpoint.interval_steps": 5,
    "checkpoint.keep_last": 2,
    "evaluate.script": "./evaluate.sh",
    "evaluate.every": 3,
    "evaluate.nodes": "1",
    "evaluate.ranks_per_node": 1,
}


def preempt(slurm, job_id):
    """Take the job's nodes from it, and let it come back at once."""
    urgent = slurm.submit_urgent(expand_nodes(slurm.job(job_id)["NodeList"]))
    slurm.wait_job(job_id, "PENDING")
    slurm.cancel(urgent)
    slurm.start_now(job_id)


def evaluations(run):
    """The evaluations' runs by step, each with its job."""
    found = {}
    for path in run.dir.evaluations.glob("run-eval-*"):
        step = int(path.name.rpartition("-")[2])
        child = RunHandle(run.slurm, run.cwd, run.dir.evaluation(step), "")
        if submitted := child.events("submitted"):
            child.job_id = submitted[0].fact.job_id
            found[step] = child
    return found


@pytest.mark.story(
    proved_by=("tests/e2e/test_evaluated_run.py", "tests/unit/submit/test_evaluations.py")
)
def test_every_third_is_evaluated_once_through_preemptions_of_both(slurm, tmp_path):
    script = tmp_path / "evaluate.sh"
    script.write_text(EVALUATE)
    script.chmod(0o755)
    run = submit(slurm, tmp_path, "--nodes=2", "--ranks-per-node=1", "--time=10", sets=SETTINGS)
    first = run.wait("the first evaluation", lambda: list(evaluations(run).values()))[0]
    preempt(slurm, run.job_id)
    first.wait_event("attempt_started")
    preempt(slurm, first.job_id)
    run.wait_event("steps", attempt=2)
    preempt(slurm, run.job_id)
    run.wait_done()
    (tmp_path / "go").touch()
    steps = due(RunHistory.read(run.dir), 3, last=True)
    run.wait_event("evaluated", count=len(steps))

    told = [event.fact for event in run.events("evaluated")]
    children = evaluations(run)
    assert sorted(fact.step for fact in told) == sorted(children) == steps
    assert [(fact.metrics, fact.why) for fact in told] == [
        ({"step": fact.step, "nodes": 1}, "") for fact in told
    ]
    order = [fact.step for fact in told]
    assert order == [order[0], *sorted(order[1:], reverse=True)]
    assert all(len(child.events("submitted")) == 1 for child in children.values())
    assert [len(child.ends()) for child in children.values()].count(1) == len(steps) - 1
    assert [reason for reason, _ in first.ends()] == ["preempted", "completed"]
    assert [reason for reason, _ in run.ends()] == ["preempted", "preempted", "completed"]
    assert run.steps_lost() == [0, 0]
