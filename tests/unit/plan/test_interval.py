"""The time between saves: what costs the least, within what is promised."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.settings.schema import CheckpointSettings
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan.interval import (
    FIRST_GUESS_S,
    SHORTEST_S,
    Costs,
    Failures,
    Interval,
    as_set,
    choose,
    costs,
    daly_s,
    failures,
    first_guess,
    mtbf_s,
)
from tests.support.ledger_runs import Story, event_of

DAY = 86400.0
FAR = 1e12
"""A bound that binds nothing."""

cost = st.floats(1e-4, 3600)
mtbf = st.floats(600, 1e8)
grown = st.floats(1, 50)
bound = st.floats(0.5, 1e6)


def record(story: Story) -> Failures:
    return failures(RunHistory.read(story.run))


def trained(story: Story, attempt: int, last: int = 100) -> Story:
    """An attempt that trained up to a step."""
    return story.started(attempt).restored(attempt).steps(attempt, 1, last)


def spent(interval_s: float, cost_s: float, between_failures_s: float) -> float:
    """Expected time for a second of training, with failures at random also during saves (Daly)."""
    whole = (interval_s + cost_s) / between_failures_s
    return between_failures_s * math.expm1(whole) / interval_s


def best_by_trial(cost_s: float, between_failures_s: float) -> float:
    """The interval that spends the least of 20,000 tried."""
    tried = (between_failures_s * 10 ** (-4 + 5 * n / 20_000) for n in range(20_000))
    return min(tried, key=lambda one: spent(one, cost_s, between_failures_s))


# ---- the formula --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_s", "between_failures_s"),
    [(0.4, 41 * 3600), (10, 7.9 * 3600), (60, 7.9 * 3600), (60, 1800), (300, 3600), (600, 2400)],
)
def test_dalys_interval_is_the_best_of_all_that_are_tried(cost_s, between_failures_s):
    best = best_by_trial(cost_s, between_failures_s)
    found = daly_s(cost_s, between_failures_s)

    assert found == pytest.approx(best, rel=0.03)
    assert spent(found, cost_s, between_failures_s) == pytest.approx(
        spent(best, cost_s, between_failures_s), rel=1e-4
    )


def test_a_worked_example_of_the_formula():
    # sqrt(2*60*3600) = 657.27; 1 + sqrt(1/120)/3 + 1/1080 = 1.031356; less the save's 60 s.
    assert daly_s(60, 3600) == pytest.approx(617.88, abs=0.01)


def test_where_a_save_costs_more_than_two_failures_are_apart_the_interval_is_their_distance():
    assert daly_s(200, 100) == 100
    assert daly_s(1e6, 100) == 100
    assert daly_s(199.9, 100) < 100


@given(cost, mtbf, grown)
def test_dearer_saves_and_rarer_failures_never_make_the_interval_shorter(cost_s, apart_s, more):
    interval = choose(cost_s, apart_s, max_loss_s=FAR).seconds

    assert choose(cost_s * more, apart_s, max_loss_s=FAR).seconds >= interval
    assert choose(cost_s, apart_s * more, max_loss_s=FAR).seconds >= interval


# ---- the bounds ---------------------------------------------------------------------------------


@given(
    st.none() | cost,
    mtbf,
    st.fixed_dictionaries(
        {
            "max_loss_s": bound,
            "job_s": st.none() | bound,
            "write_s": st.floats(0, 1e5),
            "min_s": st.floats(0, 1e4),
        }
    ),
)
def test_allowed_loss_and_the_time_limit_hold_whatever_else_is_asked_for(cost_s, apart_s, more):
    found = choose(cost_s, apart_s, **more)

    assert 0 < found.seconds <= more["max_loss_s"]
    assert more["job_s"] is None or found.seconds <= more["job_s"] / 4
    assert found.why


@given(cost, mtbf, bound, st.floats(0, 1e5))
def test_a_kill_just_before_a_save_is_committed_costs_no_more_than_allowed(
    cost_s, apart_s, max_loss_s, write_s
):
    found = choose(cost_s, apart_s, max_loss_s=max_loss_s, write_s=write_s).seconds

    if write_s <= max_loss_s / 2:
        assert found + write_s <= max_loss_s * (1 + 1e-9)
    else:  # no interval keeps the promise; training must not do nothing but save
        assert found <= max_loss_s / 2


@given(cost, mtbf, st.floats(0, 1e5))
def test_saves_take_a_20th_of_the_time_at_most_and_writes_half_of_it(cost_s, apart_s, write_s):
    found = choose(cost_s, apart_s, max_loss_s=FAR, write_s=write_s).seconds

    assert cost_s / (found + cost_s) <= 0.05 + 1e-9
    assert write_s <= found / 2
    assert found >= SHORTEST_S


def test_before_the_first_save_the_interval_is_a_guess_within_the_bounds():
    assert choose(None, DAY, max_loss_s=1800).seconds == 450
    assert choose(None, DAY, max_loss_s=1e6).seconds == FIRST_GUESS_S
    assert choose(None, DAY, max_loss_s=1e6, job_s=400).seconds == 100
    assert first_guess(1800) == 450
    assert "guess" in choose(None, DAY, max_loss_s=1800).why


@pytest.mark.parametrize(
    ("more", "seconds", "why"),
    [
        ({}, 343, "Daly, a save costs 0.4 s, one failure in 1d17h"),
        ({"max_loss_s": 100}, 100, "max_loss_s of 1m40s"),
        ({"max_loss_s": 100, "write_s": 30}, 70, "max_loss_s of 1m40s less 30 s to write"),
        (
            {"max_loss_s": 100, "write_s": 60},
            50,
            "half of max_loss_s of 1m40s, a write takes 1m00s",
        ),
        ({"job_s": 1200}, 300, "a quarter of the job's 20m00s"),
        ({"cost_s": 40, "apart_s": 3600}, 760, "saves take 5%, a save costs 40 s"),
        ({"write_s": 300}, 600, "writing a save takes 5m00s"),
        ({"cost_s": 0.0}, 10, "the shortest, a save costs 0 s"),
    ],
)
def test_what_decided_is_said(more, seconds, why):
    values = {"cost_s": 0.4, "apart_s": 41 * 3600, "max_loss_s": 1800, **more}
    found = choose(values.pop("cost_s"), values.pop("apart_s"), **values)

    assert (round(found.seconds), found.why) == (seconds, why)


def test_what_the_user_has_set_counts_steps_before_seconds():
    by_steps = as_set(CheckpointSettings(interval_steps=50, interval_s=60.0))

    assert by_steps == Interval(0.0, "checkpoint.interval_steps", steps=50)
    assert as_set(CheckpointSettings(interval_s=60.0)) == Interval(60.0, "checkpoint.interval_s")
    assert as_set(CheckpointSettings()) is None


# ---- how often runs die -------------------------------------------------------------------------


def test_a_run_without_a_record_is_believed_to_lose_one_node_of_each_in_30_days():
    assert mtbf_s(Failures(), 1) == 30 * DAY
    assert mtbf_s(Failures(), 30) == DAY
    assert mtbf_s(Failures(), 0) == 30 * DAY  # an attempt of which no agent came so far


@given(st.integers(1, 500), st.floats(1e-6, 1e-3))
def test_a_long_record_outweighs_the_prior(nodes, rate):
    count = 100_000
    assert mtbf_s(Failures(count, count / rate), nodes) == pytest.approx(1 / rate, rel=0.03)


@given(st.integers(0, 100), st.floats(0, 1e8), st.integers(1, 500), st.floats(1, 1e6))
def test_each_failure_shortens_the_time_that_is_expected_and_calm_lengthens_it(
    count, observed_s, nodes, calm_s
):
    now = mtbf_s(Failures(count, observed_s), nodes)

    assert mtbf_s(Failures(count + 1, observed_s), nodes) < now
    assert mtbf_s(Failures(count, observed_s + calm_s), nodes) > now
    assert mtbf_s(Failures(count, observed_s), nodes + 1) < now


@pytest.mark.parametrize("reason", ["node_failed", "crashed", "unknown", "a later version's"])
def test_a_sudden_end_is_a_failure(story, reason):
    trained(story, 1).ended(1, reason, "requeue")
    assert record(story).count == 1


@pytest.mark.parametrize("reason", ["preempted", "requeued", "timed_out"])
def test_an_end_that_was_warned_of_is_a_failure_only_without_a_save_of_it(story, reason):
    trained(story, 1).saved(1, 90).ended(1, reason, "requeue")
    assert record(story).count == 1
    trained(story, 2).saved(2, 100).add("stopped", 2, step=100).ended(2, reason, "requeue")
    assert record(story).count == 1


@pytest.mark.parametrize("reason", ["completed", "stopped", "cancelled", "user_error", "fenced"])
def test_what_people_and_programs_decide_is_no_failure(story, reason):
    trained(story, 1).ended(1, reason, "stop")
    assert record(story) == Failures(0, 3)


@pytest.mark.parametrize(("saved", "count"), [(100, 0), (90, 1)])
def test_an_attempt_that_saved_and_left_did_not_fail_though_its_end_was_never_written(
    story, saved, count
):
    trained(story, 1).add("stop_requested", 1, cause="sigterm", rank=0).saved(1, saved)
    story.started(2).restored(2, saved)
    story.ended(1, "unknown", "leave", by="successor")
    assert record(story).count == count


def test_an_attempt_that_is_followed_by_another_without_an_end_on_record_failed(story):
    trained(story, 1).saved(1, 100)
    story.t += 50
    story.started(2).restored(2, 100)
    # From its start to its last word, the save 3 s later; the second one's restore is 1 s old.
    assert record(story) == Failures(1, 3 + 1)


def test_an_attempt_that_never_came_to_train_lost_nothing_and_is_left_out(story):
    story.started(1)
    story.t += 1000
    story.ended(1, "node_failed", "requeue")
    assert record(story) == Failures(0, 0.0)


def test_time_counts_from_start_to_end_and_to_the_last_word_of_one_that_runs(story):
    trained(story, 1)
    story.t += 97
    story.saved(1, 100).ended(1, "preempted", "requeue")
    story.t += 10_000  # in the queue
    trained(story, 2)
    story.t += 200
    story.steps(2, 101, 120)
    assert record(story) == Failures(0, 101 + 203)


def test_a_dead_attempt_that_goes_on_writing_beside_its_successor_adds_no_time(story):
    trained(story, 1)
    story.ended(1, "node_failed", "requeue")
    trained(story, 2)
    before = record(story)
    story.t += 35
    story.steps(1, 101, 102)
    assert record(story) == before


def test_a_run_that_has_not_begun_has_no_record(story):
    assert record(story) == Failures()
    assert failures(RunHistory()) == Failures()


# ---- what saves cost ----------------------------------------------------------------------------


def saves(*fields, attempt=1, kind="saved"):
    return [event_of(float(n), kind, attempt, {"step": n, **one}) for n, one in enumerate(fields)]


def test_a_save_in_the_background_costs_its_stall_and_a_waited_for_one_all_of_itself():
    assert costs(RunHistory.of(saves({"seconds": 30.0, "stall_s": 0.4}))) == Costs(0.4, 30.0)
    assert costs(RunHistory.of(saves({"seconds": 30.0}))) == Costs(30.0, 30.0)
    assert costs(RunHistory.of(saves({"stall_s": 0.4}))) == Costs(0.4, 0.4)


def test_before_the_first_save_the_cost_is_unknown():
    assert costs(RunHistory()) is None
    assert costs(RunHistory.of(saves({}, {"seconds": "nan"}))) is None
    assert costs(RunHistory.of(saves({"seconds": 3.0}, kind="save_failed"))) is None


def test_the_newest_saves_count_and_one_slow_one_among_them_does_not():
    old = [{"seconds": 100.0, "stall_s": 50.0}] * 20
    new = [{"seconds": 10.0, "stall_s": 1.0}] * 4
    slow = {"seconds": 900.0, "stall_s": 300.0}
    assert costs(RunHistory.of(saves(*old, *new, slow))) == Costs(1.0, 10.0)


def test_what_earlier_attempts_measured_spares_the_next_one_a_guess():
    events = [
        *saves({"seconds": 5.0, "stall_s": 0.5}),
        event_of(9.0, "attempt_started", 2, {}),
        event_of(9.5, "restored", 2, {"step": 0}),
    ]
    assert costs(RunHistory.of(events)) == Costs(0.5, 5.0)


def test_the_save_on_the_way_out_says_nothing_of_those_behind_training():
    usual, last = {"seconds": 20.0, "stall_s": 0.5}, {"seconds": 20.0, "stall_s": 20.0}
    first = [*saves(usual), event_of(2.0, "stop_requested", 1, {}), *saves(last)]
    second = [event_of(3.0, "stop_requested", 2, {}), *saves(last, attempt=2)]
    assert costs(RunHistory.of([*first, *second])) == Costs(0.5, 20.0)
