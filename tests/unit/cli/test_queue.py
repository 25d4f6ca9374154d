"""`hpctrain queue` shows in one screen what would start when."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main

SINFO = "for n in 1 2 3; do echo \"work*|n$n|alloc|4:00:00\"; done; echo 'work*|n4|plnd|4:00:00'"
SQUEUE = """
now=$(date +%s)
echo "11|RUNNING|work|n[1-3]|(null)|$now|$((now + 2400))|1:00:00"
echo "12|PENDING|work||n[1-4]|$((now + 2400))|N/A|1:00:00"
echo "13|PENDING|work||(null)|N/A|N/A|1:00:00"
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A SLURM of scripts with a hole of 40 minutes on one of four nodes."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("USER", "someone")
    monkeypatch.setenv("LOGNAME", "someone")
    for name, body in {
        "sbatch": "exit 9",
        "sinfo": SINFO,
        "squeue": SQUEUE,
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_one_screen_says_what_is_free_who_waits_and_what_starts_when(slurm, capsys):
    assert main(["queue"]) == 0

    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) < 24
    assert "(default): 4 nodes, limit 4h00m" in out
    assert "1 of them: 1 node until " in out
    assert "1 job with a planned start, 1 without" in out
    assert "a job of" in out
    one = next(line for line in lines if line.startswith("1 node ")).split()
    assert one[2] == "now"  # 30 minutes
    assert one[3] != "now"  # an hour


def test_json_has_the_numbers(slurm, capsys):
    assert main(["queue", "--json"]) == 0

    value = json.loads(capsys.readouterr().out)
    assert (value["nodes"], value["free"], value["max_time_s"]) == (4, 1, 14400)
    (hole,) = value["holes"]
    assert hole["until"] - value["now"] == pytest.approx(2400, abs=5)
    waits = {(r["nodes"], r["limit_s"]): r["start"] - value["now"] for r in value["starts"]}
    assert waits[1, 1800] == 0
    assert waits[1, 3600] == pytest.approx(6000, abs=5)
    assert waits[4, 1800] == pytest.approx(6000, abs=5)


def test_without_an_answer_there_is_one_line(slurm, capsys):
    (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")

    assert main(["queue", "-p", "nope"]) != 0

    assert "the scheduler shows no queue of partition nope" in capsys.readouterr().err


def test_this_machine_has_no_queue(capsys):
    assert main(["queue", "--cluster=local"]) == 2
    assert "cluster local has no queue" in capsys.readouterr().err
