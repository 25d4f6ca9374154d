"""What follows from a ledger: attempts, what they cost, where the run stands."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from hpctrain.cluster.scheduler.slurm.jobs import job_state
from hpctrain.cluster.scheduler.slurm.parse import parse_state
from hpctrain.core.base.records import EndReason, JobInfo, Next
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_state import RunState, run_state
from hpctrain.ledger.run.events import read
from tests.support.ledger_runs import Story


def job(state: str = "RUNNING", *, alive: bool = True, restarts: int = 0) -> JobInfo:
    return JobInfo("17", job_state(parse_state(state)), alive=alive, restarts=restarts)


def lost(story: Story) -> list[int | None]:
    return [view.steps_lost for view in attempts(RunHistory.read(story.run))]


def state(story: Story, info: JobInfo | None, *, asked: bool = True) -> RunState:
    return run_state(RunHistory.read(story.run).state, info, asked=asked)


def graceful(story: Story, attempt: int, first: int, last: int) -> Story:
    """An attempt that was asked to stop, saved, and is to be requeued."""
    story.started(attempt).restored(attempt, first - 1).steps(attempt, first, last)
    story.add("stop_requested", attempt, cause="sigterm", rank=0).saved(attempt, last)
    story.add("stopped", attempt, step=last).ended(attempt, "preempted", "requeue", step=last)
    return story.add("requeued", attempt, by="agent", job_id="17")


@pytest.mark.parametrize("word", ["SUSPENDED", "STOPPED"])
def test_a_job_that_its_scheduler_has_suspended_does_not_run(story, word):
    story.started(1)

    assert state(story, job(word)) is RunState.SUSPENDED
    assert state(story, job("RUNNING")) is RunState.RUNNING


# ---- attempts -----------------------------------------------------------------------------------


def test_an_attempt_has_where_when_why_and_from_which_step_to_which(story):
    graceful(story, 1, 1, 100)

    [view] = attempts(RunHistory.read(story.run))

    assert (view.number, view.job_id, view.nodes, view.world_size) == (1, "17", ("n1", "n2"), 4)
    assert (view.first_step, view.last_step, view.last_saved_step) == (0, 100, 100)
    assert (view.reason, view.next) == (EndReason.PREEMPTED, Next.REQUEUE)
    assert view.stop_cause == "sigterm"
    assert view.ended is not None
    assert view.ended > view.started


def test_the_batch_sides_word_on_an_end_replaces_the_agents_but_not_its_time(story):
    story.started(1).ended(1, "timed_out", "ask_batch")
    first_end = story.t
    story.ended(1, "preempted", "requeue", by="batch")

    [view] = attempts(RunHistory.read(story.run))
    assert (view.reason, view.next, view.ended) == (EndReason.PREEMPTED, Next.REQUEUE, first_end)


def test_an_attempt_that_died_without_a_word_ended_when_it_was_last_heard_of(story):
    story.started(1).restored(1).steps(1, 1, 10)
    last_heard = story.t
    story.t += 500
    story.ended(1, "node_failed", "leave", by="successor").started(2)

    first, _ = attempts(RunHistory.read(story.run))
    assert first.ended == last_heard


def test_what_an_old_attempt_says_beside_a_newer_one_is_ignored_but_for_its_end(story):
    story.started(1).restored(1).steps(1, 1, 10).saved(1, 10)
    story.started(2).restored(2, 10).steps(2, 11, 12)
    story.steps(1, 11, 50).saved(1, 50).add("done", 1, step=50)
    story.ended(1, "fenced", "stop", by="agent")

    first, second = attempts(RunHistory.read(story.run))

    assert (first.last_step, first.last_saved_step, first.reason) == (10, 10, EndReason.FENCED)
    assert (second.last_step, second.reason) == (12, None)
    assert progress(RunHistory.read(story.run)).step == 12
    assert state(story, job()) is RunState.RUNNING


def test_an_attempt_whose_beginning_was_torn_is_still_seen(story):
    story.restored(1).steps(1, 1, 10)
    assert [view.last_step for view in attempts(RunHistory.read(story.run))] == [10]


def test_values_that_this_version_does_not_know_do_no_harm(story):
    story.started(1).ended(1, "struck_by_meteor", "pray", step="x", more={"a": 1})
    story.add("something_new", 1, step=None).add("steps", 1, first=None).add("restored", 1)
    [view] = attempts(RunHistory.read(story.run))
    assert (view.reason, view.next) == (EndReason.UNKNOWN, Next.ASK_BATCH)
    assert progress(RunHistory.read(story.run)).step == 0


def test_the_failure_and_the_checkpoints_passed_over_are_kept(story):
    skipped = [{"step": 9, "name": "step-0000000009", "reason": "manifest is missing"}]
    story.started(1).restored(1, 5, skipped)
    story.add("failure", 1, rank=3, node="n2", kind_of="exception", summary="boom", others=[1])
    [view] = attempts(RunHistory.read(story.run))
    assert view.skipped[0].reason == "manifest is missing"
    assert view.failure is not None
    assert (view.failure.rank, view.failure.summary, view.failure.others) == (3, "boom", (1,))


# ---- steps lost ---------------------------------------------------------------------------------


def test_a_graceful_stop_loses_nothing(story):
    graceful(story, 1, 1, 100)
    assert lost(story) == [0]
    graceful(story, 2, 101, 150)
    assert lost(story) == [0, 0]


def test_a_hard_kill_loses_the_steps_since_the_last_commit(story):
    story.started(1).restored(1).steps(1, 1, 100).saved(1, 100).steps(1, 101, 130)
    story.ended(1, "node_failed", "leave", by="successor").started(2)
    assert lost(story) == [30, None]
    story.restored(2, 100)
    assert lost(story) == [30, None]


def test_a_restore_of_an_older_checkpoint_costs_more(story):
    story.started(1).restored(1).steps(1, 1, 50).saved(1, 50).steps(1, 51, 100).saved(1, 100)
    story.steps(1, 101, 130).ended(1, "crashed", "restart").started(2).restored(2, 50)
    assert lost(story) == [80, None]


def test_an_attempt_that_died_before_its_restore_changes_nothing(story):
    story.started(1).restored(1).steps(1, 1, 100).saved(1, 100).steps(1, 101, 130)
    story.ended(1, "node_failed", "leave").started(2).ended(2, "crashed", "requeue")
    story.started(3).restored(3, 100)
    assert lost(story) == [30, None, None]


def test_a_run_that_ended_for_good_lost_what_was_not_saved(story):
    story.started(1).restored(1).steps(1, 1, 100).saved(1, 90).ended(1, "cancelled", "stop")
    assert lost(story) == [10]


def test_a_running_attempt_has_lost_nothing_yet(story):
    story.started(1).restored(1).steps(1, 1, 100)
    assert lost(story) == [None]


def test_going_back_on_purpose_is_no_loss(story):
    graceful(story, 1, 1, 100)
    story.submitted("18", "tok-2", from_step=40).started(2, "18").restored(2, 40)
    assert lost(story) == [0, None]


def test_a_program_that_tells_no_steps_has_none_to_lose(story):
    story.started(1).ended(1, "preempted", "requeue").started(2)
    assert lost(story) == [None, None]


def test_the_work_grows_with_the_attempts_and_not_with_their_square(story):
    for number in range(1, 161):
        graceful(story, number, number * 10 - 9, number * 10)
    events = read(story.run)

    def work(last):
        """How many instructions of Python so many attempts take."""
        some = [one for one in events if (one.attempt or 0) <= last]
        counts = Counter()

        def counted(frame, kind, _):
            frame.f_trace_opcodes = True
            counts[kind] += 1
            return counted

        sys.settrace(counted)
        try:
            history = RunHistory.of(some)
            found = (len(attempts(history)), run_state(history.state, None), progress(history).step)
        finally:
            sys.settrace(None)
        assert found == (last, RunState.LOST, last * 10)
        return counts["opcode"]

    assert work(160) < 4.4 * work(40)


# ---- progress -----------------------------------------------------------------------------------


def test_progress_is_the_newest_states_step_and_a_restore_takes_it_back(story):
    story.submitted("17", total_steps=400).started(1).restored(1).steps(1, 1, 100, loss=2.0)
    story.saved(1, 100).steps(1, 101, 130)
    far = progress(RunHistory.read(story.run))
    assert (far.step, far.total, far.saved_step, far.step_s) == (130, 400, 100, 0.5)
    story.started(2).restored(2, 50)
    far = progress(RunHistory.read(story.run))
    assert (far.step, far.saved_step) == (50, 50)


# ---- state --------------------------------------------------------------------------------------


def test_a_run_without_a_submission_is_only_created(tmp_path):
    story = Story(tmp_path / "lm")
    assert state(story, None) is RunState.CREATED


def test_an_unconfirmed_submission_is_submitting_until_its_job_is_found(tmp_path):
    story = Story(tmp_path / "lm").add("submit_intent", token="t", script="t.sh")
    assert state(story, None) is RunState.SUBMITTING
    assert state(story, job("PENDING")) is RunState.PENDING
    story.add("submit_failed", token="t", why="invalid account")
    assert state(story, None) is RunState.FAILED
    assert "invalid account" in RunHistory.read(story.run).state.detail


def test_a_job_may_start_before_sbatchs_answer_is_written_down(tmp_path):
    story = Story(tmp_path / "lm").add("submit_intent", token="t", script="t.sh").started(1)
    story.add("submitted", token="t", job_id="17")
    assert RunHistory.read(story.run).state.phase is RunState.RUNNING


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (job("PENDING"), RunState.PENDING),
        (job("CONFIGURING"), RunState.RUNNING),
        (job("RUNNING"), RunState.RUNNING),
        (job("PENDING", restarts=1), RunState.REQUEUED),
        (job("CANCELLED by 0", alive=False), RunState.CANCELLED),
        (job("FAILED", alive=False), RunState.FAILED),
        (job("COMPLETED", alive=False), RunState.LOST),
        (None, RunState.LOST),
    ],
)
def test_without_an_end_on_record_the_schedulers_word_counts(story, told, expected):
    assert state(story, told) is expected


def test_a_preempted_run_is_requeued_until_it_runs_again(story):
    graceful(story, 1, 1, 100)
    assert state(story, job("COMPLETING")) is RunState.REQUEUED
    assert state(story, job("PENDING", restarts=1)) is RunState.REQUEUED
    assert state(story, job("RUNNING", restarts=1)) is RunState.RUNNING
    assert state(story, None) is RunState.LOST


def test_a_cancelled_run_is_completing_until_its_job_has_ended(story):
    story.started(1).restored(1).steps(1, 1, 100)
    assert state(story, job("COMPLETING")) is RunState.RUNNING  # its time limit, or another's word
    story.add("cancel_requested", save=False, job_id="17")
    assert state(story, job("RUNNING")) is RunState.RUNNING
    assert state(story, job("COMPLETING")) is RunState.COMPLETING
    assert state(story, job("CANCELLED", alive=False)) is RunState.CANCELLED


def test_a_run_that_saves_as_asked_runs_while_its_job_is_completing(story):
    story.started(1).restored(1).steps(1, 1, 100).add("cancel_requested", save=True, job_id="17")
    assert state(story, job("COMPLETING")) is RunState.RUNNING


def test_a_silent_scheduler_leaves_the_ledgers_word(story):
    assert state(story, None, asked=False) is RunState.PENDING
    story.started(1)
    assert state(story, None, asked=False) is RunState.RUNNING
    graceful(story, 2, 1, 10)
    assert state(story, None, asked=False) is RunState.REQUEUED


def test_done_is_done_whatever_the_scheduler_says(story):
    story.started(1).add("done", 1, step=400)
    for told in (None, job("COMPLETING"), job("FAILED", alive=False)):
        assert state(story, told) is RunState.DONE
    story.ended(1, "completed", "stop")
    assert state(story, None) is RunState.DONE


def test_a_done_run_that_is_resumed_runs_again(story):
    story.started(1).add("done", 1, step=400).ended(1, "completed", "stop")
    story.submitted("18", "tok-2")
    assert state(story, job("PENDING")) is RunState.PENDING
    story.started(2, "18")
    assert state(story, job()) is RunState.RUNNING


@pytest.mark.parametrize(
    ("reason", "code", "expected"),
    [("crashed", 93, RunState.STOPPED), ("user_error", 1, RunState.FAILED)],
)
def test_a_run_that_was_stopped_for_good_says_why(story, reason, code, expected):
    story.started(1).ended(1, reason, "stop")
    story.add("run_stopped", 1, reason=reason, exit_code=code, detail="3 attempts without a step")
    assert state(story, None) is expected
    now = RunHistory.read(story.run).state
    assert (now.detail, now.exit_code) == ("3 attempts without a step", code)


def test_saved_and_left_as_asked_is_stopped(story):
    story.started(1).add("cancel_requested", save=True, job_id="17")
    assert state(story, job()) is RunState.RUNNING
    assert RunHistory.read(story.run).state.cancel == "save"
    story.add("stopped", 1, step=3).ended(1, "stopped", "stop")
    assert state(story, None) is RunState.STOPPED


def test_cancelled_is_cancelled_once_the_job_is_gone_and_not_before(story):
    story.add("cancel_requested", save=False, job_id="17")
    assert state(story, job("PENDING")) is RunState.PENDING
    assert state(story, None) is RunState.CANCELLED


def test_scancel_by_hand_is_on_record_through_the_agent(story):
    story.started(1).ended(1, "cancelled", "stop")
    assert state(story, None) is RunState.CANCELLED


def test_a_cancelled_run_that_is_resumed_is_no_longer_cancelled(story):
    story.add("cancel_requested", save=False, job_id="17").submitted("18", "tok-2")
    assert state(story, job("PENDING")) is RunState.PENDING
    assert state(story, None) is RunState.LOST


def test_a_job_that_somebody_starts_by_hand_after_a_cancel_is_not_cancelled(story):
    story.started(1).add("cancel_requested", save=False, job_id="17").started(2, "18")
    assert RunHistory.read(story.run).state.cancel == ""
    assert state(story, None, asked=False) is RunState.RUNNING


def test_a_cancel_stands_while_the_same_job_starts_once_more(story):
    story.started(1).add("cancel_requested", save=True, job_id="17").started(2)
    assert RunHistory.read(story.run).state.cancel == "save"


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("done", {"step": 9}, RunState.DONE),
        ("run_stopped", {"exit_code": 93, "detail": "x"}, RunState.STOPPED),
    ],
)
def test_an_end_for_good_is_not_undone_by_a_later_word_on_the_same_attempt(
    story, kind, fields, expected
):
    story.started(1).add(kind, 1, **fields).ended(1, "preempted", "requeue", by="batch")
    story.add("requeued", 1, by="batch")
    assert state(story, None) is expected


def test_a_restart_inside_the_allocation_is_running(story):
    story.started(1).ended(1, "crashed", "restart")
    assert state(story, job()) is RunState.RUNNING


def test_an_unknown_end_without_a_follow_up_is_a_failure(story):
    story.started(1).ended(1, "user_error", "stop", detail="ValueError: x")
    assert state(story, None) is RunState.FAILED
    assert RunHistory.read(story.run).state.detail == "ValueError: x"


def test_of_step_marks_in_a_row_the_last_counts_and_none_is_lost_at_a_change_of_attempt(story):
    story.started(1).restored(1).steps(1, 1, 10).steps(1, 11, 20).saved(1, 20).steps(1, 21, 25)
    story.started(2).restored(2, 20).steps(2, 21, 22).steps(2, 23, 29)
    assert [view.last_step for view in attempts(RunHistory.read(story.run))] == [25, 29]
    assert lost(story) == [5, None]
    assert progress(RunHistory.read(story.run)).step == 29


# ---- programs with a loop of their own ----------------------------------------------------------


def own(story: Story, attempt: int, step: int) -> Story:
    """An attempt of a program that restores for itself, and says where it goes on."""
    return story.started(attempt).add("restored", attempt, step=step, by="program")


def test_what_a_program_that_saves_for_itself_has_lost_is_known_once_it_goes_on(story):
    own(story, 1, 0).steps(1, 1, 30).ended(1, "preempted", "requeue")
    assert lost(story) == [None]

    own(story, 2, 25).steps(2, 26, 40)
    assert lost(story) == [5, None]


def test_a_program_that_saves_for_itself_and_is_done_has_lost_nothing(story):
    own(story, 1, 0).steps(1, 1, 30).add("done", 1, step=30).ended(1, "completed", "stop")
    assert lost(story) == [0]


def test_of_a_program_that_told_of_a_checkpoint_the_steps_since_then_are_lost(story):
    own(story, 1, 0).steps(1, 1, 30).saved(1, 20).ended(1, "crashed", "requeue")
    assert lost(story) == [10]
    own(story, 2, 20).steps(2, 21, 24).ended(2, "crashed", "requeue")
    assert lost(story) == [10, 4]
