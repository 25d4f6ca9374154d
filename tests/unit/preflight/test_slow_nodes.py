"""Whoever is bad is named, and nobody else: for any minority of bad nodes, also with noise."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.preflight.checks import Expected
from hpctrain.cluster.preflight.slow_nodes import Limits, search
from hpctrain.core.settings.schema import Settings
from hpctrain.node.agent.preload import NodeCheck

FAST, SLOW = 40.0, 10.0
BASELINE = Limits({1: 60.0, 2: 40.0, 8: 38.0})


def drive(nodes, limits, measure):
    """The verdict, and every round's groups."""
    state = search(nodes, limits)
    rounds = [next(state)]
    while True:
        results = {group: measure(group, len(rounds)) for group in rounds[-1]}
        try:
            rounds.append(state.send(results))
        except StopIteration as end:
            return end.value, rounds


def names(count):
    return [f"n{i:03d}" for i in range(count)]


@st.composite
def clusters(draw):
    nodes = names(draw(st.integers(3, 40)))
    most = (len(nodes) - 1) // 2
    return nodes, draw(st.sets(st.sampled_from(nodes), max_size=most))


@settings(max_examples=60)
@given(clusters(), st.sampled_from([BASELINE, Limits()]), st.sampled_from([SLOW, None]))
def test_exactly_the_bad_ones_are_named(cluster, limits, bad_value):
    nodes, bad = cluster

    verdict, rounds = drive(nodes, limits, lambda g, _: bad_value if bad & {*g} else FAST)

    assert set(verdict.bad) == bad
    assert verdict.suspects == []
    assert len(rounds) <= 8 + 2 * math.log2(len(nodes)) + 3 * len(bad)


@settings(max_examples=60)
@given(clusters(), st.sampled_from([BASELINE, Limits()]), st.integers(0, 999))
def test_a_single_slow_measurement_of_a_group_names_nobody(cluster, limits, seed):
    nodes, bad = cluster
    seen, dice = set(), random.Random(seed)

    def measure(group, _):
        noisy = group not in seen and dice.random() < 0.3
        seen.add(group)
        return SLOW if noisy or bad & {*group} else FAST

    verdict, _ = drive(nodes, limits, measure)

    assert set(verdict.bad) == bad


@settings(max_examples=60)
@given(clusters())
def test_groups_of_a_round_share_no_node(cluster):
    nodes, bad = cluster

    _, rounds = drive(nodes, BASELINE, lambda g, _: SLOW if bad & {*g} else FAST)

    for groups in rounds:
        flat = [node for group in groups for node in group]
        assert len(flat) == len(set(flat))
        assert {*flat} <= {*nodes}


@settings(max_examples=60)
@given(clusters(), st.sampled_from([BASELINE, Limits()]))
def test_a_bad_node_was_slow_beside_two_different_good_ones(cluster, limits):
    nodes, bad = cluster

    verdict, rounds = drive(nodes, limits, lambda g, _: SLOW if bad & {*g} else FAST)

    for node in verdict.bad:
        partners = {a if b == node else b for r in rounds for a, b in _pairs(r) if node in (a, b)}
        assert len(partners - bad) >= 2


def _pairs(groups):
    return [group for group in groups if len(group) == 2]


def test_healthy_nodes_cost_one_round_with_a_baseline():
    verdict, rounds = drive(names(64), BASELINE, lambda *_: FAST)

    assert (verdict.bad, verdict.suspects, verdict.whole_slow) == ([], [], False)
    assert len(rounds) == 1


def test_of_two_nodes_neither_is_named_and_both_are_suspects():
    verdict, _ = drive(names(2), BASELINE, lambda *_: SLOW)

    assert verdict.bad == []
    assert verdict.suspects == names(2)


def test_two_nodes_without_a_baseline_have_nothing_to_be_held_against():
    verdict, _ = drive(names(2), Limits(), lambda *_: SLOW)

    assert (verdict.bad, verdict.suspects, verdict.compared) == ([], [], False)


def test_one_node_that_is_slow_alone_is_named():
    verdict, rounds = drive(names(1), BASELINE, lambda *_: SLOW)

    assert verdict.bad == names(1)
    assert len(rounds) == 2


def test_slow_only_all_together_names_nobody():
    verdict, _ = drive(names(8), BASELINE, lambda g, _: SLOW if len(g) == 8 else FAST)

    assert (verdict.bad, verdict.suspects, verdict.whole_slow) == ([], [], True)


def test_where_everything_is_slow_nobody_is_named():
    verdict, _ = drive(names(6), BASELINE, lambda *_: SLOW)

    assert verdict.bad == []
    assert verdict.suspects == names(6)


def test_where_half_of_the_nodes_seem_bad_nobody_is_named():
    verdict, _ = drive(names(4), Limits(), lambda g, _: SLOW if {"n000", "n003"} & {*g} else FAST)

    assert verdict.bad == []
    assert verdict.suspects == ["n000", "n003"]


@pytest.mark.parametrize(
    ("size", "floor"), [(1, 48.0), (2, 32.0), (4, 30.4), (8, 30.4), (64, 30.4)]
)
def test_a_size_between_two_baselines_is_held_against_the_lower(size, floor):
    assert BASELINE.floor(size) == pytest.approx(floor)


def test_without_a_baseline_a_pair_is_held_against_the_others():
    just_above, just_below = FAST * 0.5 + 1, FAST * 0.5 - 1

    fine, _ = drive(names(6), Limits(), lambda g, _: just_above if "n003" in g else FAST)
    slow, _ = drive(names(6), Limits(), lambda g, _: just_below if "n003" in g else FAST)

    assert fine.bad == []
    assert slow.bad == ["n003"]


@pytest.mark.parametrize(
    ("baseline", "nodes", "yardstick"),
    [({}, 4, False), ({"1": 460.0}, 1, True), ({"1": 460.0}, 4, False), ({"2": 90.0}, 4, True)],
)
def test_what_one_node_does_is_no_yardstick_for_several(baseline, nodes, yardstick):
    """All pairs would be tried at each start, and on two nodes nobody could be named."""
    assert Expected(baseline=baseline).has_yardstick(nodes) == yardstick
    context = SimpleNamespace(nodes=["n"] * nodes)
    node_check = NodeCheck(SimpleNamespace(), SimpleNamespace(settings=Settings()), context, "s")
    if nodes > 1 and not yardstick:
        assert not node_check._tries_collective(Expected(baseline=baseline))
