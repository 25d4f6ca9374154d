"""A run that has saved does not begin anew unasked, whatever became of its checkpoints."""

from __future__ import annotations

import shutil

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.cli.main import main
from hpctrain.core.base.files import Patience
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.errors import FileSystemFault, TornCheckpoint
from hpctrain.ledger.history.run_history import RunHistory
from tests.support import checkpoints as support
from tests.support.ledger_runs import event_of, write_event


def told(*facts):
    events = (event_of(float(number), kind, 1, data) for number, (kind, data) in enumerate(facts))
    return [event for event in events if event is not None]


ANEW = ("restored", {"step": 0, "checkpoint": None})


@pytest.mark.parametrize(
    ("facts", "known"),
    [
        ([], None),
        ([ANEW], None),
        ([("saved", {"step": 40}), ("saved", {"step": 20})], 40),
        ([("imported", {"step": 0})], 0),
        ([("imported", {"step": 0}), ("restored", {"step": 0, "checkpoint": "step-0"})], 0),
        ([("saved", {"step": 40}), ("restored", {"step": 40, "checkpoint": "step-40"})], 40),
        ([("saved", {"step": 40}), ANEW], None),
        ([("saved", {"step": 40}), ANEW, ("saved", {"step": 8})], 8),
        ([("saved", {"step": 40}), ("save_failed", {"step": 60})], 40),
        ([("saved", {"step": "x"})], None),
    ],
)
def test_what_the_ledger_knows_of_saves(facts, known):
    assert RunHistory.of(told(*facts)).newest_saved == known


def test_what_was_asked_holds_until_it_is_restored():
    asked = ("submitted", {"token": "t", "job_id": "7", "from_step": 0})

    assert RunHistory.of(told(asked)).asked_step == 0
    assert RunHistory.of(told(asked, ANEW)).asked_step is None
    assert RunHistory.of(told(asked, ANEW, ("submitted", {}))).asked_step is None


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = support.new_run(tmp_path)
    Spec("gpt-a", "id", 1e9, "local", "", Entry("recipe")).dump(run.spec)
    support.save(run, support.next_attempt(run), 1000, 2000)
    write_event(run, "saved", attempt=1, step=2000)
    monkeypatch.chdir(tmp_path)
    return run


def test_resume_refuses_to_begin_anew_unasked_and_names_the_way_out(run, capsys):
    shutil.rmtree(run.checkpoints)

    assert main(["resume", "gpt-a", "--dry-run"]) == 7
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "gpt-a has saved up to step 2000, and none of its checkpoints can be loaded" in said
    assert "`hpctrain resume gpt-a --from 0`" in said

    assert main(["resume", "gpt-a", "--dry-run", "--from", "0"]) == 0
    assert "starts from the beginning" in capsys.readouterr().out


def test_resume_names_what_became_of_each(run, capsys):
    for step in find.steps(run):
        (find.step_path(run, step) / "MANIFEST.json").unlink()

    assert main(["resume", "gpt-a", "--dry-run"]) == 7
    said = capsys.readouterr().err
    assert "step-0000002000: manifest is missing; step-0000001000: manifest is missing" in said


def test_deleting_the_last_one_says_what_it_takes_to_go_on(run, capsys):
    assert main(["checkpoints", "rm", "gpt-a", "1000", "2000", "--yes"]) == 3
    assert "`hpctrain resume gpt-a --from 0`" in capsys.readouterr().err


class Refuses:
    """Fails so many times, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.fixture
def slept(hands):
    return hands.slept


def test_what_the_file_system_refuses_is_tried_again_at_growing_distances(slept, capsys):
    act = Refuses(OSError(116, "Stale"), FileSystemFault("x"), OSError(5, "Input"))

    assert Patience(60)(act) == "answer"
    assert slept == [0.5, 1.0, 2.0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[0].startswith("hpctrain: [Errno 116] Stale; tried again in 0.5 s, for 60 s more")


def test_patience_ends_and_is_one_for_all_that_is_read(slept):
    patience = Patience(5)

    with pytest.raises(OSError, match="Stale"):
        patience(Refuses(*[OSError(116, "Stale")] * 9))
    assert sum(slept) == 5
    act = Refuses(FileSystemFault("x"))
    with pytest.raises(FileSystemFault):
        patience(act)
    assert act.calls == 1


def test_damage_is_not_tried_again(slept):
    act = Refuses(TornCheckpoint("digest"))

    with pytest.raises(TornCheckpoint):
        Patience(60)(act)
    assert slept == []


@pytest.mark.parametrize(
    ("step", "says"),
    [(None, "gpt-a is done: its program has ended"), (400, "gpt-a is done (step 400); to train")],
)
def test_a_run_that_is_done_says_so_with_a_step_only_where_one_is_known(run, capsys, step, says):
    Spec("gpt-a", "id", 1e9, "local", "", Entry("script", "train.py")).dump(run.spec)
    write_event(run, "done", attempt=1, step=step)

    assert main(["resume", "gpt-a", "--dry-run"]) == 5

    assert says in capsys.readouterr().err
