"""What is asked of SLURM for one more node; tests/slurm/test_growth.py asks the real one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.base.env import HPCTRAIN_JOINS, HPCTRAIN_SRUN_ARGS
from hpctrain.entry import slurm_grow
from hpctrain.errors import ClusterError
from hpctrain.run.layout import RunDir
from hpctrain.scheduler.base import RequestEnd
from hpctrain.scheduler.local.control import LocalControl
from hpctrain.scheduler.slurm import growth
from hpctrain.scheduler.slurm.relay import RelayedControl
from hpctrain.settings.schema import EnvironmentSettings, Settings, SlurmSettings
from hpctrain.settings.spec import Entry, Spec
from tests.support import patience

ENVIRON = {
    "SLURM_JOB_ID": "7",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_CPU_BIND": "quiet",
    "PMIX_RANK": "0",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "HOME": "/home/ann",
    HPCTRAIN_JOINS: "{}",
    HPCTRAIN_SRUN_ARGS: "--cpus-per-task=8\n--mpi=none\n",
}


def spec_of(**slurm):
    spec = Spec("gpt", "0123", 0.0, "slurm", "", Entry("recipe"), python="/opt/venv/bin/python")
    spec.settings = Settings(slurm=SlurmSettings(**slurm))
    return spec


def test_one_node_of_the_job_s_own_kind_is_asked_for():
    spec = spec_of(
        nodes="2-4",
        gpus_per_node=4,
        time="12:00:00",
        partition="gpu",
        account="lab",
        qos="long",
        mem="64G",
        signal_lead_s=300,
        extra=["--switches=1", "--comment=mine", "--requeue"],
    )
    assert growth.salloc_words(spec, "7", 5400.0) == [
        "salloc",
        "--no-shell",
        "--nodes=1",
        "--dependency=expand:7",
        "--job-name=hpctrain-node-for-7",
        "--time=90",
        "--gpus-per-node=4",
        "--mem=64G",
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--comment=mine",
    ]


@pytest.mark.parametrize(("left_s", "minutes"), [(None, []), (5.0, ["--time=1"])])
def test_no_more_time_is_asked_for_than_the_job_has(left_s, minutes):
    words = growth.salloc_words(spec_of(), "7", left_s)
    assert [word for word in words if word.startswith("--time")] == minutes
    assert "--exclusive" in words


def test_the_agent_is_started_as_those_of_the_first_nodes():
    words = growth.srun_words(spec_of(), "/runs/gpt", ENVIRON, "7", "n9")
    srun = words[words.index("srun") :]
    assert srun[: srun.index("/bin/sh")] == [
        *("srun", "--jobid=7", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
        *("--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--unbuffered"),
        *("--nodelist=n9", "--cpus-per-task=8", "--mpi=none"),
    ]
    task = ["/opt/venv/bin/python", "-P", "-u", "-m", "hpctrain.entry.slurm_task", "/runs/gpt"]
    assert srun[-len(task) :] == task


def test_the_new_node_gets_what_the_job_has_and_nothing_of_the_first_node_s_step():
    left = growth._of_srun(ENVIRON)
    gone = {"SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_CPU_BIND", "PMIX_RANK"}
    assert set(ENVIRON) - set(left) == gone | {"CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("SchedulerParameters     = permit_job_expansion", ""),
        ("SchedulerParameters = bf_interval=1,permit_job_expansion,x\nX = 1", ""),
        ("SchedulerParameters = (null)", "the site's SchedulerParameters have no permit_job_expan"),
        ("SchedulerParameters = nopermit_job_expansion", "the site's SchedulerParameters have no "),
        ("", "the site's SchedulerParameters have no permit_job_expansion"),
    ],
)
def test_nothing_is_asked_for_where_the_site_does_not_permit_it(monkeypatch, config, why):
    monkeypatch.setattr(growth.shutil, "which", lambda _name: "/usr/bin/salloc")
    monkeypatch.setattr(growth, "run", lambda _words: config)
    said = growth.why_not()
    assert said.startswith(why)
    assert bool(said) == bool(why)


def test_nothing_is_asked_for_where_slurm_s_command_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(growth.shutil, "which", lambda _name: None)
    code = growth.grow(spec_of(), "/runs/gpt", ENVIRON, os.getppid())
    assert code == growth.NOT_HERE
    assert "there is no salloc on this node" in caplog.text


def test_a_staged_environment_is_not_on_the_new_node(monkeypatch, caplog):
    monkeypatch.setattr(growth, "why_not", lambda: "")
    spec = spec_of()
    spec.settings = Settings(environment=EnvironmentSettings(stage="auto"))
    assert growth.grow(spec, "/runs/gpt", ENVIRON, os.getppid()) == growth.NOT_HERE
    assert "staged to the disks of the first nodes" in caplog.text


def salloc(tmp_path, text):
    """A program in its place; SLURM's own is asked in tests/slurm/test_growth.py."""
    path = tmp_path / "salloc"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return [str(path)]


