"""`--then COMMAND`: runs that are made with a run, follow it, and never exist without it."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli import api
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import load_spec
from hpctrain.launch import change, prepare
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir

SBATCH = """#!/bin/sh
cd {folder}; echo "sbatch $*" >> asked; for script; do :; done
case "$script" in *"$(cat refused)"*) echo "sbatch: error: no room for it" >&2; exit 1 ;; esac
id=$(($(ls jobs | wc -l) + 100))
echo "JobState=PENDING Reason=None Command=$script" > jobs/$id; echo $id
"""
SCONTROL = """#!/bin/sh
cd {folder}
case "$*" in
"show job "*) [ -e jobs/$3 ] || exit 1; echo "JobId=$3 $(cat jobs/$3)" ;;
"show config") echo "ClusterName = alps" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands, which refuse scripts with a word in their names (the file `refused`)."""
    folder = tmp_path / "slurm"
    (folder / "jobs").mkdir(parents=True)
    (folder / "refused").write_text("nothing\n")
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "squeue": "", "sacct": ""}.items():
        (folder / name).write_text(text.format(folder=folder) or "#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    work = tmp_path / "work"
    work.mkdir()
    for name in ("train.py", "export.py"):
        (work / name).write_text("")
    monkeypatch.chdir(work)
    monkeypatch.delenv("HPCTRAIN_RUNS", raising=False)
    monkeypatch.setenv("HPCTRAIN_SITE", "none")
    (folder / "asked").touch()
    return folder


def submit(*words, name="lm"):
    where = ["submit", "--cluster", "slurm", "--name", name, "--nodes", "4", "--no-snapshot"]
    return main([*where, *words, "--", "train.py"])


def spec_of(name):
    return load_spec(RunDir(api.runs_root() / name).spec)


def calls(slurm):
    return (slurm / "asked").read_text().splitlines()


def test_it_is_a_run_of_its_own_on_a_small_allocation(slurm, capsys):
    words = ("--set", "slurm.gpus_per_node=8", "--set", 'then.time="0:10:00"')

    assert submit("--then", "export.py --to 'a b'", *words) == 0

    first, then = spec_of("lm"), spec_of("lm-then")
    assert then.after == [str(api.runs_root() / "lm")]
    assert (then.entry.path, then.entry.args) == (f"{first.entry.cwd}/export.py", ["--to", "a b"])
    assert then.run_id != first.run_id
    slurm_settings = then.settings.slurm
    assert (slurm_settings.nodes, slurm_settings.ranks(), slurm_settings.time) == (
        "1",
        1,
        "0:10:00",
    )
    assert slurm_settings.gpus_per_node == 8  # the run's own, where [then] says nothing
    assert first.settings.slurm.nodes == "4"
    one, other = calls(slurm)
    assert "--dependency" not in one
    assert "--dependency=afterok:100 " in other
    assert "lm-then (job 101)" in capsys.readouterr().out
    assert RunHistory.read(RunDir(api.runs_root() / "lm")).followers == then_root()


def then_root():
    return [str(api.runs_root() / "lm-then")]


def test_several_make_a_chain(slurm, capsys):
    assert (
        submit("--then", "export.py", "--then", "true", "--then", "export.py again", "--json") == 0
    )

    told = json.loads(capsys.readouterr().out)
    names = ["lm-then", "lm-then-2", "lm-then-3"]
    assert [one["run"] for one in told["following"]] == names
    assert [one["job_id"] for one in told["following"]] == ["101", "102", "103"]
    before = ["lm", *names]
    for name, first in zip(names, before, strict=False):
        assert spec_of(name).after == [str(api.runs_root() / first)]
    waits = [line.partition("afterok:")[2].partition(" ")[0] for line in calls(slurm)]
    assert waits == ["", "100", "101", "102"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--then", "nowhere.py"), 4, "--then 'nowhere.py'"),
        (("--then", "export.py 'a"), 2, '--then "export.py \'a"'),
        (("--then", " "), 2, "--then ' '"),
        (("--then", "export.py", "--set", 'then.nodes="no"'), 2, "then.nodes"),
        (("--then", "export.py", "--then", "nowhere.py"), 4, "nowhere.py"),
        (("--then", "torchrun --nproc-per-node 4 export.py"), 2, "then.ranks_per_node"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(slurm, capsys, words, code, said):
    assert submit(*words) == code

    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert said in err
    assert not calls(slurm)
    assert not api.runs_root().exists()


def test_a_run_of_that_name_is_not_touched(slurm, capsys):
    assert submit(name="lm-then") == 0
    capsys.readouterr()

    assert submit("--then", "export.py") == 5

    assert "lm-then exists, and --then makes a run of that name" in capsys.readouterr().err
    assert sorted(path.name for path in api.runs_root().iterdir()) == [".gitignore", "lm-then"]


def test_where_the_first_is_refused_nothing_is_left_of_any(slurm, capsys):
    (slurm / "refused").write_text("lm-")

    assert submit("--then", "export.py") == 6

    assert not api.runs_root().exists()


def test_where_the_second_is_refused_the_first_runs_and_one_line_says_how_to_go_on(slurm, capsys):
    (slurm / "refused").write_text("lm-then-")

    assert submit("--then", "export.py") == 6

    told = capsys.readouterr()
    (line,) = [line for line in told.err.splitlines() if "lm-then" in line]
    assert "lm-then was not submitted: " in line
    assert "no room for it" in line
    assert line.endswith("; `hpctrain resume lm-then` submits it")
    assert "100 on slurm" in told.out
    assert "lm-then, not submitted" in told.out
    (slurm / "refused").write_text("nothing")
    assert main(["resume", "lm-then"]) == 0
    assert "--dependency=afterok:100 " in calls(slurm)[-1]


def test_a_dry_run_shows_what_would_follow(slurm, capsys):
    assert submit("--then", "export.py", "--dry-run", "--json") == 0
    (spec,) = json.loads(capsys.readouterr().out)["following"]
    assert (spec["name"], spec["settings"]["slurm"]["nodes"]) == ("lm-then", "1")
    assert (
        submit("--then", "export.py --key=ghp_abcdefghijklmnopqrstuvwxyz0123456789", "--dry-run")
        == 0
    )
    assert "lm-then follows: " in capsys.readouterr().err
    assert not api.runs_root().exists()


def test_what_is_made_only_is_made_with_what_follows(slurm, capsys):
    assert submit("--then", "export.py", "--no-submit") == 0

    assert not calls(slurm)
    assert spec_of("lm-then").after == [str(api.runs_root() / "lm")]
    assert main(["resume", "lm"]) == 0
    said = capsys.readouterr().out
    assert "lm-then is to follow and has no job: `hpctrain resume lm-then` submits it" in said


def test_what_holds_for_the_run_too_is_said_once(slurm, capsys, monkeypatch):
    for module in (prepare, change):
        monkeypatch.setattr(module, "check_versions", lambda *_, **__: ["torch 9 is new"])

    assert submit("--then", "export.py", "--then", "export.py", "--dry-run") == 0

    assert capsys.readouterr().err.count("torch 9 is new") == 1


def test_from_python(slurm):
    made = api.submit(
        ["train.py"], name="lm", cluster="slurm", snapshot=False, then=["export.py", "true"]
    )

    assert made.following == ("lm-then", "lm-then-2")
    assert [spec_of(name).entry.kind for name in made.following] == ["script", "program"]
