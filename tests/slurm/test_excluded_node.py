"""A node that guards have named twice is left out where it is: the others go on in their job."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cluster.preflight.report import bad_nodes_path, read_bad
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import all_fields
from tests.support.recipe import TINY, assert_same_bits, full_state, make_run, train
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "computes_wrong.py"
STEPS = 40
SETTINGS = {
    **TINY,
    "train.steps": STEPS,
    "train.step_delay_s": 0.1,
    "train.dropout": 0.0,
    "checkpoint.interval_steps": 5,
    "run.restart_pause_s": 0,
    "guard.replicas": 4,
}
UNLIKE = "weights unlike those of the others"


def _submit(slurm, tmp_path, nodes, flips, **sets):
    args = (f"--nodes={nodes}", "--ranks-per-node=2")
    sets = SETTINGS | {name.replace("__", "."): value for name, value in sets.items()}
    script, env = [str(SCRIPT)], {"FLIPS": flips}
    return submit(slurm, tmp_path, *args, sets=sets, script=script, env=env)


def _await_that_it_leaves(slurm, run, node):
    """Its agent has taken part before, and leaves while the others train."""
    run.wait(f"processes of {node}", lambda: slurm.pids_of_job(run.job_id, node))
    run.wait_event("node_lost")
    run.wait(f"the end of {node}", lambda: not slurm.pids_of_job(run.job_id, node))
    assert not run.events("done")


def _nodes(run):
    return [one.nodes for one in attempts(RunHistory.of(run.events()))]


def _lost(run):
    facts = [all_fields(event) for event in run.events("node_lost")]
    return [(fact["node"], fact["why"], fact["members"]) for fact in facts]


def _assert_that_it_ends_as_if_nothing_was(run, peace, ranks, **sets):
    made = make_run(peace, train__steps=STEPS, train__dropout=0.0, **sets)
    train(made, ranks)
    assert_same_bits(full_state(run.dir, STEPS), full_state(made, STEPS))


@pytest.mark.soak  # a minute; tests/unit/agent/test_excluded_nodes.py has the decision
def test_the_others_go_on_without_it_and_where_too_few_are_left_the_next_start_does(
    slurm, tmp_path
):
    exact = {"engine__exact": True, "train__micro_batch": 1}
    flips = "1:n2:17,2:n3:17"
    run = _submit(slurm, tmp_path, "2-3", flips, alive__shrink="auto", guard__convict=1, **exact)
    _await_that_it_leaves(slurm, run, "n2")
    assert all_fields(run.wait_event("excluded"))["nodes"] == ["n2", "n3"]
    slurm.start_now(run.job_id)
    run.wait_done()

    assert _nodes(run) == [("n1", "n2", "n3"), ("n1", "n3"), ("n1", "n4")], run.story()
    crashed = [("crashed", "restart"), ("crashed", "requeue")]
    assert run.ends() == [*crashed, ("completed", "stop")], run.story()
    assert slurm.job(run.job_id)["Restarts"] == "1"
    why = f"guards named it 1 times: {UNLIKE}"
    assert _lost(run) == [("n2", why, ["n1", "n3"])]
    assert sorted(read_bad(bad_nodes_path(run.dir))) == ["n2", "n3"]
    _assert_that_it_ends_as_if_nothing_was(run, tmp_path / "peace", 6, **exact)


@pytest.mark.story(
    proved_by=(
        "tests/engines/test_in_place.py::test_a_node_that_guards_have_named_is_left_out_of_the_next_round",
        "tests/unit/agent/test_excluded_nodes.py",
    )
)
def test_a_spare_takes_the_place_of_a_node_that_was_named_twice(slurm, tmp_path):
    run = _submit(slurm, tmp_path, "2+1", "1:n2:17,2:n2:17")
    _await_that_it_leaves(slurm, run, "n2")
    run.wait_done()

    assert _nodes(run) == [("n1", "n2"), ("n1", "n2"), ("n1", "n3")], run.story()
    assert run.ends() == [*[("crashed", "restart")] * 2, ("completed", "stop")], run.story()
    assert slurm.job(run.job_id)["Restarts"] == "0"
    assert _lost(run) == [("n2", f"guards named it 2 times: {UNLIKE}", ["n1", "n3"])]
    words = " ".join(run.cli("status", "run").split())
    assert f"n[1,3] in training; n2 lost (guards named it 2 times: {UNLIKE})" in words
    _assert_that_it_ends_as_if_nothing_was(run, tmp_path / "peace", 4)
