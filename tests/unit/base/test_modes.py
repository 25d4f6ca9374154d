"""Nobody but its owner writes into a run, whatever the umask, unless it is shared on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hpctrain.core.base.files import (
    can_be_replaced,
    follow_folder,
    make_private_folder,
    make_run_folder,
    make_runs_folder,
    remove_runs_folder,
    write_private,
)
from hpctrain.core.base.process import own_program
from hpctrain.errors import ChecksFailed
from hpctrain.ledger.run.layout import RunDir
from hpctrain.ledger.run.ownership import job_spec
from hpctrain.train.runtime.trackers import EventFile
from tests.support.ledger_runs import Story, local_job
from tests.support.users import COLLEAGUE, OWNER, STRANGER, run_as

SUBMIT = own_program(
    "hpctrain", "submit", "--cluster", "local", "--no-submit", "--name", "r", "train.py"
)


@pytest.fixture(autouse=True)
def umask():
    """Every test sets its own, and what it leaves is undone."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


def submitted(folder, *words):
    """A run of a script under git, submitted with everything allowed by the umask."""
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    for git in (["init", "-q"], ["add", "train.py"]):
        subprocess.run(["git", *git], cwd=folder, check=True)
    runs = {"HPCTRAIN_RUNS": str(folder / "runs")}
    subprocess.run(
        [*SUBMIT, *words], cwd=folder, env=os.environ | runs, check=True, capture_output=True
    )
    return folder / "runs" / "r"


def test_a_new_run_is_shut(tmp_path):
    run = submitted(tmp_path / "work")

    assert (mode(run), mode(run / "spec.json"), mode(run / "snapshot")) == (0o755, 0o600, 0o700)
    assert (run / "snapshot" / "train.py").exists()


def test_a_run_is_shared_on_purpose_whatever_the_umask(tmp_path):
    os.umask(0o077)

    run = submitted(tmp_path / "work", "--set", "run.group_writable=true")

    # What decides what is executed as its owner stays the owner's.
    assert (mode(run), mode(run / "spec.json"), mode(run / "snapshot")) == (0o770, 0o640, 0o770)
    assert job_spec(RunDir(run)).settings.run.group_writable


@pytest.mark.parametrize(("group", "folder", "file"), [(False, 0o755, 0o644), (True, 0o775, 0o664)])
def test_all_that_a_process_makes_later_follows_the_runs_folder(tmp_path, group, folder, file):
    make_run_folder(tmp_path / "r", group=group)
    os.umask(0)

    follow_folder(tmp_path / "r")
    (tmp_path / "r" / "x").mkdir()
    (tmp_path / "r" / "y").write_text("")

    assert (mode(tmp_path / "r" / "x"), mode(tmp_path / "r" / "y")) == (folder, file)


def test_a_stricter_umask_stays(tmp_path):
    os.umask(0o077)
    make_run_folder(tmp_path / "r", group=False)
    (tmp_path / "r" / "y").write_text("")

    assert (mode(tmp_path / "r"), mode(tmp_path / "r" / "y")) == (0o700, 0o600)


def test_a_folder_of_jobs_that_was_open_is_shut(tmp_path):
    (tmp_path / "jobs").mkdir()
    tmp_path.chmod(0o755)

    make_private_folder(tmp_path / "jobs")

    assert mode(tmp_path / "jobs") == 0o700


def test_a_private_file_replaces_what_lay_ready_for_it(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "spec.json.new").symlink_to(tmp_path / "elsewhere")

    write_private(tmp_path / "spec.json", "text")

    assert (tmp_path / "spec.json").read_text() == "text"
    assert mode(tmp_path / "spec.json") == 0o600
    assert (tmp_path / "elsewhere").read_text() == ""


