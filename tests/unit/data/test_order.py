"""Every sample once per epoch, in an order that never changes between versions."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.train.data.order import FileOrder, SampleOrder

SEEDS = st.integers(0, 2**64 - 1)
GOLDEN_10 = [2, 7, 5, 0, 8, 3, 4, 1, 6, 9, 9, 2, 5, 0, 3, 7, 8, 4, 6, 1]
GOLDEN_1000 = [976, 422, 961, 62, 425, 74, 806, 685, 576, 397]
GOLDEN_HUGE = [109021029132, 584468392128, 886606540841]
AROUND_POWERS = [2**k + d for k in range(1, 13) for d in (-1, 0, 1)]


@pytest.mark.parametrize("size", sorted({1, 2, 3, 1000, *AROUND_POWERS}))
def test_each_epoch_has_every_sample_once(size):
    order = SampleOrder(size, seed=5)

    for epoch in range(3):
        drawn = order.indices(epoch * size, (epoch + 1) * size)
        assert sorted(drawn) == list(range(size))


@settings(max_examples=50)
@given(size=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_any_epoch_of_any_order_has_every_sample_once(size, seed, epoch):
    order = SampleOrder(size, seed)

    drawn = order.indices(epoch * size, (epoch + 1) * size)

    assert sorted(drawn) == list(range(size))


@settings(max_examples=50)
@given(size=st.integers(2**32, 2**60), seed=SEEDS, data=st.data())
def test_a_huge_data_set_needs_no_memory_and_repeats_nothing(size, seed, data):
    order = SampleOrder(size, seed)
    first = data.draw(st.integers(0, size - 500))

    drawn = order.indices(first, first + 500)

    assert len(set(drawn)) == 500
    assert all(0 <= index < size for index in drawn)


def test_the_order_is_the_same_in_every_version_of_hpctrain():
    # Runs on disk depend on these numbers: never change them.
    assert SampleOrder(10, seed=1234).indices(0, 20) == GOLDEN_10
    assert SampleOrder(1000, seed=0).indices(995, 1005) == GOLDEN_1000
    assert SampleOrder(10**12, seed=2**63).indices(10**15, 10**15 + 3) == GOLDEN_HUGE


@settings(max_examples=100)
@given(
    size=st.integers(1, 2**61),
    seed=SEEDS,
    first=st.integers(0, 2**62),
    count=st.integers(0, 130),
    stride=st.integers(1, 5),
)
def test_many_at_once_are_the_same_as_each_alone(size, seed, first, count, stride):
    order = SampleOrder(size, seed)
    positions = range(first, first + count * stride, stride)

    assert order.take(positions) == [order.index(position) for position in positions]


@pytest.mark.parametrize("size", [5, 257, 20_000, 2**24, 2**24 + 1])
def test_rounds_that_are_looked_up_are_those_that_are_worked_out(size):
    order = SampleOrder(size, 7)
    positions = range(max(0, 3 * size - 70), 3 * size + 70)

    assert order.take(positions) == [order.index(position) for position in positions]


def test_positions_before_the_first_are_refused_however_many_there_are():
    for count in (1, 100):
        with pytest.raises(IndexError, match="position -1 is before"):
            SampleOrder(10, seed=1).take([-1] * count)


def test_an_order_that_is_not_shuffled_is_the_datasets_own():
    assert FileOrder(3).take(range(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_have_orders_of_their_own():
    size = 200
    orders = [
        tuple(SampleOrder(size, seed).indices(epoch * size, (epoch + 1) * size))
        for seed in range(10)
        for epoch in range(10)
    ]

    assert len(set(orders)) == 100
    # Chance alone leaves about one of 200 samples in its place between two orders.
    same_place = [
        sum(a == b for a, b in zip(one, other, strict=True)) for one, other in pairwise(orders)
    ]
    assert sum(same_place) / len(same_place) < 2
    assert max(same_place) < 10


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_small_data_set_is_as_likely_as_any_other(size):
    draws = 6000

    counts = Counter(tuple(SampleOrder(size, seed).indices(0, size)) for seed in range(draws))

    every = list(permutations(range(size)))
    expected = draws / len(every)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in every)
    freedom = len(every) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("size", [1000, 1024, 1025, 70_000])
def test_a_sample_is_as_likely_in_one_part_of_the_epoch_as_in_another(size):
    cells, draws = 8, 20_000
    order = SampleOrder(size, seed=11)
    counts: Counter[tuple[int, int]] = Counter()

    epochs = -(-draws // min(size, draws))
    for epoch in range(epochs):
        for place in range(0, size, max(1, size * epochs // draws)):
            index = order.index(epoch * size + place)
            counts[place * cells // size, index * cells // size] += 1

    expected = sum(counts.values()) / cells**2
    cell_pairs = [(a, b) for a in range(cells) for b in range(cells)]
    chi_square = sum((counts[pair] - expected) ** 2 / expected for pair in cell_pairs)
    freedom = cells**2 - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_in_the_data_are_not_neighbours_in_the_order():
    size = 5000
    drawn = SampleOrder(size, seed=3).indices(0, size)

    steps = [abs(b - a) for a, b in pairwise(drawn)]

    # A random order moves by a third of the data on average, and rarely by one.
    assert abs(sum(steps) / len(steps) - size / 3) < size * 0.02
    assert steps.count(1) < 10


def test_any_part_can_be_asked_for_alone():
    whole = SampleOrder(37, seed=9).indices(0, 200)

    assert [SampleOrder(37, seed=9).index(position) for position in range(200)] == whole
    assert SampleOrder(37, seed=9).indices(61, 140) == whole[61:140]


@pytest.mark.parametrize("size", [0, -1])
def test_an_order_of_nothing_is_refused(size):
    with pytest.raises(ValueError, match=str(size)):
        SampleOrder(size, seed=0)


def test_a_position_before_the_first_is_refused():
    with pytest.raises(IndexError, match="-1"):
        SampleOrder(10, seed=0).index(-1)


def test_orders_and_batches_need_neither_torch_nor_numpy():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import hpctrain.train.data.batches, hpctrain.train.data.order\n"
        "import hpctrain.train.data.tokens\n"
        "import hpctrain.recipes.lm.corpus"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
