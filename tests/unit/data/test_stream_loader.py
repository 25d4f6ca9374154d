"""A loader over an iterable dataset: what a batch is, what its state holds, what is refused."""

import json
from contextlib import nullcontext

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.core.base.mesh import ANY_PASSES, MicrobatchRules
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
from hpctrain.train.data.loader import DataPlace
from hpctrain.train.data.readers import Source
from hpctrain.train.data.stream_loader import (
    StreamLoader,
    StreamRules,
    default_readers,
)
from tests.unit.data.test_readers import Count, Stateless, stream


def four(reader, _readers):
    """Readers of 5, 7, 9 and 11 numbers."""
    return Tens(reader)


class Tens(Count):
    def __init__(self, reader):
        super().__init__(5 + 2 * reader)
        self.reader = reader

    def __iter__(self):
        for number in super().__iter__():
            yield 100 * self.reader + number


ALL = [100 * reader + number for reader in range(4) for number in range(5 + 2 * reader)]


def alone(rank=0, ranks=1, passes=ANY_PASSES, others=(), lines=None):
    """One rank, and what the others would say: numbers, and lines of what went wrong."""

    def gather(value):
        other = lines if lines is not None else [None] * len(others)
        return [value, *(others if isinstance(value, list) else other)]

    return {"place": lambda: DataPlace(rank, ranks, passes), "gather": gather}


def make(dataset=four, *, ranks=None, options=None, **rules):
    return StreamLoader(
        dataset,
        StreamRules(**{"global_batch": 6, "readers": 4, **rules}),
        options or {},
        **(ranks or alone()),
        watch=nullcontext(),
    )


def numbers(batches):
    return [number for batch in batches for number in batch.tolist()]


# ---- batches and epochs


def test_the_next_sample_is_of_the_reader_that_has_given_the_fewest():
    assert next(make()).tolist() == [0, 100, 200, 300, 1, 101]


def test_an_epoch_has_each_sample_once_and_the_next_one_follows():
    loader = make()

    first = list(loader)

    assert sorted(numbers(first)) == ALL
    assert [len(batch) for batch in first] == [6, 6, 6, 6, 6, 2]
    assert (loader.epoch, loader.consumed) == (1, 32)
    assert sorted(numbers(loader)) == ALL
    assert sorted(numbers(next(loader) for _ in range(6))) == ALL
    assert loader.consumed == 96


def test_drop_last_ends_the_epoch_with_its_last_whole_batch():
    loader = make(drop_last=True)

    assert [len(batch) for batch in loader] == [6] * 5
    assert (loader.epoch, loader.consumed) == (1, 30)
    assert len(list(loader)) == 5


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(0, 6), max_size=6), batch=st.integers(1, 9))
def test_any_stops_use_the_samples_that_no_stop_would_have_used(stops, batch):
    state, used = None, []
    for steps in [*stops, 3]:
        loader = make(global_batch=batch)
        if state is not None:
            loader.load_state_dict(state)
        used += numbers(next(loader) for _ in range(steps))
        state = json.loads(json.dumps(loader.state_dict()))

    undisturbed = make(global_batch=batch)
    assert used == numbers(next(undisturbed) for _ in range(sum(stops) + 3))


@pytest.mark.parametrize("workers", [1, 2])
def test_what_workers_have_read_ahead_is_read_again(workers):
    loader = make(options={"workers": workers})
    used = numbers([next(loader), next(loader)])
    state = loader.state_dict()
    loader.close()
    again = make(options={"workers": workers})
    again.load_state_dict(state)

    assert sorted(used + numbers(again)) == ALL
    assert state["samples_consumed"] == 12


def test_micro_batches_have_the_shape_of_a_full_batch_where_the_engine_asks():
    place = alone(passes=MicrobatchRules(equal=True, multiple_of=2))
    loader = make(ranks=place, global_batch=6, micro_batch=2)

    cut = list(loader)

    assert {len(pieces) for pieces in cut} == {4}
    assert {len(piece) for pieces in cut for piece in pieces} == {2}
    assert sum(sum(piece.weights) for piece in loader.taken.pieces) == 2
    assert loader.consumed == 32


