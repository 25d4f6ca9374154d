"""What the batch side does once srun has ended, with SLURM's answers as inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.core.base.records import JobFacts
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import Entry, Spec, load_spec
from hpctrain.errors import ClusterUnreachable
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.fence import read_fence, take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts
from tests.support.ledger_runs import all_fields, write_event

SUBMISSION = "run-12ab"
RUNNING = JobFacts("RUNNING", restarts=0)
CANCELLED = JobFacts("COMPLETING", restarts=0)
REQUEUED = JobFacts("COMPLETING", restarts=1)
TIME_LIMIT = JobFacts("COMPLETING", restarts=0, reason="TimeLimit")
GRACE = JobFacts("RUNNING", restarts=0, preempt_time=1.0)


class Scheduler:
    """Answers as it is told to, and counts what it was asked for."""

    def __init__(self, facts, *, requeue_fails=False):
        self.answer = facts
        self.requeue_fails = requeue_fails
        self.requeues = 0
        self.forbidden = 0

    def forbid_requeue(self):
        self.forbidden += 1

    def facts(self):
        if self.answer is None:
            raise ClusterUnreachable("scontrol is not on PATH here")
        return self.answer

    def requeue(self):
        self.requeues += 1
        if self.requeue_fails:
            raise ClusterUnreachable("scontrol gave no answer")


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    Spec("run", "0", 0.0, "slurm", "local", Entry("recipe")).dump(run.spec)
    write_event(run, "submit_intent", token=SUBMISSION)
    return run


def started(run, *, job_id="7", restarts=0):
    number = take_attempt(run, job_id=job_id, restarts=restarts).number
    write_event(run, "attempt_started", attempt=number, job_id=job_id, restarts=restarts)
    return number


def ended(run, attempt, reason, following):
    write_event(run, "attempt_ended", attempt=attempt, reason=reason, next=following, by="agent")


def finish(run, scheduler, *, rc=137, term=False, token=SUBMISSION, said=None, restarts=0, why=""):
    start = JobStartFacts("7", restarts, token, ["n1", "n2"], rc, term, why, last_words=said)
    return BatchScriptSide(run, start, scheduler).finish()


def last(run, kind):
    found = [event for event in ledger.read(run) if event.kind == kind]
    return all_fields(found[-1]) if found else None


def test_requeue_that_the_agent_could_not_do_is_done(run):
    ended(run, started(run), "timed_out", "requeue")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler, rc=0) == 0

    assert scheduler.requeues == 1
    assert last(run, "requeued")["by"] == "batch"


def test_requeue_that_was_done_is_not_done_again(run):
    attempt = started(run)
    ended(run, attempt, "timed_out", "requeue")
    write_event(run, "requeued", attempt=attempt, by="agent")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler, rc=0) == 0

    assert scheduler.requeues == 0


def test_requeue_of_an_older_attempt_is_not_taken_for_this_ones(run):
    old = started(run, job_id="6")
    ended(run, old, "timed_out", "requeue")
    write_event(run, "requeued", attempt=old, by="agent")
    ended(run, started(run), "timed_out", "requeue")
    scheduler = Scheduler(RUNNING)

    finish(run, scheduler)

    assert scheduler.requeues == 1


def test_requeue_that_fails_is_written_down_and_fails_the_job(run):
    ended(run, started(run), "timed_out", "requeue")

    assert finish(run, Scheduler(RUNNING, requeue_fails=True)) == 75

    assert "gave no answer" in last(run, "requeue_failed")["why"]
    assert last(run, "requeued") is None


@pytest.mark.parametrize(
    ("facts", "reason", "requeues"),
    [
        (GRACE, "preempted", 1),
        (replace(GRACE, comes_back=True), "preempted", 0),
        (TIME_LIMIT, "timed_out", 1),
        (CANCELLED, "cancelled", 0),
        (REQUEUED, "preempted", 0),
    ],
)
def test_decision_that_the_agent_could_not_take_is_taken(run, facts, reason, requeues):
    attempt = started(run)
    write_event(run, "stop_requested", attempt=attempt, cause="sigterm", rank=0)
    ended(run, attempt, "preempted", "ask_batch")
    scheduler = Scheduler(facts)

    finish(run, scheduler)

    assert last(run, "attempt_ended")["reason"] == reason
    assert last(run, "attempt_ended")["by"] == "batch"
    assert scheduler.requeues == requeues


def test_dead_agents_are_a_crash_and_the_job_comes_back(run):
    started(run)
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler) == 0

    end = last(run, "attempt_ended")
    assert (end["reason"], end["next"], end["by"]) == ("crashed", "requeue", "batch")
    assert "exit code 137" in end["detail"]
    assert scheduler.requeues == 1


def test_agents_that_died_between_two_rounds_are_a_crash_too(run):
    ended(run, started(run), "crashed", "restart")
    scheduler = Scheduler(RUNNING)

    finish(run, scheduler)

    assert last(run, "attempt_ended")["next"] == "requeue"
    assert scheduler.requeues == 1


def test_start_in_which_no_agent_came_counts_as_an_attempt(run):
    scheduler = Scheduler(RUNNING)

    finish(run, scheduler, rc=1)

    begin = last(run, "attempt_started")
    assert (begin["job_id"], begin["by"], begin["nodes"]) == ("7", "batch", ["n1", "n2"])
    assert read_fence(run).number == 1
    assert last(run, "attempt_ended")["reason"] == "crashed"
    assert scheduler.requeues == 1


def test_successor_that_may_be_running_is_not_fenced_out(run):
    finish(run, Scheduler(REQUEUED), rc=1)

    assert read_fence(run) is None
    assert last(run, "attempt_ended") is None


def test_crashes_end_with_their_budget(run):
    codes = []
    for number in range(6):
        ended(run, started(run), "crashed", "requeue") if number < 5 else started(run)
    scheduler = Scheduler(RUNNING)

    codes.append(finish(run, scheduler))

    assert codes == [93]
    assert scheduler.requeues == 0
    assert last(run, "attempt_ended")["next"] == "stop"
    assert "budget.crashes is 5" in last(run, "run_stopped")["detail"]


def test_end_that_is_decided_here_counts_once(run):
    for _ in range(4):
        ended(run, started(run), "crashed", "requeue")
    ended(run, started(run), "crashed", "ask_batch")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler) == 0

    assert scheduler.requeues == 1


def test_what_was_cancelled_stays_cancelled(run):
    started(run)
    write_event(run, "cancel_requested", save=False, job_id="7")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler, term=True) == 1

    assert last(run, "attempt_ended")["reason"] == "cancelled"
    assert scheduler.requeues == 0


@pytest.mark.parametrize(
    ("reason", "stopped", "code"),
    [("completed", None, 0), ("stopped", None, 0), ("cancelled", None, 1), ("crashed", 93, 93)],
)
def test_exit_code_is_the_runs(run, reason, stopped, code):
    attempt = started(run)
    ended(run, attempt, reason, "stop")
    if stopped:
        write_event(run, "run_stopped", attempt=attempt, reason=reason, exit_code=stopped)

    assert finish(run, Scheduler(None), rc=0) == code


def test_silent_scheduler_leaves_the_decision_open(run):
    ended(run, started(run), "preempted", "ask_batch")

    assert finish(run, Scheduler(None)) == 75

    assert "scontrol is not on PATH" in last(run, "requeue_failed")["why"]


def test_job_of_an_older_submission_only_leaves(run):
    write_event(run, "submit_intent", token=f"{SUBMISSION}c")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler, rc=1) == 0

    assert scheduler.requeues == 0
    assert read_fence(run) is None


def test_job_that_has_been_taken_over_only_leaves(run):
    ended(run, started(run), "timed_out", "requeue")
    started(run, job_id="8")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler) == 0

    assert scheduler.requeues == 0


def test_orphan_only_leaves(run):
    write_event(run, "orphan_left", job_id="7", why="older submission")
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler, rc=0) == 0

    assert scheduler.requeues == 0


@pytest.mark.parametrize(
    ("reason", "following", "forbidden"),
    [
        ("completed", "stop", 1),
        ("user_error", "stop", 1),
        ("preempted", "leave", 0),
        ("timed_out", "requeue", 0),
    ],
)
def test_a_run_that_is_over_is_not_run_again_by_slurm_either(run, reason, following, forbidden):
    ended(run, started(run), reason, following)
    scheduler = Scheduler(GRACE)

    finish(run, scheduler, rc=0)

    assert scheduler.forbidden == forbidden


def test_a_job_that_left_the_run_alone_is_not_run_again(run):
    write_event(run, "orphan_left", job_id="7", why="it belongs to an older submission")
    scheduler = Scheduler(GRACE)

    assert finish(run, scheduler) == 0

    assert (scheduler.forbidden, scheduler.requeues) == (1, 0)


def test_a_successor_that_has_the_run_keeps_its_requeue(run):
    ended(run, started(run), "preempted", "leave")
    started(run, restarts=1)
    scheduler = Scheduler(REQUEUED)

    assert finish(run, scheduler) == 0

    assert scheduler.forbidden == 0


def test_where_slurm_cannot_be_told_the_exit_code_stays_and_a_line_says_so(run, capsys):
    ended(run, started(run), "completed", "stop")
    scheduler = Scheduler(RUNNING)
    scheduler.forbid_requeue = lambda: Scheduler(None).facts()

    assert finish(run, scheduler, rc=0) == 0

    told = capsys.readouterr().err
    assert "the job may start once more and end at once: scontrol is not on PATH" in told


def test_a_budget_that_is_used_up_ends_a_job_that_slurm_would_run_again(run):
    spec = load_spec(run.spec)
    spec.settings = replaced(spec.settings, {"budget.preemptions": 1})
    spec.dump(run.spec)
    ended(run, started(run, job_id="6"), "preempted", "leave")
    ended(run, started(run), "preempted", "ask_batch")
    scheduler = Scheduler(replace(GRACE, comes_back=True))

    assert finish(run, scheduler, term=True) != 0

    assert last(run, "attempt_ended")["next"] == "stop"
    assert scheduler.forbidden == 1


def test_a_decision_is_written_before_it_is_carried_out_and_without_a_pause(run):
    started(run)
    scheduler, seen, slept = Scheduler(RUNNING), [], []
    scheduler.requeue = lambda: seen.append(last(run, "attempt_ended")["next"])
    start = JobStartFacts("7", 0, SUBMISSION, ["n1", "n2"], 137, term=False)

    assert BatchScriptSide(run, start, scheduler, slept.append).finish() == 0

    assert (seen, slept) == (["requeue"], [])


def test_of_a_requeue_that_was_done_already_nothing_more_is_told(run):
    """The successor may be running: what is written now would be taken for its own."""
    started(run)

    assert finish(run, Scheduler(REQUEUED), term=True) == 0

    assert last(run, "attempt_ended")["next"] == "leave"
    assert last(run, "requeued") is None


# ---- starts in a container in which no agent came


def no_agent(run, scheduler, *, rc=255, words="FATAL: could not open image /x.sif", **more):
    return finish(run, scheduler, rc=rc, said=lambda: words, **more)


def test_a_container_that_did_not_start_twice_in_a_row_ends_the_run_with_its_words(run):
    scheduler = Scheduler(RUNNING)

    assert no_agent(run, scheduler) == 0  # its node may be at fault
    assert (scheduler.requeues, last(run, "attempt_ended")["reason"]) == (1, "crashed")
    assert no_agent(run, scheduler, restarts=1) == 1

    end = last(run, "attempt_ended")
    assert (scheduler.requeues, end["reason"], end["next"]) == (1, "user_error", "stop")
    assert end["detail"] == "no agent came up in the container: FATAL: could not open image /x.sif"
    assert scheduler.forbidden == 1


@pytest.mark.parametrize(
    ("rc", "words"),
    [
        (2, "hpctrain: error: python3 here has hpctrain 0.1"),
        (137, "python3: Error (ModuleNotFoundError: No module named 'hpctrain')"),
    ],
)
def test_an_image_without_our_hpctrain_ends_the_run_at_once(run, rc, words):
    scheduler = Scheduler(RUNNING)

    assert no_agent(run, scheduler, rc=rc, words=words) == 1

    assert (scheduler.requeues, scheduler.forbidden) == (0, 1)
    assert words in last(run, "run_stopped")["detail"]


@pytest.mark.parametrize("facts", [REQUEUED, GRACE, TIME_LIMIT])
def test_what_ends_a_start_from_outside_is_not_the_images_fault(run, facts):
    no_agent(run, Scheduler(RUNNING))

    facts = replace(facts, restarts=facts.restarts + 1)
    no_agent(run, Scheduler(facts), rc=2, restarts=1)

    assert last(run, "run_stopped") is None
    assert last(run, "attempt_ended")["reason"] in {"preempted", "timed_out", "crashed"}


def test_a_start_that_came_up_in_between_begins_the_count_anew(run):
    no_agent(run, Scheduler(RUNNING))
    ended(run, started(run, job_id="6"), "crashed", "requeue")
    scheduler = Scheduler(RUNNING)

    assert no_agent(run, scheduler, restarts=1) == 0

    assert scheduler.requeues == 1


def test_an_agent_that_came_has_the_word_and_a_signal_too(run):
    ended(run, started(run), "crashed", "ask_batch")
    scheduler = Scheduler(RUNNING)

    assert no_agent(run, scheduler, rc=2) == 0  # of a container, but in which an agent came
    assert no_agent(run, scheduler, rc=2, restarts=1, term=True) == 0

    assert scheduler.requeues == 2
    assert last(run, "attempt_ended")["reason"] == "crashed"  # no preemption: nobody asked for it
    assert last(run, "run_stopped") is None


SETUP = "a line of slurm.setup ended with exit code 127: module load cuda"


@pytest.mark.parametrize("rc", [0, 3, 93])
def test_a_script_that_ended_in_its_setup_is_an_attempt_with_that_reason_and_ends_the_run(run, rc):
    scheduler = Scheduler(RUNNING)

    assert finish(run, scheduler, rc=rc, why=SETUP) == 1

    end = last(run, "attempt_ended")
    assert (end["reason"], end["next"], end["detail"]) == ("user_error", "stop", SETUP)
    assert (scheduler.requeues, scheduler.forbidden) == (0, 1)


def test_setup_that_fails_where_an_earlier_start_came_further_gets_one_more_start(run):
    """A file system may be missing on this node alone."""
    ended(run, started(run), "preempted", "requeue")
    scheduler = Scheduler(replace(RUNNING, restarts=1))

    assert finish(run, scheduler, rc=3, why=SETUP, restarts=1) == 0
    assert (last(run, "attempt_ended")["reason"], scheduler.requeues) == ("crashed", 1)

    scheduler = Scheduler(replace(RUNNING, restarts=2))
    assert finish(run, scheduler, rc=3, why=SETUP, restarts=2) == 1
    assert (last(run, "attempt_ended")["reason"], scheduler.requeues) == ("user_error", 0)


def test_a_preemption_during_setup_is_one(run):
    scheduler = Scheduler(GRACE)

    assert finish(run, scheduler, rc=143, term=True, why=SETUP) == 0

    assert last(run, "attempt_ended")["reason"] == "preempted"
