"""What an earlier run saved counts for the same program only, and the newest such run."""

from __future__ import annotations

import pytest

from hpctrain.advise.check.forecast import past_saves
from hpctrain.core.settings.schema import Settings, TrainSettings
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSaved, StepsDone, SubmitIntent
from hpctrain.ledger.run.layout import RunDir

SCRIPT = Entry(kind="script", path="/p/train.py", cwd="/p")


def spec(name="new", entry=SCRIPT, settings=None):
    return Spec(name, "id", 0.0, "local", "", entry, settings or Settings())


@pytest.fixture
def run(tmp_path):
    def make(name, *saves, **changes):
        root = RunDir(tmp_path / name)
        root.root.mkdir()
        spec(name, **changes).dump(root.spec)
        facts = [CheckpointSaved(step=n, bytes=100 + n, seconds=s) for n, s in enumerate(saves)]
        for fact in (SubmitIntent(token=name), StepsDone(first=1, last=2, p50_s=0.5), *facts):
            ledger.append(root, fact)

    return make


def test_the_newest_run_of_the_program_that_has_saved_counts(run, tmp_path):
    run("old", 1.0)
    run("newer", 2.0, 5.0, 3.0)
    run("newest")

    past = past_saves(spec(), tmp_path, 2)

    assert (past.run, past.save_s, past.size_bytes, past.step_s) == ("newer", 5.0, 102, 0.5)
    assert past.costs.write_s == 3.0


def test_another_program_tells_nothing(run, tmp_path):
    run("a", 1.0, entry=Entry(kind="script", path="/p/other.py", cwd="/p"))
    run("b", 1.0, entry=Entry(kind="script", path="/q/train.py", cwd="/q"))
    run("c", 1.0, entry=Entry(kind="script", path="/p/train.py", cwd="/p", args=["--large"]))
    run("d", 1.0, entry=Entry(kind="recipe", cwd="/p"))

    assert past_saves(spec(), tmp_path, 2) is None


def test_the_recipe_counts_with_the_same_model_whatever_its_steps(run, tmp_path):
    recipe = Entry(kind="recipe", cwd="/p")
    run("a", 1.0, entry=recipe, settings=Settings(train=TrainSettings(steps=7)))

    assert past_saves(spec(entry=recipe), tmp_path, 2).run == "a"
    wider = Settings(train=TrainSettings(seq_len=1024))
    assert past_saves(spec(entry=recipe, settings=wider), tmp_path, 2) is None


def test_a_copy_of_the_code_is_the_same_program(run, tmp_path):
    run("a", 1.0, entry=Entry(kind="script", path="/runs/a/code/train.py", cwd="/p"))

    assert past_saves(spec(), tmp_path, 2).run == "a"


def test_what_is_damaged_or_missing_tells_nothing(run, tmp_path):
    run("a", 1.0)
    (tmp_path / "a" / "spec.json").write_text("{")

    assert past_saves(spec(), tmp_path, 2) is None
    assert past_saves(spec(), tmp_path / "nosuch", 2) is None
