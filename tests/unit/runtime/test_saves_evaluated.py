"""Rank 0 prunes after each commit: nothing that is to be evaluated goes, and the best stays."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.store import find
from hpctrain.core.settings.schema import CheckpointSettings, EvaluateSettings
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.events import LineReader
from hpctrain.train.runtime.saves import EvaluationsTail, Saves
from tests.support import checkpoints
from tests.support.ledger_runs import Story

KEEP_LAST, KEEP_BEST = 2, 2
CHECKPOINT = CheckpointSettings(
    keep_last=KEEP_LAST, keep_best=KEEP_BEST, best_metric="eval.loss", best_is="lowest"
)


class Training:
    """Commits and evaluations of one run, and what must be on disk after each commit."""

    def __init__(self, root, every):
        self.story = Story(root).submitted()
        self.run, self.every = self.story.run, every
        self.saved, self.asked, self.losses, self.number = [], set(), {}, 0
        self.requeued()

    def requeued(self):
        self.number += 1
        self.story.started(self.number).restored(self.number, max(self.saved, default=0))
        self.attempt = checkpoints.next_attempt(self.run)
        self.saves = Saves.__new__(Saves)
        self.saves._settings, self.saves._rows_by_step = CHECKPOINT, {}
        self.saves._place = SimpleNamespace(run=self.run, attempt=self.attempt)
        settings = EvaluateSettings(script="eval.py", every=self.every)
        self.saves._evaluations = EvaluationsTail(self.run, settings)
        self.saves._event = lambda fact: pytest.fail(str(fact))

    def commit(self, *, behind):
        step = 10 * (len(self.saved) + 1)
        checkpoints.save(self.run, self.attempt, step)
        if behind:  # a save behind training is in the ledger only after the pruning
            self.saves._prune(SimpleNamespace(step=step))
        self.story.saved(self.number, step)
        if not behind:
            self.saves._prune(SimpleNamespace(step=step))
        due_before = self.awaited()
        self.saved.append(step)
        return due_before if behind else self.awaited()

    def awaited(self):
        due = set(self.saved[self.every - 1 :: self.every]) | self.asked
        return due - self.losses.keys()

    def evaluate(self, step, loss):
        metrics = {} if loss is None else {"loss": loss}
        self.story.add("evaluated", step=step, run="x", metrics=metrics, why="")
        self.losses[step] = loss

    def ask(self, step):
        self.story.add("evaluation_asked", step=step)
        self.asked.add(step)
        self.losses.pop(step, None)

    def best(self):
        ranked = sorted((loss, -step) for step, loss in self.losses.items() if loss is not None)
        return {-step for _, step in ranked[:KEEP_BEST]}


@pytest.mark.parametrize("number", range(12))
def test_after_each_commit_there_is_what_must_stay_and_nothing_else(tmp_path, number):
    dice = random.Random(number)
    training = Training(tmp_path / "gpt-a", dice.choice([1, 2, 3]))
    for _ in range(25):
        there = [s for s in find.steps(training.run) if training.losses.get(s) is None]
        awaited = sorted(training.awaited())
        act = dice.random()
        if act < 0.4 and awaited:
            loss = dice.choice([None, dice.choice([1.0, 1.5, 2.0, dice.random()])])
            training.evaluate(dice.choice(awaited), loss)
        elif act < 0.45 and there:
            training.ask(dice.choice(there))
        elif act < 0.5:
            training.requeued()
        else:
            must_stay = training.commit(behind=dice.random() < 0.5) | training.best()
            must_stay |= set(training.saved[-KEEP_LAST:])
            assert set(find.steps(training.run)) == must_stay


def test_a_commit_reads_what_is_new_in_the_ledger(tmp_path, monkeypatch):
    training = Training(tmp_path / "gpt-a", 1)
    for _ in range(3):
        training.commit(behind=False)
        training.story.steps(1, 1, 5)
    read = []
    real = LineReader.block

    def block(self, *args):
        before = self.tell()
        lines = real(self, *args)
        read.append(self.tell() - before)
        return lines

    size = training.run.events.stat().st_size
    monkeypatch.setattr(LineReader, "block", block)
    training.commit(behind=False)

    assert sum(read) < size / 2
    assert sum(read) >= training.run.events.stat().st_size - size
    assert not training.saves._evaluations._history.training[1:], "no mark is kept in memory"


def test_a_ledger_that_cannot_be_read_prunes_nothing_and_is_told(tmp_path, monkeypatch):
    training = Training(tmp_path / "gpt-a", 3)
    for _ in range(3):
        training.commit(behind=False)
    told = []
    training.saves._event = told.append

    def refuse(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ledger.Tail, "new", refuse)
    training.commit(behind=False)

    assert find.steps(training.run) == [40, 30, 20]
    assert [fact.why for fact in told] == ["[Errno 5] Input/output error"]


def test_a_run_without_evaluations_reads_no_ledger(tmp_path, monkeypatch):
    run = Story(tmp_path / "gpt-a").run
    monkeypatch.setattr(ledger.Tail, "new", lambda _: pytest.fail("read"))

    now = EvaluationsTail(run, EvaluateSettings()).now()

    assert (now.awaited, now.metrics) == (frozenset(), {})


def test_a_prune_looks_at_all_files_but_of_what_was_just_committed(tmp_path, monkeypatch):
    life = Training(tmp_path, every=1)
    real, looked = find.look, []

    def look(run, step, *, looks=None):
        looked.append((step, looks))
        return real(run, step, looks=looks)

    monkeypatch.setattr(find, "look", look)
    checkpoints.save(life.run, life.attempt, 10, 20)

    life.saves._prune(SimpleNamespace(step=20))

    assert looked == [(20, find.SAMPLE), (10, None)]
