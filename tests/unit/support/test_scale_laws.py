"""The laws of benchmarks/scale: they grow, and say what was counted where it was counted."""

from __future__ import annotations

import pytest

from benchmarks.scale import model

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


def test_samples_of_a_month_stay_small_whatever_the_ranks():
    assert all(model.samples_bytes(ranks) < 120e6 for ranks in RANKS)


def test_a_save_is_one_operation_for_each_rank_more():
    more = model.save_operations(16384, GIVEN) - model.save_operations(8192, GIVEN)

    assert 1 <= more / 8192 <= 1.01


def test_looks_before_the_rename_and_at_what_is_chosen_are_far_below_their_goals():
    assert model.looks_of_commit_s(16384, GIVEN, shared=True) < 0.1
    assert model.looks_of_choice_s(16384, GIVEN, shared=True) < 1
