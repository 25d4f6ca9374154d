"""A run goes back behind a spike, and no start takes the samples of the bad steps any more."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hpctrain.checkpoint.store import find
from hpctrain.checkpoint.tensors import restore
from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.core.settings.schema import CheckpointSettings, GuardSettings
from hpctrain.core.world import World
from hpctrain.errors import RewindNeeded, UsageError
from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.observe.status.event_lines import in_words
from hpctrain.recipes.lm import train as recipe
from hpctrain.train.data.order import SampleOrder
from hpctrain.train.runtime import guarding as rewinds
from hpctrain.train.runtime.guarding import Guarding
from tests.support.ledger_runs import all_fields, coverage, write_event
from tests.support.recipe import (
    assert_same_bits,
    consumed_by_step,
    full_state,
    make_run,
    samples_of_step,
    train,
)

BATCH, BACK, STEPS = 24, 4, 14
BAD = 11
"""The step that jumps: its checkpoint of step 6 is old enough, the one of step 9 is not."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("hpctrain.train.guards.rules.LEAST", 8)
    monkeypatch.setattr(rewinds, "STEPS_BEFORE", BACK)


@pytest.fixture
def spoil(monkeypatch):
    """Multiply the loss of the samples at these positions of the order."""
    real = recipe.microbatches

    def spoil(factors):
        def cut(settings, device, tokens, batch):
            size, _ = recipe.split(tokens, settings)
            order = SampleOrder(size, settings.seed)
            bad = {order.index(position): factor for position, factor in factors.items()}
            made = real(settings, device, tokens, batch)
            for piece, each in zip(batch.pieces, made, strict=True):
                for place, index in enumerate(piece.indices):
                    each.targets[1][place] *= bad.get(index, 1.0)
            return made

        monkeypatch.setattr(recipe, "microbatches", cut)

    return spoil


def run_with(root, **more):
    changes = {
        "guard__spike": "rewind",
        "checkpoint__interval_steps": 3,
        "checkpoint__mode": "sync",  # each is there before the next step
        "train__steps": STEPS,
    }
    return make_run(root, **{**changes, **more})


def facts(run, kind):
    return [all_fields(event) for event in ledger.read(run) if event.kind == kind]


def used(run, steps):
    """The positions whose samples made the final weights, by the ranks' own records."""
    by_step = consumed_by_step(run)
    order = [s for step in range(1, steps + BACK + 4) for s in samples_of_step(run, step)]
    return [[order.index(s) for s in by_step[step]] for step in range(1, steps + 1)]


HOLE = ((BAD - BACK) * BATCH, BAD * BATCH)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_back_and_ends_as_if_the_samples_had_never_been_there(tmp_path, spoil, ranks):
    spoil({(BAD - 1) * BATCH + 3: 200.0})
    run = run_with(tmp_path / "run")
    with pytest.raises(AssertionError) as failed:
        train(run, ranks)
    assert str(failed.value).count("RewindNeeded: guard.spike: step 11 has loss ") >= ranks
    assert json_outcome(run) is None

    train(run, ranks, stop_at=8)  # before the hole, or in the steps behind it: all the same
    train(run, ranks)

    (gone,) = facts(run, "rewound")
    assert (gone["step"], gone["to"], gone["why"]) == (BAD, BAD - BACK, "spike")
    assert (gone["first"], gone["last"]) == HOLE
    assert [fact["step"] for fact in facts(run, "checkpoint_set_aside")] == [9]
    assert [fact["step"] for fact in facts(run, "restored")][1] == 6
    assert len(facts(run, "spike")) == 1
    assert facts(run, "batch_skipped") == []
    found = lineage(RunHistory.read(run))
    assert found.problems == []
    assert [(h.sample_first, h.sample_last, h.why) for h in found.holes] == [(*HOLE, "spike")]
    assert coverage(RunHistory.read(run)) == [(0, STEPS * BATCH + BACK * BATCH)]
    flat = [position for step in used(run, STEPS) for position in step]
    assert flat == [n for n in range((STEPS + BACK) * BATCH) if not HOLE[0] <= n < HOLE[1]]
    assert any(
        "step 11: training goes back to step 7 or before: a spike; samples 168 to 263 are left out"
        in in_words(event)
        for event in ledger.read(run)
    )

    quiet = run_with(tmp_path / "quiet", guard__spike="tell")
    write_event(quiet, "rewound", attempt=None, step=1, first=HOLE[0], last=HOLE[1], why="spike")
    train(quiet, ranks)
    assert_same_bits(full_state(quiet, STEPS), full_state(run, STEPS))


def json_outcome(run):
    path = run.outcome(1)
    return json.loads(path.read_text())["outcome"] if path.exists() else None


