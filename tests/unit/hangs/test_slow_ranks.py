"""A slow rank is named soon, and nobody is where all are as quick as each other."""

from __future__ import annotations

import random

import pytest

from hpctrain.node.hangs.outliers import (
    RUNNING,
    SLOPE_WINDOWS,
    WINDOW,
    Cleared,
    OwnWork,
    StragglerJudge,
    Straggling,
    slope_of,
    stands_out,
    window_of,
)

RANKS, STEP_S, NOISE = 8, 0.04, 0.02
ONE_NODE = {0: range(RANKS)}
TWO_NODES = {0: range(4), 1: range(4, 8)}


def series(steps, factor=lambda _step, _rank: 1.0, seed=1, ranks=RANKS):
    """Own work of ranks in windows of made-up steps."""
    noise = random.Random(seed)
    rows = []
    for step in range(steps):
        own = [STEP_S * factor(step, rank) * noise.gauss(1, NOISE) for rank in range(ranks)]
        rows.append(OwnWork(tuple(own), max(own)))
    return [window_of(rows[at : at + WINDOW]) for at in range(0, steps, WINDOW)]


def said(windows, nodes=ONE_NODE, data_share=None):
    """What comes of windows, with the step after which it came."""
    judge = StragglerJudge(nodes)
    return [
        ((number + 1) * WINDOW, finding)
        for number, window in enumerate(windows)
        for finding in judge.hear(window, data_share)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES, {n: [2 * n, 2 * n + 1] for n in range(4)}])
def test_five_thousand_clean_steps_name_nobody(seed, nodes):
    assert said(series(5000, seed=seed), nodes) == []


@pytest.mark.parametrize("by", [0.1, 0.2])
def test_a_slower_rank_is_named_within_a_hundred_steps_once(by):
    windows = series(1000, lambda _, rank: 1 + by * (rank == 5))
    [(step, finding)] = said(windows)
    assert step <= 100
    assert (finding.kind, finding.ranks, finding.nodes) == ("rank", (5,), (0,))
    assert finding.is_steady
    assert finding.by == pytest.approx(by / (1 + by), abs=0.03)


def test_one_that_is_slow_at_every_tenth_step_is_seen_by_its_mean():
    windows = series(400, lambda step, rank: 1 + (rank == 5 and step % 10 == 0))
    [(step, finding)] = said(windows)
    assert (step <= 100, finding.ranks, finding.is_steady) == (True, (5,), False)


def test_one_that_is_slow_at_most_steps_is_seen_by_its_median():
    windows = series(400, lambda step, rank: 1 + (0.1 if step % 5 else -0.4) * (rank == 5))
    [(_, finding)] = said(windows)
    assert (finding.ranks, finding.is_steady) == ((5,), True)


def test_one_slow_window_and_two_are_a_hiccup():
    last = (RUNNING - 1) * WINDOW
    assert said(series(400, lambda step, rank: 1 + (rank == 5 and step < last))) == []


def test_who_becomes_quick_again_is_cleared_and_named_anew():
    slow = {*range(100), *range(300, 400)}
    windows = series(500, lambda step, rank: 1 + 0.3 * (rank == 5 and step in slow))
    findings = [finding for _, finding in said(windows)]
    assert [type(finding) for finding in findings] == [Straggling, Cleared, Straggling, Cleared]
    assert findings[1] == Cleared((5,))


def test_all_ranks_of_a_node_are_the_node():
    slow = {4, 5, 6, 7}
    nodes = {0: range(4), 1: range(4, 8), 2: range(8, 12)}
    windows = series(200, lambda _, rank: 1 + 0.2 * (rank in slow), ranks=12)
    [(_, finding)] = said(windows, nodes)
    assert (finding.kind, finding.ranks, finding.nodes) == ("node", (4, 5, 6, 7), (1,))


