"""A node on which all work takes longer is named, and gives its place to a spare behind a save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.history.attempts import attempts
from hpctrain.history.run_history import RunHistory
from tests.support.ledger_runs import all_fields
from tests.support.scenario import submit

pytestmark = [pytest.mark.slurm, pytest.mark.soak]  # a minute

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "slow_node.py"
EVERY = 10


def test_a_slow_node_gives_its_place_to_a_spare(slurm, tmp_path, capsys):
    run = submit(
        slurm,
        tmp_path,
        "--nodes=2+1",
        "--ranks-per-node=2",
        sets={"alive.stragglers": "swap", "checkpoint.interval_steps": EVERY},
        script=[str(SCRIPT), "n2"],
    )
    run.wait_done()

    slow = all_fields(run.events("straggler")[0])
    assert (slow["kind_of"], slow["nodes"]) in [("node", ["n2"]), ("rank", ["n2"])], run.story()
    [lost] = [all_fields(event) for event in run.events("node_lost")]
    assert (lost["node"], lost["members"]) == ("n2", ["n1", "n3"])
    assert "it gives its place to n3: n2" in lost["why"]
    first, second = attempts(RunHistory.of(run.events()))
    assert (first.nodes, second.nodes) == (("n1", "n2"), ("n1", "n3"))
    assert second.first_step % EVERY == 0
    assert first.steps_lost <= 2, "right behind a save"
    capsys.readouterr()
    assert main(["report", "--nodes", "--runs", str(run.dir.root.parent), "--json"]) == 0
    past, *_ = json.loads(capsys.readouterr().out)["nodes"]
    assert (past["node"], past["slow"], past["served"]) == ("n2", [run.dir.name], 1)
    with capsys.disabled():
        print(f"\nswapped at step {first.last_step}, {first.steps_lost} steps lost")
