"""`cp -r runs/a runs/b`: the copy has the run, and never its job."""

from __future__ import annotations

import json
import shutil

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler import base
from hpctrain.cluster.scheduler.base import Cluster
from hpctrain.cluster.scheduler.local import LocalCluster
from hpctrain.cluster.scheduler.slurm.client import SlurmCluster
from hpctrain.core.base.records import JobInfo
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import ClusterError
from hpctrain.launch import launch, live_job
from hpctrain.launch.live_job import copied_from, not_own
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from tests.support.ledger_runs import Story

SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> {folder}/asked
case "$(basename $0) $*" in
"scontrol show job 4711") echo "JobId=4711 JobName=lm
   JobState=RUNNING Reason=None Restarts=0
   Command={command}" ;;
*) exit 0 ;;
esac
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path / "runs"


def story(root, token="lm-12ab"):
    """A run whose job 4711 is in its tenth step."""
    found = Story(root, cluster="slurm")
    found.run.jobs.mkdir()
    found.add("submit_intent", token=token, script=str(found.run.script(token)))
    found.add("submitted", token=token, job_id="4711", cluster="slurm", by="submit")
    return found.started(1, "4711").restored(1).steps(1, 1, 10)


@pytest.fixture
def original(runs):
    return story(runs / "lm")


@pytest.fixture
def copy(original, runs):
    shutil.copytree(original.run.root, runs / "other")
    return type(original.run)(runs / "other")


@pytest.fixture
def asked(tmp_path, monkeypatch, original):
    """SLURM's commands, which know of the original's job; returns what they were asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_slurm(folder, original.run.script("lm-12ab"))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (folder / "asked").touch()
    return folder / "asked"


def write_slurm(folder, command):
    for name in ("scontrol", "scancel", "sacct", "squeue"):
        (folder / name).write_text(SLURM.format(folder=folder, command=command))
        (folder / name).chmod(0o755)


def test_cancel_of_a_copy_leaves_the_originals_job_alone(copy, original, asked, capsys):
    assert main(["cancel", "other"]) == 5

    said = capsys.readouterr().err
    assert f"this is a copy of {original.run.root}, whose job 4711 is" in said
    assert "scancel" not in asked.read_text()
    assert not any(e.kind == "cancel_requested" for e in ledger.read(copy))


def test_cancel_of_the_original_reaches_its_job(copy, original, asked):
    assert main(["cancel", "lm"]) == 0

    assert "scancel -- 4711" in asked.read_text()


def test_a_moved_run_keeps_its_job(original, runs, asked):
    original.run.root.rename(runs / "moved")

    assert main(["cancel", "moved"]) == 0

    assert "scancel -- 4711" in asked.read_text()


def test_a_run_that_is_seen_under_another_path_keeps_its_job(original, tmp_path, asked):
    (tmp_path / "link").symlink_to(original.run.root.parent)

    assert main(["cancel", f"{tmp_path}/link/lm"]) == 0

    assert "scancel -- 4711" in asked.read_text()


def test_a_number_that_is_another_jobs_by_now_is_left_alone(original, asked, capsys):
    """The folder is seen on two clusters, each of which has a job of that number."""
    write_slurm(asked.parent, "/home/me/quite-another.sh")

    assert main(["cancel", "lm"]) == 5

    assert "job 4711 is another's by now (/home/me/quite-another.sh)" in capsys.readouterr().err
    assert "scancel" not in asked.read_text()


def test_status_of_a_copy_says_what_it_is(copy, original, asked, capsys):
    assert main(["status", "other"]) == 0

    told = " ".join(capsys.readouterr().out.split())
    assert "running" not in told.partition("attempt")[0]
    assert f"this is a copy of {original.run.root}" in told


def test_nobody_guesses_where_scontrol_is_silent(original, asked, capsys):
    silent = "#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n"
    (asked.parent / "scontrol").write_text(silent)

    assert main(["cancel", "lm"]) == 6

    assert "job 4711 was not cancelled" in capsys.readouterr().err
    assert "scancel" not in asked.read_text()
    assert ledger.read(original.run)[-1].kind == "cancel_requested"


class Scheduler(Cluster):
    """Runs the original's job, and takes another."""

    name = "slurm"

    def __init__(self, script):
        self.script = script

    def here(self):
        return ""

    def job(self, job_id):
        return JobInfo(job_id, "RUNNING", alive=True, script=str(self.script))

    def submit(self, request):
        del request
        return "4712"

    def render(self, *_):
        return "#!/bin/sh\n"


