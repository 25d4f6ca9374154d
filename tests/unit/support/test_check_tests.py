"""What `make check` runs beside its tests on this machine's SLURM, and what fails it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.patience import PATIENCE_S, until
from tests.support.two_clusters import NO_CLUSTER_LEFT

SCRIPT = Path(__file__).parents[2] / "support" / "check_tests.sh"
MAKE = """#!/bin/sh
echo "begin $1" >>"$DIARY"
[ "$1" != landing-tests ] || while [ ! -e "$LANDED" ]; do sleep 0.05; done
echo "end $1" >>"$DIARY"
echo "printed by $1"
case $1 in
  landing-tests) [ "$HPCTRAIN_NO_CLUSTER_LEFT" ] || exit 1 ;;
  *) [ -z "$HPCTRAIN_NO_CLUSTER_LEFT" ] || exit 1 ;;  # that path is not in the other systems
esac
[ "$1" != "$FAILS" ]
"""


@pytest.fixture
def begin(tmp_path):
    """Start the script with a `make` that writes down what it is called for."""
    make = tmp_path / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    diary = tmp_path / "diary"
    diary.touch()
    scripts = []

    def begin(fails=""):
        environ = {**os.environ, "DIARY": str(diary), "LANDED": str(tmp_path / "landed")}
        environ |= {"FAILS": fails, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        environ |= {"TMPDIR": str(tmp_path)}
        environ.pop(NO_CLUSTER_LEFT, None)  # of the script that runs this test
        scripts.append(
            subprocess.Popen(
                [SCRIPT], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return scripts[-1]

    yield begin, lambda: diary.read_text().splitlines(), tmp_path
    for script in scripts:  # of a test that failed
        processes.kill_all([*processes.descendants(script.pid), script.pid])
        script.communicate()


def test_other_versions_begin_when_no_cluster_is_left(begin):
    begin, diary, folder = begin
    script = begin()
    until(lambda: "end slurm-systems" in diary())
    assert "begin slurm-versions" not in diary()
    (made,) = folder.glob("tmp.*")
    (made / "no-cluster-left").touch()
    until(lambda: "end slurm-versions" in diary())
    assert "end landing-tests" not in diary()
    (folder / "landed").touch()
    printed, _ = script.communicate(timeout=PATIENCE_S)
    assert script.returncode == 0
    assert printed.splitlines() == [
        "printed by landing-tests", "printed by slurm-systems", "printed by slurm-versions"
    ]  # fmt: skip
    assert not made.exists()


@pytest.mark.parametrize("fails", ["landing-tests", "slurm-systems", "slurm-versions"])
def test_what_fails_fails_the_whole(begin, fails):
    begin, diary, folder = begin
    (folder / "landed").touch()
    script = begin(fails)
    script.communicate(timeout=PATIENCE_S)
    assert script.returncode == 1
    assert "end landing-tests" in diary()
    assert ("end slurm-versions" in diary()) == (fails != "slurm-systems")


def test_with_its_end_ends_what_runs_beside(begin):
    begin, diary, folder = begin
    script = begin()
    until(lambda: "end slurm-systems" in diary())
    beside = processes.descendants(script.pid)
    script.send_signal(signal.SIGTERM)
    (folder / "landed").touch()
    script.communicate(timeout=PATIENCE_S)
    until(lambda: not any(map(processes.alive, beside)))
    assert "begin slurm-versions" not in diary()
