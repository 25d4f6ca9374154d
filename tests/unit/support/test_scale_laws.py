"""The laws of benchmarks/scale: they grow, and say what was counted where it was counted."""

from __future__ import annotations

import pytest

from benchmarks.scale import model
from hpctrain.runtime.telemetry import sample_every_s

RANKS = (64, 256, 1024, 4096, 16384)
GIVEN = model.constants()
LAWS = (
    model.agreement_s,
    model.start_operations,
    model.import_operations,
    model.save_operations,
    model.resume_operations,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_more_ranks_never_cost_less(law):
    values = [law(ranks, GIVEN) for ranks in RANKS]

    assert values == sorted(values)


@pytest.mark.parametrize(
    ("nodes", "levels"), [(1, 0), (2, 1), (33, 1), (34, 2), (1057, 2), (2048, 3)]
)
def test_the_depth_of_a_tree_with_32_children_each(nodes, levels):
    assert model.depth(nodes) == levels


def test_a_stop_is_agreed_on_within_a_second_at_16384_ranks():
    assert model.agreement_s(16384, GIVEN) < 1


@pytest.mark.parametrize("days", [1, 7, 30])
@pytest.mark.parametrize("ranks", [1, 8, *RANKS, 8192])
def test_samples_of_a_month_keep_their_budget_whatever_the_ranks(ranks, days):
    """And are not so few that nothing is known: half of what the budget allows is used."""
    written = model.samples_bytes(ranks, days)

    assert written < 22e6
    assert written > 8e6 or days < 30 or ranks < 64


@pytest.mark.parametrize("ranks", [64, 16384])
def test_a_young_run_is_sampled_more_often_than_an_old_one(ranks):
    minute, day = (sample_every_s(age, 5.0, ranks) for age in (60.0, 86400.0))

    assert minute < 120
    assert day > 2 * minute


def test_a_save_is_one_operation_for_each_rank_more():
    more = model.save_operations(16384, GIVEN) - model.save_operations(8192, GIVEN)

    assert 1 <= more / 8192 <= 1.01


def test_looks_before_the_rename_and_at_what_is_chosen_are_far_below_their_goals():
    assert model.looks_of_commit_s(16384, GIVEN, shared=True) < 0.1
    assert model.looks_of_choice_s(16384, GIVEN, shared=True) < 1
