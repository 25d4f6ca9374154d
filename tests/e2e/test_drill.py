"""A drill on the embedded cluster: each fault ends as promised, and a broken build is found.

The builds are copies of the package in which the one line that keeps a promise is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
LATE = 600


def drill(folder, *words, build=None):
    """The drill's own process; its package is the build where one is given."""
    path = [str(build)] if build else []
    env = {
        **os.environ,
        "HPCTRAIN_LOCAL_DIR": str(folder / "local"),
        "PYTHONPATH": os.pathsep.join([*path, str(PACKAGE.parent)]),
    }
    # A shell that starts the tests in the background has it ignored, and so would this command.
    heard = ["env", "--default-signal=INT"]
    command = [
        *heard,
        sys.executable,
        "-P",
        "-m",
        "hpctrain",
        "drill",
        "--cluster",
        "local",
        *words,
    ]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def told(folder, *words, code=0, build=None):
    """What came of each fault, by its name."""
    child = drill(folder, "--json", *words, build=build)
    out, err = child.communicate(timeout=LATE)
    assert child.returncode == code, out + err
    return {one["name"]: (one["outcome"], one["why"]) for one in json.loads(out)["faults"]}, err


def test_a_killed_rank_and_a_turned_bit_end_as_promised(tmp_path):
    found, _ = told(tmp_path, "--faults", "kill_rank,flip_bit")

    assert [outcome for outcome, _ in found.values()] == ["kept", "kept"]
    assert "the newest committed" in found["kill_rank"][1]
    assert "left out" in found["flip_bit"][1]
    ignore, run = sorted((tmp_path / "runs").iterdir())  # what was armed has gone with the drill
    assert ignore.name == ".gitignore"
    assert run.name.startswith("drill-")


@pytest.mark.soak
def test_every_fault_ends_as_promised(tmp_path):
    found, _ = told(tmp_path)

    assert {outcome for outcome, _ in found.values()} == {"kept"}, found
    assert len(found) == 9


BUILDS = {
    "fence": (
        "ledger/run/fence.py",
        "if newest is None or newest.token != attempt.token:",
        "if False:",
    ),
    "digest": (
        "checkpoint/format/reader.py",
        "if digest != self.table.digests[self.table.first_block[row] + block]:",
        "if False:",
    ),
}


def built(folder, what):
    """A copy of the package without the line that keeps a promise."""
    name, line, instead = BUILDS[what]
    shutil.copytree(PACKAGE, folder / "build" / "hpctrain", symlinks=False)
    for beside in ("sbatch", "site-configs"):
        shutil.copytree(PACKAGE.parent / beside, folder / "build" / beside)
    path = folder / "build" / "hpctrain" / name
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, instead))
    return folder / "build"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "fault", "said"),
    [
        ("fence", "second_writer", "after it was taken over"),
        ("digest", "flip_bit", "which was damaged"),
    ],
)
def test_a_build_that_breaks_a_promise_is_found(tmp_path, what, fault, said):
    build = built(tmp_path, what)
    whole, _ = told(tmp_path, "--faults", fault)
    found, err = told(tmp_path, "--faults", fault, code=3, build=build)

    assert whole[fault][0] == "kept"
    assert found[fault][0] == "broken"
    assert said in found[fault][1]
    assert f"a promise was broken: {fault}" in err


@pytest.mark.soak
def test_ctrl_c_ends_the_drills_own_run_and_leaves_nothing(tmp_path):
    child = drill(tmp_path, "--faults", "freeze_rank,kill_rank")
    assert child.stdout.readline().startswith("drill of drill-")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=LATE)

    assert child.returncode == 130
    (run,) = (tmp_path / "runs").glob("drill-*")
    status = [sys.executable, "-m", "hpctrain", "status", run.name, "--json"]
    env = {**os.environ, "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local")}
    done = subprocess.run(status, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["state"] in {"cancelled", "completing"}
