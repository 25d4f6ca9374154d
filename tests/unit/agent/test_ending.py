"""What node 0's agent writes of the end of an attempt, its own or a dead one's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hpctrain.core.base.records import EndReason, FailureReport, JobContext, JobFacts, StopCause
from hpctrain.core.settings.schema import replaced
from hpctrain.core.settings.spec import load_spec
from hpctrain.errors import ClusterUnreachable, FileSystemFault, NoCheckpoint
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import RunState
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.attempt_files import Heartbeat, write_heartbeat
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.node.agent.batch_side import BatchScriptSide, JobStartFacts
from hpctrain.node.agent.end_writer import read_outcome
from hpctrain.node.agent.ending import AttemptEnding
from hpctrain.node.agent.rounds import RoundEnd
from hpctrain.node.control.board import BOARD, Board
from hpctrain.node.control.heartbeat import STEP, HeartbeatWriter
from tests.support.ledger_runs import Story, all_fields

ENDED_AT = 1_763_700_500.0


class Scheduler:
    """Remembers the previous start of the job, or does not, and counts how often it is asked."""

    def __init__(self, reason=EndReason.NODE_FAILED):
        self.reason = reason
        self.asked = []

    def facts(self):
        return JobFacts("RUNNING", restarts=1)

    def previous_end(self):
        self.asked.append("end")
        return self.reason

    def previous_stop(self):
        self.asked.append("stop")
        return ENDED_AT


@pytest.fixture
def story(tmp_path):
    """A run whose attempt 1 is in its tenth step."""
    story = Story(tmp_path / "gpt").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=0).number
    story.run.attempt(number).mkdir(parents=True)
    return story.started(number, "7").restored(number).add("phase", number, name="first_step")


def ending(story, scheduler, *, job_id="7", restarts=1):
    context = JobContext(job_id, restarts, 0, ["n1", "n2"], "n1", 20000, "")
    spec = load_spec(story.run.spec)
    return AttemptEnding(story.run, spec, context, scheduler, now=lambda: story.t)


def test_a_zombie_requeues_nothing_and_writes_no_end(story):
    """Its node was lost, and another job has the run by now."""
    take_attempt(story.run, job_id="8", restarts=0)
    forbidden = SimpleNamespace()  # whoever asks or requeues by it fails

    assert ending(story, forbidden).conclude(1, RoundEnd("failed"), SimpleNamespace()) == 0

    kinds = [event.kind for event in ledger.read(story.run)]
    assert kinds[-1] == "fenced"
    assert "attempt_ended" not in kinds


def context_of(token, job_id="7"):
    return JobContext(job_id, 0, 0, ["n1"], "n1", 20000, token)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], ""),
        ([("submit_intent", {"token": "tok-2", "script": "x.sh"})], "belongs to an older"),
        ([("submit_failed", {"token": "tok-1", "why": "no"})], "belongs to an older"),
        ([("cancel_requested", {"job_id": "7", "save": False})], "was cancelled"),
        ([("cancel_requested", {"job_id": "6", "save": False})], ""),
        ([("cancel_requested", {"job_id": "7", "save": True})], ""),
    ],
)
def test_a_job_of_a_submission_that_no_longer_counts_does_not_start(
    story, monkeypatch, events, why
):
    """Before anything of it can write: the newest submission's job may be running."""
    from hpctrain.node.agent import main

    for kind, fields in events:
        story.add(kind, **fields)
    story.ended(1, "crashed", "requeue")
    monkeypatch.setattr(main.signals, "install", lambda: None)
    monkeypatch.setattr(main, "follow_folder", lambda _: None)
    monkeypatch.setattr(main, "RankEnvironment", _started)

    if not why:
        with pytest.raises(Started):
            main.run_agent(story.run, context_of("tok-1"), Scheduler())
        return
    assert main.run_agent(story.run, context_of("tok-1"), Scheduler()) == 5
    assert why in all_fields(last(story, "orphan_left"))["why"]


