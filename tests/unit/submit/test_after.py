"""`--after RUN`: who can be waited for, who follows whom, and a resume that takes its followers."""

from __future__ import annotations

import json
import os

import pytest

from hpctrain.cli import api
from hpctrain.cli.main import main
from hpctrain.cluster.scheduler.slurm.client import SlurmCluster
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import UsageError
from hpctrain.launch import after
from hpctrain.launch.prepare import SubmitRequest, prepare
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Followed
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story, write_event

SBATCH = """#!/bin/sh
cd {folder}; echo "sbatch $*" >> asked
[ -e full ] && {{ echo "sbatch: error: no room in the queue" >&2; exit 1; }}
id=$(($(ls jobs | wc -l) + 100)); for script; do :; done
echo "JobState=PENDING Reason=Dependency Command=$script" > jobs/$id; echo $id
"""
SCONTROL = """#!/bin/sh
cd {folder}; echo "scontrol $*" >> asked
case "$*" in
"show job "*) [ -e jobs/$3 ] || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2
   exit 1; }}; echo "JobId=$3 $(cat jobs/$3)" ;;
"show config") echo "ClusterName = alps" ;;
update*) [ ! -e deaf ] || {{ echo "scontrol: error: Access/permission denied" >&2; exit 1; }} ;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, whose jobs are files in the folder `jobs`; returns theirs."""
    folder = tmp_path / "slurm"
    (folder / "jobs").mkdir(parents=True)
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "squeue": "", "scancel": ""}.items():
        (folder / name).write_text(text.format(folder=folder) or "#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HPCTRAIN_SITE", "none")
    (folder / "asked").touch()
    return folder


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


def a_run(runs, slurm, name, state="RUNNING", job_id="17"):
    """A run with a job that SLURM knows."""
    story = Story(runs / name, cluster="slurm")
    if job_id:
        story.submitted(job_id, token=f"{name}-1")
        command = story.run.script(f"{name}-1")
        (slurm / "jobs" / job_id).write_text(f"JobState={state} Reason=None Command={command}")
    return story


def submit(*words, name="b"):
    return main(
        ["submit", "--cluster", "slurm", "--name", name, "--no-snapshot", *words, "--", "train.py"]
    )


def submitted(slurm):
    """How sbatch was called."""
    return [
        line for line in (slurm / "asked").read_text().splitlines() if line.startswith("sbatch")
    ]


def assert_refused(code, capsys, *words):
    assert code != 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    for word in words:
        assert word in said
    return said


def test_a_run_waits_for_the_jobs_of_those_before_it_and_they_know_of_it(runs, slurm, capsys):
    a_run(runs, slurm, "a")
    a_run(runs, slurm, "c", state="PENDING", job_id="18")

    assert submit("--after", "a", "--after", "c", "--after", str(runs / "a")) == 0

    (call,) = submitted(slurm)
    assert " --dependency=afterok:17:18 --kill-on-invalid-dep=no " in call
    assert load_spec(runs / "b" / "spec.json").after == [str(runs / "a"), str(runs / "c")]
    for name in "ac":
        assert RunHistory.read(RunDir(runs / name)).followers == [str(runs / "b")]
    assert "a (job 17), c (job 18)" in capsys.readouterr().out
    script = RunDir(runs / "b").script(RunHistory.read(RunDir(runs / "b")).state.token)
    assert "dependency" not in script.read_text()  # it belongs to this submission alone


def test_what_is_done_already_is_not_waited_for(runs, slurm):
    a_run(runs, slurm, "a", state="COMPLETED").started(1).add("done", 1).ended(
        1, "completed", "stop"
    )

    assert submit("--after", "a") == 0

    (call,) = submitted(slurm)
    assert "--dependency" not in call
    assert load_spec(runs / "b" / "spec.json").after == [str(runs / "a")]


def test_what_is_done_and_goes_on_for_more_steps_is_waited_for(runs, slurm):
    story = a_run(runs, slurm, "a").started(1).add("done", 1).ended(1, "completed", "stop")
    story.submitted("17", token="a-1")

    assert submit("--after", "a") == 0

    assert "--dependency=afterok:17 " in submitted(slurm)[0]


ENDS = {
    "has failed": lambda s: s.started(1).ended(1, "user_error", "stop"),
    "was stopped before it was done": lambda s: s.started(1).ended(1, "stopped", "stop"),
    "was cancelled": lambda s: s.started(1).ended(1, "cancelled", "stop"),
    "has no job any more": lambda s: s.started(1),
}


@pytest.mark.parametrize("words", ENDS)
def test_what_will_not_be_done_by_itself_is_refused_and_nothing_is_made(runs, slurm, capsys, words):
    ENDS[words](a_run(runs, slurm, "a", state="FAILED"))

    assert_refused(submit("--after", "a"), capsys, f"--after a: it {words}", "`hpctrain resume a`")

    assert not (runs / "b").exists()
    assert not RunHistory.read(RunDir(runs / "a")).followers


def test_what_was_never_submitted_is_refused(runs, slurm, capsys):
    a_run(runs, slurm, "a", job_id="")

    assert_refused(submit("--after", "a"), capsys, "it was never submitted; `hpctrain resume a`")


