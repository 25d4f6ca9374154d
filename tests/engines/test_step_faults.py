"""A fault at the beginning of a step meets every rank there, before anything of it is done."""

from __future__ import annotations

import threading

from hpctrain.run import events as ledger
from hpctrain.testing import faults
from tests.support.gates import steps_held
from tests.support.ledger_runs import all_fields
from tests.support.recipe import make_run, train

STEPS = 6


def test_ranks_stand_before_the_step_that_is_named_until_they_are_let_go(tmp_path):
    run = make_run(tmp_path / "run", train__steps=STEPS)
    gates, held = steps_held(tmp_path, {1: 3, 2: 5})
    arrived, done = [], []

    def let_go():
        arrived.extend(gates[1].wait(2))
        done.extend(all_fields(e)["last"] for e in ledger.read(run) if e.kind == "steps")
        gates[1].open()

    opener = threading.Thread(target=let_go)
    opener.start()
    with faults.armed(held):
        train(run, 2)
    opener.join()

    assert sorted(rank for rank, _ in arrived) == [0, 1]
    assert max(done, default=0) <= 3
    assert gates[2].arrivals() == [], "of another attempt"
    assert [all_fields(e)["step"] for e in ledger.read(run) if e.kind == "done"] == [STEPS]