def test_a_job_that_may_not_start_writes_no_end_for_the_one_that_runs(story, monkeypatch):
    """It was late: the run's newer job has begun an attempt, of which it knows no end."""
    from hpctrain.node.agent import main

    story.submitted("8", "tok-2")
    number = take_attempt(story.run, job_id="8", restarts=0).number
    story.started(number, "8")
    monkeypatch.setattr(main.signals, "install", lambda: None)
    monkeypatch.setattr(main, "follow_folder", lambda _: None)

    assert main.run_agent(story.run, context_of("tok-1"), Scheduler()) == 5

    kinds = [event.kind for event in ledger.read(story.run)]
    assert kinds[-1] == "orphan_left"
    assert "attempt_ended" not in kinds
    assert RunHistory.read(story.run).state.phase is RunState.RUNNING


class Started(Exception):
    """The agent went on to its ranks."""


def _started(*_):
    raise Started


def last(story, kind):
    return [event for event in ledger.read(story.run) if event.kind == kind][-1]


def test_the_successor_tells_how_far_the_dead_came_by_its_heartbeat(story):
    story.steps(1, 1, 4)
    write_heartbeat(story.run, 1, Heartbeat(story.t + 40, 9))

    ending(story, Scheduler()).record_lost_attempt()

    end = all_fields(last(story, "attempt_ended"))
    assert (end["reason"], end["step"], end["heard"]) == ("node_failed", 9, story.t + 40)
    assert end["ended_at"] == ENDED_AT


def test_an_older_heartbeat_takes_nothing_back(story):
    write_heartbeat(story.run, 1, Heartbeat(story.t - 10, 2))
    story.steps(1, 1, 4)

    ending(story, Scheduler()).record_lost_attempt()

    end = all_fields(last(story, "attempt_ended"))
    assert (end["step"], end["heard"]) == (4, story.t)


def test_an_attempt_of_another_job_is_buried_without_the_schedulers_help(story):
    scheduler = Scheduler()

    ending(story, scheduler, job_id="8", restarts=0).record_lost_attempt()

    end = all_fields(last(story, "attempt_ended"))
    assert (end["reason"], end["ended_at"], scheduler.asked) == ("unknown", None, [])


def test_a_scheduler_without_memory_is_asked_once(story):
    scheduler = Scheduler(EndReason.UNKNOWN)

    ending(story, scheduler).record_lost_attempt()

    assert scheduler.asked == ["end"]
    assert all_fields(last(story, "attempt_ended"))["ended_at"] is None


@pytest.mark.parametrize(
    ("thought", "known", "then"),
    [
        (("preempted", "ask_batch"), EndReason.NODE_FAILED, ["preempted", "node_failed"]),
        (("preempted", "ask_batch"), EndReason.PREEMPTED, ["preempted"]),
        (("preempted", "ask_batch"), EndReason.UNKNOWN, ["preempted"]),
        (("preempted", "leave"), EndReason.NODE_FAILED, ["preempted"]),
    ],
)
def test_what_was_only_thought_of_an_end_is_put_right_by_accounting(story, thought, known, then):
    story.ended(1, *thought)

    ending(story, Scheduler(known)).record_lost_attempt()

    ends = [all_fields(e) for e in ledger.read(story.run) if e.kind == "attempt_ended"]
    assert [end["reason"] for end in ends] == then
    if len(then) > 1:
        assert "could not ask the scheduler" in ends[-1]["detail"]


@pytest.mark.parametrize("stepped", [True, False])
def test_an_error_after_the_first_step_is_no_users_error_though_no_mark_was_written(
    tmp_path, stepped
):
    """An old run's marks come a minute apart; as the user's error it would never come back."""
    story = Story(tmp_path / "gpt").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.started(number, "7", restarts=1).restored(number)
    if stepped:
        story.add("phase", number, name="first_step")
    failure = FailureReport(0, "n1", "exception", "ValueError: x")

    assert ending(story, Scheduler()).after_crash(number, failure) is stepped


