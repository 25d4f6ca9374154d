"""The laws of benchmarks/scale: they grow, and say what was counted where it was counted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.scale import laws, model, points
from hpctrain.train.runtime.telemetry import sample_every_s

RANKS = (64, 256, 1024, 4096, 16384)
GIVEN = model.constants()
SIZES = {"agreement": 512, "nodes": 1000, "meeting": 2000, "checkpoint": 16384}
LAWS = (
    model.start_operations,
    model.import_operations,
    model.save_operations,
    model.resume_operations,
    laws.commit_s,
    laws.restore_s,
    laws.start_s,
)


@dataclass(frozen=True)
class Met:
    agents: int
    meet_s: float


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_more_ranks_never_cost_less(law):
    values = [law(ranks, GIVEN) for ranks in RANKS]

    assert values == sorted(values)


@pytest.mark.parametrize(
    ("nodes", "levels"), [(1, 0), (2, 1), (33, 1), (34, 2), (1057, 2), (2048, 3)]
)
def test_the_depth_of_a_tree_with_32_children_each(nodes, levels):
    assert model.depth(nodes) == levels


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


@pytest.mark.parametrize("anchor", laws.ANCHORS, ids=lambda anchor: f"{anchor.of} {anchor.field}")
def test_a_law_passes_through_the_points_that_were_run(anchor):
    known = points.points(anchor.of)
    free = [point for point in known if not anchor.is_bound(point)]
    busy = [point for point in known if anchor.is_bound(point)]

    assert len(free) >= 2
    for point in free:
        off = point[anchor.field] / anchor.law(point, GIVEN)
        assert 1 / anchor.within <= off <= anchor.within, point
    for point in busy if anchor.field.endswith("_s") else ():  # who is kept waiting computes less
        assert anchor.law(point, GIVEN) <= anchor.within * point[anchor.field], point


def test_the_points_reach_the_sizes_that_run_here():
    largest = {of: max(map(laws.processes, points.points(of))) for of in SIZES}

    assert largest == SIZES


def test_a_point_is_written_down_once_and_the_words_above_it_stay(tmp_path, monkeypatch):
    file = tmp_path / "constants.toml"
    file.write_text("# told by people\n[measured]\nhop_s = 1.0\n")
    monkeypatch.setattr(points, "FILE", file)

    points.record("meeting", Met(agents=64, meet_s=0.5))
    points.record("meeting", Met(agents=500, meet_s=1.0))
    points.record("meeting", Met(agents=64, meet_s=0.123456))

    assert file.read_text().startswith("# told by people\n[measured]\nhop_s = 1.0\n")
    told = [(point["agents"], point["meet_s"]) for point in points.points("meeting")]
    assert told == [(64, 0.123), (500, 1.0)]


def test_a_stop_is_told_a_commit_is_done_and_a_choice_is_made_in_time_at_16384_ranks():
    assert laws.notice_s(model.depth(2048), GIVEN) < 1
    assert laws.commit_s(16384, GIVEN) < 3
    assert laws.choose_s(16384, GIVEN) + laws.tell_s(16384, GIVEN) < 2
