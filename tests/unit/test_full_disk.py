"""A disk without room: jobs come back, cancel cancels, and every command ends in one line."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.ledger import events as ledger
from tests.support import small_disk as disks
from tests.support.ledger_runs import Story, local_job

small_disk = disks.small_disk
FULL = "No space left on device"


@pytest.fixture
def runs(tmp_path, monkeypatch, small_disk):
    """A folder of runs on a disk of its own; the scheduler's files lie elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    folder = small_disk(512 * 1024)
    monkeypatch.setenv("HPCTRAIN_RUNS", str(folder))
    return folder


@pytest.fixture
def running(runs, tmp_path):
    local_job(tmp_path / "local", "local-17", state="RUNNING", run_dir=str(runs / "lm"))
    story = Story(runs / "lm").submitted("local-17").started(1, "local-17").restored(1)
    return story.add("phase", 1, name="first_step").steps(1, 1, 50).saved(1, 50)


def fill(runs):
    """The disk is full to the last byte, also within the pages of files that are there."""
    disks.fill(runs)
    for path in runs.rglob("events.jsonl"):
        size = path.stat().st_size
        with path.open("ab") as file:  # up to the page's end: the next fact needs another page
            file.write(b" " * (-size % 4096 - 1) + b"\n")


def told(capsys):
    return capsys.readouterr().err.splitlines()


def requests(tmp_path):
    folder = tmp_path / "local" / "local-17"
    return [json.loads(path.read_text())["operation"] for path in folder.glob("request-*.json")]


def test_cancel_cancels(running, runs, tmp_path, capsys):
    fill(runs)

    assert main(["cancel", "lm"]) == 0

    assert requests(tmp_path) == ["cancel"]
    assert told(capsys) == [
        f"hpctrain: the ledger misses cancel_requested: {running.run.events}: {FULL}"
    ]


def test_cancel_with_save_says_what_to_do(running, runs, tmp_path, capsys):
    fill(runs)

    assert main(["cancel", "lm", "--save"]) == 1

    [line] = told(capsys)
    assert line.startswith("hpctrain: error: lm cannot be asked to save: ")
    assert f"No space left on device ({running.run.root}); make room, or leave out" in line
    assert requests(tmp_path) == []
    assert not running.run.stop_request.exists()
    assert not any(e.kind == "cancel_requested" for e in ledger.read(running.run))


@pytest.mark.parametrize(
    "argv", [["profile", "lm", "--now"], ["resume", "other", "--set=train.steps=500"]]
)
def test_what_needs_room_ends_in_one_line_that_names_the_file(running, runs, argv, capsys):
    Story(runs / "other").submitted("local-3").started(1, "local-3").ended(1, "crashed", "stop")
    fill(runs)

    assert main(argv) == 1

    [line] = told(capsys)
    assert line.startswith(f"hpctrain: error: {runs}/")
    assert line.endswith(f": {FULL}")
    assert list(runs.rglob("*.new")) == []


def test_a_job_whose_submission_could_not_be_written_down_is_found_again(runs, monkeypatch, capsys):
    """The intent was written, sbatch has answered, and then the disk was full."""
    from hpctrain.settings.spec import load_spec
    from hpctrain.submit import launch

    run = Story(runs / "lm").run

    class Scheduler:
        def submit(self, request):
            self.token = request.token
            fill(runs)
            return "local-17"

        def find_job(self, token):
            return token

    scheduler = Scheduler()
    monkeypatch.setattr(launch, "get_cluster", lambda _: scheduler)

    assert launch.launch(run, load_spec(run.spec), by="resume") == "local-17"

    assert [one.partition(": /")[0] for one in told(capsys)] == [
        "hpctrain: the ledger misses submitted"
    ]
    assert launch.newest_submission(ledger.read(run)) == (scheduler.token, None)


def test_a_fact_that_cannot_be_written_names_the_file(runs):
    run = Story(runs / "lm").run
    fill(runs)

    with pytest.raises(OSError, match=FULL) as error:
        ledger.append(run, "steps", first=1, last=1)

    assert error.value.filename == str(run.events)