@pytest.mark.parametrize(
    ("seconds", "error", "again"),
    [
        (5.0, "ValueError: x", False),
        (7200.0, "ValueError: x", True),
        (5.0, "RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        (5.0, "RuntimeError: CUDA error: device-side assert triggered", False),
        (5.0, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", True),
        (5.0, "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly", True),
        (5.0, "torch.distributed.DistBackendError: NCCL error in: x", True),
    ],
)
def test_an_unchanged_script_starts_again_after_hours_or_where_the_machine_failed(
    tmp_path, seconds, error, again
):
    story = Story(tmp_path / "gpt").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.started(number, "7", restarts=1)
    story.t += seconds
    failure = FailureReport(0, "n1", "exception", error)
    own = ending(story, Scheduler())

    assert own.after_crash(number, failure) is again
    assert own.pause_s == 0.0  # the first of its cause


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("StopIteration", False),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
        ("OSError: [Errno 28] No space left on device", True),
    ],
)
def test_an_error_at_the_step_of_the_one_before_is_the_users_unless_a_disk_is_full(
    story, error, again
):
    failure = FailureReport(0, "n1", "exception", error)
    story.add("phase", 1, name="first_step").add("failure", 1, summary=error)
    story.ended(1, "crashed", "restart", step=32)
    take_attempt(story.run, job_id="7", restarts=1)
    story.started(2, "7", restarts=1, by="restart").add("phase", 2, name="first_step")
    own = ending(story, Scheduler())
    own.seen_step = lambda: 32

    assert own.after_crash(2, failure) is again


def test_the_second_crash_of_a_cause_makes_the_ranks_wait(story):
    story.add("phase", 1, name="first_step").ended(1, "crashed", "restart")
    take_attempt(story.run, job_id="7", restarts=1)
    story.started(2, "7", restarts=1, by="restart").add("phase", 2, name="first_step")
    own = ending(story, Scheduler())

    assert own.after_crash(2, FailureReport(0, "n1", "signal", "killed by SIGKILL"))
    assert own.pause_s == 1.0


def test_restarts_in_a_job_are_as_many_as_were_asked_for(story):
    spec = load_spec(story.run.spec)
    spec.settings = replaced(spec.settings, {"run.restarts_in_job": 20})
    spec.settings = replaced(spec.settings, {"budget.crashes": 100})
    spec.dump(story.run.spec)
    for number in range(2, 21):
        take_attempt(story.run, job_id="7", restarts=1)
        story.started(number, "7", restarts=1, by="restart")
    killed = FailureReport(0, "n1", "signal", "killed by SIGKILL")

    assert ending(story, Scheduler()).after_crash(20, killed)
    take_attempt(story.run, job_id="7", restarts=1)
    story.started(21, "7", restarts=1, by="restart")
    assert not ending(story, Scheduler()).after_crash(21, killed)


REFUSED = (
    "hpctrain.errors.FileSystemFault: step-0000000010 cannot be read now, and stays: rank 1: "
    "manifest cannot be read: [Errno 116] Stale file handle"
)


@pytest.mark.parametrize(
    ("before", "following"), [(0, "requeue"), (9, "requeue"), (10, "stop"), (11, "stop")]
)
def test_a_file_system_that_refuses_costs_an_attempt_of_its_own_budget(tmp_path, before, following):
    """It comes before the first step, and yet is not the user's error: it may pass."""
    story = Story(tmp_path / "gpt").submitted("7")
    for number in range(1, before + 1):
        story.started(number, "7").ended(number, "storage_failed", "requeue")
        take_attempt(story.run, job_id="7", restarts=1)
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7", restarts=1)
    scheduler = Scheduler()
    scheduler.requeue = lambda: scheduler.asked.append("requeue")
    failure = FailureReport(1, "n2", "exception", REFUSED)
    mine = ending(story, scheduler)

    assert not mine.after_crash(number, failure)
    end = SimpleNamespace(ending="failed", failure=failure, why=REFUSED, silent_nodes=[])
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)
    code = mine.conclude(number, end, deadline)

    told = all_fields(last(story, "attempt_ended"))
    assert (told["reason"], told["next"]) == ("storage_failed", following)
    assert scheduler.asked.count("requeue") == (following == "requeue")
    assert code == (0 if following == "requeue" else 93)
    assert "Stale file handle" in all_fields(last(story, "failure"))["summary"]


