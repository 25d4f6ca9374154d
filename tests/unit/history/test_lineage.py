"""Exactly once: the ledger proves which samples are in the final weights."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.ledger.history.lineage import lineage
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.events import Event, read
from tests.support.ledger_runs import BATCH, Story, coverage, event_of


def check(story: Story) -> tuple[list[tuple[int, int]], list[str]]:
    events = read(story.run)
    return coverage(RunHistory.of(events)), lineage(RunHistory.of(events)).problems


def test_an_undisturbed_run_used_one_range_of_samples(story):
    story.started(1).restored(1).steps(1, 1, 60).steps(1, 61, 100)
    assert check(story) == ([(0, 100 * BATCH)], [])


def test_steps_that_were_done_again_count_once(story):
    story.started(1).restored(1).steps(1, 1, 50).saved(1, 50).steps(1, 51, 80)
    story.started(2).restored(2, 50).steps(2, 51, 100)
    assert check(story) == ([(0, 100 * BATCH)], [])
    pieces = lineage(RunHistory.read(story.run)).pieces
    assert [(p.attempt, p.first, p.last) for p in pieces] == [(1, 1, 50), (2, 51, 100)]


def test_a_restore_over_several_attempts_cuts_all_that_it_goes_back_behind(story):
    story.started(1).restored(1).steps(1, 1, 40).saved(1, 40).steps(1, 41, 50).saved(1, 50)
    story.started(2).restored(2, 50).steps(2, 51, 90).saved(2, 90)
    story.started(3).restored(3, 40).steps(3, 41, 100)
    assert check(story) == ([(0, 100 * BATCH)], [])


def test_a_cut_inside_a_step_mark_finds_the_exact_sample(story):
    story.started(1).restored(1).steps(1, 1, 80)
    story.started(2).restored(2, 50).steps(2, 51, 100)
    assert check(story) == ([(0, 100 * BATCH)], [])


def test_a_cut_inside_a_mark_of_uneven_steps_is_said_to_be_inexact(story):
    story.started(1).restored(1)
    story.add("steps", 1, first=1, last=3, sample_first=0, sample_last=10)
    story.started(2).restored(2, 2)
    assert check(story)[1] == [
        "attempt 2 restored step 2, which lies inside a step mark: its sample position is not exact"
    ]


def test_a_beginning_from_nothing_cuts_everything(story):
    story.started(1).restored(1).steps(1, 1, 30)
    story.started(2).restored(2, 0).steps(2, 1, 30)
    assert check(story) == ([(0, 30 * BATCH)], [])


def test_what_a_zombie_did_is_not_in_the_weights(story):
    story.started(1).restored(1).steps(1, 1, 50).saved(1, 50)
    story.started(2).restored(2, 50).steps(1, 51, 70).steps(2, 51, 60).steps(1, 71, 90)
    story.steps(2, 61, 100)
    assert check(story) == ([(0, 100 * BATCH)], [])


def test_skipped_samples_are_a_gap(story):
    story.started(1).restored(1).steps(1, 1, 50).saved(1, 50)
    story.started(2).restored(2, 50)
    story.add("steps", 2, first=51, last=60, sample_first=51 * BATCH, sample_last=61 * BATCH)
    ranges, problems = check(story)
    assert ranges == [(0, 400), (408, 488)]
    assert problems == ["gap: samples 400 to 407 are missing before attempt 2's"]


def test_samples_used_twice_are_an_overlap(story):
    story.started(1).restored(1).steps(1, 1, 50).saved(1, 50)
    story.started(2).restored(2, 50)
    story.add("steps", 2, first=51, last=60, sample_first=392, sample_last=480)
    assert check(story)[1] == ["overlap: samples 392 to 399 were used again by attempt 2"]


def test_steps_that_no_mark_tells_of_are_a_gap(story):
    story.started(1).restored(1).steps(1, 1, 50)
    story.started(2).restored(2, 60).steps(2, 61, 100)
    assert check(story)[1] == [
        "attempt 2 restored step 60, but steps 51 to 60 are not in the ledger",
        "gap: steps 51 to 60 are missing before attempt 2's",
        "gap: samples 400 to 479 are missing before attempt 2's",
    ]


def test_a_first_step_that_is_not_the_first_is_a_gap(story):
    story.started(1).restored(1).steps(1, 3, 10)
    assert check(story)[1] == [
        "gap: steps 1 to 2 are missing before attempt 1's",
        "gap: samples 0 to 15 are missing before attempt 1's",
    ]


def test_a_program_that_counts_no_samples_still_has_its_steps_checked(story):
    story.started(1).restored(1)
    for first, last in ((1, 10), (12, 20)):
        story.add("steps", 1, first=first, last=last, sample_first=None, sample_last=None)
    assert check(story) == ([], ["gap: steps 11 to 11 are missing before attempt 1's"])


@given(
    st.lists(
        st.tuples(
            st.integers(1, 30),
            st.lists(st.integers(1, 9), max_size=3),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_whatever_is_killed_and_restored_correctly_is_covered_exactly_once(life):
    """Attempts that do some steps, save at some, and restore the newest or an older save."""
    events: list[Event] = []
    saves, number = [0], 0
    for number, (count, offsets, older) in enumerate(life, start=1):
        if older and len(saves) > 1:
            saves.pop()
        step = saves[-1]
        events.append(event_of(0, "attempt_started", number, {"job_id": "1"}))
        events.append(event_of(0, "restored", number, {"step": step}))
        done = step
        for length in [*offsets, count]:
            mark = {"sample_first": done * BATCH, "sample_last": (done + length) * BATCH}
            first, done = done + 1, done + length
            events.append(event_of(0, "steps", number, {"first": first, "last": done, **mark}))
            if length != count:
                saves.append(done)
        end = done
    found = lineage(RunHistory.of(events))
    assert found.problems == []
    if number:
        assert coverage(RunHistory.of(events)) == [(0, end * BATCH)]


def left_out(story, attempt, step, first=None):
    first = (step - 1) * BATCH if first is None else first
    story.add("batch_skipped", attempt, step=step, first=first, last=first + BATCH, why="spike")
    return story


def test_a_batch_that_was_left_out_is_a_named_hole_and_no_gap(story):
    story.started(1).restored(1).steps(1, 1, 20)
    left_out(story, 1, 31).steps(1, 21, 40)

    assert check(story) == ([(0, 40 * BATCH)], [])
    (hole,) = lineage(RunHistory.read(story.run)).holes
    assert (hole.attempt, hole.step, hole.why) == (1, 31, "spike")
    assert (hole.sample_first, hole.sample_last) == (30 * BATCH, 31 * BATCH)


def test_a_hole_that_a_restore_goes_back_behind_is_void(story):
    story.started(1).restored(1).steps(1, 1, 50).saved(1, 50)
    left_out(left_out(story, 1, 50), 1, 51).steps(1, 51, 80)
    story.started(2).restored(2, 50).steps(2, 51, 100)

    found = lineage(RunHistory.read(story.run))
    assert [hole.step for hole in found.holes] == [50]
    assert found.problems == []


def test_a_hole_outside_its_steps_samples_is_a_problem(story):
    story.started(1).restored(1).steps(1, 1, 20)
    left_out(story, 1, 5, first=20 * BATCH)

    assert check(story)[1] == [
        f"hole: samples {20 * BATCH} to {21 * BATCH - 1} are left out in step 5, which has others"
    ]


def test_a_hole_of_a_step_without_a_mark_is_awaited(story):
    story.started(1).restored(1).steps(1, 1, 20)
    left_out(story, 1, 21)

    assert check(story)[1] == []


def rewound(story, attempt, step, steps=20):
    """A spike at a step: the samples of so many steps up to it are left out from then on."""
    first, last = (step - steps) * BATCH, step * BATCH
    hole = {"first": first, "last": last}
    story.add("rewound", attempt, step=step, to=step - steps, why="spike", **hole)
    return first, last


def after_a_rewind(story, done=(50, 90)):
    """Step 60 jumps, the run goes back to step 30 and comes by the samples of steps 41 to 60."""
    story.started(1).restored(1).steps(1, 1, 59).saved(1, 30)
    hole = rewound(story, 1, 60)
    story.started(2).restored(2, 30)
    begin = 30 * BATCH
    for first, last in itertools.pairwise([30, *done]):
        end = last * BATCH + (20 * BATCH if last > 40 else 0)
        marks = {"sample_first": begin, "sample_last": end}
        story.add("steps", 2, first=first + 1, last=last, **marks)
        begin = end
    return hole


def test_samples_that_a_rewind_leaves_out_are_a_named_hole_and_no_gap(story):
    hole = after_a_rewind(story)
    found = lineage(RunHistory.read(story.run))
    assert found.problems == []
    assert [(h.attempt, h.step, h.sample_first, h.sample_last, h.why) for h in found.holes] == [
        (1, 60, *hole, "spike")
    ]
    assert check(story) == ([(0, 110 * BATCH)], [])


@pytest.mark.parametrize("step", [35, 40, 41, 45])
def test_a_cut_inside_a_mark_with_a_hole_finds_the_exact_sample(story, step):
    after_a_rewind(story)
    story.started(3).restored(3, step)
    pieces = lineage(RunHistory.read(story.run)).pieces
    assert pieces[-1].sample_last == (step + (20 if step > 40 else 0)) * BATCH


def test_samples_that_are_left_out_and_were_used_are_a_problem(story):
    story.started(1).restored(1).steps(1, 1, 60)
    first, last = rewound(story, 1, 60)
    assert check(story)[1] == []  # nothing was restored so far
    story.started(2).restored(2, 30).steps(2, 31, 70)  # as if there was no hole
    assert check(story)[1] == []  # a mark over all of it: it may have come by
    story.started(3).restored(3, 30).steps(3, 31, 50)
    hole = f"hole: samples {first} to {last - 1} are left out since step 60"
    assert check(story)[1] == [f"{hole}, and attempt 3 used {first} to {50 * BATCH - 1}"]


def test_a_rewind_that_nothing_went_back_behind_is_a_problem(story):
    story.started(1).restored(1).steps(1, 1, 60).saved(1, 60)
    first, last = rewound(story, 1, 60)
    story.started(2).restored(2, 60).steps(2, 61, 70)
    hole = f"hole: samples {first} to {last - 1} are left out since step 60"
    assert check(story)[1] == [f"{hole}, and attempt 1 used {first} to {last - 1}"]


def test_a_rewind_bounds_what_is_gone_on_from_until_a_restore(story):
    story.started(1).restored(1).steps(1, 1, 60)
    rewound(story, 1, 60)
    assert RunHistory.read(story.run).rewound_to == 40
    story.started(2).restored(2, 30)
    assert RunHistory.read(story.run).rewound_to is None
