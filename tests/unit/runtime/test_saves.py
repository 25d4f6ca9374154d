"""A save behind training that was not committed is made again: its step is not taken for saved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.tensors.save import Outcome
from hpctrain.errors import CheckpointError, Fenced
from hpctrain.train.runtime.saves import LastSave, Saves


@pytest.fixture
def saves(monkeypatch):
    """Of one rank, whose save of step 5 is on its way; the steps that are saved while it waits."""
    found = Saves.__new__(Saves)
    found.step, found._reported, found.made = 5, None, []
    found._world = SimpleNamespace(rank=0, control=None)
    found._clock = SimpleNamespace(expected_save_s=lambda: 1.0)
    monkeypatch.setattr(Saves, "_record_fact", lambda *_: None)
    monkeypatch.setattr(Saves, "_now", lambda self, step, _snapshot: self.made.append(step))
    return found


def landing(outcome, *, in_time=True):
    return SimpleNamespace(
        land=lambda: outcome, abandon=lambda: outcome, settle=lambda _patience_s: in_time
    )


FAILED = Outcome(5, None, CheckpointError("a full disk"))
DONE = Outcome(5, SimpleNamespace(seconds=1.0))


@pytest.mark.parametrize(
    ("outcome", "step", "made"),
    [(FAILED, 5, [5]), (DONE, 5, []), (FAILED, 6, [6]), (DONE, 6, [6]), (None, 6, [6])],
)
def test_the_last_step_is_saved_unless_it_was_committed(saves, outcome, step, made):
    saves.saver = landing(outcome)

    saves.now(step, None)

    assert saves.made == made


def test_a_newer_attempt_ends_this_one(saves):
    saves.saver = landing(Outcome(5, None, Fenced("attempt 3 has taken over")))

    with pytest.raises(Fenced):
        saves.now(6, None)


@pytest.mark.parametrize(
    ("choice", "left_s", "in_time", "hangs"),
    [
        (LastSave.BOTH, 30.0, False, True),
        (LastSave.BOTH, 30.0, True, False),
        (LastSave.BOTH, None, False, False),
        (LastSave.FINISH, 30.0, False, False),
    ],
)
def test_a_save_that_hangs_is_given_up_where_a_new_one_would_not_fit(
    saves, choice, left_s, in_time, hangs
):
    saves.saver = landing(DONE, in_time=in_time)

    assert saves._hangs(choice, left_s) is hangs
