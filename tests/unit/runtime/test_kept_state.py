"""No save is ahead of the ledger; a step that only memory has is not taken for saved."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.tensors.restore import Restored
from hpctrain.core.settings.schema import Settings
from hpctrain.train.runtime import kept_state
from hpctrain.train.runtime.kept_state import NothingKept, TrainingState

AGREED = SimpleNamespace(save=True, memory=False)


class FakeSaves:
    """Notes what it is called for, beside what else happens."""

    saver = None

    def __init__(self, did):
        self.did = did

    def __getattr__(self, name):
        return lambda *_: self.did.append(name)

    def is_due(self, _):
        return False

    def start(self, step):
        self.did.append(("start", step))


@pytest.fixture
def did():
    return []


@pytest.fixture
def state(did, monkeypatch):
    monkeypatch.setattr(kept_state, "Saves", lambda *_: FakeSaves(did))
    monkeypatch.delenv("HPCTRAIN_CONTROL", raising=False)
    monkeypatch.setattr(kept_state, "on_rank_0", lambda *_: None)
    record = SimpleNamespace(event=did.append, start_trackers=lambda _: None, metrics={})
    return TrainingState(
        SimpleNamespace(attempt=SimpleNamespace(number=1), run=SimpleNamespace(name="run")),
        Settings(),
        SimpleNamespace(awaits_weights=False, take_over=lambda _: None),
        world=SimpleNamespace(rank=0, world_size=1),
        job_clock=None,
        stops=SimpleNamespace(near_stop_left_s=None),
        record=record,
        run_id="",
        extra=lambda _: {},
        flush=lambda: did.append("flush"),
        saving=nullcontext(),
    )


@pytest.mark.parametrize(
    ("save", "called"),
    [
        (lambda state: state.save(3), "now"),
        (lambda state: state.follow(AGREED, 3), "periodic"),
        (lambda state: state.save_at_stop(3, None), "final"),
        (lambda state: state.save_at_end(3), "patiently"),
    ],
)
def test_no_checkpoint_is_ahead_of_the_ledger_and_the_curves(state, did, save, called):
    """A kill after the save would leave a hole before its step, and the resume begins behind it."""
    save(state)

    assert did[:2] == ["flush", called]


@pytest.mark.parametrize(("is_saved", "step"), [(True, 7), (False, 0)])
def test_a_step_that_only_memory_has_is_still_to_be_saved(state, did, monkeypatch, is_saved, step):
    """Taken for saved, a stop right after the resume would leave without writing it."""
    manifest = SimpleNamespace(step=7, world_size=1)
    restored = Restored(manifest=manifest, is_saved=is_saved)
    monkeypatch.setattr(kept_state, "restore", lambda *_, **__: restored)

    assert state.restore() is restored

    assert did[-1] == ("start", step)


def test_where_nothing_is_kept_nothing_is_wished_and_nothing_happens():
    nothing = NothingKept()

    assert not nothing.wishes_save()
    assert not nothing.wishes_copy(3)
    nothing.follow(AGREED, 3)
    nothing.save(3)
