"""A node dies: SLURM brings the run back on the others; what it left running can do no harm."""

from __future__ import annotations

import pytest

from hpctrain.checkpoint import find, verify
from hpctrain.ledger.derive import attempts, lineage
from tests.support.recipe import consumed_by_step, losses, samples_of_step
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

STEPS = 60
EVERY = 5
SETTINGS = {"train.steps": STEPS, "train.step_delay_s": 0.1, "checkpoint.interval_steps": EVERY}


def assert_every_sample_was_used_once(run, steps):
    """By the ranks' own records, step by step, against the order that nobody may change."""
    used = consumed_by_step(run.dir)
    assert sorted(used) == list(range(1, steps + 1))
    for step, indices in used.items():
        assert sorted(indices) == sorted(samples_of_step(run.dir, step)), f"step {step}"
    assert lineage(run.events()).problems == []


def test_a_dead_node_costs_a_few_steps_and_the_run_ends_on_the_others(slurm, tmp_path, undisturbed):
    run = submit(slurm, tmp_path, "--nodes=2-4", "--ranks-per-node=2", sets=SETTINGS)
    run.wait_event("saved")
    run.wait_step(EVERY + 2)

    slurm.kill_node("n3")
    run.wait_done()

    first, last = attempts(run.events())
    assert (first.world_size, last.world_size) == (8, 6)
    assert last.nodes == ("n1", "n2", "n4")
    assert (first.reason, last.reason) == ("node_failed", "completed")
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert last.first_step % EVERY == 0
    assert last.first_step >= EVERY
    assert run.steps_lost()[0] == first.steps_lost <= EVERY
    assert_every_sample_was_used_once(run, STEPS)
    assert losses(run.dir) == pytest.approx(losses(undisturbed), rel=1e-4)