def test_a_copy_goes_on_as_a_run_of_its_own(copy, original, monkeypatch, capsys):
    scheduler = Scheduler(original.run.script("lm-12ab"))
    for module in (launch, live_job, base):
        monkeypatch.setattr(module, "get_cluster", lambda _: scheduler)
    before = load_spec(original.run.spec)
    raw = json.loads(copy.spec.read_text())
    raw["entry"] |= {"kind": "script", "path": f"{original.run.root}/snapshot/train.py"}
    copy.spec.write_text(json.dumps(raw))

    assert main(["resume", "other"]) == 0

    spec = load_spec(copy.spec)
    assert spec.run_id != before.run_id
    assert load_spec(original.run.spec).run_id == before.run_id
    assert (spec.name, spec.entry.path) == ("other", f"{copy.root}/snapshot/train.py")
    assert "is a copy of" in capsys.readouterr().out
    assert live_job.newest_submission(RunHistory.read(copy))[1] == "4712"
    assert copied_from(copy, RunHistory.read(copy)) is None


def test_the_original_is_not_submitted_beside_its_job(original, monkeypatch, capsys):
    scheduler = Scheduler(original.run.script("lm-12ab"))
    for module in (launch, live_job, base):
        monkeypatch.setattr(module, "get_cluster", lambda _: scheduler)

    assert main(["resume", "lm"]) == 5

    assert "has job 4711 (running)" in capsys.readouterr().err


def test_a_copy_of_a_hand_written_scripts_run_is_known_by_where_its_agent_was(runs):
    story = Story(runs / "lm", cluster="slurm")
    story.started(1, "4711", run_dir=str(runs / "lm"))
    shutil.copytree(runs / "lm", runs / "other")
    other = type(story.run)(runs / "other")
    job = JobInfo("4711", "RUNNING", alive=True, script="/home/me/train.sbatch")

    assert not_own(story.run, RunHistory.read(story.run), None, job) == ""
    assert "copy of" in not_own(other, RunHistory.read(other), None, job)


@pytest.mark.parametrize("job_id", ["--user=me", "-u", "../../x", "1 2", "1;2", "", "1_", "\u0661"])
@pytest.mark.parametrize("cluster", [SlurmCluster(), LocalCluster()])
def test_what_is_no_jobs_id_reaches_no_command(cluster, job_id, asked):
    with pytest.raises(ClusterError, match="which is no job's id"):
        cluster.cancel(job_id)
    assert cluster.starts([job_id]) == []
    if cluster.name == "slurm":
        with pytest.raises(ClusterError, match="which is no job's id"):
            cluster.job(job_id)
    else:
        assert cluster.job(job_id) is None

    assert asked.read_text() == ""


@pytest.mark.parametrize("job_id", ["4711", "4711_3"])
def test_what_is_a_jobs_id_does(job_id, asked):
    SlurmCluster().cancel(job_id)

    assert asked.read_text() == f"scancel -- {job_id}\n"


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_copy_with_a_ledger_that_names_no_folder_is_known_by_slurms_path_of_the_script(
    runs, is_moved
):
    """As version 0.1 has written them."""
    story = Story(runs / "lm", cluster="slurm")
    story.add("submit_intent", token="lm-12ab")
    story.add("submitted", token="lm-12ab", job_id="4711", cluster="slurm", by="submit")
    other = type(story.run)(runs / "other")
    if is_moved:
        story.run.root.rename(other.root)
    else:
        shutil.copytree(story.run.root, other.root)
    job = JobInfo("4711", "RUNNING", alive=True, script=str(story.run.script("lm-12ab")))

    history = RunHistory.read(other)
    assert copied_from(other, history) is None
    said = "" if is_moved else f"this is a copy of {story.run.root}, whose job 4711 is"
    assert not_own(other, history, "lm-12ab", job) == said
    if not is_moved:
        assert not_own(story.run, RunHistory.read(story.run), "lm-12ab", job) == ""
