"""One run under several engines, really preempted between them: one curve, or the same bits."""

from __future__ import annotations

import hashlib

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.recipe import (
    consumed_by_step,
    full_state,
    losses,
    make_run,
    samples_of_step,
    train,
)
from tests.support.scenario import submit

pytestmark = pytest.mark.slurm

STEPS = 32
SETTINGS = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.15,
    "train.micro_batch": 2,
    "engine.kind": "fsdp2",
}


def _preempt(slurm, run, *resume):
    """Take the run's nodes away; when it waits in the queue, send it elsewhere by other means."""
    urgent = slurm.submit_urgent(4)
    slurm.wait_job(run.job_id, "PENDING")
    slurm.cancel(urgent)
    slurm.wait_job(urgent, "CANCELLED")
    run.cli("cancel", "run")
    slurm.wait_job(run.job_id, "CANCELLED")
    plan = run.cli("resume", "run", *resume)
    run.job_id = plan.split("job ")[1].split()[0]


def _in_peace(folder, **changes):
    settings = {key.replace(".", "__"): value for key, value in SETTINGS.items()}
    run = make_run(folder / "run", **{**settings, "train__step_delay_s": 0.0, **changes})
    train(run, 1)
    return run


def _assert_exactly_once(run):
    assert lineage(RunHistory.of(run.events())).problems == []
    for step, indices in consumed_by_step(run.dir).items():
        assert sorted(indices) == sorted(samples_of_step(run.dir, step)), f"step {step}"


@pytest.mark.story(proved_by="tests/engines/test_every_engine.py")
def test_a_run_changes_engine_and_nodes_three_times_and_keeps_its_curve(
    slurm, tmp_path, tmp_path_factory
):
    one_process = _in_peace(tmp_path_factory.mktemp("in-peace"), train__dropout=0.0)
    run = submit(slurm, tmp_path, "--nodes=2", "--ranks-per-node=2", "--mesh=tp=2", sets=SETTINGS)
    one_rank = "--set=slurm.ranks_per_node=1"
    run.wait_step(5, attempt=1)
    _preempt(slurm, run, "--engine=zero2", "--mesh=tp=1", "--nodes=3", one_rank)
    run.wait_step(12, attempt=2)
    two_ranks = "--ranks-per-node=2"
    _preempt(slurm, run, "--engine=fsdp2", "--mesh=pp=2", "--nodes=2", two_ranks)
    run.wait_step(19, attempt=3)
    _preempt(slurm, run, "--engine=zero3", "--mesh=pp=1", "--nodes=2", one_rank)
    run.wait_done()

    views = attempts(RunHistory.of(run.events()))
    assert [view.world_size for view in views] == [4, 3, 4, 2]
    meshes = [
        (e.fact.engine, {k: v for k in ("pp", "tp") if (v := getattr(e.fact, k)) > 1})
        for e in run.events("mesh")
    ]
    assert meshes == [("fsdp2", {"tp": 2}), ("zero2", {}), ("fsdp2", {"pp": 2}), ("zero3", {})]
    assert run.steps_lost() == [0, 0, 0]
    assert {"zero3"} == {found.manifest.engine for found in find.candidates(run.dir)[:1]}
    _assert_exactly_once(run)
    assert losses(run.dir) == pytest.approx(losses(one_process), rel=1e-4)


def _sha256(run):
    digest = hashlib.sha256()
    for name, tensor in sorted(full_state(run, STEPS).items()):
        if name.startswith("model."):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.story(proved_by="tests/engines/test_exact.py")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(((3, 1),), id="once"),
        pytest.param(((1, 2), (3, 1), (2, 2)), id="three times", marks=pytest.mark.soak),
    ],
)
def test_an_exact_run_has_the_same_bits_whatever_nodes_it_had(
    slurm, tmp_path, tmp_path_factory, sizes
):
    exact = {"engine.exact": True, "engine.precision": "bf16", "train.dropout": 0.1}
    changes = {key.replace(".", "__"): value for key, value in exact.items()}
    in_peace = _in_peace(tmp_path_factory.mktemp("exact"), **changes)
    run = submit(slurm, tmp_path, "--nodes=2", "--ranks-per-node=2", sets={**SETTINGS, **exact})
    for attempt, (nodes, ranks) in enumerate(sizes, start=1):
        run.wait_step(5 * attempt, attempt=attempt)
        _preempt(slurm, run, f"--nodes={nodes}", f"--ranks-per-node={ranks}")
    run.wait_done()

    assert [view.world_size for view in attempts(RunHistory.of(run.events()))] == [
        4,
        *(nodes * ranks for nodes, ranks in sizes),
    ]
    assert run.steps_lost() == [0] * len(sizes)
    _assert_exactly_once(run)
    assert losses(run.dir) == losses(in_peace)
    assert _sha256(run.dir) == _sha256(in_peace)
