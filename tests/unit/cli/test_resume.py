"""`hpctrain resume --dry-run`: what is said of a program that tells nothing of itself."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.launch import resume as resuming
from hpctrain.ledger.run.layout import RunDir
from tests.support.checkpoints import next_attempt, save
from tests.support.ledger_runs import write_event
from tests.support.terminal import Keyboard


@pytest.fixture
def plain(tmp_path, monkeypatch) -> RunDir:
    """A script's run that was never started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hi')\n")
    argv = ["submit", "--cluster", "local", "--no-submit", "--name", "plain", "--nodes", "2"]
    assert main([*argv, "--", "train.py"]) == 0
    return RunDir(tmp_path / "runs" / "plain")


def ended(run: RunDir, *told: tuple[str, dict]) -> None:
    """The run has had an attempt that was preempted."""
    where = {"job_id": "local-1", "nodes": ["n1", "n2"], "world_size": 2}
    write_event(run, "submit_intent", token="t")
    write_event(run, "submitted", token="t", job_id="local-1")
    write_event(run, "attempt_started", attempt=1, by="start", **where)
    for kind, fields in told:
        write_event(run, kind, attempt=1, **fields)
    write_event(run, "attempt_ended", attempt=1, reason="cancelled", next="stop", by="agent")


def dry_run(capsys, *argv: str) -> str:
    capsys.readouterr()
    assert main(["resume", "plain", "--dry-run", *argv]) == 0
    return capsys.readouterr().out


def test_where_a_program_that_tells_nothing_goes_on_and_how_it_spreads_is_not_known(plain, capsys):
    ended(plain)

    out = dry_run(capsys)

    assert "checkpoint   not known (the program has reported no step): the program decides" in out
    assert "ranks        2 nodes x 1 rank" in out
    assert "mesh" not in out
    assert "beginning" not in out
    plan = json.loads(dry_run(capsys, "--json"))["plan"]
    assert (plan["step"], plan["not_known"]) == (None, "the program has reported no step")


def test_a_program_that_resumes_by_its_arguments_is_said_to(plain, capsys):
    ended(plain)

    out = dry_run(capsys, "--set", "run.resume_args=--resume last.pt")

    assert "reported no step): the program resumes by its arguments (--resume last.pt)" in out

    out = dry_run(capsys, "--set", "run.resume_args=--resume {checkpoint}")

    assert "the newest that is registered when it starts (--resume {checkpoint})" in out


def test_one_that_trained_with_hpctrain_and_saved_nothing_starts_from_the_beginning(plain, capsys):
    ended(plain, ("restored", {"step": 0}))

    out = dry_run(capsys)

    assert "checkpoint   none yet: starts from the beginning" in out
    assert "ranks        2 nodes x 1 rank\n" in out
    assert "mesh" not in out, "it has said nothing of one"
    assert "mesh         2 nodes x 1 rank: fsdp2" in dry_run(capsys, "--engine", "fsdp2")


def test_a_program_whose_ranks_have_formed_a_mesh_is_shown_the_next_one(plain, capsys):
    mesh = {"engine": "ddp", "ranks_per_node": 1, "dp_replicate": 2}
    ended(plain, ("restored", {"step": 0}), ("mesh", mesh))
    shown = dry_run(capsys)
    assert "mesh         2 nodes x 1 rank: ddp, dp_replicate=2" in shown
    assert "batch" not in shown


def test_a_run_that_never_began_is_as_it_was(plain, capsys):
    assert "none yet: starts from the beginning" in dry_run(capsys)


def test_what_copies_in_memory_take_is_told_from_the_newest_checkpoint(plain, capsys):
    copies = ["--set", "alive.memory=auto"]
    ended(plain, ("restored", {"step": 0}))
    assert "not known before the first checkpoint: 2 times" in dry_run(capsys, *copies)

    save(plain, next_attempt(plain), 4)
    write_event(plain, "saved", attempt=1, step=4, bytes=2**30)
    assert "mesh         2 nodes x 1 rank: ddp" in dry_run(capsys), "its checkpoint is ours"

    line = next(line for line in dry_run(capsys, *copies).splitlines() if "alive.memory" in line)
    assert "copies take about 1.0 GiB of each node's memory, 2 times its part" in line
    assert "alive.memory" not in dry_run(capsys)
    notes = json.loads(dry_run(capsys, *copies, "--json"))["notes"]
    assert [note for note in notes if note.startswith("alive.memory: copies take about 1.0 GiB")]


@pytest.mark.parametrize(("typed", "code"), [("n\n", 130), ("y\n", 0)])
def test_without_a_name_resume_shows_what_it_would_take_and_asks(
    plain, monkeypatch, capsys, typed, code
):
    ended(plain)
    started = []
    monkeypatch.setattr(resuming, "launch", lambda *a, **k: started.append(a) or "9")
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    capsys.readouterr()

    assert main(["resume"]) == code

    out, err = capsys.readouterr()
    assert out.startswith("run          plain\n")
    assert "resume plain (cancelled for " in err
    assert bool(started) == (code == 0)


@pytest.mark.parametrize("words", [["--yes"], ["-"], ["--dry-run"]])
def test_a_script_resumes_the_newest_by_yes_or_its_sign_and_looks_without_either(
    plain, monkeypatch, capsys, words
):
    ended(plain)
    started = []
    monkeypatch.setattr(resuming, "launch", lambda *a, **k: started.append(a) or "9")
    monkeypatch.setattr("sys.stdin", None)

    assert main(["resume", *words]) == 0

    assert bool(started) == (words != ["--dry-run"])
