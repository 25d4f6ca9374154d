"""Exactly once, and in step: the arithmetic of a step at any world size."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.base.mesh import MicrobatchRules, plan_micro_batches
from hpctrain.errors import CheckpointError
from hpctrain.train.data.batches import GlobalBatches, cut_step, pieces, rank_positions
from hpctrain.train.data.order import SampleOrder

WORLDS = range(1, 18)
BATCHES = st.integers(1, 67)


def walk(world_size, *, consumed=0, seed=7, size=101, global_batch=24, micro_batch=0):
    order = SampleOrder(size, seed)
    return [
        GlobalBatches(order, global_batch, rank, world_size, micro_batch, consumed=consumed)
        for rank in range(world_size)
    ]


def take(ranks, steps):
    """The samples of each step in the order of the global positions."""
    return [[i for batches in ranks for i in batches.next_step().consumed] for _ in range(steps)]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("micro_batch", [0, 1, 3])
@settings(max_examples=10)
@given(global_batch=BATCHES, first=st.integers(0, 10**15))
def test_all_ranks_and_pieces_take_each_position_once(world_size, micro_batch, global_batch, first):
    plan = plan_micro_batches(global_batch, world_size, micro_batch)

    taken = [
        position
        for rank in range(world_size)
        for piece in pieces(
            rank_positions(first, global_batch, rank, world_size), plan.micro_batches
        )
        for position in piece
    ]

    assert taken == list(range(first, first + global_batch))


@pytest.mark.parametrize("world_size", WORLDS)
@settings(max_examples=20)
@given(global_batch=BATCHES, micro_batch=st.integers(0, 9))
def test_every_rank_runs_the_same_number_of_passes(world_size, global_batch, micro_batch):
    plan = plan_micro_batches(global_batch, world_size, micro_batch)

    steps = [
        cut_step(range(global_batch), rank, world_size, micro_batch, index=lambda p: p)
        for rank in range(world_size)
    ]

    assert {len(step.pieces) for step in steps} == {plan.micro_batches}
    sizes = [len(piece.indices) for step in steps for piece in step.pieces]
    assert min(sizes) >= 1
    assert max(sizes) == plan.largest_piece
    assert not micro_batch or plan.largest_piece <= micro_batch
    weights = [weight for step in steps for piece in step.pieces for weight in piece.weights]
    assert weights.count(1.0) == global_batch
    assert weights.count(0.0) == len(weights) - global_batch


ASKED = st.builds(
    MicrobatchRules,
    equal=st.booleans(),
    at_least=st.integers(1, 9),
    multiple_of=st.integers(1, 5),
    leaves=st.booleans(),
)


@settings(max_examples=300)
@given(
    asked=ASKED,
    world_size=st.integers(1, 17),
    micro_batch=st.integers(1, 9),
    first=st.integers(0, 10**15),
    global_batch=BATCHES,
)
def test_whatever_an_engine_asks_each_position_is_taken_once_in_equally_many_passes(
    asked, world_size, micro_batch, first, global_batch
):
    plan = plan_micro_batches(global_batch, world_size, micro_batch, asked)

    steps = cut(range(first, first + global_batch), world_size, micro_batch, asked)

    assert {len(step.pieces) for step in steps} == {plan.micro_batches}
    assert plan.micro_batches >= asked.at_least
    assert plan.micro_batches % asked.multiple_of == 0
    taken = [position for step in steps for position in step.consumed]
    assert sorted(taken) == list(range(first, first + global_batch))
    all_pieces = [piece for step in steps for piece in step.pieces]
    assert all(len(piece.indices) == len(piece.weights) >= 1 for piece in all_pieces)
    assert max(len(piece.indices) for piece in all_pieces) == plan.largest_piece <= micro_batch
    if asked.equal:
        assert {len(piece.indices) for piece in all_pieces} == {plan.largest_piece}


@settings(max_examples=200)
@given(
    equal=st.booleans(),
    world_size=st.integers(1, 17),
    micro_batch=st.integers(1, 9),
    global_batch=BATCHES,
)
def test_leaves_are_the_same_samples_at_any_world_size(
    equal, world_size, micro_batch, global_batch
):
    asked = MicrobatchRules(leaves=True, equal=equal)
    (alone,) = cut(range(100, 100 + global_batch), 1, micro_batch, asked)

    steps = cut(range(100, 100 + global_batch), world_size, micro_batch, asked)

    assert [piece.leaf for piece in alone.pieces] == list(range(len(alone.pieces)))
    in_order = [
        piece for round_ in zip(*(step.pieces for step in steps), strict=True) for piece in round_
    ]
    assert in_order[: len(alone.pieces)] == alone.pieces
    spare = in_order[len(alone.pieces) :]
    assert len(spare) < world_size
    assert all(piece.leaf is None and not any(piece.weights) for piece in spare)
    assert {len(piece.indices) for piece in spare} <= {len(alone.pieces[0].indices)}


def test_the_last_leaf_may_be_smaller_and_ranks_without_one_run_a_spare_pass():
    steps = cut(range(10, 17), 3, 2, MicrobatchRules(leaves=True))

    assert [[(p.leaf, p.indices, p.weights) for p in step.pieces] for step in steps] == [
        [(0, [10, 11], [1.0, 1.0]), (3, [16], [1.0])],
        [(1, [12, 13], [1.0, 1.0]), (None, [10, 10], [0.0, 0.0])],
        [(2, [14, 15], [1.0, 1.0]), (None, [10, 10], [0.0, 0.0])],
    ]


def test_a_walk_cuts_its_steps_as_its_engine_asks():
    order = SampleOrder(101, 7)
    asked = MicrobatchRules(leaves=True)
    walk = GlobalBatches(order, 6, 1, 2, 2, passes=asked)

    walk.next_step()

    assert walk.next_step() == cut_step(range(6, 12), 1, 2, 2, index=order.index, passes=asked)


def cut(positions, world_size, micro_batch, passes):
    return [
        cut_step(positions, rank, world_size, micro_batch, index=lambda p: p, passes=passes)
        for rank in range(world_size)
    ]


def test_a_rank_without_samples_repeats_one_that_does_not_count():
    step = cut_step(range(100, 102), rank=2, world_size=3, micro_batch=0, index=lambda p: p + 1000)

    assert (step.first, step.last) == (100, 102)
    assert [(piece.indices, piece.weights) for piece in step.pieces] == [([1100], [0.0])]
    assert step.consumed == []


def test_a_rank_with_fewer_samples_than_passes_fills_up_with_passes_that_do_not_count():
    step = cut_step(range(7), rank=1, world_size=2, micro_batch=1, index=lambda p: p)

    assert [piece.indices for piece in step.pieces] == [[4], [5], [6], [0]]
    assert [piece.weights for piece in step.pieces] == [[1.0], [1.0], [1.0], [0.0]]
    assert step.consumed == [4, 5, 6]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("micro_batch", [0, 1, 5])
def test_the_world_size_does_not_change_which_samples_a_step_takes(world_size, micro_batch):
    alone = take(walk(1), 12)

    together = take(walk(world_size, micro_batch=micro_batch), 12)

    assert together == alone


@settings(max_examples=40)
@given(
    legs=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(0, 5), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    )
)
def test_no_change_of_world_or_batch_skips_or_repeats_a_sample(legs):
    order = SampleOrder(size=53, seed=2)
    state = None
    seen = []

    for world_size, global_batch, micro_batch, steps in legs:
        ranks = [
            GlobalBatches(order, global_batch, rank, world_size, micro_batch)
            for rank in range(world_size)
        ]
        for batches in ranks:
            if state is not None:
                batches.load_state_dict(state)
        seen += [index for step in take(ranks, steps) for index in step]
        states = [json.dumps(batches.state_dict()) for batches in ranks]
        assert len(set(states)) == 1
        state = json.loads(states[0])

    assert seen == order.indices(0, len(seen))
    assert state["samples_consumed"] == len(seen)


def test_a_step_may_reach_into_the_next_epoch():
    (batches,) = walk(1, size=10, global_batch=6)

    steps = [batches.next_step() for _ in range(5)]

    assert [(step.first, step.last) for step in steps] == [(n * 6, n * 6 + 6) for n in range(5)]
    drawn = [index for step in steps for index in step.consumed]
    assert [sorted(drawn[n : n + 10]) for n in (0, 10, 20)] == [list(range(10))] * 3


def test_a_walk_can_begin_anywhere():
    assert take(walk(3, consumed=240), 2) == take(walk(5), 12)[10:]


def test_the_state_is_one_number_and_what_makes_it_meaningful():
    (batches,) = walk(1)
    batches.next_step()

    assert batches.state_dict() == {
        "samples_consumed": 24,
        "seed": 7,
        "size": 101,
        "global_batch": 24,
    }


@pytest.mark.parametrize(("changed", "found"), [({"seed": 8}, "seed 7.* 8"), ({"size": 99}, "99")])
def test_a_state_of_another_order_is_refused(changed, found):
    (saved,) = walk(1)
    saved.next_step()
    (other,) = walk(1, **changed)

    with pytest.raises(CheckpointError, match=found):
        other.load_state_dict(saved.state_dict())

    assert other.consumed == 0


@pytest.mark.parametrize("consumed", [None, -1, "24", 24.0, True])
def test_a_state_without_a_count_of_samples_is_refused(consumed):
    (batches,) = walk(1)
    state = batches.state_dict() | {"samples_consumed": consumed}

    with pytest.raises(CheckpointError, match="samples_consumed"):
        batches.load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: rank_positions(0, 4, 4, 4), "rank 4"),
        (lambda: rank_positions(0, 4, -1, 4), "rank -1"),
    ],
)
def test_impossible_numbers_are_refused(call, found):
    with pytest.raises(ValueError, match=found):
        call()
