"""What ordinary users do in their first hour, typed on a real cluster: it works, or says the line.

Programs are shell scripts, so that what is tried is the way around them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support.patience import until
from tests.support.scenario import cli

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slurm

FOLLOWS = '#!/bin/sh\necho "begun with $*" >>"$HPCTRAIN_OUTPUT_DIR/log"\nexec sleep 1000\n'

SAVES = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
args = parser.parse_args()
model = torch.nn.Linear(2, 2)
if args.resume:
    model.load_state_dict(torch.load(args.resume, weights_only=True))
for epoch in range(1_000_000):
    model(torch.ones(2)).sum().backward()
    torch.save(model.state_dict(), "last.pt")
"""


class Desk:
    """A user's project folder, and what is typed there."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.env = {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder)}
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)

    def types(self, *words: str, code: int = 0, cwd: Path | None = None) -> str:
        """A command; what it said on both streams."""
        done = cli(self.slurm, cwd or self.folder, *words, env=self.env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def writes(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def facts(self, run: str, kind: str) -> list[ledger.Event]:
        return [e for e in ledger.read(RunDir(self.folder / "runs" / run)) if e.kind == kind]

    def awaits(self, run: str, kind: str, count: int = 1) -> None:
        until(lambda: len(self.facts(run, kind)) >= count, lambda: f"{run}: {kind}")


@pytest.fixture
def desk(slurm, tmp_path):
    return Desk(slurm, tmp_path)


def test_a_mended_program_is_what_a_resume_runs_with_other_arguments_if_need_be(desk):
    """Findings 1, 7 and 10: the old code ran for ever; git was told to add it; `resume` guessed."""
    desk.writes("train.sh", "#!/bin/sh\nexit 3\n")
    subprocess.run(["git", "add", "train.sh"], cwd=desk.folder, check=True)
    desk.types("submit", "--name", "fix", "--", "./train.sh", "--lr", "1")
    desk.awaits("fix", "attempt_ended")

    desk.writes("train.sh", FOLLOWS)
    said = desk.types("resume", "fix", "--", "./train.sh", "--lr", "2")

    assert "train.sh" in said.partition("code ")[2].splitlines()[0]
    log = desk.folder / "runs" / "fix" / "output" / "log"
    until(log.exists, lambda: "the second start")
    assert log.read_text() == "begun with --lr 2\n"
    status = subprocess.run(
        ["git", "status", "--short"], cwd=desk.folder, capture_output=True, text=True, check=True
    )
    assert "runs" not in status.stdout
    desk.types("cancel", "fix")
    assert "no run is named; the newest is fix" in desk.types("resume", code=2)


def test_a_program_that_saves_and_does_not_go_on_is_noticed_before_it_waits(desk):
    """Finding 2: it began at epoch 0 again after each preemption, and nobody had said so."""
    desk.writes("train.py", SAVES)

    said = desk.types("submit", "--name", "anew", "--", "train.py")
    desk.types("cancel", "anew")

    words = said.partition("Add: ")[2].splitlines()[0]
    own = desk.types("submit", "--name", "goes-on", *shlex.split(words), "--", "train.py")
    desk.types("cancel", "goes-on")
    assert "begins at its first step again" in said
    assert "begins at its first step again" not in own


def test_two_runs_of_a_sweep_are_refused_one_file_and_told_the_way(desk):
    """Finding 4: each resumed from the other's weights."""
    desk.writes("train.sh", FOLLOWS)
    pattern = ("--checkpoint", "last.pt")
    desk.types("submit", "--name", "lr-1", *pattern, "--", "./train.sh")

    said = desk.types("submit", "--name", "lr-2", *pattern, "--", "./train.sh", code=2)
    assert "takes in files that lr-1 saves too" in said
    own = ("--checkpoint", "{output}/last.pt", "--", "./train.sh", "{output}")
    desk.types("submit", "--name", "lr-2", *own)

    desk.types("cancel", "lr-1", "lr-2")


def test_a_run_is_found_from_every_folder_by_its_name_and_by_its_jobs_id(desk, tmp_path):
    """Findings 9, 11 and 31: one folder only; a save that nobody hears; an error for an end."""
    desk.writes("train.sh", FOLLOWS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made = json.loads(desk.types("submit", "--name", "found", "--json", "--", "./train.sh"))

    assert not any("--save" in line for line in made["next"])
    for name in ("found", made["job_id"]):
        shown = json.loads(desk.types("status", name, "--json", cwd=elsewhere))
        assert shown["run"] == "found"
    assert "found" in desk.types("status", cwd=elsewhere)
    desk.types("cancel", made["job_id"], cwd=elsewhere)
    desk.slurm.wait_job(made["job_id"], "CANCELLED")
    desk.types("cancel", "found", cwd=elsewhere)
    desk.types("rm", "found", "--yes", cwd=elsewhere)
    assert not (desk.folder / "runs" / "found").exists()
