"""What came of a fault, judged from real ledgers: kept, broken, or not tried with why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.advise.drill.promises import FAULTS, Planted, is_settled, judge
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.ledger_runs import Story

NONE = frozenset()


def name(step):
    return f"step-{step:010d}"


@pytest.fixture
def story(tmp_path):
    """An attempt that has saved twice and does its 46th step."""
    tale = Story(tmp_path / "lm").submitted().started(1).restored(1).steps(1, 1, 20)
    tale.saved(1, 20).steps(1, 21, 40).saved(1, 40)
    return tale.steps(1, 41, 46)


@pytest.fixture
def planted(story):
    return Planted(story.t, attempt=1, step=46, saves=2, on_disk=frozenset({name(20), name(40)}))


def history(story):
    return RunHistory.read(story.run)


def judged(fault, planted, story, on_disk=NONE):
    read = history(story)
    assert is_settled(FAULTS[fault], planted, read, on_disk)
    verdict = judge(FAULTS[fault], planted, read, on_disk)
    return verdict.outcome, verdict.why


def back(story, step, **more):
    """The run comes back at a step, and trains on."""
    story.ended(1, "crashed", "restart").started(2, by="restart")
    story.restored(2, step, **more)
    return story.steps(2, step + 1, step + 2)


@pytest.mark.parametrize("fault", ["kill_rank", "kill_agent"])
def test_a_run_that_goes_on_where_it_saved_last_has_kept_its_promise(story, planted, fault):
    assert not is_settled(FAULTS[fault], planted, history(story), NONE)
    outcome, why = judged(fault, planted, back(story, 40))
    assert outcome == "kept"
    assert why == "attempt 2 resumed from step 40, the newest committed; 6 steps done again"


@pytest.mark.parametrize("fault", ["kill_rank", "kill_agent"])
def test_one_that_goes_on_from_an_older_one_has_not(story, planted, fault):
    outcome, why = judged(fault, planted, back(story, 20))
    assert (outcome, why) == ("broken", "resumed from step 20, though step 40 was committed")


def test_what_it_saves_after_its_return_is_not_held_against_it(story, planted):
    back(story, 40).steps(2, 43, 60).saved(2, 60)
    assert judged("kill_rank", planted, story)[0] == "kept"


def test_an_attempt_that_has_done_no_step_yet_is_waited_for(story, planted):
    story.ended(1, "crashed", "restart").started(2, by="restart").restored(2, 40)
    assert not is_settled(FAULTS["kill_rank"], planted, history(story), NONE)


def test_one_that_ends_for_good_has_not(story, planted):
    story.ended(1, "crashed", "stop").add("run_ended", 1, reason="crashed")
    outcome, why = judged("kill_rank", planted, story)
    assert outcome == "broken"
    assert "attempt 1 ended (crashed" in why
    assert "none trains after it" in why


def test_one_that_neither_ends_nor_goes_on_has_not(story, planted):
    verdict = judge(FAULTS["kill_rank"], planted, history(story), NONE)
    assert verdict.outcome == "broken"
    assert verdict.why == "attempt 1 neither ended nor continued"


def preempted(story, saved, *, asked=True):
    if asked:
        story.add("stop_requested", 1, cause="sigterm", rank=0)
    story.saved(1, saved).ended(1, "preempted", "requeue")
    story.started(2, by="requeue").restored(2, saved)
    return story.steps(2, saved + 1, saved + 2)


def test_a_preempted_run_may_lose_no_step(story, planted):
    assert judged("preempt", planted, preempted(story, 46))[0] == "kept"


def test_one_that_loses_a_step_or_leaves_unasked_has_broken_its_promise(tmp_path, planted):
    tales = []
    for asked in (True, False):
        tale = Story(tmp_path / f"asked-{asked}").submitted().started(1).restored(1)
        tales.append(preempted(tale.steps(1, 1, 46), 45, asked=asked))
    fewer = replace(planted, saves=0)
    assert judged("preempt", fewer, tales[0])[0] == "broken"
    assert "unasked" in judged("preempt", fewer, tales[1])[1]


def skipped(step, why="its table is damaged"):
    return [{"step": step, "name": name(step), "reason": why}]


@pytest.mark.parametrize("fault", ["tear_checkpoint", "flip_bit"])
def test_a_damaged_checkpoint_is_passed_over_and_told(story, planted, fault):
    planted = replace(planted, damaged=name(40), damaged_step=40)
    outcome, why = judged(fault, planted, back(story, 20, skipped=skipped(40)))
    assert outcome == "kept"
    assert "its table is damaged" in why


def test_one_that_is_loaded_not_told_or_passed_over_too_far_is_a_broken_promise(story, planted):
    planted = replace(planted, damaged=name(40), damaged_step=40)
    loaded = judged("flip_bit", planted, back(story, 40))
    assert loaded == ("broken", f"attempt 2 loaded {name(40)}, which was damaged")


def test_nobody_was_told_is_a_broken_promise(story, planted):
    planted = replace(planted, damaged=name(40), damaged_step=40)
    outcome, why = judged("flip_bit", planted, back(story, 20))
    assert (outcome, why) == ("broken", f"{name(40)} was passed over, and nobody was told")


def test_too_old_a_checkpoint_is_a_broken_promise(story, planted):
    planted = replace(planted, damaged=name(40), damaged_step=40)
    outcome, why = judged("flip_bit", planted, back(story, 0, skipped=skipped(40)))
    assert (outcome, why) == ("broken", "resumed from step 0, though 20 was whole")


def test_a_newer_save_came_between_is_tried_again(story, planted):
    planted = replace(planted, damaged=name(20), damaged_step=20)
    verdict = judge(FAULTS["flip_bit"], planted, history(back(story, 40)), NONE)
    assert (verdict.outcome, verdict.again) == ("not tried", True)


def test_a_frozen_rank_costs_time_alone(story, planted):
    assert not is_settled(FAULTS["freeze_rank"], planted, history(story), NONE)
    story.steps(1, 47, 50)
    assert judged("freeze_rank", planted, story) == (
        "kept", "the same attempt continued, to step 50",
    )  # fmt: skip


def test_one_whose_run_starts_again_is_judged_as_a_killed_one(story, planted):
    assert judged("freeze_rank", planted, back(story, 20))[0] == "broken"


def refused(story):
    return story.add("save_failed", 1, step=60, why="No space left on device")


def test_a_full_disk_costs_one_save_that_is_told(story, planted):
    refused(story.steps(1, 47, 60)).steps(1, 61, 80).saved(1, 80)
    outcome, why = judged("fill_disk", planted, story, frozenset({name(40), name(80)}))
    assert (outcome, why) == ("kept", "step 60 was not saved (No space left on device); 80 was")


def test_a_save_that_was_refused_and_is_there_is_a_broken_promise(story, planted):
    refused(story.steps(1, 47, 60)).steps(1, 61, 80).saved(1, 80)
    outcome, why = judged("fill_disk", planted, story, frozenset({name(60), name(80)}))
    assert (outcome, why) == ("broken", "step 60 is there, though a write of it was refused")


def test_a_disk_on_which_no_save_follows_is_a_broken_promise(story, planted):
    refused(story.steps(1, 47, 60))
    verdict = judge(FAULTS["fill_disk"], planted, history(story), NONE)
    assert (verdict.outcome, verdict.why) == (
        "broken", "the save of step 60 failed, and none came after it",
    )  # fmt: skip


def test_one_of_which_nothing_is_told_is_a_broken_promise(story, planted):
    story.steps(1, 47, 60).saved(1, 60)
    outcome, why = judged("fill_disk", planted, story)
    assert (outcome, why) == (
        "broken", "a write was refused, and no save was told to have failed",
    )  # fmt: skip


@pytest.mark.parametrize("fault", ["fill_disk", "delay_files"])
def test_what_ends_the_attempt_is_no_fault_that_costs_time_alone(story, planted, fault):
    verdict = judge(FAULTS[fault], planted, history(back(story, 40)), NONE)
    assert (verdict.outcome, verdict.why) == ("broken", "attempt 1 ended by it (crashed)")


def test_a_slow_disk_costs_time_alone(story, planted):
    story.steps(1, 47, 60).saved(1, 60)
    assert judged("delay_files", planted, story) == ("kept", "step 60 was committed after 0.1 s")


def test_a_save_that_a_slow_disk_fails_is_a_broken_promise(story, planted):
    refused(story.steps(1, 47, 60)).saved(1, 61)
    assert judged("delay_files", planted, story)[0] == "broken"


def test_what_never_fired_is_not_called_kept(story, planted):
    verdict = judge(FAULTS["delay_files"], replace(planted, fired=False), history(story), NONE)
    assert (verdict.outcome, verdict.why) == (
        "not tried", "no save came to the place where it was armed",
    )  # fmt: skip


def test_the_older_of_two_writers_writes_nothing_more_and_says_so(story, planted):
    fault = FAULTS["second_writer"]
    assert not is_settled(fault, planted, history(story), planted.on_disk)
    told = replace(planted, gave_way=True)
    assert judged("second_writer", told, story, planted.on_disk)[0] == "kept"
    outcome, why = judged("second_writer", told, story, planted.on_disk | {name(60)})
    assert (outcome, why) == (
        "broken", f"attempt 1 committed {name(60)} after it was taken over",
    )  # fmt: skip
    silent = judge(fault, planted, history(story), planted.on_disk)
    assert silent.outcome == "broken"
    assert "never told" in silent.why


def test_samples_that_are_used_twice_break_every_promise(story, planted):
    story.ended(1, "crashed", "restart").started(2, by="restart").restored(2, 40)
    story.add("steps", 2, first=41, last=42, sample_first=0, sample_last=16, loss=2.5, seconds=1.0)
    outcome, why = judged("kill_rank", planted, story)
    assert outcome == "broken"
    assert "samples were skipped or used twice" in why
