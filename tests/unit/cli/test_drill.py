"""`hpctrain drill`: what is listed, refused and written; tests/e2e/test_drill.py plants faults."""

from __future__ import annotations

import json
import os
import signal

import pytest

from hpctrain.advise.drill import schedule
from hpctrain.advise.drill.promises import FAULTS, DrillVerdict
from hpctrain.advise.drill.schedule import DrillResult
from hpctrain.cli import drill
from hpctrain.cli.main import main
from hpctrain.core.base.env import HPCTRAIN_FAULTS

RESULTS = [
    DrillResult(FAULTS["kill_rank"], DrillVerdict("kept", "attempt 2 went on"), 3.21),
    DrillResult(FAULTS["flip_bit"], DrillVerdict("broken", "loaded <step> | it was damaged"), 4.0),
    DrillResult(FAULTS["fill_disk"], DrillVerdict("not tried", "nobody can tell"), 0.1),
]


def test_a_dry_run_lists_every_fault_with_its_promise(capsys):
    assert main(["drill", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{one.name}\n    does: {one.does}" in shown for one in FAULTS.values())
    assert main(["drill", "--dry-run", "--json", "--faults", "preempt, kill_rank"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["kill_rank", "preempt"]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder with a local cluster of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--faults", "kil_rank"], 2, "did you mean kill_rank?"),
        (["lm-3"], 4, "script lm-3 is not there"),
        (["--set", "x", "--", "train.py"], 2, "--set x: not of the form section.key=value"),
        (["--cluster", "local", "--", "nothere.py"], 4, "script nothere.py is not there"),
    ],
)
def test_what_cannot_be_drilled_is_one_line(words, code, said, alone, capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert main(["drill", *words]) == code
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert [path.name for path in alone.rglob("*drill-*")] == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_faults_of_the_users_own_stay_armed_and_the_drills_are_gone_afterwards(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(HPCTRAIN_FAULTS, "kill:report.gather,step=8")
    with drill._armed(tmp_path):
        mine, *armed = os.environ[HPCTRAIN_FAULTS].split(";")
        assert mine == "kill:report.gather,step=8"
        assert armed == [
            f"{one.armed},once={tmp_path / one.name}" for one in FAULTS.values() if one.armed
        ]
        assert all((tmp_path / one.name).exists() for one in FAULTS.values() if one.armed)
    assert os.environ[HPCTRAIN_FAULTS] == "kill:report.gather,step=8"


class Told:
    """A course whose faults are over."""

    def __init__(self, results):
        self.results, self.cluster = results, "local"
        self.run = type("Run", (), {"name": "drill-1"})

    def drill(self, _faults):
        return iter(self.results)


def test_the_table_counts_what_was_kept_and_a_broken_promise_is_an_exit_code(capsys):
    assert drill._inject(Told(RESULTS[:1]), [], as_json=False) == 0
    with pytest.raises(drill.ChecksFailed, match="a promise was broken: flip_bit"):
        drill._inject(Told(RESULTS), [], as_json=False)
    shown = capsys.readouterr().out
    assert "kill_rank        kept       attempt 2 went on" in shown
    assert shown.endswith("1 kept, 1 broken, 1 not tried\n")


def test_json_has_all_of_it():
    told = schedule.as_json("drill-1", RESULTS)
    assert told["faults"][0] == {
        "name": "kill_rank", "does": FAULTS["kill_rank"].does, "anchor": FAULTS["kill_rank"].anchor,
        "promise": FAULTS["kill_rank"].promise, "outcome": "kept", "why": "attempt 2 went on",
        "seconds": 3.2,
    }  # fmt: skip