def test_the_holes_travel_in_the_checkpoint_too(tmp_path, spoil):
    spoil({(BAD - 1) * BATCH: 200.0})
    run = run_with(tmp_path / "run")
    with pytest.raises(AssertionError, match="RewindNeeded"):
        train(run, 1)
    train(run, 1)
    manifest = json.loads((run.checkpoints / f"step-{STEPS:010d}" / "MANIFEST.json").read_text())
    assert manifest["data"]["holes"] == [list(HOLE)]


def test_without_a_checkpoint_from_before_the_update_alone_is_left_out(tmp_path, spoil):
    spoil({(BAD - 1) * BATCH: 200.0})
    run = run_with(tmp_path / "run", checkpoint__interval_steps=9)
    train(run, 1)
    assert facts(run, "rewound") == []
    assert [hole["step"] for hole in facts(run, "batch_skipped")] == [BAD]
    assert facts(run, "done")


def test_after_three_times_training_goes_on(tmp_path, spoil, monkeypatch):
    monkeypatch.setattr(rewinds, "MOST", 1)
    spoil({(BAD - 1) * BATCH: 200.0, (BAD + 3) * BATCH: 200.0})
    run = run_with(tmp_path / "run", train__steps=STEPS + 2)
    with pytest.raises(AssertionError, match="RewindNeeded"):
        train(run, 1)
    train(run, 1)
    assert len(facts(run, "rewound")) == 1
    assert [fact["step"] for fact in facts(run, "spike")] == [11, 11]
    assert len(facts(run, "batch_skipped")) == 1


def test_where_skipping_would_end_a_run_it_goes_back_first(tmp_path, spoil):
    spoil({step * BATCH: float("nan") for step in (8, 9, 10)})
    bad = run_with(tmp_path / "run", guard__spike="off", guard__nonfinite="rewind")
    with pytest.raises(AssertionError, match=r"RewindNeeded: guard\.nonfinite: step 11 is not"):
        train(bad, 2)
    assert json_outcome(bad) is None
    train(bad, 2)
    assert facts(bad, "rewound")[0]["why"] == "nonfinite"
    assert [fact["step"] for fact in facts(bad, "nonfinite")] == [9, 10, 11]
    assert lineage(RunHistory.read(bad)).problems == []
    assert facts(bad, "done")

    none_before = run_with(
        tmp_path / "none",
        guard__spike="off",
        guard__nonfinite="rewind",
        checkpoint__interval_steps=100,
    )
    with pytest.raises(AssertionError, match="GuardStopped"):
        train(none_before, 1)
    assert json.loads(none_before.outcome(1).read_text())["outcome"] == "failed"


def begun(data, told=(), *, wanted=True):
    """A rank's side, of a program with such data in a run with such a ledger."""
    world = World(0, 0, 1, torch.device("cpu"))
    settings = GuardSettings(spike="rewind" if wanted else "off", replicas=0)
    side = Guarding(
        settings, SimpleNamespace(data=data), record=print, log_skipped=print, stop=print
    )
    side.begin(world, SimpleNamespace(run=told))


def test_data_that_can_leave_nothing_out_is_refused_in_one_line(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"^guard\.spike or guard\.nonfinite = rewind has samples"):
        begun(None, run)
    begun(None, run, wanted=False)  # nobody asks for it
    write_event(run, "rewound", step=9, first=0, last=24, why="spike")
    with pytest.raises(UsageError, match=r"^the run's ledger names samples .* object cannot;"):
        begun(object(), run, wanted=False)


def test_a_loop_of_ones_own_has_nothing_to_go_back_to():
    settings = GuardSettings(spike="rewind")
    program = SimpleNamespace(engine=None, data=None, tracked={})
    guards = Guarding(settings, program, record=print, log_skipped=print, stop=print)
    with pytest.raises(UsageError, match="has a loop of its own; set skip"):
        guards.judge(World(0, 0, 1, torch.device("cpu")), 1, 1.0, 1.0)


def test_a_copy_in_memory_from_behind_the_spike_is_not_taken(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    write_event(run, "rewound", step=11, to=7, first=0, last=24, why="spike")
    held = [find.FoundCheckpoint(step, tmp_path, None, None) for step in (10, 8, 7, 5)]
    copies = SimpleNamespace(find=lambda _: iter(held))
    tried = []
    monkeypatch.setattr(restore, "_try", lambda one, *_: (0, tried.append(one.step) or "torn"))
    place = SavePlace(run, take_attempt(run, job_id="1", restarts=0), CheckpointSettings())
    world = World(0, 0, 1, torch.device("cpu"))
    restore.restore(place, world, lambda _: None, copies=copies)
    assert tried == [7, 5]
    write_event(run, "restored", step=5)
    tried.clear()
    restore.restore(place, world, lambda _: None, copies=copies)
    assert tried == [10, 8, 7, 5]


def test_the_error_ends_with_the_code_of_the_table():
    assert RewindNeeded("x").exit_code == 1
