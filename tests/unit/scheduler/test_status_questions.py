"""How often `hpctrain status` asks SLURM, which all users share: not once for each run."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler.slurm.client import SlurmCluster
from tests.support.ledger_runs import Story

COMMAND = """#!/bin/sh
echo "$(basename $0) $*" >> {folder}/asked
case "$(basename $0)" in
{answer}
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands; `answer(name=lines)` says what they print, `asked()` what they were."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("HPCTRAIN_RUNS", str(tmp_path / "runs"))

    class Slurm:
        def answer(self, **answers):
            text = "".join(f"{name}) {shell} ;;\n" for name, shell in answers.items())
            for name in ("scontrol", "squeue", "sacct", "scancel", "sinfo"):
                (folder / name).write_text(COMMAND.format(folder=folder, answer=text))
                (folder / name).chmod(0o755)

        def asked(self):
            path = folder / "asked"
            return path.read_text().splitlines() if path.exists() else []

    slurm = Slurm()
    slurm.answer()
    return slurm


def live(root, job_id):
    story = Story(root, cluster="slurm")
    story.run.jobs.mkdir()
    token = f"{root.name}-tok"
    story.add("submit_intent", token=token, script=str(story.run.script(token)))
    return story.add("submitted", token=token, job_id=job_id, cluster="slurm", by="submit")


def status(capsys, *argv):
    code = main(["status", *argv])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


@pytest.mark.parametrize("argv", [[], ["--json"]])
def test_nobody_is_asked_about_runs_that_are_over(slurm, tmp_path, capsys, argv):
    for number in range(60):
        story = live(tmp_path / "runs" / f"run-{number}", str(100 + number)).started(1, "17")
        story.add("done", 1, step=400) if number % 2 else story.ended(1, "cancelled", "stop")

    shown = status(capsys, *argv)

    assert slurm.asked() == []
    assert shown.count("done") >= 30


def test_one_question_to_the_queue_and_one_to_accounting_serve_all(slurm, tmp_path, capsys):
    runs = tmp_path / "runs"
    for number in range(20):
        live(runs / f"run-{number}", str(100 + number))
    live(runs / "over", "17").started(1, "17").add("done", 1, step=400)
    rows = [
        f"100|RUNNING|n1|1763700000|1763790000|40|None|{runs}/run-0/jobs/run-0-tok.sh",
        f"101|PENDING||N/A|N/A|40|Priority|{runs}/run-1/jobs/run-1-tok.sh",
        "102|RUNNING|n2|1763700000|1763790000|40|None|/home/me/another.sh",
    ]
    slurm.answer(
        squeue=f"printf '%s\\n' '{chr(10).join(rows)}'",
        sacct="echo '103|NODE_FAIL|1763700000|1763700100|n3'",
    )

    found = {run["run"]: run for run in json.loads(status(capsys, "--json"))}

    assert sorted(line.split()[0] for line in slurm.asked()) == ["sacct", "squeue"]
    told = next(line for line in slurm.asked() if line.startswith("sacct"))
    assert set(told.rpartition(" ")[2].split(",")) == {str(100 + number) for number in range(20)}
    states = [found[f"run-{number}"]["state"] for number in range(5)]
    assert states == ["running", "pending", "lost", "failed", "lost"]
    assert found["over"]["state"] == "done"


def test_a_submission_without_an_answer_is_found_by_the_same_question(slurm, tmp_path, capsys):
    root = tmp_path / "runs" / "lm"
    story = Story(root, cluster="slurm")
    story.add("submit_intent", token="lm-tok", script=str(story.run.script("lm-tok")))
    slurm.answer(squeue=f"echo '7|RUNNING|n1|1763700000|N/A|40|None|{root}/jobs/lm-tok.sh'")

    assert "running" in status(capsys)

    assert [line.split()[0] for line in slurm.asked()] == ["squeue"]


def test_what_is_not_known_is_said_in_time(slurm, tmp_path, monkeypatch, capsys):
    """A slurmctld that does not answer is waited for once, not once for each run."""
    for number in range(12):
        live(tmp_path / "runs" / f"run-{number}", str(100 + number))
    slurm.answer(squeue="sleep 100000")
    monkeypatch.setattr(SlurmCluster, "query_timeout_s", 1.0)

    shown = status(capsys)

    assert [line.split()[0] for line in slurm.asked()] == ["squeue"]
    assert shown.count("pending?") == 12
    assert "no answer: squeue gave no answer within 1 s" in " ".join(shown.split())


SILENT = "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"
DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.mark.parametrize("known", [True, False])
def test_a_silent_accounting_is_said_once_and_what_is_not_known_without_it(
    slurm, tmp_path, capsys, known
):
    """Also where slurmctld has forgotten the job: how it ended is not known then."""
    for number in range(3):
        live(tmp_path / "runs" / f"run-{number}", str(100 + number)).started(1, str(100 + number))
    line = "$(echo $4 | sed 's/.*/JobId=& JobState=RUNNING/')"
    slurm.answer(
        sacct=SILENT,
        scontrol=f'echo "{line}"' if known else "echo 'Invalid job id specified' >&2; exit 1",
        squeue="true"
        if not known
        else "printf '%s\\n' "
        + " ".join(f"'{100 + n}|RUNNING|n1|1763700000|N/A|40|None|x'" for n in range(3)),
    )

    screen = " ".join(status(capsys, "run-1").split())
    shown = json.loads(status(capsys, "run-1", "--json"))
    table = " ".join(status(capsys).split())
    several = json.loads(status(capsys, "--json"))

    assert screen.count("accounting did not answer (sacct: Problem talking to the database") == 1
    assert "slurmdbd does not answer" in screen
    assert "are not known" in screen
    assert "Problem talking to the database" in shown["accounting_problem"]
    assert shown["cluster_problem"] is None
    assert all("Problem talking" in run["accounting_problem"] for run in several)
    assert table.count("accounting did not answer") == (0 if known else 1)


def test_a_site_without_accounting_is_told_nothing(slurm, tmp_path, capsys):
    live(tmp_path / "runs" / "lm", "100").started(1, "100")
    slurm.answer(sacct=DISABLED, scontrol="echo 'Invalid job id specified' >&2; exit 1")

    assert "accounting" not in status(capsys, "lm")
    assert json.loads(status(capsys, "lm", "--json"))["accounting_problem"] is None
