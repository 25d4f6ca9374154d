from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpctrain.ledger.shapes.choose import RunFacts, StepPoint, choose_shape, decide
from hpctrain.ledger.shapes.queue import JobShape

HOUR = 3600
SMALL, LARGE = JobShape(2, 4 * HOUR), JobShape(8, 4 * HOUR)
DAY = JobShape(2, 24 * HOUR)


def facts(**more):
    given = {
        "points": [StepPoint(2, 4.0, "attempt 1 of this run")],
        "remaining_steps": 10_000,
        "restart_s": 60.0,
    }
    return RunFacts(**{**given, **more})


def chosen(estimates, **more):
    return choose_shape(list(estimates), more.pop("facts", facts()), estimates, **more)


def test_the_shape_that_finishes_first_is_chosen_and_the_reason_given_in_two_lines():
    choice = chosen({SMALL: 0.0, LARGE: 600.0, DAY: 0.0})

    assert choice.row is not None
    assert choice.row.shape == LARGE
    first, second = choice.why
    assert first == "8 nodes x 4h00m: finishes first of 3 candidates"
    assert second.startswith(
        "starts in about 45 s (SLURM's estimate x 0.16 (from simulated queues)); step time: "
    )


def test_a_short_job_in_a_hole_beats_a_long_one_that_waits_for_days():
    choice = chosen({SMALL: 0.0, DAY: 60 * HOUR})

    assert choice.row is not None
    assert choice.row.shape == SMALL


def test_hardly_more_than_the_fewest_node_hours_where_cost_is_preferred():
    choice = chosen({SMALL: 0.0, LARGE: 0.0, DAY: 90_000.0}, prefer="cost")

    assert choice.row is not None
    assert choice.row.shape == SMALL  # DAY has a restart less, and waits
    assert "within 5 % of the fewest node-hours" in choice.why[0]
    assert chosen({SMALL: 90_000.0, DAY: 0.0}, prefer="cost").row.shape == DAY


@pytest.mark.parametrize(("lost", "nodes"), [(0.006, 16), (0.02, 4)])
def test_balanced_takes_what_costs_little_more_than_the_middle_of_the_range(lost, nodes):
    """The cheapest size, one node, is no measure: it would take for ever."""
    points = [StepPoint(n, 4.0 / n * (1 + lost * (n - 1)), "attempt 1") for n in (1, 4, 16)]
    shapes = {JobShape(n, 24 * HOUR): 0.0 for n in (1, 4, 16)}

    choice = chosen(shapes, facts=facts(points=points), prefer="balanced")

    assert choice.row is not None
    assert choice.row.shape.nodes == nodes
    middle = next(row for row in choice.rows if row.shape.nodes == 4)
    assert choice.row.node_hours <= 1.1 * middle.node_hours
    assert "within 10 % of the middle size's node-hours" in choice.why[0]


def test_a_ceiling_counts_what_the_run_has_used():
    spent = facts(spent_node_hours=5.0)

    choice = chosen({SMALL: 0.0, LARGE: 0.0}, facts=spent, most_node_hours=30.0)

    assert choice.row is not None
    assert choice.row.shape == SMALL
    refused = next(row for row in choice.rows if row.shape == LARGE)
    assert refused.refused.endswith("node-hours (at most 30)")


def test_where_all_are_refused_nothing_is_chosen_and_the_reasons_are_given():
    choice = chosen({SMALL: 0.0}, most_node_hours=1.0)

    assert choice.row is None
    assert choice.why[0].startswith("no shape can be chosen: it would take 22.")


def test_a_wait_that_is_not_known_loses_against_one_that_is():
    choice = chosen({SMALL: 5000.0, LARGE: None})

    assert choice.row is not None
    assert choice.row.shape == SMALL
    assert chosen({SMALL: None, LARGE: None}).row is None


@pytest.mark.parametrize(("sooner", "kept"), [(0.91, True), (0.89, False)])
def test_a_run_keeps_its_shape_unless_another_is_clearly_better(sooner, kept):
    small = chosen({SMALL: 0.0}).rows[0]
    assert small.mean_s is not None
    large = replace(small, shape=LARGE, mean_s=small.mean_s * sooner)

    choice = decide([small, large], now_has=SMALL)

    assert choice.row is not None
    assert (choice.row.shape, choice.kept) == (SMALL if kept else LARGE, kept)


@pytest.mark.parametrize(("prefer", "kept"), [("time", True), ("balanced", False)])
def test_a_run_whose_costs_count_leaves_a_shape_that_costs_clearly_more(prefer, kept):
    had = chosen({SMALL: 0.0}).rows[0]
    assert had.node_hours is not None
    cheap = replace(had, shape=DAY, node_hours=had.node_hours * 0.85)

    choice = decide([had, cheap], prefer=prefer, now_has=SMALL)

    assert choice.kept is kept


def test_a_shape_that_is_refused_now_is_not_kept():
    choice = chosen({SMALL: 0.0, LARGE: None}, now_has=LARGE)

    assert choice.row is not None
    assert choice.row.shape == SMALL


@pytest.mark.parametrize("lacks", [{"points": []}, {"remaining_steps": None}])
def test_where_the_work_is_not_known_the_pace_decides(lacks):
    choice = chosen({SMALL: 0.0, DAY: 200 * HOUR}, facts=facts(**lacks))

    assert choice.row is not None
    assert choice.row.shape == SMALL
    assert "most work per hour of waiting and running" in choice.why[0]


def test_the_choice_is_plain_json_with_all_candidates():
    value = json.loads(json.dumps(chosen({SMALL: 0.0, LARGE: None}).as_json()))

    assert value["chosen"] == {"nodes": 2, "limit_s": 4 * HOUR}
    assert [row["refused"] for row in value["candidates"]] == ["", "its wait is not known"]