@pytest.mark.parametrize(
    ("outcome", "ledger_says_done", "ends"),
    [
        (None, False, ("crashed", "requeue")),
        (None, True, ("completed", "stop")),  # outcome.json could not be written
        ("left", False, ("completed", "stop")),  # by its own will, e.g. it stopped early
        ("done", False, ("completed", "stop")),
    ],
)
def test_ranks_that_left_between_two_steps_without_a_word_are_not_done(
    story, outcome, ledger_says_done, ends
):
    """Whoever tells the agents that the ranks have left does not make the run a finished one."""
    run, calls = story.run, []
    if outcome is not None:
        word = {"outcome": outcome, "step": 7, "cause": None}
        (run.attempt(1) / "outcome.json").write_text(json.dumps(word))
    if ledger_says_done:
        story.add("done", 1, step=7)
    scheduler = Scheduler()
    scheduler.requeue = lambda: calls.append("requeue")
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)

    ending(story, scheduler).conclude(1, RoundEnd("left"), deadline)

    end = all_fields(last(story, "attempt_ended"))
    assert (end["reason"], end["next"]) == ends
    assert calls == (["requeue"] if ends[1] == "requeue" else [])
    done = [event for event in ledger.read(story.run) if event.kind == "done"]
    assert len(done) == (ends[0] == "completed")
    if ends[0] == "crashed":
        assert "without a word of its last" in end["detail"]


@pytest.mark.parametrize("heard", [None, StopCause.WARNING])
@pytest.mark.parametrize("kind", ["exception", "signal"])
def test_a_program_that_says_it_has_failed_for_good_does_not_start_again(story, heard, kind):
    """Also after hours, and where it was to stop anyway: its word counts."""
    story.steps(1, 1, 50)
    (story.run.attempt(1) / "outcome.json").write_text('{"outcome": "failed"}')
    deadline = SimpleNamespace(cause=heard, is_stop_requested=lambda: heard is not None)
    failure = FailureReport(0, "n1", kind, "ValueError: x")
    mine = ending(story, Scheduler())

    assert not mine.after_crash(1, failure)
    assert mine.conclude(1, RoundEnd("failed", failure=failure), deadline) == 1

    end = all_fields(last(story, "attempt_ended"))
    assert (end["reason"], end["next"]) == ("user_error", "stop")


def test_a_program_with_its_own_loop_that_was_asked_to_stop_and_left_has_stopped(story):
    word = {"outcome": "left", "step": 7, "cause": "clock"}
    (story.run.attempt(1) / "outcome.json").write_text(json.dumps(word))
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)
    scheduler = Scheduler()
    scheduler.requeue = lambda: None

    ending(story, scheduler).conclude(1, RoundEnd("left"), deadline)

    end = all_fields(last(story, "attempt_ended"))
    assert (end["reason"], end["next"]) == (EndReason.TIMED_OUT, "requeue")


def test_a_program_that_knows_nothing_of_hpctrain_is_done_when_it_leaves(tmp_path):
    story = Story(tmp_path / "gpt").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.started(number, "7", restarts=1)
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)

    ending(story, Scheduler()).conclude(number, RoundEnd("left"), deadline)

    assert all_fields(last(story, "attempt_ended"))["reason"] == "completed"


def test_the_batch_side_tells_the_same(story):
    write_heartbeat(story.run, 1, Heartbeat(story.t + 3, 8))
    control = SimpleNamespace(facts=lambda: JobFacts("COMPLETING", restarts=1))

    BatchScriptSide(
        story.run, JobStartFacts("7", 0, "tok-1", ["n1"], 137, term=False), control
    ).finish()

    end = all_fields(last(story, "attempt_ended"))
    assert (end["by"], end["step"], end["heard"]) == ("batch", 8, story.t + 3)


def test_a_start_without_an_agent_tells_when_the_scheduler_began_it(story):
    control = SimpleNamespace(facts=lambda: JobFacts("RUNNING", restarts=0), requeue=lambda: None)
    start = JobStartFacts("9", 0, "tok-1", ["n1"], 1, term=True, start_time=1_763_700_400.0)

    BatchScriptSide(story.run, start, control).finish()

    assert all_fields(last(story, "attempt_started"))["job_started"] == 1_763_700_400.0


@pytest.mark.parametrize(
    ("reason", "following", "again"),
    [("completed", "stop", False), ("cancelled", "stop", False), ("preempted", "leave", True)],
)
def test_a_job_that_has_ended_the_run_does_not_start_again(story, reason, following, again):
    story.add("attempt_ended", 1, reason=reason, next=following)

    why = ending(story, Scheduler()).is_over()

    assert why == ("" if again else f"job 7 has ended the run ({reason}); it does not start again")


