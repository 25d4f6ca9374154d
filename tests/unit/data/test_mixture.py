"""A mixture takes of each dataset its share, and of each its own samples once per its epoch."""

import json
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.base.mesh import MicrobatchRules
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.data.loader import BatchRules, DataPlace, Loader
from hpctrain.train.data.order import BLOCK, Mixture, MixtureOrder

SIZES = [50, 700, 3000]
WEIGHTS = [0.2, 0.5, 0.3]
WEIGHTS_ST = st.lists(st.floats(0.001, 100), min_size=1, max_size=5)
GOLDEN = [372, 1558, 47, 13, 1241, 2924, 394, 23]


def named(sizes=SIZES):
    """Samples that say whose they are."""
    return [[(name, n) for n in range(size)] for name, size in zip("abcde", sizes, strict=False)]


def draw(mixture, count, seed=7):
    return [mixture[index] for index in mixture.sample_order(seed).take(range(count))]


def assert_each_once_per_epoch(samples, sizes):
    """Of each dataset: every epoch of its own has each of its samples once, in whatever order."""
    for name, size in zip("abcde", sizes, strict=False):
        own = [n for whose, n in samples if whose == name]
        for first in range(0, len(own), size):
            epoch = own[first : first + size]
            assert len(set(epoch)) == len(epoch)


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=5, max_size=5),
    weights=WEIGHTS_ST,
    seed=st.none() | st.integers(0, 2**64 - 1),
)
def test_each_datasets_samples_are_used_once_per_its_own_epoch(sizes, weights, seed):
    sizes = sizes[: len(weights)]

    samples = draw(Mixture(named(sizes), weights), 12_000, seed)

    assert_each_once_per_epoch(samples, sizes)


def test_every_block_has_the_share_that_the_weights_say():
    samples = draw(Mixture(named(), WEIGHTS), 3 * BLOCK)

    for block in range(3):
        count = Counter(name for name, _ in samples[block * BLOCK : (block + 1) * BLOCK])
        assert count == {"a": 2000, "b": 5000, "c": 3000}


def test_datasets_are_mixed_and_not_one_after_the_other():
    samples = draw(Mixture(named([500, 500]), [1, 1]), 1000)

    changes = sum(before[0] != after[0] for before, after in pairwise(samples))
    assert 400 < changes < 600


@settings(max_examples=25)
@given(positions=st.lists(st.integers(0, 10**12), max_size=80), weights=WEIGHTS_ST)
def test_a_position_alone_says_the_sample(positions, weights):
    sizes = [11, 200, 3, 4000, 1][: len(weights)]
    order = Mixture(named(sizes), weights).sample_order(3)

    assert order.take(positions) == [order.take([position])[0] for position in positions]


def test_the_order_is_the_same_in_every_version_of_hpctrain():
    # Runs on disk depend on these numbers: never change them.
    assert Mixture(named(), WEIGHTS).sample_order(1234).take(range(9_996, 10_004)) == GOLDEN


def test_without_a_seed_each_dataset_keeps_its_own_order():
    samples = draw(Mixture(named(), WEIGHTS), 100, seed=None)

    for name in "abc":
        own = [n for whose, n in samples if whose == name]
        assert own == list(range(len(own)))


def test_a_weight_of_nothing_leaves_a_dataset_out_and_a_tiny_one_does_not():
    samples = draw(Mixture(named([5, 0, 9]), [1e-9, 0, 1e9]), 2 * BLOCK)

    assert Counter(name for name, _ in samples) == {"a": 2, "c": 2 * BLOCK - 2}


@settings(max_examples=100)
@given(weights=st.lists(st.floats(0, 1e308), min_size=1, max_size=40))
def test_shares_always_fill_a_block(weights):
    if not any(weights):
        return
    order = Mixture([[0]] * len(weights), weights).sample_order(1)

    quotas = order.state_dict()["weights"]
    assert sum(quotas) == BLOCK
    assert [quota > 0 for quota in quotas] == [weight > 0 for weight in weights]


# ---- in a loader, through stops


def loader(mixture, rank, ranks, global_batch):
    return Loader(
        mixture,
        BatchRules(global_batch, seed=7),
        {"collate_fn": list},
        place=lambda: DataPlace(rank, ranks, MicrobatchRules()),
        watch=nullcontext(),
    )


