from __future__ import annotations

import math

from hpctrain.ledger.shapes.queue import JobShape, NodeClaim, QueueView

NOW = 1000.0
MINUTE = 60


def claim(job_id, nodes, start, end):
    return NodeClaim(job_id, frozenset(nodes.split()), NOW + start * MINUTE, NOW + end * MINUTE)


def hole():
    """Three nodes run for 30 minutes; then a job is to have all four for an hour."""
    running = claim("1", "n1 n2 n3", 0, 30)
    planned = claim("2", "n1 n2 n3 n4", 30, 90)
    return QueueView(NOW, frozenset({"n1", "n2", "n3", "n4"}), (running, planned))


def wait(view, nodes, minutes, **more):
    start = view.start_of(JobShape(nodes, minutes * MINUTE), **more)
    return None if start is None else (start - NOW) / MINUTE


def test_a_job_that_ends_in_time_starts_in_the_hole_and_a_longer_one_behind_the_planned_job():
    assert wait(hole(), 1, 30) == 0
    assert wait(hole(), 1, 31) == 90
    assert wait(hole(), 2, 10) == 90


def test_more_nodes_than_there_are_never_start():
    assert wait(hole(), 5, 10) is None


def test_a_job_without_an_end_blocks_its_nodes_for_ever():
    endless = NodeClaim("1", frozenset({"n1"}), NOW, math.inf)
    view = QueueView(NOW, frozenset({"n1", "n2"}), (endless,))

    assert wait(view, 1, 10) == 0
    assert wait(view, 2, 10) is None


def test_a_start_is_not_before_the_earliest():
    assert wait(hole(), 1, 10, earliest=NOW + 5 * MINUTE) == 5
    assert wait(hole(), 1, 30, earliest=NOW + 5 * MINUTE) == 90


def test_the_nodes_of_a_job_that_ends_are_free():
    assert wait(hole().without("1"), 4, 30) == 0
    assert wait(hole().without("1"), 4, 31) == 90


def test_holes_are_told_by_how_long_they_last():
    view = QueueView(
        NOW,
        frozenset({"n1", "n2", "n3"}),
        (claim("1", "n1", 10, 90), claim("2", "n2", 60, 90)),
    )

    assert view.holes() == [
        (1, math.inf),
        (2, NOW + 60 * MINUTE),
        (3, NOW + 10 * MINUTE),
    ]
    assert hole().holes() == [(1, NOW + 30 * MINUTE)]


def test_the_shapes_of_holes_end_a_minute_before_them_and_have_a_size_that_fits():
    view = QueueView(NOW, frozenset({"n1", "n2", "n3"}), (claim("1", "n1", 10, 90),))

    assert view.hole_shapes([1, 2, 3]) == [JobShape(3, 9 * MINUTE)]
    assert view.hole_shapes([1, 2], spares=1) == [JobShape(2, 9 * MINUTE)]
    assert view.hole_shapes([4]) == []
    assert hole().hole_shapes([1, 2]) == [JobShape(1, 29 * MINUTE)]