@pytest.mark.parametrize(("umask", "mode_of"), [(0o002, 0o1775), (0o022, 0o755), (0o000, 0o1777)])
def test_others_may_put_runs_beside_and_not_in_the_place_of_one(tmp_path, umask, mode_of):
    os.umask(umask)

    run = submitted(tmp_path / "work", "--runs", "a/b")

    del run
    for folder in (tmp_path / "work" / "a", tmp_path / "work" / "a" / "b"):
        assert folder.stat().st_mode & 0o7777 == mode_of


def test_a_folder_in_which_others_can_replace_runs_is_told(tmp_path):
    (tmp_path / "runs").mkdir()
    assert "chmod +t" in can_be_replaced(tmp_path / "runs")
    (tmp_path / "runs").chmod(0o1777)
    assert not can_be_replaced(tmp_path / "runs")
    assert not can_be_replaced(tmp_path / "missing")


@pytest.mark.two_users
def test_the_owner_of_the_folder_can_always_replace_what_is_in_it(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o1777)
    os.chown(tmp_path / "runs", STRANGER.uid, STRANGER.gid)
    assert f"belongs to user {STRANGER.uid}" in can_be_replaced(tmp_path / "runs")


def test_a_preflights_node_starts_nothing_that_others_can_have_written(tmp_path):
    folder = tmp_path / "p"
    folder.mkdir(mode=0o700)
    (folder / "order.json").write_text("{}")
    (folder / "order.json").chmod(0o666)

    done = subprocess.run(
        own_program("hpctrain.cluster.preflight.node", str(folder), "0"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == ChecksFailed.exit_code
    assert done.stderr.count("\n") == 1
    assert "can be written by every user: it says what this job starts" in done.stderr


@pytest.mark.parametrize("part", ["spec.json", "snapshot"])
def test_a_job_does_not_run_what_others_can_have_written(tmp_path, part):
    run = Story(tmp_path / "runs" / "lm").submitted().run
    run.snapshot.mkdir(mode=0o755)
    run.spec.chmod(0o600)
    job_spec(run)
    (run.root / part).chmod(0o777)

    with pytest.raises(ChecksFailed, match=rf"{part} can be written by every user.*chmod -R go-w"):
        job_spec(run)


@pytest.mark.parametrize("program", ["controller", "node"])
def test_a_local_job_of_such_a_run_ends_in_one_line(tmp_path, program):
    run = Story(tmp_path / "runs" / "lm").submitted().run
    run.spec.chmod(0o666)
    local_job(tmp_path / "local", "local-1", run_dir=str(run.root), state="PENDING")
    context = {"job_id": "local-1", "restarts": 0, "node_rank": 0, "nodes": ["local0"]}
    context |= {"master_addr": "127.0.0.1", "port": 20000, "token": "tok-1"}
    words = {"controller": "local-1", "node": str(run.root)}

    done = subprocess.run(
        own_program(f"hpctrain.entry.local_{program}", words[program]),
        env={
            **os.environ,
            "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local"),
            "HPCTRAIN_LOCAL_CONTEXT": json.dumps(context),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == ChecksFailed.exit_code, done.stderr
    assert "spec.json can be written by every user: it decides what this job runs" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if program == "controller":
        record = json.loads((tmp_path / "local" / "local-1" / "job.json").read_text())
        assert record["state"] == "FAILED"


def test_event_files_are_no_programs(tmp_path):
    EventFile(tmp_path / "e", purge_step=0).close()

    assert mode(tmp_path / "e") == 0o666  # less what the umask takes


@pytest.mark.two_users
def test_a_colleague_changes_nothing_that_the_owners_job_executes(common_path):
    """The folder is the group's, umask 002: what many sites have."""
    project = common_path / "project"
    project.mkdir()
    os.chown(project, OWNER.uid, OWNER.gid)
    project.chmod(0o2775)
    (project / "train.py").write_text("print()\n")
    hand = 'umask 002; exec "$@"'
    env = {"HPCTRAIN_RUNS": str(project / "runs")}
    run_as(OWNER, ["sh", "-c", hand, "sh", *SUBMIT], cwd=project, **env)
    run = project / "runs" / "r"

    for attack in (
        f"echo '{{}}' > {run}/spec.json",
        f"echo '{{}}' > {run}/x && mv {run}/x {run}/spec.json",
        f"mv {run} {run}-old",
        f"touch {run}/attempt.json",
        f"mkdir {run}/snapshot",
    ):
        done = run_as(COLLEAGUE, ["sh", "-c", f"umask 002; {attack}"], check=False)
        assert done.returncode != 0, attack
    assert run_as(STRANGER, ["cat", str(run / "spec.json")], check=False).returncode != 0


@pytest.mark.two_users
def test_a_run_that_a_colleague_has_put_in_the_place_of_the_owners_is_not_executed(common_path):
    """Who may write the folder of all runs can replace a run; the job sees whose it is."""
    project = common_path / "project"
    project.mkdir()
    os.chown(project, OWNER.uid, OWNER.gid)
    (project / "train.py").write_text("print()\n")
    run_as(OWNER, SUBMIT, cwd=project, HPCTRAIN_RUNS=str(project / "runs"))
    run = project / "runs" / "r"
    os.chown(run / "spec.json", COLLEAGUE.uid, COLLEAGUE.gid)
    (run / "spec.json").chmod(0o644)

    done = run_as(
        OWNER,
        own_program("hpctrain.entry.slurm_task", str(run)),
        check=False,
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n1",
        SLURM_NNODES="1",
        SLURM_NODEID="0",
        HPCTRAIN_NODES="n1",
        HPCTRAIN_PORT="20000",
    )

    assert done.returncode == ChecksFailed.exit_code, done.stderr
    assert (
        f"spec.json belongs to user {COLLEAGUE.uid}: it decides what this job runs" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.two_users
def test_others_who_may_look_at_a_run_still_can(common_path):
    """Its state and its events are for all whom the umask lets in; what it executes is not."""
    project = common_path / "project"
    project.mkdir()
    os.chown(project, OWNER.uid, OWNER.gid)
    (project / "train.py").write_text("print()\n")
    hand = 'umask 022; exec "$@"'
    run_as(OWNER, ["sh", "-c", hand, "sh", *SUBMIT], cwd=project, HPCTRAIN_RUNS=f"{project}/runs")
    told = (
        "from pathlib import Path; from hpctrain.ledger.run import events;"
        "from hpctrain.ledger.run.event_types import SubmitIntent;"
        "from hpctrain.ledger.run.layout import RunDir;"
        f"events.append(RunDir(Path({str(project / 'runs' / 'r')!r})), SubmitIntent(token='t'))"
    )
    run_as(OWNER, ["sh", "-c", hand, "sh", sys.executable, "-c", told])

    for words in (["status", "--json"], ["events"], ["report", "--text"]):
        done = run_as(
            STRANGER,
            own_program("hpctrain", words[0], str(project / "runs" / "r"), *words[1:]),
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), (words, done.stderr)


def test_a_new_folder_of_runs_ignores_itself_in_git_and_no_other_folder_does(tmp_path):
    runs = tmp_path / "project" / "runs"
    make_runs_folder(runs)

    assert (runs / ".gitignore").read_text() == "*\n"
    assert not (runs.parent / ".gitignore").exists()
    remove_runs_folder(runs)
    assert not runs.exists()
    runs.mkdir()
    make_runs_folder(runs)
    assert list(runs.iterdir()) == []


def test_a_folder_with_a_run_is_not_removed_and_still_ignores_itself(tmp_path):
    make_runs_folder(tmp_path / "runs")
    (tmp_path / "runs" / "lm").mkdir()

    with pytest.raises(OSError, match="not empty"):
        remove_runs_folder(tmp_path / "runs")

    assert (tmp_path / "runs" / ".gitignore").exists()
