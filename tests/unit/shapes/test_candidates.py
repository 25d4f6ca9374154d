from __future__ import annotations

import pytest

from hpctrain.ledger.shapes.queue import (
    LADDER_S,
    MOST,
    UNLIMITED_S,
    JobShape,
    enumerate_shapes,
    pick,
)

HOUR = 3600


def test_a_range_gives_at_most_twelve_with_both_ends_and_short_limits():
    shapes = enumerate_shapes(range(2, 17), lambda _nodes: 24 * HOUR)

    assert len(shapes) <= MOST
    assert {shape.nodes for shape in shapes} == {2, 3, 5, 7, 11, 16}
    assert {shape.limit_s for shape in shapes} == {600, 24 * HOUR}


def test_only_sizes_that_the_run_can_train_on_are_candidates():
    shapes = enumerate_shapes([3, 6], lambda _nodes: HOUR)

    assert {shape.nodes for shape in shapes} == {3, 6}


def test_a_fixed_time_limit_leaves_only_the_nodes_to_choose():
    shapes = enumerate_shapes([1, 2, 4], lambda _nodes: HOUR, fixed_s=1234)

    assert shapes == [JobShape(1, 1234), JobShape(2, 1234), JobShape(4, 1234)]


def test_no_limit_is_longer_than_the_site_allows_at_that_size():
    shapes = enumerate_shapes([1, 8], lambda nodes: 2 * HOUR if nodes > 4 else 48 * HOUR)

    assert max(s.limit_s for s in shapes if s.nodes == 8) == 2 * HOUR
    assert max(s.limit_s for s in shapes if s.nodes == 1) == 48 * HOUR


def test_a_size_that_the_site_does_not_allow_is_left_out():
    shapes = enumerate_shapes([1, 8], lambda nodes: 0 if nodes > 4 else HOUR)

    assert {shape.nodes for shape in shapes} == {1}
    assert enumerate_shapes([8], lambda _nodes: 0) == []


def test_without_any_limit_a_day_is_the_longest_that_is_tried():
    shapes = enumerate_shapes([1], lambda _nodes: None)

    assert max(shape.limit_s for shape in shapes) == UNLIMITED_S


def test_limits_that_mostly_restart_are_left_out_unless_none_would_be_left():
    costly = enumerate_shapes([1], lambda _nodes: 24 * HOUR, restart_s=200)

    assert min(shape.limit_s for shape in costly) == 3600  # 1800 s would be a ninth
    assert enumerate_shapes([1], lambda _nodes: 600, restart_s=200) == [JobShape(1, 600)]


def test_no_limit_is_longer_than_the_remaining_work():
    shapes = enumerate_shapes([1, 2], lambda _nodes: 48 * HOUR, whole_s=lambda n: 9001 / n)

    assert max(s.limit_s for s in shapes if s.nodes == 1) == 9600
    assert max(s.limit_s for s in shapes if s.nodes == 2) == 4800


def test_very_little_work_still_has_a_limit():
    shapes = enumerate_shapes([1], lambda _nodes: HOUR, whole_s=lambda _nodes: 1.0)

    assert shapes == [JobShape(1, LADDER_S[0])]


def test_the_shape_that_the_run_has_is_among_them_and_counts():
    now = JobShape(5, 5000)

    shapes = enumerate_shapes(range(2, 17), lambda _nodes: 24 * HOUR, also=[now])

    assert now in shapes
    assert len(shapes) <= MOST
    assert JobShape(99, 60) not in enumerate_shapes([1], lambda _n: HOUR, also=[JobShape(99, 60)])


@pytest.mark.parametrize(
    ("values", "most", "picked"),
    [
        ([1, 2, 3], 4, [1, 2, 3]),
        ([1, 2, 4, 8, 16], 3, [1, 4, 16]),
        ([2, 9], 1, [9]),
        ([], 3, []),
    ],
)
def test_picked_values_have_both_ends(values, most, picked):
    assert pick(values, most) == picked


def test_a_shape_reads_as_people_say_it():
    assert JobShape(4, 7200).text == "4 nodes x 2h00m"