# ---- other ranks


def test_a_rank_without_a_sample_gets_one_of_weight_0_while_others_have_some():
    loader = make(lambda _reader, _readers: Count(0), ranks=alone(0, 2, others=[[1, 3]]))
    loader._source = Source(four)  # it finds nothing in its own, and something elsewhere
    loader._is_dry = True

    batch = next(loader)

    assert batch.tolist() == [0]
    assert (loader.weight, loader.consumed) == (0.0, 3)


def test_the_error_of_another_rank_is_raised_here():
    ranks = alone(0, 2, others=[[1, -1]], lines=["OSError: stale"])
    loader = make(ranks=ranks)

    with pytest.raises(HpctrainError, match="rank 1 could not read its batch: OSError: stale"):
        next(loader)
    assert loader.consumed == 0


def test_ranks_that_should_read_the_same_and_do_not_are_told():
    loader = make(ranks=alone(0, 1, others=[[0, 5]]))

    with pytest.raises(HpctrainError, match=r"along tp and pp\) have read differently"):
        next(loader)


# ---- what is refused


class Broken(Count):
    def load_state_dict(self, state):
        raise ValueError("\nof another version")


def test_a_readers_refusal_is_one_line_from_a_worker_too():
    state = make().state_dict()
    state["readers"] = [[2, False, {"at": 2}]] * 4
    state["samples_consumed"] = 8
    loader = make(lambda _reader, _readers: Broken(), options={"workers": 1})
    loader.load_state_dict(state)

    with pytest.raises(CheckpointError, match="cannot go on from its state") as refused:
        next(loader)
    assert "\n" not in str(refused.value)


def test_readers_without_samples_are_refused():
    with pytest.raises(UsageError, match="4 readers together have 0 samples"):
        next(make(lambda _reader, _readers: Count(0)))
    with pytest.raises(UsageError, match=r"4 samples for a batch of 6: .*drop_last=False"):
        next(make(lambda _reader, _readers: Count(1), drop_last=True))


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"global_batch": "8"}, "run.stream_loader: global_batch='8' is not a number of samples"),
        ({"global_batch": 8.0}, "global_batch=8.0 is not"),
        ({"global_batch": True}, "global_batch=True is not"),
        ({"micro_batch": -1}, "micro_batch=-1 is not"),
        ({"readers": 0}, "readers=0 is not a number of readers"),
        ({"readers": "3"}, "readers='3' is not"),
        ({"options": {"num_workers": 3}}, "run.stream_loader: num_workers is not an option"),
        ({"dataset": lambda _reader, _readers: Stateless()}, "a Stateless has no state_dict"),
    ],
)
def test_bad_input_is_refused_in_one_line(rules, why):
    with pytest.raises(UsageError, match=why) as refused:
        make(**rules)

    assert "\n" not in str(refused.value)


def test_a_batch_that_leaves_a_rank_without_samples_is_refused():
    with pytest.raises(UsageError, match="global_batch=2 has no sample for some of 3 ranks"):
        next(make(global_batch=2, ranks=alone(0, 3, others=[[1, -1], [2, -1]])))


def test_a_number_of_ranks_that_does_not_divide_the_readers_is_said(caplog):
    next(make(ranks=alone(0, 3, others=[[1, 2], [2, 2]])))

    assert "4 readers are not dealt evenly to 3 ranks" in caplog.text


@pytest.mark.parametrize(
    ("shards", "ranks", "workers", "readers"),
    [(None, 4, 2, 24), (1000, 4, 2, 24), (20, 4, 2, 16), (6, 4, 2, 4), (2, 4, 2, 4), (1, 1, 1, 1)],
)
def test_a_new_run_has_as_many_readers_as_many_ranks_divide(shards, ranks, workers, readers):
    assert default_readers(Source(four, shards), ranks, workers) == readers


