"""Which rank runs under nsys, and with which words; tests/engines/test_nsys_run.py does it."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.core.base.env import HPCTRAIN_NSYS
from hpctrain.core.base.records import RankTask
from hpctrain.node.agent.foreign import nsys_command, nsys_environment, run_below_nsys

TASK = RankTask("module", nsys_rank=1)


def test_the_words_name_the_report_and_leave_the_program_alive():
    report = Path("/run/profile/attempt-0001/rank-00001")
    words = nsys_command("/x/nsys", report, ["python", "-m", "x"], in_range=False)

    assert words[:3] == ["/x/nsys", "profile", "--output=/run/profile/attempt-0001/rank-00001"]
    assert words[-3:] == ["python", "-m", "x"]
    assert {"--trace=cuda,nvtx,osrt", "--kill=none"} < set(words)
    assert not [word for word in words if word.startswith("--capture-range")]


def test_with_steps_only_they_are_recorded():
    words = nsys_command("nsys", Path("r"), ["python"], in_range=True)

    assert "--capture-range=cudaProfilerApi" in words
    assert "--capture-range-end=stop" in words


def test_other_ranks_and_the_rank_below_nsys_run_where_they_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not run_below_nsys(TASK, 0, tmp_path)
    monkeypatch.setenv(HPCTRAIN_NSYS, "1")
    assert not run_below_nsys(TASK, 1, tmp_path)
    assert capsys.readouterr().out == ""


def test_without_an_nsys_the_rank_trains_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not run_below_nsys(TASK, 1, tmp_path)
    assert "no nsys on PATH: rank 1 trains without it" in capsys.readouterr().err


def test_what_runs_below_finds_hpctrain_first_and_keeps_the_users_paths():
    given = {"PYTHONPATH": os.pathsep.join(["/mine", "", "/mine"]), "RANK": "1"}
    found = nsys_environment(given)

    here = str(Path(__file__).parents[3])
    assert found["PYTHONPATH"].split(os.pathsep) == [here, "/mine"]
    assert (found["RANK"], found[HPCTRAIN_NSYS]) == ("1", "1")
