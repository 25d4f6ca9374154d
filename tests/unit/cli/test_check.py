"""`hpctrain check`: its list, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import json
import shlex

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.scheduler.base import get_cluster
from hpctrain.cluster.site.load import load_site
from hpctrain.core.settings.schema import Settings, SlurmSettings
from hpctrain.launch import preflight

GOOD = "import json\nprint('never run')\n"
HANGS = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
LOCAL = ("--cluster", "local")


@pytest.fixture
def check(runs, capsys):
    def call(*words, code=0, by_name=True, **programs):
        for name, text in programs.items():
            (runs.parent / f"{name}.py").write_text(text)
        assert main(["check", *LOCAL, "--json", *words]) == code
        value = json.loads(capsys.readouterr().out)
        assert value["exit_code"] == code
        return {one["check"]: one for one in value["checks"]} if by_name else value["checks"]

    return call


def test_a_good_program_passes_and_nothing_is_left(check, runs):
    answers = check("--", "train.py", train=GOOD)

    assert [answers[name]["status"] for name in ("submit", "space", "lint", "imports")] == [
        *("ok", "ok", "ok", "ok")
    ]
    assert answers["submit"]["message"].startswith("would make run train-1 on local (nodes 1")
    assert answers["scheduler"]["status"] == "ok"
    assert [answers[name]["status"] for name in ("lead time", "interval", "disk")] == [
        *("not known", "not known", "not known")
    ]
    assert [path.name for path in runs.parent.iterdir()] == ["train.py"]


RESUMES_BY_AN_OPTION = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
given = parser.parse_args()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if given.resume:
    model.load_state_dict(torch.load(given.resume))
for epoch in range(9):
    model(torch.ones(1)).backward()
    optimizer.step()
    torch.save(model.state_dict(), "out/last.pt")
"""


def test_what_check_says_to_add_can_be_added_to_check(check):
    note = check("--", "train.py", train=RESUMES_BY_AN_OPTION)["resume"]
    words = shlex.split(note["message"].partition("Add: ")[2])

    assert (note["status"], words[:2]) == ("note", ["--checkpoint", "out/last.pt"])
    assert "resume" not in check(*words, "--", "train.py")


def test_a_missing_import_fails_with_its_place(check):
    one = check("--", "train.py", code=3, train="import json\nimport nosuchmodule\n")["imports"]

    assert (one["status"], one["path"], one["line"]) == ("fail", "train.py", 2)
    assert one["message"].startswith("train.py:2: import nosuchmodule: No module named")


def test_a_missing_import_that_may_never_come_is_a_note(check):
    text = "def plot():\n    import nosuchmodule\n"

    assert check("--", "train.py", train=text)["imports"]["status"] == "note"


def test_a_missing_import_is_a_note_where_the_job_may_bring_it(check):
    words = ["--set", "slurm.setup=['module load x']", "--", "train.py"]

    assert check(*words, train="import nosuchmodule\n")["imports"]["status"] == "note"


def test_what_hangs_fails_and_is_told_once(runs, capsys):
    (runs.parent / "train.py").write_text(HANGS)

    assert main(["check", *LOCAL, "--", "train.py"]) == 3
    out = capsys.readouterr().out
    assert out.count("HT101") == 1
    assert "fail       lint" in out
    assert out.splitlines()[-1].startswith("1 failed, ")
    assert out.splitlines()[-1].endswith("exit code 3")


def test_no_script_is_one_line_and_submits_exit_code(check):
    one = check("--", "train.py", code=4)["submit"]

    assert one["status"] == "fail"
    assert one["message"].startswith("script train.py is not there")


def test_a_syntax_error_is_one_line_with_its_place(check):
    answers = check("--", "train.py", code=2, train="x = (\n")

    assert answers["submit"]["message"].startswith("train.py is no Python: line 1:")
    assert set(answers) == {"submit", "the rest"}


def test_an_unknown_site_is_told_and_the_program_looked_at_all_the_same(check):
    answers = check("--site", "nosuch", "--", "train.py", code=4, train=HANGS)

    assert answers["submit"]["message"].startswith('there is no site "nosuch"')
    assert answers["lint"]["status"] == "fail"
    assert answers["the rest"]["status"] == "not known"


def test_a_full_disk_fails(check, monkeypatch):
    monkeypatch.setattr(preflight, "ROOM_FAIL_GIB", 1e9)

    assert check("--", "train.py", code=3, train=GOOD)["space"]["status"] == "fail"


def test_notes_of_submit_are_lines(check):
    answers = check("--partition", "gpu", "--", "train.py", by_name=False, train=GOOD)

    (note,) = [one for one in answers if "--partition" in one["message"]]
    assert (note["check"], note["status"]) == ("submit", "note")


SITE = """
schema = 1
name = "juniper"
[slurm]
kill_wait_s = 30
[partitions.spare]
[partitions.spare.preemption]
mode = "requeue"
grace_s = {grace}
"""


@pytest.fixture
def sbatch(runs, monkeypatch, capsys):
    """Checks for a SLURM whose sbatch answers so."""

    def call(answer, *words, code):
        folder = runs.parent / "bin"
        folder.mkdir()
        (folder / "sbatch").write_text(f"#!/bin/sh\n{answer}\n")
        (folder / "sbatch").chmod(0o755)
        (runs.parent / "train.py").write_text(GOOD)
        monkeypatch.setenv("PATH", str(folder))
        command = ["check", "--cluster", "slurm", "--json", *words, "--", "train.py"]
        assert main(command) == code
        checks = json.loads(capsys.readouterr().out)["checks"]
        (line,) = [one for one in checks if one["check"] == "scheduler"]
        return line

    return call


def test_the_scheduler_is_asked_whether_it_takes_the_script(sbatch):
    line = sbatch(
        'case "$1" in --test-only) [ -s "$2" ] && exit 0;; esac; exit 1',
        *("--partition", "gpu"),
        code=0,
    )

    assert (line["status"], line["message"]) == ("ok", "gpu: accepts the job")


def test_what_the_scheduler_refuses_fails(sbatch):
    line = sbatch("echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1", code=3)

    assert line["status"] == "fail"
    assert "invalid partition specified: gpu" in line["message"]


def test_where_there_is_no_scheduler_nobody_is_asked(runs, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(runs.parent))
    (runs.parent / "train.py").write_text(GOOD)

    assert main(["check", "--cluster", "slurm", "--json", "--", "train.py"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    (line,) = [one for one in checks if one["check"] == "scheduler"]
    assert line["status"] == "not known"
    assert line["message"].startswith("nobody to ask: ")


@pytest.mark.parametrize(
    ("partition", "grace", "seconds"),
    [("spare", 20, 20), ("spare", 0, 30), ("other", 20, None)],
)
def test_the_notice_is_that_of_the_preset(tmp_path, partition, grace, seconds):
    (tmp_path / "juniper.toml").write_text(SITE.format(grace=grace))
    site = load_site(str(tmp_path / "juniper.toml"), environ={})
    settings = Settings(slurm=SlurmSettings(partition=partition))

    answer = get_cluster("slurm").notice(settings, site)

    assert answer == (seconds and (seconds, site.where("partitions", "spare", "preemption")))
    assert get_cluster("local").notice(settings, site) is None