def test_a_run_that_another_job_has_ended_may_be_gone_on_with(story):
    story.add("attempt_ended", 1, reason="stopped", next="stop")

    assert not ending(story, Scheduler(), job_id="8", restarts=0).is_over()


KILLED = FailureReport(0, "n1", "signal", "killed by SIGKILL")


def test_ranks_of_a_job_that_lives_start_again(story):
    assert ending(story, Scheduler(), restarts=1).after_crash(1, KILLED)


@pytest.mark.parametrize(("seen", "step"), [(None, 9), (8, 9), (12, 12)])
def test_an_end_says_the_step_at_which_the_ranks_were_seen(story, seen, step):
    """A heartbeat is written every few seconds: what came after it would not count as lost."""
    write_heartbeat(story.run, 1, Heartbeat(story.t + 1, 9))
    agents = ending(story, Scheduler(), restarts=1)
    agents.seen_step = lambda: seen

    assert agents.after_crash(1, KILLED)
    assert all_fields(last(story, "attempt_ended"))["step"] == step


def test_an_agent_sees_the_step_of_its_own_nodes_ranks(story, tmp_path, monkeypatch):
    from hpctrain.node.agent import main

    Board.create(tmp_path / BOARD, first_rank=0, ranks=1).close()
    rank = HeartbeatWriter.of_rank(tmp_path, 0)
    rank.stepped()
    rank.at_step(12, STEP)
    processes = SimpleNamespace(folder=tmp_path, stop=lambda: None)
    beforehand = SimpleNamespace(before_imports=lambda: None)
    for name in ("install", "ignore_all"):
        monkeypatch.setattr(main.signals, name, lambda: None)
    for name, value in {
        "follow_folder": None,
        "RankEnvironment": beforehand,
        "_node_control": processes,
        "_preload": None,
    }.items():
        monkeypatch.setattr(main, name, lambda *_, value=value: value)
    monkeypatch.setattr(main, "_run_rounds", lambda *given, **_: given[3].seen_step())

    assert main.run_agent(story.run, context_of("tok-1"), Scheduler()) == 12


@pytest.mark.parametrize(
    "facts",
    [
        JobFacts("RUNNING", restarts=2),
        JobFacts("PENDING", restarts=2),
        JobFacts("COMPLETING", restarts=1),
        JobFacts("CANCELLED", restarts=1),
    ],
)
def test_ranks_of_a_job_that_went_on_without_us_or_ended_do_not(story, facts):
    """A dead node's agent may live on: two of them would train the same run."""
    scheduler = Scheduler()
    scheduler.facts = lambda: facts

    assert not ending(story, scheduler, restarts=1).after_crash(1, KILLED)


def test_a_silent_scheduler_keeps_no_ranks_from_starting_again(story):
    scheduler = Scheduler()

    def silent():
        raise ClusterUnreachable("no answer")

    scheduler.facts = silent

    assert ending(story, scheduler, restarts=1).after_crash(1, KILLED)


@pytest.mark.parametrize(("job_id", "again"), [("7", False), ("8", True)])
def test_a_cancelled_jobs_ranks_do_not_start_again(story, job_id, again):
    story.add("cancel_requested", job_id=job_id, save=True)

    assert ending(story, Scheduler(), restarts=1).after_crash(1, KILLED) is again


def test_an_agent_that_was_overtaken_neither_restarts_nor_requeues(story):
    take_attempt(story.run, job_id="7", restarts=2)
    scheduler = Scheduler()
    scheduler.requeue = lambda: scheduler.asked.append("requeue")
    mine = ending(story, scheduler)
    end = SimpleNamespace(ending="failed", failure=KILLED, why="", silent_nodes=[])
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)

    assert not mine.after_crash(1, KILLED)
    assert mine.conclude(1, end, deadline) == 0

    assert "requeue" not in scheduler.asked
    assert last(story, "fenced").attempt == 1
    assert not [e for e in ledger.read(story.run) if e.kind == "attempt_ended"]


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("tok-1", "job 7 belongs to an older submission of gpt; it leaves"),
        ("tok-2", ""),
        ("", ""),
    ],
)
def test_the_job_of_an_older_submission_leaves(story, token, why):
    story.submitted("8", "tok-2")
    context = JobContext("7", 1, 0, ["n1"], "n1", 20000, token)
    mine = AttemptEnding(story.run, load_spec(story.run.spec), context, Scheduler())

    assert mine.is_over() == why


