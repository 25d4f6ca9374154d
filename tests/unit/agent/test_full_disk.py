"""A disk without room: jobs come back, cancel cancels, and every command ends in one line."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.main import main
from hpctrain.core.base.records import FailureReport, JobContext, JobFacts, StopCause
from hpctrain.core.settings.spec import load_spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts, finish
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.rounds import RoundEnd
from tests.support import small_disk as disks
from tests.support.ledger_runs import Story, local_job, write_event

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
    from hpctrain.cluster.scheduler.base import Cluster
    from hpctrain.core.settings.spec import load_spec
    from hpctrain.launch import launch, live_job

    run = Story(runs / "lm").run

    class Scheduler(Cluster):
        def here(self):
            return ""

        def submit(self, request):
            self.token = request.token
            fill(runs)
            return "local-17"

        def find_job(self, token):
            return token

        def render(self, *_):
            return "#!/bin/sh\n"

    scheduler = Scheduler()
    monkeypatch.setattr(launch, "get_cluster", lambda _: scheduler)

    assert launch.launch(run, load_spec(run.spec), by="resume") == "local-17"

    assert [one.partition(": /")[0] for one in told(capsys)] == [
        "hpctrain: the ledger misses submitted"
    ]
    assert live_job.newest_submission(RunHistory.read(run)) == (scheduler.token, None)


def test_a_fact_that_cannot_be_written_names_the_file(runs):
    run = Story(runs / "lm").run
    fill(runs)

    with pytest.raises(OSError, match=FULL) as error:
        write_event(run, "steps", first=1, last=1)

    assert error.value.filename == str(run.events)


# ---- inside the job


class Scheduler:
    """Takes requeues, and tells of the job what it is told to."""

    def __init__(self, facts):
        self.answer = facts
        self.requeues = 0
        self.forbidden = 0

    def facts(self):
        return self.answer

    def requeue(self):
        self.requeues += 1

    def forbid_requeue(self):
        self.forbidden += 1


RUNNING = JobFacts("RUNNING", restarts=0)
PREEMPTED = JobFacts("RUNNING", restarts=0, preempt_time=1.0)


@pytest.fixture
def training(runs):
    """Attempt 1 in job 7, of an unchanged script, on a disk that is full by now."""
    story = Story(runs / "lm", cluster="slurm").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=0).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7")
    fill(runs)
    return story.run


class Watch:
    cause = StopCause.TERM

    def is_stop_requested(self):
        return self.cause is not None


def conclude(run, scheduler, end, cause=None):
    context = JobContext("7", 0, 0, ["n1", "n2"], "n1", 20000, "tok-1")
    watch = Watch()
    watch.cause = cause
    return AttemptEnding(run, load_spec(run.spec), context, scheduler).conclude(1, end, watch)


def after(run, scheduler, *, rc=0, term=False, restarts=0, slept=None):
    start = JobStartFacts("7", restarts, "tok-1", ["n1", "n2"], rc, term)
    return BatchScriptSide(
        run, start, scheduler, (slept if slept is not None else []).append
    ).finish()


def test_a_preempted_job_is_requeued(training, capsys):
    scheduler = Scheduler(PREEMPTED)

    assert conclude(training, scheduler, RoundEnd("left"), StopCause.TERM) == 0

    assert scheduler.requeues == 1
    assert "hpctrain: the ledger misses attempt_ended: " in capsys.readouterr().err


def test_a_crash_that_cannot_be_counted_is_requeued_after_a_pause(training):
    """No budget ends what cannot be counted, so at least it must not spin."""
    scheduler, slept = Scheduler(RUNNING), []
    failure = FailureReport(1, "n2", "signal", "killed by SIGKILL")

    assert conclude(training, scheduler, RoundEnd("failed", failure=failure)) == 0
    assert scheduler.requeues == 0
    assert after(training, scheduler, slept=slept) == 0

    assert (scheduler.requeues, slept) == (1, [30.0])


def test_what_had_no_room_is_written_with_its_own_time_as_soon_as_there_is_some(training, runs):
    context = JobContext("7", 0, 0, ["n1", "n2"], "n1", 20000, "tok-1")
    ending = AttemptEnding(training, load_spec(training.spec), context, Scheduler(RUNNING))
    failure = FailureReport(1, "n2", "signal", "killed by SIGKILL")

    assert ending.after_crash(1, failure)
    with pytest.raises(OSError, match=FULL):
        ending.write_missed()
    asked = [event.t for event in ending._end.missed]
    ending._look(2)  # as the next attempt begins
    (runs / "filler").unlink()
    ending.write_missed()
    ending.write_missed()

    kinds = [(event.kind, event.attempt, event.t) for event in ledger.read(training)][-2:]
    assert kinds == [("failure", 1, asked[0]), ("attempt_ended", 1, asked[1])]


@pytest.mark.parametrize(("silent", "code"), [([], 0), ([1], 1)])
def test_agents_that_are_silent_at_the_end_are_not_waited_for(training, runs, silent, code):
    (runs / "filler").unlink()

    assert conclude(training, Scheduler(RUNNING), RoundEnd("left", silent_nodes=silent)) == code
    assert after(training, Scheduler(RUNNING), rc=code) == 0


def test_a_run_that_ends_without_room_for_the_word_stays_over(training):
    scheduler = Scheduler(RUNNING)

    code = conclude(training, scheduler, RoundEnd("left"))

    assert code == 93
    assert after(training, scheduler, rc=code) == 93
    assert (scheduler.requeues, scheduler.forbidden) == (0, 1)


@pytest.mark.parametrize(("restarts", "pause_s"), [(0, 30), (1, 60), (4, 480), (5, 900), (99, 900)])
def test_a_start_for_which_there_is_no_room_comes_again_later_and_later(runs, restarts, pause_s):
    run = Story(runs / "lm", cluster="slurm").submitted("7").run
    fill(runs)
    scheduler, slept = Scheduler(JobFacts("RUNNING", restarts=restarts)), []

    assert after(run, scheduler, rc=1, restarts=restarts, slept=slept) == 0

    assert (scheduler.requeues, slept) == (1, [pause_s])


def test_a_cancelled_job_is_not_run_again_either(training):
    scheduler = Scheduler(JobFacts("COMPLETING", restarts=0))

    assert after(training, scheduler, rc=137) == 1

    assert (scheduler.requeues, scheduler.forbidden) == (0, 1)


def test_before_sigkill_there_is_no_pause(training):
    scheduler, slept = Scheduler(PREEMPTED), []

    assert after(training, scheduler, rc=137, term=True, slept=slept) == 0

    assert (scheduler.requeues, slept) == (1, [0.0])


def test_a_pause_ends_before_the_job_does(hands):
    hands.set_wall(1000.0)

    assert JobStartFacts("7", 9, "", [], 1, term=False, end_time=1100.0).pause_s() == 40.0
    assert JobStartFacts("7", 9, "", [], 1, term=False, end_time=900.0).pause_s() == 0.0


def stale(times):
    """Reads of the ledger fail so often before one succeeds."""
    left, new = [None] * times, ledger.Tail.new

    def failing(tail):
        if left:
            left.pop()
            raise OSError(116, "Stale file handle", "events.jsonl")
        return new(tail)

    return failing


def test_a_ledger_that_cannot_be_read_for_a_moment_is_read_again(training, monkeypatch):
    monkeypatch.setattr(ledger.Tail, "new", stale(3))
    scheduler, slept = Scheduler(RUNNING), []

    code = finish(
        training, JobStartFacts("7", 0, "tok-1", ["n1"], 93, term=False), scheduler, slept.append
    )

    assert (code, slept, scheduler.requeues) == (93, [2.0, 2.0, 2.0], 0)


@pytest.mark.parametrize(
    ("facts", "requeues", "code"),
    [
        (PREEMPTED, 1, 0),
        (JobFacts("COMPLETING", restarts=0), 0, 1),
        (JobFacts("COMPLETING", restarts=1), 0, 0),
    ],
)
def test_where_the_ledger_stays_away_slurms_word_decides(
    training, monkeypatch, facts, requeues, code
):
    monkeypatch.setattr(ledger.Tail, "new", stale(1000))
    scheduler = Scheduler(facts)
    start = JobStartFacts("7", 0, "tok-1", ["n1"], 137, term=True)

    assert finish(training, start, scheduler, lambda _: None) == code

    assert scheduler.requeues == requeues
