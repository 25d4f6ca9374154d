"""Runs that wait for each other are shown as one chain, and each says for whom it waits."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler import local as client
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import Followed
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story, local_job, write_event


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path / "runs"


class Chain:
    """Runs of the embedded cluster, made one behind the other."""

    def __init__(self, runs):
        self.runs = runs
        self.t = 1_763_700_000.0

    def add(self, name, *after, state="PENDING", reason="Dependency"):
        self.t += 100
        job_id = f"local-{int(self.t) % 1000}"
        story = Story(self.runs / name, t=self.t).submitted(job_id)
        self.follow(name, *after)
        pid = os.getpid() if state not in client.OVER else 0
        local_job(
            self.runs.parent / "local",
            job_id,
            state=state,
            reason=reason,
            controller_pid=pid,
            controller_started=client.process_start(pid) if pid else 0.0,
        )
        return story

    def follow(self, name, *after):
        spec = load_spec(self.runs / name / "spec.json")
        spec.after = [str(self.runs / one) for one in after]
        spec.dump(self.runs / name / "spec.json")
        for one in after:
            ledger.append(RunDir(self.runs / one), Followed(run=str(self.runs / name)))


@pytest.fixture
def five(runs):
    """Prepare is done, train runs, three wait; z is alone."""
    chain = Chain(runs)
    chain.add("z")
    done = chain.add("prepare", state="COMPLETED", reason=None)
    done.started(1).add("done", 1).ended(1, "completed", "stop")
    train = chain.add("train", "prepare", state="RUNNING", reason=None)
    train.started(1).restored(1).steps(1, 1, 40)
    chain.add("export", "train")
    chain.add("check", "export")
    chain.add("a-report", "check", "prepare")
    return chain


def value(capsys, *words):
    assert main(["status", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def screen(capsys, *words):
    assert main(["status", *words]) == 0
    return capsys.readouterr().out


ORDER = ["prepare", "train", "export", "check", "a-report"]


@pytest.mark.parametrize("member", ORDER)
def test_five_runs_are_shown_as_one_for_any_of_them(five, capsys, member):
    chain = value(capsys, member)["chain"]

    assert [link["run"] for link in chain] == ORDER
    assert [link["state"] for link in chain] == ["done", "running", *3 * ["pending"]]
    assert [link["words"] for link in chain] == [
        "",
        "step 40/400",
        "waits for train",
        "waits for export",
        "waits for check",
    ]
    assert chain[4]["after"] == [str(five.runs / "check"), str(five.runs / "prepare")]
    lines = screen(capsys, member).splitlines()
    head = next(at for at, line in enumerate(lines) if line.split() == ["chain", "state", "job"])
    rows = [line.split() for line in lines[head + 1 : head + 6]]
    assert [next(word for word in row if word in ORDER) for row in rows] == ORDER
    assert [row[0] == ">" for row in rows] == [name == member for name in ORDER]


def test_a_run_that_is_alone_has_no_chain(five, capsys):
    assert value(capsys, "z")["chain"] == []
    assert "chain" not in screen(capsys, "z")


def test_the_table_of_all_runs_says_who_waits_for_whom(five, capsys):
    rows = {line.split()[0]: line.split()[-1] for line in screen(capsys).splitlines()[1:]}

    assert (rows["export"], rows["check"], rows["a-report"]) == ("train", "export", "check")
    for name in ("z", "prepare", "train"):
        assert rows[name] not in ORDER
    values = {run["run"]: run for run in value(capsys)}
    assert [link["run"] for link in values["train"]["chain"]] == ORDER
    assert values["z"]["chain"] == []


def test_the_table_has_no_such_column_where_nobody_waits(runs, capsys):
    Chain(runs).add("z")

    assert "after" not in screen(capsys).splitlines()[0].split()


def test_names_are_whole_on_a_narrow_screen(runs, capsys, monkeypatch):
    chain = Chain(runs)
    chain.add("train-12")
    chain.add("train-12-then", "train-12")
    chain.add("train-12-then-2", "train-12-then")
    monkeypatch.setenv("COLUMNS", "80")

    title, *rows = screen(capsys).splitlines()

    assert title.split()[-1] == "after"
    assert rows[0].split()[0] == "train-12-then-2"
    assert rows[0].split()[-1] == "train-12-then"
    assert max(map(len, [title, *rows])) <= 80


def test_a_run_whose_predecessor_runs_says_so(five, capsys):
    words = value(capsys, "export")["words"]

    assert words.endswith(" waits for train (running)")


@pytest.mark.parametrize(
    ("reason", "words"),
    [("user_error", "has failed"), ("stopped", "was stopped"), ("cancelled", "was cancelled")],
)
def test_a_run_that_waits_in_vain_says_what_to_do(runs, capsys, reason, words):
    chain = Chain(runs)
    chain.add("train", state="FAILED", reason=None).started(1).ended(1, reason, "stop")
    chain.add("export", "train", reason="DependencyNeverSatisfied")

    seen = value(capsys, "export")

    assert seen["state"] == "pending"
    assert seen["words"].endswith(
        f"waits for train, which {words}: `hpctrain resume train` resumes it and export follows, "
        "or `hpctrain cancel export`"
    )
    assert seen["next"] == ["hpctrain resume train", "hpctrain cancel export"]
    assert f"waits for train, which {words}" in seen["chain"][1]["words"]


def test_a_job_that_was_not_pointed_to_its_predecessors_new_job_says_so(runs, capsys):
    chain = Chain(runs)
    chain.add("train", state="RUNNING", reason=None).started(1)
    chain.add("export", "train", reason="DependencyNeverSatisfied")

    assert value(capsys, "export")["words"].endswith(
        "waits for train (running), and not for its newest job: `hpctrain cancel export`, then "
        "`hpctrain resume export`"
    )


def test_a_run_that_has_begun_waits_for_nobody(five, capsys):
    """It was resumed, and the run before it is not done any more."""
    run = RunDir(five.runs / "export")
    job_id = RunHistory.read(run).state.job_id
    write_event(run, "attempt_started", attempt=1, world_size=1, job_id="local-7")
    write_event(run, "attempt_ended", attempt=1, reason="crashed", next="stop")
    write_event(run, "submit_intent", token="tok-1")
    write_event(run, "submitted", token="tok-1", job_id=job_id)
    assert value(capsys, "export")["state"] == "pending"

    assert "waits for train" not in value(capsys, "export")["words"]
    assert value(capsys, "export")["chain"][2]["words"] == ""


def test_a_predecessor_in_another_folder_counts(five, tmp_path, capsys):
    shutil.move(five.runs / "prepare", tmp_path / "prepare")
    spec = load_spec(five.runs / "z" / "spec.json")
    spec.after = [str(tmp_path / "prepare")]
    spec.dump(five.runs / "z" / "spec.json")
    write_event(RunDir(tmp_path / "prepare"), "submit_intent", token="again")

    rows = {line.split()[0]: line.split()[-1] for line in screen(capsys).splitlines()[1:]}

    assert rows["z"] == "prepare"
    assert "prepare" not in rows


def test_a_circle_and_a_lost_member_are_no_error(five, capsys):
    five.follow("prepare", "a-report")
    shutil.rmtree(five.runs / "export")

    assert {link["run"] for link in value(capsys, "train")["chain"]} == {
        "prepare",
        "train",
        "check",
        "a-report",
    }
    assert main(["status"]) == 0


def test_a_copy_takes_no_followers_along(five, capsys):
    shutil.copytree(five.runs / "train", five.runs / "copy")

    chain = value(capsys, "copy")["chain"]

    assert [link["run"] for link in value(capsys, "export")["chain"]] == ORDER
    assert "copy" in {link["run"] for link in chain}
