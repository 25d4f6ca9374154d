"""A preemption of which only the user signal tells; the others are in tests/stories."""

from __future__ import annotations

import pytest

from tests.support.recipe import assert_same_bits, consumed, full_state
from tests.support.scenario import submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=("tests/unit/plan/test_decide.py", "tests/unit/entry/test_local_contract.py")
    ),
]

STEPS = 60
SETTINGS = {"train.steps": STEPS, "train.step_delay_s": 0.1}


@pytest.mark.every_slurm
def test_a_run_that_gets_its_user_signal_in_a_grace_time_ends_bit_equal(
    slurm, tmp_path, undisturbed
):
    shape = ("--nodes=2", "--ranks-per-node=4", "--time=10", "--partition=grace")
    with slurm.user_signal():
        run = submit(slurm, tmp_path, *shape, sets=SETTINGS, held={1: 10})
        run.wait_step(5)
        urgent = slurm.submit_urgent(4)
        run.wait_preempted()
        run.let_go(1)
        slurm.wait_job(run.job_id, "PENDING")
        slurm.cancel(urgent)
        run.wait_done()

    assert run.steps_lost() == [0]
    assert [reason for reason, _ in run.ends()] == ["preempted", "completed"]
    assert slurm.job(run.job_id)["Restarts"] == "1"
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run.dir, STEPS))
    assert consumed(run.dir) == consumed(undisturbed)