# ---- a state of another, and one that is torn


def test_a_state_decides_how_many_readers_there_are():
    first = make(readers=4)
    next(first)
    second = make(readers=None)
    second.load_state_dict(first.state_dict())

    assert second.readers == 4
    assert len(numbers(second)) == 26


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stream": None}, "is not of run.stream_loader"),
        ({"stream": 0}, "is of version 0, and version 1 is read"),
        ({"stream": True}, "is of version True"),
        ({"epoch": -1}, "has epoch -1"),
        ({"samples_consumed": "6"}, "has samples_consumed '6'"),
        ({"samples_consumed": 5}, "more samples of its epoch than of all"),
        ({"readers": []}, "no list of readers"),
        ({"readers": {"0": 1}}, "no list of readers"),
        ({"readers": [[1, False]] * 4}, "no place of reader 0"),
        ({"readers": [[1, 0, None]] * 4}, "has 1 samples of reader 0, done: 0"),
        ({"readers": [[-1, False, None]] * 4}, "has -1 samples of reader 0"),
        ({"readers": [[0, False, None]] * 5}, "is of 5 readers, and this run has readers=4"),
        ({"readers": [[1, False, None]] * 4}, "it was written with replay=True"),
        ({"shards": 8}, "is of a dataset of 8 shards, this one has None"),
        ({"turns": [1]}, "has turns"),
        ({"turns": {"workers": 0, "of_ranks": ["x"]}}, "has turns"),
    ],
)
def test_a_state_of_another_loader_is_refused_in_one_line(change, why):
    loader = make()
    next(loader)
    state = {**loader.state_dict(), **change}

    with pytest.raises(CheckpointError, match=why) as refused:
        loader.load_state_dict(state)
    assert "\n" not in str(refused.value)


def test_a_state_of_the_other_loader_is_refused():
    from tests.unit.data.test_loader import make as make_loader

    with pytest.raises(CheckpointError, match=r"is not of run\.stream_loader"):
        make().load_state_dict(make_loader().state_dict())
    with pytest.raises(CheckpointError, match="has seed None"):
        make_loader().load_state_dict(make().state_dict())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
KEYS = ["stream", "samples_consumed", "epoch", "shards", "replay", "turns", "readers"]


def torn(state, path, value):
    """The state with another value at one place."""
    key, *inner = path
    if isinstance(state, dict):
        state = dict(state)
    else:
        state, key = list(state), key % len(state)
    held = state[key]
    state[key] = torn(held, inner, value) if inner and isinstance(held, list) and held else value
    return state


@settings(max_examples=150, deadline=None)
@example(path=("samples_consumed", 0, 0), depth=1, value=1 << 64)
@given(
    path=st.tuples(st.sampled_from(KEYS), st.integers(0, 9), st.integers(0, 2)),
    depth=st.integers(1, 3),
    value=JSON,
)
def test_whatever_a_state_holds_it_is_refused_in_one_line_or_gone_on_from(path, depth, value):
    first = make()
    next(first)
    loader = make()
    line = ""
    try:
        loader.load_state_dict(torn(first.state_dict(), path[:depth], value))
        next(loader)
    except (CheckpointError, UsageError) as refused:
        line = str(refused)
    assert "\n" not in line


def test_a_run_that_has_no_stream_yet_says_its_state_before_the_first_batch():
    state = make(readers=None).state_dict()

    assert state["readers"] == [[0, False, None]] * 3


def test_hugging_faces_own_shards_are_dealt():
    loader = make(stream(6), readers=None)

    assert loader.readers == 3
    assert sorted(row["i"] for row in rows(loader)) == list(range(60))


def rows(loader):
    for batch in loader:
        for number in batch["i"].tolist():
            yield {"i": number}