def test_what_was_asked_to_end_is_refused(runs, slurm, capsys):
    a_run(runs, slurm, "a").started(1).add("cancel_requested", job_id="17", save=True)

    assert_refused(
        submit("--after", "a"), capsys, "it was asked to end (job 17)", "resume a` first"
    )


def test_what_runs_on_another_cluster_or_in_a_terminal_is_refused(runs, slurm, capsys, tmp_path):
    a_run(runs, slurm, "a").started(1, "pid-17")
    assert_refused(submit("--after", "a"), capsys, "it runs in a terminal")

    local = ["submit", "--cluster", "local", "--name", "b", "--no-snapshot", "--after", "c"]
    a_run(runs, slurm, "c")
    code = main([*local, "--", "train.py"])
    assert_refused(code, capsys, "job 17 on slurm, for which a job on local cannot wait")


def test_a_scheduler_whose_jobs_cannot_wait_says_so(runs, slurm, capsys, monkeypatch):
    monkeypatch.setattr(SlurmCluster, "has_dependencies", False)
    a_run(runs, slurm, "a")

    assert_refused(submit("--after", "a"), capsys, "cannot wait: try again when it is done")


def test_what_others_can_write_is_not_waited_for(runs, slurm, capsys):
    a_run(runs, slurm, "a").run.root.chmod(0o777)

    assert_refused(submit("--after", "a"), capsys, "can be written by every user")


def test_it_is_refused_before_anything_is_made(runs, slurm, tmp_path):
    a_run(runs, slurm, "a", job_id="")
    words = {"cwd": tmp_path, "environ": dict(os.environ), "runs": runs, "cluster": "slurm"}

    with pytest.raises(UsageError, match="was never submitted"):
        prepare(SubmitRequest(**words, command=["train.py"], after=["a"]))


def test_an_unknown_run_is_not_found(runs, slurm, capsys):
    a_run(runs, slurm, "alpha")

    code = submit("--after", "alphx")

    assert code == 4
    assert_refused(code, capsys, "no run or job 'alphx'", "did you mean alpha?")


def test_an_option_of_the_users_own_is_not_overruled_in_silence(runs, slurm, capsys):
    a_run(runs, slurm, "a")

    code = submit("--after", "a", "--set", 'slurm.extra=["-d singleton"]')

    assert_refused(code, capsys, "slurm.extra: '-d singleton' does not go with --after")


def put_after(runs, name, *others):
    spec = load_spec(runs / name / "spec.json")
    spec.after = [str(runs / other) for other in others]
    spec.dump(runs / name / "spec.json")


def test_a_run_after_itself_is_refused(runs, slurm, capsys):
    assert_refused(submit("--after", "b"), capsys, "--after b is the run itself")

    a_run(runs, slurm, "a", job_id="")
    put_after(runs, "a", "a")
    assert_refused(main(["resume", "a"]), capsys, "a circle", "a after a;")


def test_a_chain_that_leads_back_is_refused_at_submit_and_at_resume(runs, slurm, capsys):
    """The first was deleted and is made anew under its name."""
    a_run(runs, slurm, "b", job_id="")
    a_run(runs, slurm, "c")
    put_after(runs, "c", "b")
    put_after(runs, "b", "new")

    code = submit("--after", "c", name="new")

    assert_refused(code, capsys, "a circle", ": new after c after b after new;", "--name")
    code = submit("--after", "c", "--no-submit", name="new")
    assert_refused(code, capsys, ": new after c after b after new;")
    assert not (runs / "new").exists()
    put_after(runs, "b", "c")
    assert_refused(main(["resume", "b"]), capsys, ": b after c after b;")


def test_a_circle_further_up_is_refused_too(runs, slurm, capsys):
    for name in "ac":
        a_run(runs, slurm, name)
    put_after(runs, "a", "c")
    put_after(runs, "c", "a")

    assert_refused(submit("--after", "a"), capsys, ": a after c after a;")


def test_a_diamond_is_no_circle(runs, slurm):
    for name, job_id in {"a": "17", "c": "18", "d": "19"}.items():
        a_run(runs, slurm, name, job_id=job_id)
    put_after(runs, "c", "a")
    put_after(runs, "d", "a")

    assert submit("--after", "c", "--after", "d") == 0


def test_a_ladder_of_runs_is_looked_at_once(runs, slurm, monkeypatch):
    for at in range(12):
        for side in "lr":
            Story(runs / f"{side}{at}", cluster="slurm")
            put_after(runs, f"{side}{at}", *([f"l{at - 1}", f"r{at - 1}"] if at else []))
    looks = []
    monkeypatch.setattr(after, "load_spec", lambda path: looks.append(path) or load_spec(path))

    after.refuse_circle(runs / "top", [str(runs / "l11"), str(runs / "r11")])

    assert len(looks) == 24


