"""Ranks are granted ticks shortly before they get there; what is decided holds at one tick."""

from __future__ import annotations

import pytest

from hpctrain.node.control import lease as leases
from hpctrain.node.control.lease import (
    AHEAD,
    MOST_DECISIONS,
    NOTHING,
    Decision,
    Lease,
    Report,
    Root,
    Subtree,
    Wishes,
    merge,
)

VERSIONS = iter(range(10**9))


def said(arrived: int, *, behind: int | None = None, ranks: int = 1, **fields) -> Report:
    fields = {"began_ago_s": 0.0, "step_s": 0.0, "wishes": Wishes()} | fields
    lowest = arrived if behind is None else behind
    return Report(next(VERSIONS), arrived, lowest, ranks=ranks, **fields)


def told(root: Root, now_s: float = 0.0, **fields) -> Lease:
    root.hear(said(**fields), now_s)
    return root.lease(now_s)


def test_nothing_is_granted_before_a_rank_has_arrived():
    assert Root(1).lease(5.0) == Lease(0, -1)


def test_a_rank_whose_steps_are_not_yet_known_may_begin_the_tick_at_which_it_stands():
    assert told(Root(1), arrived=0) == Lease(1, 0)


def test_short_ticks_are_granted_as_far_as_the_lead_reaches():
    assert told(Root(1), arrived=0).horizon == 0
    root = Root(1)
    root.hear(said(0), 0.0)
    root.lease(0.0)

    assert told(root, arrived=1, step_s=0.09).horizon == 1 + 3  # 0.3 s


def test_a_long_tick_is_granted_only_shortly_before_the_fastest_rank_gets_there():
    root = Root(1)
    told(root, arrived=0)

    assert told(root, 100.0, arrived=1, step_s=60.0, began_ago_s=10.0).horizon == 1
    due_s = root.due_s()
    assert due_s == pytest.approx(100.0 + 60.0 - 10.0 - root.lead_s, abs=1e-3)
    assert root.lease(due_s - 0.1).horizon == 1
    assert root.lease(due_s).horizon == 2
    assert root.due_s() is None


def test_a_rank_that_stays_away_for_long_is_granted_no_more_than_its_lead():
    root = Root(1)
    told(root, arrived=0)
    told(root, arrived=1, step_s=1.0)

    assert root.lease(3600.0).horizon == 2
    assert root.due_s() is None


def test_at_most_so_many_ticks_are_granted_ahead():
    root = Root(1)
    told(root, arrived=0)

    assert told(root, arrived=1, step_s=1e-9).horizon == 1 + AHEAD


def test_the_horizon_is_not_taken_back_where_steps_get_longer():
    root = Root(1)
    told(root, arrived=0)
    granted = told(root, arrived=1, step_s=0.01)

    assert told(root, arrived=2, step_s=60.0) == granted


def test_a_stop_is_granted_at_once_and_nothing_behind_it():
    root = Root(1)
    told(root, arrived=0)
    stop = told(root, arrived=0, step_s=60.0, wishes=Wishes(stop=3))

    assert stop == Lease(2, 1, (Decision(1, "stop", 3),))
    assert told(root, 100.0, arrived=1, wishes=Wishes(stop=5, save=1)) == stop
    assert root.due_s() is None


def test_a_stop_is_the_last_tick_however_much_further_a_fast_rank_was_to_be_granted():
    root = Root(1)
    told(root, arrived=0)
    ahead = told(root, arrived=1, step_s=0.09).horizon

    lease = told(root, arrived=ahead, step_s=0.09, wishes=Wishes(stop=3))

    assert lease.horizon == ahead + 1
    assert lease.at(ahead + 2) == lease.at(ahead + 1) == (Decision(ahead + 1, "stop", 3),)


def test_a_stop_that_nobody_has_waited_for_holds_at_the_first_tick():
    assert told(Root(1), arrived=-1, ranks=0, wishes=Wishes(stop=3)) == Lease(
        1, 0, (Decision(0, "stop", 3),)
    )


def test_other_wishes_wait_until_the_next_tick_is_granted_so_that_a_stop_does_not_come_later():
    root = Root(1)
    told(root, arrived=0)
    assert told(root, arrived=0, step_s=60.0, wishes=Wishes(save=1)) == Lease(1, 0)

    stop = told(root, arrived=0, step_s=60.0, wishes=Wishes(save=1, stop=3))

    assert stop == Lease(2, 1, (Decision(1, "stop", 3), Decision(1, "save", 1)))


