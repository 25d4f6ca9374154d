"""`hpctrain init`: a settings file from a few questions, or from flags."""

from __future__ import annotations

import tomllib

import pytest

from hpctrain.cli.main import main
from tests.support.terminal import Keyboard

PROGRAM = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
state = torch.load(args.resume) if args.resume else None
for epoch in range(3):
    torch.save(state, "out/last.pt")
"""
SINFO = "gpu*|4|64|2-00:00:00|gpu:a100:4\ncpu|9|48|1:00:00|(null)\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a program; SLURM's commands say what they are told to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("SBATCH_ACCOUNT", "SLURM_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    commands = tmp_path / "commands"
    commands.mkdir()
    said = {"sinfo": SINFO, "sbatch": "", "scontrol": "", "sacctmgr": ""}
    for name, text in said.items():
        (commands / f"{name}.txt").write_text(text)
        (commands / name).write_text(f"#!/bin/sh\ncat {commands}/{name}.txt\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "train.py").write_text(PROGRAM)
    (tmp_path / "work" / "data.py").write_text("")
    return tmp_path / "work"


def written(project) -> dict:
    return tomllib.loads((project / "hpctrain.toml").read_text())


def test_without_a_terminal_what_was_found_is_written_and_the_line_to_type_printed(project, capsys):
    assert main(["init"]) == 0

    assert written(project) == {
        "slurm": {"partition": "gpu", "gpus_per_node": 4, "nodes": "1", "time": "12:00:00"},
        "checkpoint": {"sealed": ["out/last.pt"]},
        "run": {"resume_args": "--resume {checkpoint}"},
    }
    out = capsys.readouterr().out
    lines = ["  hpctrain submit --dry-run -- train.py", "  hpctrain submit -- train.py"]
    assert out.splitlines()[-2:] == lines
    assert main(lines[0].split()[1:]) == 0, "what it says can be typed"
    shown = capsys.readouterr().out
    assert "#SBATCH --gpus-per-node=4\n" in shown
    assert "#SBATCH --partition=gpu\n" in shown


def test_flags_win_over_what_was_found(project, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    flags = ["--partition", "cpu", "--nodes", "2-4", "--checkpoint", "", "--program", "data.py"]
    assert main(["init", *flags]) == 0
    slurm = {"partition": "cpu", "account": "mine", "nodes": "2-4", "time": "1:00:00"}
    assert written(project) == {"slurm": slurm}


def test_on_a_terminal_each_is_asked_with_what_was_found(project, monkeypatch, capsys):
    answers = ["data.py --lr 1", "", "me", "2", "6h", "2", 'o"ut/*.pt', ""]
    monkeypatch.setattr("sys.stdin", Keyboard("\n".join(answers) + "\n"))
    assert main(["init"]) == 0

    asked = capsys.readouterr().err
    assert "Partition (gpu, cpu) [gpu]: " in asked
    assert "GPUs per node [4]: " in asked
    assert written(project) == {
        "slurm": {
            "partition": "gpu",
            "account": "me",
            "gpus_per_node": 2,
            "nodes": "2",
            "time": "6h",
        },
        "checkpoint": {"sealed": ['o"ut/*.pt']},
    }


def test_a_file_that_is_there_is_kept_unless_force_is_given(project, capsys):
    (project / "hpctrain.toml").write_text("[slurm]\nnodes = '7'\n")
    assert main(["init"]) == 2
    assert "is there already: edit it, or add --force" in capsys.readouterr().err
    assert main(["init", "--force"]) == 0
    assert written(project)["slurm"]["nodes"] == "1"


@pytest.mark.parametrize("old", [None, "[slurm]\nnodes = '7'\n"])
def test_what_submit_would_refuse_is_not_written(project, capsys, old):
    path = project / "hpctrain.toml"
    if old:
        path.write_text(old)
    assert main(["init", "--program", "nope.py", "--force"]) == 4
    assert "nothing was written: script nope.py is not there" in capsys.readouterr().err
    assert (path.read_text() if path.exists() else None) == old
    assert main(["init", "--nodes", "many", "--force"]) == 2
    assert (path.read_text() if path.exists() else None) == old


def test_here_without_a_scheduler_no_partition_is_asked_for(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(project))
    (project / "train.py").write_text("import hpctrain\n")
    assert main(["init"]) == 0
    assert written(project) == {"slurm": {"nodes": "1"}}