def test_nodes_that_share_no_directory_end_the_run_until_that_is_mended(story):
    """Another start would meet the same directory: no requeue, and the line says what to do."""
    why = "/runs is not one directory for all nodes"

    assert ending(story, Scheduler()).end_without_shared_folder(1, why) == 93

    end, stop = ledger.read(story.run)[-2:]
    assert (end.kind, all_fields(end)["reason"], all_fields(end)["next"]) == (
        "attempt_ended", "storage_failed", "stop",
    )  # fmt: skip
    assert (stop.kind, stop.fact.exit_code, stop.fact.detail) == (
        "run_stopped",
        93,
        why,
    )


def test_a_run_whose_sealed_checkpoints_are_all_damaged_ends_and_says_what_to_do(story):
    """Another start would find the same; the program would begin at step 0 and write over them."""
    error = NoCheckpoint("gpt has registered 2 checkpoints, and none is complete")

    assert ending(story, Scheduler()).end_without_resume(1, error) == 1

    end, stop = ledger.read(story.run)[-2:]
    assert (all_fields(end)["reason"], all_fields(end)["next"]) == ("user_error", "stop")
    assert (stop.kind, stop.fact.detail) == ("run_stopped", str(error))


def test_a_disk_that_does_not_give_the_sealed_checkpoint_is_tried_again_by_another_start(story):
    error = FileSystemFault("out/ckpt.pt cannot be read: Stale file handle")
    scheduler, requeued = Scheduler(), []
    scheduler.requeue = lambda: requeued.append(1)

    assert ending(story, scheduler).end_without_resume(1, error) == 0
    assert requeued

    (end,) = [event for event in ledger.read(story.run) if event.kind == "attempt_ended"]
    assert (all_fields(end)["reason"], all_fields(end)["next"]) == ("storage_failed", "requeue")


@pytest.mark.parametrize(
    ("job_id", "save", "why"),
    [
        ("7", False, "job 7 was cancelled; it does not start again"),
        ("7", True, ""),
        ("8", False, ""),
    ],
)
def test_a_cancelled_job_does_not_start_again(story, job_id, save, why):
    story.add("cancel_requested", job_id=job_id, save=save)
    context = JobContext("7", 1, 0, ["n1"], "n1", 20000, "tok-1")
    mine = AttemptEnding(story.run, load_spec(story.run.spec), context, Scheduler())

    assert mine.is_over() == why


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"done"', '{"outcome": "vanished"}', '{"outcome": 5, "step": 3}']
)
def test_an_outcome_of_no_sense_is_no_word_at_all(story, text):
    story.run.outcome(1).write_text(text)
    assert read_outcome(story.run, 1) == {}


def test_an_outcome_of_another_version_keeps_what_is_known(story):
    told = {"outcome": "stopped", "step": "x", "cause": "meteor", "more": [1]}
    story.run.outcome(1).write_text(json.dumps(told))
    assert read_outcome(story.run, 1) == {"outcome": "stopped", "step": None, "cause": None}


def test_an_error_of_the_users_stays_one_where_the_scheduler_was_silent(tmp_path):
    """The batch side asks it again; what the ranks raised, the agent alone has seen."""
    story = Story(tmp_path / "gpt", cluster="slurm").submitted("7")
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.started(number, "7", restarts=1)
    scheduler, answer = Scheduler(), Scheduler().facts
    scheduler.requeue = scheduler.forbid_requeue = lambda: scheduler.asked.append("asked")
    end = RoundEnd("failed", failure=FailureReport(0, "n1", "exception", "ValueError: x"))
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)

    def silent():
        raise ClusterUnreachable("no answer")

    scheduler.facts = silent
    assert ending(story, scheduler).conclude(number, end, deadline) == 0
    assert all_fields(last(story, "attempt_ended"))["next"] == "ask_batch"
    scheduler.facts = answer
    start = JobStartFacts("7", 1, "tok-1", ["n1"], 1, term=False)
    assert BatchScriptSide(story.run, start, scheduler).finish() == 1

    told = all_fields(last(story, "attempt_ended"))
    assert (told["reason"], told["next"], told["by"]) == ("user_error", "stop", "batch")
    assert scheduler.asked == ["asked"]  # to run it no more