def test_a_dry_run_and_json_show_whom_it_waits_for(runs, slurm, capsys):
    a_run(runs, slurm, "a")
    waits = [{"run": "a", "run_dir": str(runs / "a"), "job_id": "17"}]

    assert submit("--after", "a", "--dry-run") == 0
    assert "waits until these are done: a (job 17)" in capsys.readouterr().err
    assert submit("--after", "a", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["awaited"] == waits
    assert not RunHistory.read(RunDir(runs / "a")).followers
    assert submit("--after", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["awaited"] == waits


def test_a_run_that_is_only_made_may_follow_one_that_is_not_alive(runs, slurm, capsys):
    a_run(runs, slurm, "a", job_id="")

    assert submit("--after", "a", "--no-submit") == 0

    assert "its job would be refused: --after a: it was never submitted" in capsys.readouterr().err
    assert RunHistory.read(RunDir(runs / "a")).followers == [str(runs / "b")]
    assert_refused(main(["resume", "b"]), capsys, "--after a: it was never submitted")


def test_from_python(runs, slurm):
    a_run(runs, slurm, "a")

    api.submit(["train.py"], name="b", cluster="slurm", snapshot=False, after="a")

    assert "--dependency=afterok:17 " in submitted(slurm)[0]


# ---- resume


@pytest.fixture
def follower(runs, slurm):
    """b waits for a, which has failed; returns what a has done so far."""
    story = a_run(runs, slurm, "a").started(1)
    assert submit("--after", "a") == 0
    (slurm / "jobs" / "17").write_text("JobState=FAILED Reason=None")
    story.ended(1, "user_error", "stop")
    return story


def updates(slurm):
    return [
        line for line in (slurm / "asked").read_text().splitlines() if "scontrol update" in line
    ]


def test_a_resume_has_its_followers_wait_for_the_new_job(follower, slurm, capsys):
    assert main(["resume", "a"]) == 0

    assert updates(slurm) == ["scontrol update JobId=101 Dependency=afterok:102"]
    assert "b (job 101) now waits for job 102" in capsys.readouterr().out


def test_a_resume_from_python_says_so_in_its_notes(follower, slurm):
    assert "b (job 101) now waits for job 102" in api.resume("a").notes


def test_a_follower_of_several_goes_on_waiting_for_the_others(runs, slurm):
    story = a_run(runs, slurm, "a").started(1)
    a_run(runs, slurm, "c", job_id="18")
    assert submit("--after", "a", "--after", "c") == 0
    (slurm / "jobs" / "17").write_text("JobState=FAILED Reason=None")
    story.ended(1, "user_error", "stop")

    assert main(["resume", "a"]) == 0

    assert updates(slurm) == ["scontrol update JobId=102 Dependency=afterok:103:18"]


def test_a_follower_whose_job_cannot_be_changed_is_told(follower, slurm, capsys):
    (slurm / "deaf").touch()

    assert main(["resume", "a"]) == 0

    said = capsys.readouterr().out
    assert "b is to follow, and its job could not be notified: " in said
    assert "Access/permission denied" in said
    assert "`hpctrain cancel b`, then `hpctrain resume b`" in said


def test_a_follower_without_a_job_is_told(follower, runs, slurm, capsys):
    (slurm / "jobs" / "101").write_text("JobState=CANCELLED Reason=None")

    assert main(["resume", "a"]) == 0

    assert not updates(slurm)
    assert (
        "b is to follow and has no job: `hpctrain resume b` submits it" in capsys.readouterr().out
    )
    assert main(["resume", "b"]) == 0
    assert "--dependency=afterok:102 " in submitted(slurm)[-1]


def test_followers_that_are_gone_or_have_begun_or_follow_another_are_left_alone(
    follower, runs, slurm, capsys
):
    for name in ("gone", "other"):
        ledger.append(follower.run, Followed(run=str(runs / name)))
    a_run(runs, slurm, "other", state="PENDING", job_id="18")
    write_event(RunDir(runs / "b"), "attempt_started", attempt=1, world_size=1, job_id="101")

    assert main(["resume", "a"]) == 0

    assert not updates(slurm)
    assert "follow" not in capsys.readouterr().out


def test_a_follower_is_resumed_behind_a_predecessor_that_is_alive(follower, runs, slurm, capsys):
    assert_refused(main(["resume", "b"]), capsys, "b has job 101 (pending)")
    (slurm / "jobs" / "101").write_text("JobState=CANCELLED Reason=None")
    assert_refused(main(["resume", "b"]), capsys, "--after a: it has failed; `hpctrain resume a`")
    assert main(["resume", "a"]) == 0

    assert main(["resume", "b"]) == 0

    assert "--dependency=afterok:102 " in submitted(slurm)[-1]


def test_a_run_that_has_begun_waits_for_nobody_any_more(follower, runs, slurm):
    (slurm / "jobs" / "101").write_text("JobState=FAILED Reason=None")
    run = RunDir(runs / "b")
    fields = {"job_id": "101", "nodes": ["n1"], "world_size": 1}
    write_event(run, "attempt_started", attempt=1, **fields)
    write_event(run, "attempt_ended", attempt=1, reason="crashed", next="stop")

    assert main(["resume", "b"]) == 0

    assert "--dependency" not in submitted(slurm)[-1]
