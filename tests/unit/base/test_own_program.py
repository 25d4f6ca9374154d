"""Whatever lies where submit was typed, a job and a command run their own modules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain
from hpctrain.cluster.scheduler.slurm.script import body_path
from hpctrain.core.base.process import own_program
from tests.support.patience import PATIENCE_S

TOP = Path(hpctrain.__file__).parent
LURES = ("json", "secrets", "signal", "hpctrain", "selectors", "shlex", "sitecustomize")


@pytest.fixture
def lures(tmp_path):
    """A working directory with files of the names of modules; each leaves a mark when imported."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in LURES:
        mark = f"open({str(tmp_path / 'RAN')!r}, 'a').write({name!r} + ' ')"
        (folder / f"{name}.py").write_text(f"{mark}\nraise SystemExit('the lure {name} ran')\n")
    yield folder
    assert not (tmp_path / "RAN").exists(), (tmp_path / "RAN").read_text()


@pytest.mark.parametrize(
    "module",
    [
        "hpctrain.entry.local_controller",
        "hpctrain.entry.local_node",
        "hpctrain.cluster.preflight.node",
        "hpctrain.node.agent.notify_child",
        "hpctrain.node.agent.ranks",
        "hpctrain.entry.slurm_batch",
    ],
)
def test_a_program_of_ours_imports_nothing_from_the_working_directory(lures, module):
    done = subprocess.run(own_program(module), cwd=lures, capture_output=True, check=False)

    assert b"lure" not in done.stderr  # without arguments each ends in an error of its own


def test_every_program_is_started_by_the_one_helper():
    starts = [
        f"{path.relative_to(TOP)}: {line.strip()}"
        for path in TOP.rglob("*.py")
        if path.name != "process.py"
        for line in path.read_text().splitlines()
        if re.search(r"""executable, *["']|["']-u?m["'],""", line)
        and not re.search('"-[PI]"', line)
    ]

    allowed = (
        "launch/prepare.py",
        "launch/launchers.py",
        "submitit/executor.py",
        "core/settings/spec.py",
        "cluster/scheduler/local.py: what =",
    )  # text, not starts
    assert [start for start in starts if not start.startswith(allowed)] == []


def test_every_python_of_a_batch_script_is_told_so():
    lines = [
        line
        for path in body_path().parent.iterdir()
        for line in path.read_text().splitlines()
        if re.search(r"(HPCTRAIN_PYTHON[^\"]*|\$@)\" .*-m ", line)
    ]

    assert len(lines) == 9
    assert all(
        re.search(r'"\$(HPCTRAIN_PYTHON|@|\{HPCTRAIN_PYTHON:-[^"]*\})" -P ', line) for line in lines
    )


def test_a_batch_script_runs_the_real_modules(lures, tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    srun.with_name("scontrol").write_text("#!/bin/bash\necho JobId=7 JobState=CANCELLED\n")
    srun.with_name("scontrol").chmod(0o755)
    (tmp_path / "run").mkdir()

    done = subprocess.run(
        ["bash", body_path()],
        cwd=lures,
        env={
            "PATH": f"{srun.parent}:/usr/bin:/bin",
            "HPCTRAIN_RUN_DIR": str(tmp_path / "run"),
            "HPCTRAIN_PYTHON": sys.executable,
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    agents, batchs = [line for line in done.stderr.splitlines() if "spec.json" in line]
    assert "holds no spec.json" in agents
    assert "spec.json is not there" in batchs
    assert "lure" not in done.stderr


def test_a_local_job_runs_the_real_modules_and_leaves_nothing_that_others_can_write(
    lures, tmp_path
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("WORD = 'mine'\n")
    script = tmp_path / "code" / "train.py"
    script.write_text(
        "import beside, json, signal\n"
        f"open({str(tmp_path / 'told')!r}, 'w').write(beside.WORD + ' ' + json.__file__)\n"
    )
    words = ["--cluster", "local", "--name", "r", "--nodes", "1", "--no-snapshot"]

    for command in (["submit", *words, str(script)], ["logs", "r", "-f"]):
        done = subprocess.run(
            own_program("hpctrain", *command),
            cwd=lures,
            env={
                **os.environ,
                "HPCTRAIN_RUNS": str(tmp_path / "runs"),
                "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local"),
            },
            umask=0,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

        assert done.returncode == 0, done.stdout + done.stderr
    mine, json_file = (tmp_path / "told").read_text().split()
    assert mine == "mine"  # a script's own folder stays
    assert not json_file.startswith(str(tmp_path))
    run = tmp_path / "runs" / "r"
    assert (run / "attempts" / "0001" / "rank-00000.log").exists()
    assert [path for path in (run, *run.rglob("*")) if path.stat().st_mode & 0o022] == []
