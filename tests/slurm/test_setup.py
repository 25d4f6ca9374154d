"""Lines that run before srun, on a real node: what fails there is named, and nothing trains."""

from __future__ import annotations

import pytest

from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = [pytest.mark.slurm, pytest.mark.every_slurm]

PROGRAM = "print('a rank was here')\n"


@pytest.fixture
def ended(slurm, tmp_path):
    """Submit a program with these lines of setup; the run once its job has ended."""

    def run(*setup):
        (tmp_path / "program.py").write_text(PROGRAM)
        made = submit(
            slurm, tmp_path, "--nodes=1", "--time=10", "--partition=work",
            sets={"slurm.setup": list(setup)}, script=["program.py"],
        )  # fmt: skip
        slurm.wait_job(made.job_id, ("COMPLETED", "FAILED"), timeout=60)
        return made

    return run


def has_begun(run):
    return "a rank was here" in "".join(path.read_text() for path in run.dir.root.rglob("*.log"))


def test_a_line_that_fails_ends_the_run_and_status_says_which(ended):
    run = ended("export FIRST=1", "module load cuda/12")

    [end] = run.events("attempt_ended")
    why = "a line of slurm.setup ended with exit code 127: module load cuda/12"
    assert all_fields(end)["detail"] == why
    assert run.ends() == [("user_error", "stop")]
    assert not has_begun(run)
    assert why in " ".join(run.cli("status", "run").split())


def test_a_file_that_exits_is_recorded_and_nothing_is_lost(ended, tmp_path):
    (tmp_path / "env.sh").write_text("exit 0\n")

    run = ended(f"source {tmp_path}/env.sh")

    [end] = run.events("attempt_ended")
    assert all_fields(end)["detail"] == "its setup ended the batch script, by exit 0"
    assert run.ends() == [("user_error", "stop")]
    assert run.status()["state"] == "failed"


def test_a_setup_that_takes_slurm_off_path_changes_nothing(ended, tmp_path):
    run = ended(f"export PATH={tmp_path}")

    assert run.ends() == [("completed", "stop")]
    assert has_begun(run)
