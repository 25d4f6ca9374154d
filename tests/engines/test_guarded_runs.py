"""Guards in a run: what the ledger hears, what a resume remembers, and when training ends."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hpctrain.core.settings.schema import GuardSettings
from hpctrain.errors import GuardStopped, UsageError
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.observe.status.event_lines import in_words
from hpctrain.recipes.lm import train as recipe
from hpctrain.train.data.order import SampleOrder
from hpctrain.train.runtime.guarding import Guarding
from tests.support.gloo import launch
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, make_run, samples_of_step, train

pytestmark = pytest.mark.quick

BATCH = 24


@pytest.fixture
def spoil(monkeypatch):
    """Make the loss of the sample at each of these positions no number, or so many times itself."""
    real_cut, real_order = recipe.microbatches, SampleOrder.index

    def spoil(factors):
        def cut(settings, device, tokens, batch):
            made = real_cut(settings, device, tokens, batch)
            for position, factor in factors.items():
                if not batch.first <= position < batch.last or not settings.steps:
                    continue
                for piece, each in zip(batch.pieces, made, strict=True):
                    for place, index in enumerate(piece.indices):
                        if index == wanted(settings, tokens, position):
                            each.targets[1][place] *= factor
            return made

        def wanted(settings, tokens, position):
            size, _ = recipe.split(tokens, settings)
            return real_order(SampleOrder(size, settings.seed), position)

        monkeypatch.setattr(recipe, "microbatches", cut)

    return spoil


def facts(run, kind):
    return [all_fields(event) for event in ledger.read(run) if event.kind == kind]


def test_a_bad_batch_is_left_out_named_and_a_hole_in_the_proof(tmp_path, spoil):
    spoil({3 * BATCH + 13: float("nan")})
    run = make_run(tmp_path / "run", train__steps=6, guard__spike="off")
    train(run, 2)

    (bad,) = facts(run, "nonfinite")
    (hole,) = facts(run, "batch_skipped")
    sample = samples_of_step(run, 4)[13]
    assert (bad["step"], bad["rank"], bad["ranks"]) == (4, 1, [1])
    assert sample in bad["samples"]
    assert bad["transient"] is False
    assert bad["left_out"] is True
    assert bad["node"]
    assert (hole["step"], hole["first"], hole["last"]) == (4, 3 * BATCH, 4 * BATCH)
    assert sum(mark["skipped"] or 0 for mark in facts(run, "steps")) == 1
    found = lineage(RunHistory.read(run))
    assert found.problems == []
    assert [(one.step, one.sample_first) for one in found.holes] == [(4, 3 * BATCH)]
    lines = [in_words(event) for event in ledger.read(run)]
    assert any(line.startswith("step 4 is not finite: rank 1 on ") for line in lines)
    assert (
        f"step 4: the update of samples {3 * BATCH} to {4 * BATCH - 1} is left out: not finite"
        in lines
    )


def test_bad_batches_in_a_row_end_the_run_for_good(tmp_path, spoil):
    spoil({step * BATCH: float("nan") for step in (2, 3, 4)})
    run = make_run(tmp_path / "run", train__steps=8)

    with pytest.raises(
        AssertionError, match=r"GuardStopped: guard.nonfinite: step 5 is not finite"
    ):
        train(run, 2)

    assert [bad["step"] for bad in facts(run, "nonfinite")] == [3, 4, 5]
    assert json.loads(run.outcome(1).read_text())["outcome"] == "failed"


def test_the_first_one_ends_a_run_that_is_to_stop(tmp_path, spoil):
    spoil({2 * BATCH: float("nan")})
    run = make_run(tmp_path / "run", train__steps=8, guard__nonfinite="stop")

    with pytest.raises(AssertionError, match="GuardStopped"):
        train(run, 1)

    assert [bad["step"] for bad in facts(run, "nonfinite")] == [3]


def test_a_resumed_run_counts_on_and_ends_bit_equal(tmp_path, spoil):
    spoil({step * BATCH + 5: float("nan") for step in (1, 7)})
    quiet = make_run(tmp_path / "quiet")
    disturbed = make_run(tmp_path / "disturbed")
    train(quiet, 2)
    train(disturbed, 2, stop_at=4)
    train(disturbed, 2)

    assert_same_bits(full_state(quiet, 12), full_state(disturbed, 12))
    assert [bad["step"] for bad in facts(disturbed, "nonfinite")] == [2, 8]
    assert _remembered(disturbed) == _remembered(quiet)
    assert _remembered(quiet)["nonfinite"]["steps"] == [2, 8]
    assert len(_remembered(quiet)["spikes"]["losses"]) == 10


def _remembered(run):
    (path,) = run.checkpoints.glob("step-0000000012/MANIFEST.json")
    return json.loads(path.read_text())["extra"]["hpctrain.guard"]


def test_a_spike_is_told_or_left_out(tmp_path, spoil, monkeypatch):
    monkeypatch.setattr("hpctrain.train.guards.rules.LEAST", 8)
    spoil({8 * BATCH + 3: 200.0})
    told = make_run(tmp_path / "told")
    skipped = make_run(tmp_path / "skipped", guard__spike="skip")
    train(told, 1)
    train(skipped, 1)

    for run in (told, skipped):
        (spike,) = facts(run, "spike")
        assert spike["step"] == 9
        assert spike["what"] == "loss"
        assert spike["value"] > 2 * spike["usual"]
        assert spike["left_out"] is (run is skipped)
    assert facts(told, "batch_skipped") == []
    assert [hole["why"] for hole in facts(skipped, "batch_skipped")] == ["spike"]
    assert any("step 9 jumps: the loss is" in in_words(event) for event in ledger.read(told))


def test_with_all_guards_off_a_checkpoint_is_as_before(tmp_path):
    run = make_run(tmp_path / "run", guard__nonfinite="off", guard__spike="off", train__steps=2)
    train(run, 1)
    (path,) = run.checkpoints.glob("step-*/MANIFEST.json")
    assert "hpctrain.guard" not in json.loads(path.read_text())["extra"]


def test_an_engine_that_does_not_ask_cannot_leave_out_spikes():
    guards = Guarding(
        GuardSettings(spike="skip"), None, record=print, log_skipped=print, stop=print
    )
    with pytest.raises(UsageError, match=r"guard\.spike = tell"):
        guards.guard(SimpleNamespace(kind="zero2", decides_alone=True))


def test_the_error_of_a_guard_ends_with_the_code_of_the_table():
    assert GuardStopped("x").exit_code == 1


def own_loop(bad):
    """A loop of the program's own; which updates it was told to apply."""
    import torch

    import hpctrain

    run = hpctrain.init()
    applied = []
    for step in run.steps(total=6):
        own = torch.tensor(float("nan") if (step, run.world.rank) in bad else 2.0)
        applied.append(run.guard(own, 1.0))
    return applied


@pytest.mark.parametrize("tree", [0, 1])
def test_a_loop_of_ones_own_is_told_by_all_ranks_numbers(tree):
    assert (
        launch(own_loop, 2, tree=tree, bad={(2, 1), (4, 0)})
        == [[True, True, False, True, False, True]] * 2
    )


def test_a_loop_of_ones_own_is_ended_on_every_rank():
    with pytest.raises(AssertionError) as failed:
        launch(own_loop, 2, bad={(2, 1), (3, 0), (4, 1)})
    assert str(failed.value).count("GuardStopped: guard.nonfinite: step 5 is not finite") >= 2
