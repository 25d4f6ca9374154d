"""`make demo` tells its whole story on a machine without SLURM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[2]


def test_the_demo_ends_with_the_table_of_attempts_and_loses_nothing(tmp_path):
    env = {
        **os.environ,
        "HPCTRAIN_RUNS": str(tmp_path / "runs"),
        "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local"),
    }

    done = subprocess.run(
        [sys.executable, "demo/demo.py"],
        cwd=TOP,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.rpartition("$ hpctrain status")[2]
    rows = [line.split() for line in table.splitlines() if line[:3] in {"1  ", "2  "}]
    assert ["preempted" in row for row in rows] == [True, False]
    assert ("queue" in rows[0], rows[1][-2:]) == (True, ["0", "-"])  # back from it; nothing lost
    assert "4 ranks, then 2 ranks: 240 steps, none done twice" in done.stdout
    assert done.stderr == ""
