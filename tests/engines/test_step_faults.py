"""A fault at the beginning of a step meets every rank there, before anything of it is done."""

from __future__ import annotations

import os
import threading

from hpctrain.core.testing import faults
from hpctrain.ledger.run import events as ledger
from hpctrain.recipes.lm import train as recipe
from tests.support.gates import before, steps_held
from tests.support.ledger_runs import all_fields
from tests.support.recipe import make_run, train

STEPS = 6


def test_ranks_stand_before_the_step_that_is_named_until_they_are_let_go(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", train__steps=STEPS)
    gates, held = steps_held(tmp_path, {1: 3, 2: 5})
    arrived, begun = [], []

    def begin(*_, **__):
        with (tmp_path / f"begun-{os.environ['RANK']}").open("a") as file:
            file.write("a step\n")

    def let_go():
        arrived.extend(gates[1].wait(2))
        begun.extend((tmp_path / f"begun-{n}").read_text().count("\n") for n in range(2))
        gates[1].open()

    before(monkeypatch, recipe, "microbatches", begin)

    opener = threading.Thread(target=let_go)
    opener.start()
    with faults.armed(held):
        train(run, 2)
    opener.join()

    assert sorted(rank for rank, _ in arrived) == [0, 1]
    assert begun == [3, 3]
    assert gates[2].arrivals() == [], "of another attempt"
    assert [all_fields(e)["step"] for e in ledger.read(run) if e.kind == "done"] == [STEPS]
