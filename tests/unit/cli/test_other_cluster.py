"""A folder of runs that two clusters see: a job id means the job of the cluster that gave it."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.ledger.run import events as ledger
from tests.support.ledger_runs import Story, all_fields

SLURM = """#!/bin/sh
echo "$(basename $0) $*" >> {folder}/asked
case "$(basename $0) $*" in
"scontrol show config") echo "ClusterName             = {name}" ;;
"scontrol show job 17") echo "JobId=17 JobName=other JobState=RUNNING Restarts=0" ;;
sacct*) echo "17|COMPLETED|1763600000|1763690000|n9" ;;
sbatch*) echo 4712 ;;
esac
"""


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Be on the login node of a cluster; returns what its SLURM is asked from then on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))

    def on(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "asked").write_text("")
        for command in ("scontrol", "scancel", "sacct", "squeue", "sbatch"):
            (folder / command).write_text(SLURM.format(folder=folder, name=name))
            (folder / command).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return folder / "asked"

    return on


@pytest.fixture
def story(tmp_path):
    """A run whose job 17 of the cluster alpha trains."""
    story = Story(tmp_path / "runs" / "lm", cluster="slurm")
    story.run.jobs.mkdir()
    script = str(story.run.script("lm-12ab"))
    story.add("submit_intent", token="lm-12ab", script=script, slurm_cluster="alpha")
    story.add("submitted", token="lm-12ab", job_id="17", cluster="slurm", by="submit")
    return story.started(1, "17", run_dir=str(story.run.root)).restored(1).steps(1, 1, 10)


def test_status_elsewhere_says_where_to_ask_and_takes_nothing_from_here(story, on, capsys):
    asked = on("beta")

    assert main(["status", "lm"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert main(["status", "lm", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main(["status"]) == 0
    table = capsys.readouterr().out

    assert "job 17 is one of the cluster alpha, and this is beta: ask there" in screen
    assert "n9" not in screen
    assert (shown["state"], shown["job"]) == ("running", None)
    assert "running?" in table
    assert "one of the cluster alpha" in " ".join(table.split())
    assert not any(word in asked.read_text() for word in ("17", "sacct", "show job"))


def test_status_at_home_is_as_ever(story, on, capsys):
    asked = on("alpha")

    assert main(["status", "lm"]) == 0

    assert "cluster alpha" not in capsys.readouterr().out
    assert "scontrol show job 17" in asked.read_text()
    assert "sacct" in asked.read_text()


def test_resume_elsewhere_is_refused_until_the_job_is_said_to_be_gone(story, on, capsys):
    asked = on("beta")
    assert main(["resume", "lm"]) == 6
    said = capsys.readouterr().err
    assert "job 17 is one of the cluster alpha, and this is beta" in said
    assert "`hpctrain cancel lm` says so here" in said

    assert main(["cancel", "lm"]) == 6
    said = capsys.readouterr().err
    assert "job 17 was not cancelled" in said
    assert said.strip().endswith("Cancel it there")
    assert ledger.read(story.run)[-1].kind == "cancel_requested"
    assert "17" not in asked.read_text()

    assert main(["resume", "lm"]) == 0
    newest = [e for e in ledger.read(story.run) if e.kind.startswith("submit")]
    assert all_fields(newest[-2])["slurm_cluster"] == "beta"
    assert all_fields(newest[-1])["job_id"] == "4712"


def test_cancel_with_a_save_is_heard_from_every_cluster(story, on, capsys):
    story.add("phase", 1, name="initialised")
    asked = on("beta")

    assert main(["cancel", "lm", "--save"]) == 0

    assert json.loads(story.run.stop_request.read_text())["job_id"] == "17"
    assert "scancel" not in asked.read_text()


def test_a_run_that_is_over_goes_on_on_another_cluster(story, on):
    story.ended(1, "cancelled", "stop")
    on("beta")

    assert main(["resume", "lm"]) == 0


def test_accounts_of_jobs_of_both_clusters_are_those_of_this_one(story, on):
    story.ended(1, "cancelled", "stop")
    story.add("submit_intent", token="lm-2", script="x", slurm_cluster="beta")
    story.add("submitted", token="lm-2", job_id="9", cluster="slurm", by="resume")
    asked = on("beta")

    assert main(["status", "lm"]) == 0

    told = [line for line in asked.read_text().splitlines() if line.startswith("sacct")]
    assert {line.split()[-1] for line in told} == {"9"}


def test_a_job_that_began_on_a_sibling_of_a_federation_is_asked_about_there(story, on):
    story.started(2, "17", slurm_cluster="beta")
    asked = on("beta")

    assert main(["status", "lm"]) == 0

    assert "scontrol show job 17" in asked.read_text()


def test_where_nobody_knows_the_clusters_name_the_id_is_asked_about(story, on):
    asked = on("gamma")
    (asked.parent / "scontrol").write_text(
        f"#!/bin/sh\necho $* >> {asked}\n[ $2 = job ] && echo JobId=17 JobState=RUNNING\n"
    )

    assert main(["status", "lm"]) == 0

    assert "show job 17" in asked.read_text()


def test_a_run_that_went_on_elsewhere_is_asked_about_there_and_no_longer_at_home(story, on, capsys):
    story.ended(1, "cancelled", "stop")
    story.add("submit_intent", token="lm-2", script="x", slurm_cluster="beta")
    story.add("submitted", token="lm-2", job_id="9", cluster="slurm", by="resume")
    on("alpha")

    assert main(["status", "lm"]) == 0

    assert "job 9 is one of the cluster beta, and this is alpha" in capsys.readouterr().out
