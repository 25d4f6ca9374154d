"""The time limit: the clock stops a run as late as is safe, whether SLURM warns or not."""

from __future__ import annotations

import sys

import pytest

from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, train
from tests.support.scenario import submit

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(400),
    pytest.mark.realtime(
        proved_by=(
            "tests/unit/agent/test_stop_deadline.py",
            "tests/unit/entry/test_local_contract.py",
        )
    ),
]

LIMIT_S = 60
SAVES_S = 10
"""More than a save and the leaving are thought to take."""
STEPS = 60
"""A start may come late on a busy machine, and then has time for a step or two."""
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.55,  # in all a little more than the first start can do
    "slurm.signal_lead_s": 0,
    "run.stop_margin_s": 30,  # of a minute, so that the second start has little left to do
}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The same run on two ranks, never stopped, without SLURM."""
    run = make_run(tmp_path_factory.mktemp("quiet") / "run", train__steps=STEPS, train__dropout=0.0)
    train(run, 2)
    return run


def test_the_clock_alone_stops_a_run_before_its_limit(slurm, tmp_path, quiet):
    """No signal is asked for (no --signal line): only the job's end, known from SLURM, counts."""
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=2", "--time=1", sets=SETTINGS)

    run.wait_done()

    assert "--signal" not in next(run.dir.jobs.glob("*.sh")).read_text()
    assert run.ends()[0] == ("timed_out", "requeue")
    assert run.ends()[-1][0] == "completed"
    assert {all_fields(e)["cause"] for e in run.events("stop_requested")} == {"clock"}
    assert set(run.steps_lost()) == {0}
    # It used its time, and did not leave at the first opportunity.
    used_s = run.events("stop_requested")[0].t - run.events("submitted")[0].t
    assert used_s > LIMIT_S - SETTINGS["run.stop_margin_s"] - SAVES_S
    assert_same_bits(full_state(quiet, STEPS), full_state(run.dir, STEPS))


@pytest.mark.story(proved_by="tests/unit/agent/test_stop_deadline.py")
def test_a_warning_that_comes_at_once_does_not_make_a_requeue_loop(slurm, tmp_path, quiet):
    """With a limit of a minute SLURM warns in its first round; the clock knows better."""
    settings = SETTINGS | {"slurm.signal_lead_s": 30}
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=2", "--time=1", sets=settings)

    run.wait_done()

    *stopped, last = [reason for reason, _ in run.ends()]
    assert (set(stopped), last) == ({"timed_out"}, "completed")
    assert {all_fields(e)["cause"] for e in run.events("stop_requested")} == {"clock"}
    assert set(run.steps_lost()) == {0}
    assert_same_bits(full_state(quiet, STEPS), full_state(run.dir, STEPS))


def test_where_slurm_cannot_be_asked_a_warning_stops_and_the_batch_side_requeues(slurm, tmp_path):
    """As in a container, only the batch script has scontrol, no rank and no agent."""
    container = tmp_path / "container-python"
    container.write_text(
        '#!/bin/sh\ncase "$*" in *hpctrain.entry.slurm_task*) PATH=/none ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    container.chmod(0o755)
    settings = SETTINGS | {
        "train.steps": 25,
        "train.step_delay_s": 0.4,
        "slurm.setup": [f"export HPCTRAIN_PYTHON={container}"],
    }
    run = submit(slurm, tmp_path, "--nodes=1", "--ranks-per-node=2", "--time=10", sets=settings)
    run.wait_step(3)

    slurm.run("scancel", "-s", "USR2", run.job_id, check=True)
    run.wait_done()

    assert all_fields(run.events("stop_requested")[0])["cause"] == "sigusr2"
    assert ("timed_out", "ask_batch") in run.ends()
    assert [all_fields(e)["by"] for e in run.events("requeued")] == ["batch"]
    assert run.steps_lost() == [0]