def test_what_was_stopped_on_a_users_wish_has_one_name_whoever_saw_it(story):
    """Agents that die after the last save change nothing of what the user asked for."""
    story.add("cancel_requested", job_id="7", save=True)
    word = {"outcome": "stopped", "step": 7, "cause": "user"}
    (story.run.attempt(1) / "outcome.json").write_text(json.dumps(word))
    control = SimpleNamespace(
        facts=lambda: JobFacts("RUNNING", restarts=0), forbid_requeue=lambda: None
    )
    start = JobStartFacts("7", 0, "tok-1", ["n1"], 137, term=False)

    assert BatchScriptSide(story.run, start, control).finish() == 0

    assert all_fields(last(story, "attempt_ended"))["reason"] == "stopped"


def test_the_agent_writes_its_decision_before_it_carries_it_out(story):
    """A requeue is what gets the agent killed."""
    scheduler, seen = Scheduler(), []
    scheduler.requeue = lambda: seen.append(all_fields(last(story, "attempt_ended"))["next"])
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)

    ending(story, scheduler).conclude(1, RoundEnd("failed", failure=KILLED), deadline)

    assert seen == ["requeue"]


def hang(*left):
    words = "3 ranks returned and rank 3 did not"
    return FailureReport(left[0], "n2", "hang", words, others=list(left[1:]))


def silent(tmp_path, *, before=(), done=False, tells=False):
    """An attempt of four ranks of which some have returned and others were ended."""
    story = Story(tmp_path / "gpt").submitted("7")
    for number, left in enumerate(before, start=1):
        take_attempt(story.run, job_id="7", restarts=1)
        story.started(number, "7", restarts=1)
        if left:
            story.add("ranks_awaited", number, returned=2, left=list(left), ended=True)
        story.ended(number, "crashed", "restart")
    number = take_attempt(story.run, job_id="7", restarts=1).number
    story.run.attempt(number).mkdir(parents=True)
    story.started(number, "7", restarts=1)
    if tells:
        story.restored(number).steps(number, 1, 10)
    if done:
        story.add("done", number, step=10)
    return story, number


@pytest.mark.parametrize(
    ("left", "more", "ends"),
    [
        ((3,), {}, "completed"),
        ((1, 2, 3), {}, "completed"),  # rank 0 has done what is kept
        ((0,), {}, "crashed"),  # which may be missing here
        ((0,), {"before": [(0,)]}, "completed"),  # it hangs at its end each time
        ((0, 1), {"before": [(0,)]}, "completed"),
        ((0, 1, 2), {"before": [(0,)]}, "crashed"),  # few ranks are not taken at their word
        ((0,), {"before": [(0,), ()]}, "crashed"),  # not twice in a row
        ((3,), {"tells": True}, "crashed"),  # it would have said so
        ((3,), {"tells": True, "done": True}, "completed"),
        ((0, 1, 2, 3), {"tells": True, "done": True}, "completed"),
    ],
)
def test_a_program_that_hung_is_done_where_those_that_returned_can_say_so(
    tmp_path, left, more, ends
):
    story, number = silent(tmp_path, **more)
    scheduler, failure = Scheduler(), hang(*left)
    scheduler.requeue = lambda: None
    own = ending(story, scheduler)
    deadline = SimpleNamespace(cause=None, is_stop_requested=lambda: False)
    end = RoundEnd("hung", why=failure.summary, failure=failure)

    assert own.after_crash(number, failure) is (ends == "crashed")
    if ends == "completed":
        own.conclude(number, end, deadline)

    told = all_fields(last(story, "attempt_ended"))
    assert (told["reason"], told["detail"]) == (ends, failure.summary)
    failures = [event for event in ledger.read(story.run) if event.kind == "failure"]
    assert len(failures) == (ends == "crashed")


def test_a_hang_that_is_no_end_stands_in_the_budget_of_crashes(tmp_path):
    story, number = silent(tmp_path, before=[()] * 5)
    assert not ending(story, Scheduler()).after_crash(number, hang(0, 1, 2))
