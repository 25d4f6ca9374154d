"""The main job: preempted, saved, requeued, back, done, and bit-equal to a run left in peace."""

from __future__ import annotations

import contextlib

import pytest

from tests.support.recipe import assert_same_bits, consumed, full_state
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

STEPS = 60
FOUR_BY_TWO = ("--nodes=4", "--ranks-per-node=2", "--time=10")
SETTINGS = {"train.steps": STEPS, "train.step_delay_s": 0.1}


@pytest.mark.every_slurm
@pytest.mark.parametrize(
    ("partition", "user_signal"),
    [("work", False), pytest.param("grace", False, marks=pytest.mark.soak), ("grace", True)],
    ids=["no grace, SIGTERM", "grace, SIGTERM only", "grace, user signal"],
)
def test_a_preempted_run_comes_back_and_ends_bit_equal(
    slurm, tmp_path, undisturbed, partition, user_signal
):
    with slurm.user_signal() if user_signal else contextlib.nullcontext():
        run = submit(
            slurm, tmp_path, *FOUR_BY_TWO, f"--partition={partition}", sets=SETTINGS, held={1: 10}
        )
        run.wait_step(5)
        urgent = slurm.submit_urgent(4)
        run.wait_preempted()
        run.let_go(1)
        slurm.wait_job(run.job_id, "PENDING", timeout=30)
        slurm.cancel(urgent)
        run.wait_done()

    assert run.steps_lost() == [0]
    assert [reason for reason, _ in run.ends()] == ["preempted", "completed"]
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run.dir, STEPS))
    assert consumed(run.dir) == consumed(undisturbed)
