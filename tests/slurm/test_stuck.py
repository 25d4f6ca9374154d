"""A rank that cannot answer a stop: the wait is bounded, and the job comes back all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "stuck.py"
SAVE_EVERY = 5
STUCK_AT = 7


@pytest.mark.story(
    proved_by=("tests/engines/test_hang_watch.py", "tests/unit/agent/test_stop_deadline.py")
)
@pytest.mark.parametrize(
    ("how", "partition"),
    [("c-call", "grace"), ("stopped", "work")],
    ids=["in C code with the GIL, grace time", "stopped by SIGSTOP, no grace time"],
)
def test_a_stuck_rank_is_killed_in_time_and_the_run_resumes_from_the_last_save(
    slurm, tmp_path, how, partition
):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=1",
        "--ranks-per-node=2",
        f"--partition={partition}",
        "--time=10",
        sets={"checkpoint.interval_steps": SAVE_EVERY, "run.log_every_s": 0.0},
        script=[str(SCRIPT), how, str(STUCK_AT)],
    )
    run.wait("rank 1 to be stuck", (tmp_path / "stuck").exists)
    run.wait_step(STUCK_AT)
    urgent = slurm.submit_urgent(4)
    ended = run.wait_event("attempt_ended", attempt=1)
    back = slurm.wait_job(run.job_id, ("PENDING", "FAILED", "COMPLETED"))
    slurm.cancel(urgent)

    assert all_fields(ended)["by"] == "agent"  # which SLURM's SIGKILL would have hit too
    expected = slurm.end_in_grace if partition == "grace" else ("preempted", "leave")
    assert (all_fields(ended)["reason"], all_fields(ended)["next"]) == expected
    assert (back["JobState"], back["Restarts"]) == ("PENDING", "1")
    run.wait_done()
    assert run.restored() == [0, SAVE_EVERY]
    assert run.steps_lost() == [STUCK_AT - SAVE_EVERY]
    assert run.ends()[1:] == [("completed", "stop")]
