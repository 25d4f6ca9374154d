"""`--time auto` on the real thing: a hole of the queue, and a requeued job in another shape."""

from __future__ import annotations

import sys

import pytest

from hpctrain.cluster.scheduler.slurm.control import SlurmControl
from hpctrain.ledger.shapes.queue import JobShape
from tests.support import patience
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, consumed, full_state
from tests.support.scenario import submit
from tests.support.users import User, run_as

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.realtime(
        proved_by=("tests/unit/submit/test_shape.py", "tests/unit/shapes/test_windows.py")
    ),
]

STEPS = 60
SETTINGS = {"train.step_delay_s": 0.1}
RANKS = "--ranks-per-node=8"


@pytest.fixture
def queue_with_a_hole(slurm):
    """Three of four nodes are taken for an hour, and all four are planned for the hour after."""
    whole = ("--partition=work", "--exclusive", "--time=60", "--output=/dev/null")
    taken = slurm.sbatch(*whole, "--nodes=3", "--nodelist=n1,n2,n3", "--wrap=exec sleep 3600")
    slurm.wait_job(taken, "RUNNING")
    planned = slurm.sbatch(*whole, "--nodes=4", "--wrap=exec sleep 3600")

    def is_planned():
        return slurm.job(planned).get("SchedNodeList", "(null)") != "(null)"

    patience.until(is_planned, lambda: slurm.run("squeue").stdout)
    return taken, planned


def pilot(slurm, folder):
    """A run of the same program, which shows what a step and a start take."""
    folder.mkdir()
    run = submit(slurm, folder, "--nodes=1", RANKS, sets={**SETTINGS, "train.steps": 20})
    run.wait_done()


def choices(run):
    return [all_fields(event) for event in run.events("shape_chosen")]


def test_a_run_starts_in_a_hole_comes_back_in_the_next_and_ends_bit_equal(
    slurm, tmp_path, undisturbed, request
):
    pilot(slurm, tmp_path / "pilot")
    request.getfixturevalue("queue_with_a_hole")
    sets = {**SETTINGS, "train.steps": STEPS}
    fixed = submit(slurm, tmp_path, "--nodes=1", "--time=24h", RANKS, sets=sets, name="fixed")
    words = ("--nodes=1-2", "--time=auto", RANKS)

    run = submit(slurm, tmp_path, *words, sets=sets, held={1: 20})
    run.wait_step(10)
    short = ("--partition=urgent", "--exclusive", "--nodelist=n4", "--time=2", "--output=/dev/null")
    urgent = slurm.sbatch(*short, "--wrap=exec sleep 600")
    run.wait_preempted()
    run.let_go(1)
    run.wait_event("shape_chosen", count=2)
    slurm.cancel(urgent)
    slurm.start_now(run.job_id)
    run.wait_done()

    assert slurm.job(fixed.job_id)["JobState"] == "PENDING"
    assert [choice["by"] for choice in choices(run)] == ["submit", "requeue"]
    assert {(choice["nodes"], choice["limit_s"]) for choice in choices(run)} == {(1, 600.0)}
    assert all(choice["candidates"] for choice in choices(run))
    assert [reason for reason, _ in run.ends()] == ["preempted", "completed"]
    assert run.steps_lost() == [0]
    assert_same_bits(full_state(undisturbed, STEPS), full_state(run.dir, STEPS))
    assert consumed(run.dir) == consumed(undisturbed)


@pytest.mark.story(
    proved_by=(
        "tests/slurm/test_shapes.py::"
        "test_a_run_starts_in_a_hole_comes_back_in_the_next_and_ends_bit_equal"
    )
)
def test_a_requeued_run_takes_the_nodes_that_have_become_free(slurm, tmp_path, request):
    pilot(slurm, tmp_path / "pilot")
    blockers = request.getfixturevalue("queue_with_a_hole")
    sets = {**SETTINGS, "train.steps": 5000}  # some half an hour on one node, in the hole
    words = ("--nodes=1-2", "--time=auto", RANKS)
    run = submit(slurm, tmp_path, *words, sets=sets)
    run.wait_step(5)
    (first,) = choices(run)

    for job in reversed(blockers):
        slurm.end_job(job)
    slurm.run("scontrol", "requeue", run.job_id, check=True)
    run.wait_event("shape_chosen", count=2)
    second = choices(run)[1]
    slurm.start_now(run.job_id)
    run.wait_step(1, attempt=2)
    nodes, _ = run.nodes()
    run.cli("cancel", "run")

    assert (first["nodes"], first["limit_s"] <= 3600) == (1, True)
    assert (second["by"], second["nodes"], second.get("failed", "")) == ("requeue", 2, "")
    assert len(nodes) == 2


@pytest.mark.every_slurm
@pytest.mark.two_users
def test_an_ordinary_user_may_raise_nodes_and_limit_of_a_requeued_job(slurm, tmp_path):
    """What `SlurmControl.reshape` stands on; of a running job SLURM refuses both."""
    owner = User.named("daemon")
    options = ["--parsable", "--partition=work", "--nodes=1", "--time=5", "--requeue"]
    job = run_as(
        owner,
        ["sbatch", *options, "--output=/dev/null", "--wrap=exec sleep 600"],
        cwd="/",
        **slurm.env,
    ).stdout.strip()
    slurm.wait_job(job, "RUNNING")
    shape = "from hpctrain.ledger.shapes.queue import JobShape as S"
    control = "from hpctrain.cluster.scheduler.slurm.control import SlurmControl as C"
    program = f"{shape}; {control}; C('{job}').reshape(S(3, 1800))"
    slurm.run("scontrol", "requeue", job, check=True)

    run_as(owner, [sys.executable, "-c", program], cwd="/", **slurm.env)

    slurm.start_now(job)
    record = slurm.wait_job(job, "RUNNING")
    assert (record["NumNodes"], record["TimeLimit"]) == ("3", "00:30:00")
    slurm.end_job(job)


def test_fewer_nodes_do_not_wait_for_the_processors_of_more(slurm):
    job = slurm.sbatch("--partition=work", "--nodes=4", "--time=30", "--begin=now+600", "--wrap=:")

    SlurmControl(job).reshape(JobShape(1, 90))

    record = slurm.job(job)
    assert (record["NumNodes"], record["TimeLimit"]) == ("1-1", "00:02:00")
    assert record["NumCPUs"] == "1"
    slurm.end_job(job)
