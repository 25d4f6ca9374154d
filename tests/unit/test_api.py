"""The command line's verbs as functions: the same facts, the same errors, and not a word."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

import hpctrain
from hpctrain import errors
from hpctrain.cli.main import main
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.run.layout import RunDir
from tests.support.ledger_runs import Story, local_job
from tests.support.memory import entries


@pytest.fixture
def work(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text("print('hi')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    for name in ("HPCTRAIN_RUNS", "HPCTRAIN_SITE", "HPCTRAIN_SITE_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def running(work, tmp_path):
    local_job(tmp_path / "local", "local-17", state="RUNNING")
    story = Story(work / "runs" / "lm").submitted("local-17").started(1, "local-17").restored(1)
    return story.steps(1, 1, 50).saved(1, 50)


def made(work, *flags):
    """The spec that the command makes of these flags."""
    assert main(["submit", "--no-submit", "--cluster", "local", "--name", "cli", *flags]) == 0
    return load_spec(work / "runs" / "cli" / "spec.json")


def test_what_lint_finds_in_the_program_is_reported_by_the_function_and_the_command(work, capsys):
    (work / "train.py").write_text(
        "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )

    run = hpctrain.submit(["train.py"], name="api", cluster="local", start=False)
    made(work, "--", "train.py")

    assert "lint: train.py:3 HT101 " in capsys.readouterr().err
    assert [note for note in run.notes if note.startswith("lint: train.py:3 HT101 ")]


def test_submit_makes_of_python_values_what_the_command_makes_of_flags(work, capsys):
    run = hpctrain.submit(
        ["train.py", "--lr", "1e-3"],
        name="api",
        nodes="2-4",
        ranks_per_node=2,
        time=30,
        engine="fsdp2",
        mesh={"tp": 2, "pp": "1-2"},
        settings={"train.steps": 500, "run.snapshot": "no", "slurm.extra": ["--switches=1", "-v"]},
        env={"A": "b c"},
        cluster="local",
        start=False,
    )

    assert capsys.readouterr() == ("", "")
    assert (run.run, run.dir, run.job_id) == ("api", work / "runs" / "api", None)
    assert any("has its own settings" in note for note in run.notes)
    ours = load_spec(RunDir(run.dir).spec)
    flags = [
        "--nodes",
        "2-4",
        "--ranks-per-node",
        "2",
        "--time",
        "30",
        "--engine",
        "fsdp2",
        "--mesh",
        "tp=2,pp=1-2",
    ]
    sets = ["train.steps=500", "run.snapshot=no", 'slurm.extra=["--switches=1", "-v"]']
    flags += [word for text in sets for word in ("--set", text)]
    theirs = made(work, *flags, "--env", "A=b c", "--", "train.py", "--lr", "1e-3")
    assert (ours.settings, ours.origins) == (theirs.settings, theirs.origins)
    assert (ours.entry, ours.env) == (theirs.entry, theirs.env)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"command": ["tain.py"]}, errors.NotFound, "did you mean train.py"),
        ({"command": "train.py --lr 1"}, errors.UsageError, "takes a list of words"),
        ({"nodes": "4-2"}, errors.UsageError, "4-2"),
        ({"settings": {"train.stepz": 1}}, errors.UsageError, "did you mean train.steps"),
        ({"settings": {"train.steps": "many"}}, errors.UsageError, "many"),
        ({"settings": {"train.steps": None}}, errors.UsageError, "train.steps"),
        ({"mesh": {"dp": 4}}, errors.UsageError, "data-parallel"),
        ({"env": {"RANK": "0"}}, errors.UsageError, "RANK is set by hpctrain"),
        ({"cluster": "pbs"}, errors.UsageError, "pbs"),
        ({"name": "a/b"}, errors.UsageError, "a/b"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_wrong_is_an_error_of_ours_and_leaves_nothing(work, arguments, error, words):
    with pytest.raises(error) as caught:
        hpctrain.submit(**{"cluster": "local", "start": False, **arguments})

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert entries(work) == ["train.py"]


def test_text_is_taken_as_text_and_never_as_another_type(work):
    with pytest.raises(errors.UsageError, match=r"train\.steps"):
        hpctrain.submit(settings={"train.steps": "500"}, cluster="local", start=False)


def test_status_says_what_the_command_says_as_json(running, capsys):
    now = hpctrain.status("lm")

    assert capsys.readouterr() == ("", "")
    assert main(["status", "lm", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (now.state, now.step, now.job_id, now.cluster) == ("running", 50, "local-17", "local")
    assert (now.over, now.steps_lost, now.failure) == (False, shown["steps_lost"], None)
    assert [attempt.number for attempt in now.attempts] == [1]
    ages = {"words", "goodput", "last_24h", "disk_free_bytes", "last_seen"}
    same = set(shown) - ages
    assert {key: json.loads(json.dumps(now.facts))[key] for key in same} == {
        key: shown[key] for key in same
    }
    assert {f.name for f in dataclasses.fields(now)} - {"dir", "over", "facts"} <= set(shown)


def test_a_failed_run_tells_why_and_where_its_log_is(work):
    story = Story(work / "runs" / "lm").submitted().started(1)
    story.add("failure", 1, rank=3, node="n1", kind_of="exception", summary="ValueError: no")
    story.ended(1, "user_error", "stop")

    now = hpctrain.status()

    assert now.over
    assert now.failure == "ValueError: no"
    assert now.failure_log == work / "runs" / "lm" / "attempts" / "0001" / "rank-00003.log"
    assert now.attempts[0].reason == "user_error"


def test_cancel_ends_the_job_as_the_command_does(running):
    ended = hpctrain.cancel("lm")

    assert ended == hpctrain.CancelledJob("lm", running.run.root, "local-17", saves=False)
    assert hpctrain.status("lm").facts["cancel_requested"] == "cancel"


def test_resume_beside_a_living_job_is_refused(running):
    with pytest.raises(errors.RunAlive, match="local-17"):
        hpctrain.resume("lm")


@pytest.mark.parametrize("verb", [hpctrain.status, hpctrain.resume, hpctrain.cancel])
def test_a_run_that_is_not_there_is_not_found(work, verb):
    with pytest.raises(errors.NotFound, match="no run 'lm'"):
        verb("lm")


def test_a_step_before_the_first_is_refused(running):
    with pytest.raises(errors.UsageError, match="from_step -1"):
        hpctrain.resume("lm", from_step=-1)


def test_runs_may_lie_elsewhere(running, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert hpctrain.status("lm", runs="work/runs").dir == running.run.root
    assert hpctrain.status(str(running.run.root)).run == "lm"


def test_results_are_frozen(running):
    with pytest.raises(dataclasses.FrozenInstanceError):
        hpctrain.status("lm").state = "done"


def test_the_functions_stay_functions_whatever_was_imported_before():
    """Two rooms of the package have their names, and Python sets a room over the function."""
    code = (
        "import sys, hpctrain\n"
        "import hpctrain.launch.launch, hpctrain.observe.status.reader\n"
        "from hpctrain.launch import prepare\n"
        "from hpctrain import submit, status\n"
        "import types\n"
        "print(*[type(f).__name__ for f in (submit, status, hpctrain.submit, hpctrain.resume)])\n"
        "print(prepare.__name__, 'torch' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "function function function function\nhpctrain.launch.prepare False\n"


def test_every_flag_of_the_commands_is_an_argument():
    from hpctrain.cli import runs, submit

    elsewhere = {"config", "sets", "wait", "no_submit", "dry_run", "as_json", "script"}
    elsewhere |= {"profile", "from_step", "names", "yes", "whole"}
    # what sbatch calls so is among `settings` here
    elsewhere |= {"gres", "cpus_per_rank", "mem", "constraint", "reservation", "exclude"}
    elsewhere |= {"nodelist", "exclusive", "mail_type", "mail_user", "sbatch"}
    commands = {"submit": submit.command, "resume": submit.resume, "cancel": runs.command}
    for function, command in commands.items():
        flags = {option.name for option in command.params} - elsewhere
        assert flags <= set(inspect.signature(getattr(hpctrain, function)).parameters), function
