"""What is read from sbatch, what a node's task runs, and what importing the room costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import submitit

from hpctrain.cluster.scheduler.slurm.command import submitted_here as read_id
from hpctrain.cluster.scheduler.slurm.executor import AgentTask, HpctrainExecutor
from hpctrain.cluster.scheduler.slurm.script import sbatch
from hpctrain.core.base.env import HPCTRAIN_LOCAL_CONTEXT
from hpctrain.core.base.files import write_private
from hpctrain.core.base.records import JobContext
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.entry import slurm_task
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.ledger.run.layout import RunDir


@pytest.fixture(autouse=True)
def commands(tmp_path, monkeypatch):
    """This is the cluster alps; returns what SLURM's commands were asked."""
    for name in ("scontrol", "scancel"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\necho "ClusterName = alps"\n'
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path / "asked"


@pytest.mark.parametrize("printed", ["4711;cm4\n", "Submitted batch job 4711 on cluster cm4\n"])
def test_a_job_that_went_to_another_cluster_is_cancelled_there(commands, printed):
    with pytest.raises(ClusterError, match="sent job 4711 to the cluster cm4, and this is alps"):
        read_id(printed)

    assert commands.read_text().splitlines()[-1] == "scancel --clusters=cm4 4711"


@pytest.mark.parametrize(
    "printed",
    [
        "4711\n",
        "4711;alps\n",
        "Welcome to Alps!\nproject ok\n4711\n",
        "4711\nhours left: 300\n",
        "4711\r\n",
        "Submitted batch job 4711\n",
        "Submitted batch job 4711 on cluster alps\n",
    ],
)
def test_job_id_is_read_whatever_the_site_prints_around_it(printed):
    assert read_id(printed) == "4711"


@pytest.mark.parametrize("printed", ["", "Submitted\n", "hours left: 300\n", "4711\n300\n"])
def test_without_an_id_the_job_may_be_there_and_no_other_is_taken_for_it(printed):
    with pytest.raises(ClusterUnreachable, match="printed no job id"):
        read_id(printed)


def test_the_task_of_a_node_is_its_runs_and_no_pickle_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_task.signals, "install", lambda: None)  # would change this process
    started = []
    monkeypatch.setattr(slurm_task, "run_node", lambda run: started.append(str(run.root)) or 0)
    (tmp_path / "spec.json").write_text("{}")
    (tmp_path / "submitted.pkl").write_bytes(b"no pickle")

    assert slurm_task.main([str(tmp_path)]) == 0
    assert started == [str(tmp_path)]


def test_the_script_is_submitted_and_nothing_is_pickled(tmp_path, commands):
    command = commands.parent / "bin" / "sbatch"
    command.write_text(f'#!/bin/sh\necho "sbatch $*" >> {commands}\necho "4711;alps"\n')
    command.chmod(0o755)
    script = tmp_path / "tok.sh"
    script.write_text("#!/bin/sh\n#SBATCH --export=NONE\n")

    assert sbatch(script, timeout_s=20.0) == "4711"
    assert commands.read_text().splitlines()[0] == f"sbatch --parsable {script}"
    assert not (tmp_path / "tok").exists()


def test_a_script_with_a_path_that_is_no_utf_8_is_submitted(tmp_path, commands):
    command = commands.parent / "bin" / "sbatch"
    command.write_text("#!/bin/sh\necho 4711\n")
    command.chmod(0o755)
    script = tmp_path / "tok.sh"

    write_private(script, os.fsdecode(b"#!/bin/sh\ncd lait\xe9\n"), mode=0o700)

    assert script.read_bytes() == b"#!/bin/sh\ncd lait\xe9\n"
    assert sbatch(script, timeout_s=20.0) == "4711"


def test_task_outside_of_a_job_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm_task.signals, "install", lambda: None)  # would change this process
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "spec.json").write_text("{}")

    code = slurm_task.main([str(tmp_path)])

    assert code == 6
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().err


FULL_DISK = """
import errno, os, sys

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "attempt.json")

from hpctrain.entry import {entry}
{entry}.run_node = {entry}.run_agent = full
sys.exit({entry}.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("entry", ["slurm_task", "local_node"])
def test_a_full_disk_ends_an_agent_with_a_line_and_no_trace(entry, tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    context = JobContext("local-1", 0, 0, ["n1"], "127.0.0.1", 1, "")
    env = os.environ | {HPCTRAIN_LOCAL_CONTEXT: json.dumps(asdict(context))}
    command = [sys.executable, "-c", FULL_DISK.format(entry=entry), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"{tmp_path}: [Errno 28] No space left on device: 'attempt.json'")


def test_another_version_than_the_batch_scripts_is_refused_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm_task.signals, "install", lambda: None)  # would change this process
    monkeypatch.setenv("HPCTRAIN_BATCH_VERSION", "0.0.1")
    (tmp_path / "spec.json").write_text("{}")

    code = slurm_task.main([str(tmp_path)])

    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has hpctrain {slurm_task.VERSION}, and the batch script's python has 0.0.1" in line


def test_a_script_of_ones_own_that_starts_no_container_is_told(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    spec = Spec("r", "id", 0.0, "slurm", "", Entry("recipe"))
    spec.dump(run.spec)
    monkeypatch.delenv("HPCTRAIN_RELAY", raising=False)
    assert slurm_task.outside_of_image(run) == ""

    settings = replaced(spec.settings, {"container.image": "/x.sif"})
    replace(spec, settings=settings).dump(run.spec)
    assert "container.image is /x.sif, and this task runs in no container" in (
        slurm_task.outside_of_image(run)
    )
    monkeypatch.setenv("HPCTRAIN_RELAY", "/runs/r/jobs/tok.port")
    assert slurm_task.outside_of_image(run) == ""


def test_task_without_a_run_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm_task.signals, "install", lambda: None)  # would change this process

    code = slurm_task.main([str(tmp_path)])

    assert code == 2
    assert "holds no spec.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("entry.slurm_batch", {"torch", "numpy", "submitit", "dataclasses", "click"}),
        ("cluster.scheduler.slurm.client", {"torch", "numpy", "submitit", "click"}),
        ("cluster.scheduler.slurm.script", {"torch", "numpy", "submitit", "click"}),
        ("entry.slurm_after", {"torch", "numpy", "submitit", "click"}),
    ],
)
def test_importing_is_cheap(module, unwanted):
    code = f"import sys, hpctrain.{module}; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert f"hpctrain.{module}" in loaded
    assert not unwanted & set(loaded)


def test_submitits_executor_keeps_all_but_submission_and_choice():
    overruled = {name for name in vars(HpctrainExecutor) if not name.startswith("__")}

    assert overruled - {"_abc_impl"} == {"submit", "affinity"}


def test_a_job_is_submitits_and_its_task_checkpointable(tmp_path, commands):
    command = commands.parent / "bin" / "sbatch"
    command.write_text('#!/bin/sh\necho "4711;alps"\n')
    command.chmod(0o755)
    script = tmp_path / "tok.sh"
    script.write_text("#!/bin/sh\n")
    task = AgentTask(tmp_path, lambda run: len(run.root.parts))

    job = HpctrainExecutor(tmp_path / "tok", script, 20.0).submit(task)

    assert isinstance(job, submitit.SlurmJob)
    assert job.job_id == "4711"
    assert isinstance(task, submitit.helpers.Checkpointable)
    assert task() == len(tmp_path.parts)
