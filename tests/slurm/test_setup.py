"""What a job is submitted with, on a real node: lines of setup that fail, and options of sbatch."""

from __future__ import annotations

import pytest

from hpctrain.core.settings.external import OURS, PASSED, REFUSED
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit
from tests.unit.settings.test_sbatch_options import options_of

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
        slurm.wait_job(made.job_id, ("COMPLETED", "FAILED"))
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


def test_every_option_of_this_sbatch_is_of_a_known_class(slurm):
    """tests/data/slurm-answers has what the versions say that are tested; this is the one here."""
    told = slurm.run("sbatch", "--help", check=True).stdout

    assert len(options_of(told)) > 80
    assert options_of(told) <= {*OURS, *REFUSED, *PASSED}


def test_of_a_script_that_was_killed_status_knows_by_slurm_that_it_is_over(ended):
    """SIGKILL leaves nobody who could write an event: no trap runs, and no agent had begun."""
    run = ended("kill -9 $$")

    assert run.events("attempt_ended") == []
    assert run.status()["state"] == "failed"
    told = " ".join(run.cli("status", "run").split())
    assert f"job {run.job_id} ended as FAILED before the run could say why" in told