def live(lives, sizes):
    """What is used through so many lives: (weights, ranks, steps, global batch) of each."""
    state, samples = None, []
    for weights, ranks, steps, global_batch in lives:
        loaders = [
            loader(Mixture(named(sizes), weights), rank, ranks, global_batch)
            for rank in range(ranks)
        ]
        for each in loaders:
            if state is not None:
                each.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            for each in loaders:
                batch = next(each)
                samples += batch if each.weight else []
        states = [each.state_dict() for each in loaders]
        assert states == [states[0]] * ranks
        state = states[0]
    return samples


STOPS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(4, 30)), min_size=1, max_size=5
)


@settings(max_examples=25)
@given(stops=STOPS)
def test_any_stops_and_ranks_use_the_same_samples_in_the_same_order(stops):
    samples = live([(WEIGHTS, *stop) for stop in stops], [20, 31, 64])

    assert samples == draw(Mixture(named([20, 31, 64]), WEIGHTS), len(samples))


@settings(max_examples=25)
@given(stops=STOPS, weights=st.lists(st.tuples(*[st.floats(0.05, 1)] * 3), min_size=5, max_size=5))
def test_weights_that_change_at_a_stop_skip_and_repeat_nothing(stops, weights):
    sizes = [20, 31, 64]
    lives = [(own, *stop) for own, stop in zip(weights, stops, strict=False)]

    assert_each_once_per_epoch(live(lives, sizes), sizes)


def test_weights_that_have_changed_once_count_from_there_on_through_later_stops():
    lives = [([1, 1], 1, 3, 8), ([1, 3], 2, 5, 8), ([1, 3], 1, 9, 8)]

    once = [*lives[:1], ([1, 3], 1, 14, 8)]
    assert live(lives, [40, 40]) == live(once, [40, 40])


def test_weights_that_change_at_a_stop_are_told(caplog):
    live([([1, 1], 2, 3, 8)] * 2, [40, 40])
    assert not caplog.text

    samples = live([([1, 1], 1, 3, 8), ([1, 3], 1, 1000, 8)], [40, 40])

    assert (
        "(in ten-thousandths [5000, 5000], now [2500, 7500]); the new ones count from sample 24"
        in (caplog.text)
    )
    share = Counter(name for name, _ in samples[24:])
    assert share["b"] / share["a"] == pytest.approx(3, rel=0.1)


# ---- what is refused


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ([1, 1], "a mixture of 3 datasets has 2 weights"),
        ([1, -1, 1], "0 or more each"),
        ([0, 0, 0], "one above 0"),
        ([1, float("nan"), 1], "0 or more each"),
        ([1, float("inf"), 1], "0 or more each"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, why):
    with pytest.raises(UsageError, match=why):
        Mixture(named(), weights)


def test_a_dataset_without_samples_cannot_have_a_weight():
    with pytest.raises(UsageError, match="dataset 1 of a mixture has no samples, and weight 1"):
        Mixture(named([3, 0]), [1, 1])


def test_other_datasets_are_refused():
    state = MixtureOrder([3, 4], [5000, 5000], 1).state_dict()

    with pytest.raises(CheckpointError, match=r"mixes datasets of \[3, 4\] samples, this run of"):
        MixtureOrder([4, 3], [5000, 5000], 1).load_state_dict(state, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"since": -1}, {"since": True}, {"sizes": None}, {"weights": [1.5, 2]}, {"drawn": [0]},
        {"weights": [1, 2]}, {"since": 6},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(change):
    order = MixtureOrder([3, 4], [5000, 5000], 1)

    with pytest.raises(CheckpointError, match="resume from another checkpoint"):
        order.load_state_dict({**order.state_dict(), **change}, 5)


def test_the_state_of_a_single_dataset_is_refused():
    with pytest.raises(CheckpointError, match="not that of a mixture"):
        MixtureOrder([3, 4], [5000, 5000], 1).load_state_dict(None, 5)


def test_samples_outside_are_no_samples():
    mixture = Mixture(named(), WEIGHTS)

    for index in (-1, len(mixture)):
        with pytest.raises(IndexError, match=f"sample {index} is not one of 3750"):
            mixture[index]