def test_what_slurm_said_first_is_why_there_is_no_node(tmp_path):
    words = salloc(
        tmp_path,
        "raise SystemExit('salloc: hello\\nsalloc: error: Job dependency problem\\nTry --help')",
    )
    with pytest.raises(ClusterError, match=r"gave no node: salloc: error: Job dependency problem$"):
        growth._granted(words, os.getppid())


def test_the_job_that_was_granted_is_known_by_what_salloc_prints(tmp_path):
    words = salloc(tmp_path, "print('salloc: Pending job allocation 81\\nsalloc: Granted job...')")
    assert growth._granted(words, os.getppid()) == "81"


def test_the_request_goes_with_the_agent_that_asked(tmp_path, monkeypatch):
    told, waits = tmp_path / "told", tmp_path / "waits"
    words = salloc(
        tmp_path,
        f"""
import pathlib, signal, sys, time
def taken_back(*_):
    pathlib.Path({str(told)!r}).touch()
    sys.exit(1)
signal.signal(signal.SIGINT, taken_back)
pathlib.Path({str(waits)!r}).touch()
time.sleep(60)
""",
    )
    parent = os.getppid()
    monkeypatch.setattr(growth.os, "getppid", lambda: 1 if waits.exists() else parent)

    with pytest.raises(ClusterError, match="has gone"):
        growth._granted([*growth.IGNORE_STORM, *words], parent)

    assert told.exists()


def added(tmp_path, monkeypatch, text):
    run = RunDir(tmp_path)
    run.jobs.mkdir()
    program = [sys.executable, "-c", text]
    monkeypatch.setattr(growth, "own_program", lambda *_words, **_more: program)
    return growth.AddedNode(run, dict(os.environ), "tok-joins-3")


def ended(request):
    patience.until(lambda: request.ended() is not None)
    return request.ended()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("import sys; sys.exit('x hpctrain: error: no node')", RequestEnd("no node")),
        ("print('srun: Killed'); raise SystemExit(4)", RequestEnd("srun: Killed", is_final=True)),
    ],
)
def test_a_request_tells_how_it_ended(tmp_path, monkeypatch, text, end):
    assert ended(added(tmp_path, monkeypatch, text)) == end


def test_a_request_that_said_nothing_names_its_file(tmp_path, monkeypatch):
    end = ended(added(tmp_path, monkeypatch, ""))
    assert end is not None
    assert str(tmp_path / "jobs" / "tok-joins-3.out") in end.why


def test_a_request_that_is_taken_back_is_interrupted_and_awaited(tmp_path, monkeypatch, caplog):
    listens = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    text = listens + "import time; print(1, flush=True); time.sleep(60)"
    request = added(tmp_path, monkeypatch, text)
    out = tmp_path / "jobs" / "tok-joins-3.out"
    patience.until(out.read_text)
    assert request.ended() is None
    request.take_back(30)
    assert request._child.returncode == -signal.SIGINT
    request.take_back(30)
    assert caplog.messages == []


def test_what_waits_for_a_node_hears_its_interrupt_where_a_shell_has_it_ignored(
    tmp_path, monkeypatch
):
    heard = []
    monkeypatch.setattr(slurm_grow, "configure", lambda _kind: None)
    monkeypatch.setattr(slurm_grow, "job_spec", lambda _run: None)
    monkeypatch.setattr(
        slurm_grow, "grow", lambda *_: heard.append(signal.getsignal(signal.SIGINT)) or 7
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert slurm_grow.main([str(tmp_path)]) == 7
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.default_int_handler]


def test_other_schedulers_and_containers_say_that_they_add_none(tmp_path):
    for control in (LocalControl("1"), RelayedControl(Path("port"), "secret", timeout_s=1)):
        with pytest.raises(ClusterError, match=r"adds? no nodes"):
            control.add_node(RunDir(tmp_path), {}, "x")
