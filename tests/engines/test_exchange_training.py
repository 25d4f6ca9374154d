"""A run that starts from an import trains on as the one that it was exported from."""

from __future__ import annotations

import pytest

from hpctrain.ledger.run import events as ledger
from tests.support.exchange import Commands
from tests.support.ledger_runs import all_fields
from tests.support.recipe import assert_same_bits, full_state, losses, make_run, train

pytestmark = pytest.mark.quick

STEPS, STOP = 12, 5


def test_an_export_of_everything_trains_on_bit_equal(tmp_path, capsys):
    call = Commands(tmp_path, capsys)
    first = make_run(tmp_path / "first")
    train(first, 2, stop_at=STOP, victim=0)
    step = max(all_fields(event)["step"] for event in ledger.read(first) if event.kind == "saved")
    exports = {"torch": "all.pt", "safetensors": "all"}
    for kind, dest in exports.items():
        call("export", first.root, step, tmp_path / dest, "--to", kind, "--what", "all")
    train(first, 2)

    for kind, dest in exports.items():
        other = make_run(tmp_path / f"from-{kind}")
        code, _, err = call("import", tmp_path / dest, "--run", other.root, "--step", step)
        assert (code, err) == (0, "")
        train(other, 2)

        restored = [
            all_fields(event)["step"] for event in ledger.read(other) if event.kind == "restored"
        ]
        assert restored == [step]
        assert_same_bits(full_state(first, STEPS), full_state(other, STEPS))


def test_weights_alone_begin_with_a_new_optimizer(tmp_path, capsys):
    call = Commands(tmp_path, capsys)
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second")
    train(first, 1)
    weights = full_state(first, STEPS)

    call("export", first.root, STEPS, tmp_path / "out")
    code, _, _ = call("import", tmp_path / "out", "--run", second.root, "--step", 0)
    assert code == 0
    train(second, 2)

    restored = [all_fields(e) for e in ledger.read(second) if e.kind == "restored"]
    assert [(one["step"], one["checkpoint"]) for one in restored] == [(0, "step-0000000000")]
    assert losses(second)[1] < losses(first)[1]
    assert full_state(second, STEPS).keys() == weights.keys()
