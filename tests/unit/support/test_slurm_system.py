"""tests/support/slurm_system.sh where it may not, or is asked for what there is not: one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "support" / "slurm_system.sh"


def run(folder, *argv):
    done = subprocess.run(
        [str(SCRIPT), *argv],
        env={**os.environ, "HPCTRAIN_SLURM_SYSTEMS": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.count("\n") <= 1
    return done.returncode, done.stderr.strip()


def test_a_version_that_there_is_not(tmp_path):
    for verb in ("prepare", "run"):
        code, said = run(tmp_path, verb, "19.05", *(["true"] if verb == "run" else []))
        assert (code, said) == (2, "no system for SLURM 19.05: there are 24.11 and 26.05")


def test_a_system_that_is_not_there_yet(tmp_path):
    code, said = run(tmp_path, "run", "24.11", "true")

    assert code == 3
    assert said == f"no SLURM 24.11 in {tmp_path}: run {SCRIPT} prepare 24.11"


def test_one_that_was_half_made_is_not_used(tmp_path):
    (tmp_path / "24.11" / "usr").mkdir(parents=True)

    code, _ = run(tmp_path, "run", "24.11", "true")

    assert code == 3


def test_a_word_too_few(tmp_path):
    assert run(tmp_path, "prepare") == (2, "slurm_system.sh prepare VERSION")
    assert run(tmp_path, "run", "24.11") == (2, "slurm_system.sh run VERSION CMD...")