def test_what_is_decided_is_decided_once_and_holds_at_the_first_tick_that_was_not_granted():
    root = Root(1)
    told(root, arrived=0)
    told(root, arrived=1, step_s=0.09)
    decided = told(root, arrived=2, step_s=0.09, wishes=Wishes(save=1, warned=2))

    assert decided.decisions == (Decision(5, "warned", 2), Decision(5, "save", 1))
    later = told(root, arrived=3, step_s=0.09, wishes=Wishes(save=2, warned=2))
    assert later.decisions == (*decided.decisions, Decision(6, "save", 2))


def test_a_decision_stays_in_the_lease_until_the_slowest_rank_is_past_it():
    root = Root(2)
    wishes = Wishes(save=1)
    told(root, arrived=0, behind=0, ranks=1, wishes=wishes)

    assert told(root, arrived=1, ranks=1).decisions == (Decision(0, "save", 1),)  # one is unheard
    assert told(root, arrived=2, behind=0, ranks=2).decisions == (Decision(0, "save", 1),)
    assert told(root, arrived=3, behind=1, ranks=2).decisions == ()


def test_where_a_slow_rank_has_many_decisions_before_it_all_but_a_stop_waits():
    root = Root(2)
    for tick in range(2 * MOST_DECISIONS):
        lease = told(root, arrived=tick, behind=0, ranks=2, wishes=Wishes(0, *[tick + 1] * 5))
    held = len(lease.decisions)
    assert MOST_DECISIONS - len(leases.KINDS) < held < MOST_DECISIONS

    rank = {"arrived": lease.horizon + 1, "behind": lease.horizon, "ranks": 2}
    late = told(root, **rank, wishes=Wishes(0, *[2 * MOST_DECISIONS] * 5))
    assert late.decisions == tuple(
        Decision(lease.horizon + 1, kind, 2 * MOST_DECISIONS) for kind in leases.KINDS[1:]
    )


def test_a_stop_finds_room_where_nothing_else_does():
    root = Root(2)
    for tick in range(2 * MOST_DECISIONS):
        told(root, arrived=tick, behind=0, ranks=2, wishes=Wishes(0, *[tick + 1] * 5))
    lease = told(root, arrived=tick, behind=0, ranks=2, wishes=Wishes(2, *[tick + 1] * 5))

    assert lease.stops
    assert Lease.of_plain(lease.to_plain()) == lease


def test_an_older_report_changes_nothing():
    root = Root(1)
    old = said(0, wishes=Wishes(stop=2))
    told(root, arrived=0)
    root.hear(old, 1.0)

    assert root.lease(1.0) == Lease(1, 0)


def test_a_broken_row_does_not_lift_the_horizon_by_more_than_a_tick():
    assert told(Root(1), arrived=10**12).horizon == 0


def test_the_lead_follows_the_measured_round_trip_between_its_bounds():
    root = Root(1)
    told(root, 0.0, arrived=0)
    assert root.lead_s == pytest.approx(0.3)

    told(root, 10.0, arrived=1, lease=1, lease_ago_s=9.86)  # there for long; 0.14 s under way
    assert root.lead_s == pytest.approx(0.42)
    for tick in range(2, 100):
        number = told(root, float(tick), arrived=tick).number
        told(root, tick + 0.001, arrived=tick, lease=number)
    assert root.lead_s == leases.LEAST_LEAD_S


def test_the_pace_is_the_fastest_ranks_and_wishes_are_everybodys():
    slow = Report(3, 4, 2, 9.0, 7.0, Wishes(stop=2, warned=1, save=5), 3, lease=7, lease_ago_s=1.0)
    fast = Report(9, 5, 5, 1.0, 0.1, Wishes(stop=4, warned=2, tell=1), 2, lease=6, lease_ago_s=2.0)

    both = Report(9, 5, 2, 1.0, 0.1, Wishes(4, 3, 5, 1), 5, lease=6, lease_ago_s=2.0)
    assert merge([slow, fast]) == merge([fast, NOTHING, slow]) == both


def test_a_node_counts_each_senders_newest_report_and_lets_it_grow_older():
    subtree = Subtree()
    assert subtree.hear("board", Report(2, 5, 5, 0.5, 1.0, Wishes(warned=1), 1, 6), 10.0)
    assert subtree.hear("child", Report(1, 4, 4, 0.5, 1.0, Wishes(warned=1), 1), 10.0)
    assert not subtree.hear("board", Report(2, 4, 4, 0.5, 1.0, Wishes(), 1), 11.0)
    assert not subtree.hear("board", Report(1, 4, 4, 0.5, 1.0, Wishes(), 1), 11.0)

    merged = subtree.merged(12.0)

    assert merged == Report(1, 5, 4, 2.5, 1.0, Wishes(warned=2), 2, 6, 2.0)
    assert subtree.merged(12.0).version == 2
