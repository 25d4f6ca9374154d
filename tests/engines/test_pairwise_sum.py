"""Sums and a norm whose bits depend on the numbers alone."""

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.world import World
from hpctrain.train.engines.exact import LIMBS, PairwiseSum, exact_norm, limbs_of

ALONE = World(0, 0, 1, torch.device("cpu"))
SIZE = 37
COUNTS = st.integers(1, 40)
SEEDS = st.integers(0, 2**31)


def numbers(count, seed):
    """Leaves of so different sizes that any other order gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-4, 5, (count, SIZE), generator=generator)
    return list(torch.randn(count, SIZE, generator=generator) * scale)


def added(leaves):
    counter = PairwiseSum()
    for leaf in leaves:
        counter.push([leaf])
    return counter.total()[0]


def tree(leaves):
    """The tree that `Counter` promises, told in another way."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:half]) + tree(leaves[half:])


@settings(max_examples=60)
@given(count=COUNTS, seed=SEEDS)
def test_the_order_of_additions_is_a_tree_over_the_number_of_leaves_alone(count, seed):
    leaves = numbers(count, seed)

    assert torch.equal(added(leaves), tree(leaves))


@settings(max_examples=60)
@given(count=COUNTS, seed=SEEDS, cuts=st.sets(st.integers(1, SIZE - 1), max_size=6))
def test_it_does_not_matter_how_elements_are_cut_into_shards(count, seed, cuts):
    leaves = numbers(count, seed)
    ends = [0, *sorted(cuts), SIZE]

    shards = [
        added([leaf[first:last] for leaf in leaves]) for first, last in itertools.pairwise(ends)
    ]

    assert torch.equal(torch.cat(shards), added(leaves))


def test_leaves_are_left_as_they_are_and_their_memory_may_be_used_again():
    leaves = numbers(11, 0)
    counter, received = PairwiseSum(), torch.empty(SIZE)

    for leaf in leaves:
        received.copy_(leaf)
        counter.push([received])
        assert torch.equal(received, leaf)

    assert torch.equal(counter.total()[0], tree(leaves))


def test_no_more_partial_sums_are_held_than_the_logarithm_of_the_leaves():
    counter = PairwiseSum()
    for count, leaf in enumerate(numbers(100, 0), start=1):
        counter.push([leaf])
        assert counter.count == count
        assert len(counter._sums) <= math.log2(count) + 1


def test_a_counter_can_be_used_for_the_next_step():
    counter = PairwiseSum()
    for seed in (0, 1):
        for leaf in numbers(5, seed):
            counter.push([leaf])
        assert torch.equal(counter.total()[0], tree(numbers(5, seed)))
        assert counter.count == 0


def test_leaves_of_another_shape_and_no_leaves_are_refused():
    counter = PairwiseSum()
    counter.push([torch.zeros(3)])

    with pytest.raises(ValueError, match=r"leaf 1 has shapes \[\(1,\)\]"):
        counter.push([torch.zeros(1)])
    with pytest.raises(ValueError, match="nothing to add up"):
        PairwiseSum().total()


def norm_of(parts, count=None):
    count = sum(part.numel() for part in parts) if count is None else count
    return exact_norm(parts, count, ALONE, spread=False)


@settings(max_examples=60)
@given(seed=SEEDS, cuts=st.sets(st.integers(1, 1999), max_size=9), scale=st.integers(-30, 30))
def test_a_norm_does_not_depend_on_how_elements_are_spread(seed, cuts, scale):
    generator = torch.Generator().manual_seed(seed)
    wide = 10.0 ** torch.randint(-5, 5, (2000,), generator=generator)
    whole = torch.randn(2000, generator=generator) * wide * 10.0**scale
    ends = [0, *sorted(cuts), 2000]
    parts = [whole[a:b] for a, b in itertools.pairwise(ends)]

    norm = norm_of(parts[::-1])

    assert struct.pack("d", norm) == struct.pack("d", norm_of([whole]))
    assert norm == pytest.approx(math.sqrt(math.fsum(x * x for x in whole.tolist())), rel=1e-12)


def test_squares_are_added_up_without_rounding():
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    shift, bits = 40, 45

    digits = limbs_of(values, shift, bits).tolist()

    parts = [limbs_of(part, shift, bits).tolist() for part in values.split([1, 700, 1299])]
    assert digits == [sum(column) for column in zip(*parts, strict=True)]
    scale = 2 ** (shift + (LIMBS - 1) * bits)
    exact = sum(Fraction(value) ** 2 * scale for value in values.tolist())
    told = sum(digit << bits * place for place, digit in enumerate(reversed(digits)))
    assert 0 <= exact - told < len(values)


def test_a_norm_of_many_elements_is_exact_too():
    one = torch.randn(1000, generator=torch.Generator().manual_seed(0))

    assert norm_of([one], count=10**12) == pytest.approx(float(one.double().norm()), rel=1e-9)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_of_an_overflow_is_infinite(bad):
    assert norm_of([torch.tensor([1.0, bad]), torch.zeros(2)]) == math.inf


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38, -2.0])
def test_a_norm_of_one_number_is_its_size(value):
    number = torch.tensor([value, 0.0])

    assert norm_of([number, torch.zeros(0)]) == abs(float(number[0]))


def test_a_parameter_s_update_does_not_depend_on_where_its_shard_is_cut():
    """What `engines/exact` takes for granted of AdamW, at sizes that leave vectors half full."""
    size, generator = 515, torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator)
    gradients = torch.randn(4, size, generator=generator)

    def trained(ends):
        cuts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        shards = [torch.nn.Parameter(start[cut].clone()) for cut in cuts]
        optimizer = torch.optim.AdamW(shards, lr=1e-2, weight_decay=0.1)
        for gradient in gradients:
            for shard, cut in zip(shards, cuts, strict=True):
                shard.grad = gradient[cut] * 0.337
            optimizer.step()
        return torch.cat([shard.detach() for shard in shards])

    whole = trained([0, size])

    for ends in ([0, 258, size], [0, 172, 344, size], [0, 129, 258, 387, size], [0, 1, 2, 9, size]):
        assert torch.equal(trained(ends), whole)
