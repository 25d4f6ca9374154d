"""A sample is repeatable, keeps order and both ends, and differs from commit to commit."""

from __future__ import annotations

import pytest

from tests.support import sampling


@pytest.fixture
def seeded(monkeypatch):
    def set_seed(value):
        monkeypatch.setenv("HPCTRAIN_SEED", value)
        sampling.seed.cache_clear()

    yield set_seed
    sampling.seed.cache_clear()


def test_a_sample_is_repeatable_and_keeps_order_and_both_ends(seeded):
    seeded("a")
    drawn = sampling.sample(range(1000), 20)

    assert drawn == sampling.sample(range(1000), 20)
    assert len(set(drawn)) == 20
    assert drawn == sorted(drawn)
    assert (drawn[0], drawn[-1]) == (0, 999)


def test_another_seed_draws_other_places(seeded):
    seeded("a")
    first = sampling.sample(range(1000), 20)
    seeded("b")

    assert sampling.sample(range(1000), 20) != first


def test_without_a_limit_all_are_taken():
    assert sampling.sample(range(1000), None) == list(range(1000))
    assert sampling.sample(range(20), 20) == list(range(20))


def test_some_values_run_and_the_others_are_marked_for_soak(seeded):
    for name in "abcdef":
        seeded(name)
        params = sampling.some(["w", "x", ("y", 2), "z"], 1)

        assert [param.values for param in params] == [("w",), ("x",), ("y", 2), ("z",)]
        assert sum(not param.marks for param in params) == 1
        assert sum(["soak" in [mark.name for mark in param.marks] for param in params]) == 3


def test_in_turn_each_value_runs(seeded):
    ran = set()
    for number in range(60):
        seeded(f"commit {number}")
        ran |= {p.values for p in sampling.some(["w", "x", "y", "z"], 1) if not p.marks}

    assert len(ran) == 4