def test_of_two_nodes_the_slow_one_is_named_though_half_of_all_ranks_are_slow():
    windows = series(200, lambda _, rank: 1 + 0.25 * (rank >= RANKS // 2))
    [(_, finding)] = said(windows, TWO_NODES)
    assert (finding.kind, finding.ranks, finding.nodes) == ("node", (4, 5, 6, 7), (1,))
    few = series(200, lambda _, rank: 1 + 0.05 * (rank >= RANKS // 2))
    assert said(few, TWO_NODES) == [], "two nodes have no deviation that tells noise from it"


def test_one_rank_of_a_node_is_not_the_node():
    [(_, finding)] = said(series(200, lambda _, rank: 1 + 0.2 * (rank == 5)), TWO_NODES)
    assert (finding.kind, finding.ranks, finding.nodes) == ("rank", (5,), (1,))


def test_one_that_waits_for_its_data_is_no_slow_machine():
    waits = dict.fromkeys(range(RANKS), 0.02) | {5: 0.2}
    windows = series(200, lambda _, rank: 1 + 0.25 * (rank == 5))
    assert [finding.kind for _, finding in said(windows, data_share=waits)] == ["data"]
    little = waits | {5: 0.05}
    assert [finding.kind for _, finding in said(windows, data_share=little)] == ["rank"]
    same = dict.fromkeys(range(RANKS), 0.2)
    assert [finding.kind for _, finding in said(windows, data_share=same)] == ["rank"]


def test_steps_that_take_longer_without_anybody_slow_are_the_network_or_everybody():
    judge, windows = StragglerJudge(ONE_NODE), series(600)
    longer = [
        window._replace(step_s=window.step_s * (1.5 if 15 <= number < 25 else 1))
        for number, window in enumerate(windows)
    ]
    findings = [finding for window in longer for finding in judge.hear(window)]
    assert [type(finding) for finding in findings] == [Straggling, Cleared]
    assert (findings[0].kind, findings[0].ranks) == ("network", ())
    assert findings[0].by == pytest.approx(0.5, abs=0.05)
    assert findings[1] == Cleared(())


def test_a_slow_rank_is_no_network():
    windows = series(1000, lambda step, rank: 1 + (rank == 5 and step > 400))
    assert {finding.kind for _, finding in said(windows)} == {"rank"}


def test_one_that_fails_slowly_is_said_to_grow():
    steps = 3 * SLOPE_WINDOWS * WINDOW
    grows = series(steps, lambda step, rank: 1 + 0.05 * (rank == 5) * step / steps)
    [(_, finding)] = said(grows)
    assert finding.is_growing
    [(_, level)] = said(series(1000, lambda step, rank: 1 + 0.3 * (rank == 5 and step >= 800)))
    assert level.ranks == (5,)
    assert not level.is_growing


def test_what_was_lost_is_counted_and_forgotten_with_the_rank():
    judge = StragglerJudge(ONE_NODE)
    windows = series(400, lambda step, rank: 1 + 0.5 * (rank == 5 and step < 200))
    for window in windows[:10]:
        judge.hear(window)
    assert judge.lost_s[5] == pytest.approx(200 * 0.5 * STEP_S, rel=0.1)
    for window in windows[10:]:
        judge.hear(window)
    assert 5 not in judge.lost_s


@pytest.mark.parametrize(
    ("lateness", "out"),
    [
        ([0.0], set()),
        ([0.0, 0.05], set()),
        ([0.0, 0.15], {1}),
        ([0.0, 0.001, 0.019, 0.0], set()),
        ([0.0, 0.001, 0.03, 0.0], {2}),
        ([0.0, 0.02, 0.04, 0.06, 0.08], set()),
    ],
)
def test_who_stands_out(lateness, out):
    assert stands_out(lateness) == out


def test_a_slope_is_not_changed_by_an_outlier():
    assert slope_of([1, 2, 3, 400, 5, 6, 7]) == pytest.approx(1)
    assert slope_of([1]) == 0
