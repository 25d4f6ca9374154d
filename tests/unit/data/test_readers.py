"""How an iterable dataset is divided, and what of its state goes into a checkpoint."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.data.readers import (
    TAG,
    OpenReader,
    ReaderPlace,
    Source,
    check_first,
    from_plain,
    source_of,
    to_plain,
)


class Count:
    """A class of a user's, with state."""

    def __init__(self, size=9):
        self.size, self.at = size, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            yield self.at - 1


class Stateless:
    def __init__(self, size=9):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class OfIterator(Stateless):
    """The iterator has the state, as torchdata allows too."""

    def __iter__(self):
        return CountIterator(self.size)


class CountIterator(Count):
    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return self.at - 1


def rest(reader):
    samples = []
    while True:
        try:
            samples.append(reader.take())
        except StopIteration:
            return samples


@pytest.mark.parametrize("make", [Count, OfIterator, CountIterator])
@pytest.mark.parametrize("replay", [True, False])
def test_a_reader_goes_on_with_the_sample_behind_its_place(make, replay):
    source = Source(lambda _reader, _readers: make(), replay=replay)
    check_first(source, 1)
    first = OpenReader(source, 0, 1, 0, ReaderPlace())
    taken = [first.take() for _ in range(4)]
    place = ReaderPlace(first.samples, state=first.state())
    second = OpenReader(source, 0, 1, 0, place)

    assert taken + rest(second) == list(range(9))
    assert (second.samples, second.is_done) == (9, True)
    assert (place.state is None) == replay


def test_a_reader_without_state_is_replayed():
    source = Source(lambda _reader, _readers: Stateless(), replay=True)

    assert rest(OpenReader(source, 0, 1, 0, ReaderPlace(6))) == [6, 7, 8]


def test_a_replayed_reader_that_has_become_shorter_is_refused():
    source = Source(lambda _reader, _readers: Stateless(5), replay=True)

    with pytest.raises(CheckpointError, match="reader 0 of 1 has 5 samples, and 6 were used"):
        OpenReader(source, 0, 1, 0, ReaderPlace(6))


@pytest.mark.parametrize("state", ["7", '{"to": 3}', "[]", f'{{"{TAG}": "what"}}', '"at"'])
def test_a_state_that_the_dataset_does_not_understand_is_refused_in_one_line(state):
    source = Source(lambda _reader, _readers: Count())

    with pytest.raises(CheckpointError, match="reader 0 of 1 cannot go on from its state") as no:
        OpenReader(source, 0, 1, 0, ReaderPlace(3, state=state))

    assert "\n" not in str(no.value)


def test_a_state_that_is_understood_only_at_the_first_sample_is_refused_too():
    source = source_of(stream(2), replay=False)
    reader = OpenReader(source, 0, 2, 0, ReaderPlace())
    reader.take()
    odd = json.loads(reader.state())
    odd["examples_iterable"] = {"shard_idx": "3"}

    with pytest.raises(CheckpointError, match="cannot go on from its state"):
        OpenReader(source, 0, 2, 0, ReaderPlace(1, state=json.dumps(odd))).take()


def test_a_state_of_another_epoch_is_refused_though_hugging_face_would_begin_anew():
    source = source_of(stream(2), replay=False)
    reader = OpenReader(source, 0, 2, 1, ReaderPlace())
    reader.take()

    with pytest.raises(CheckpointError, match="it is of epoch 1, not 2"):
        OpenReader(source, 0, 2, 2, ReaderPlace(1, state=reader.state()))


def test_an_error_of_the_dataset_itself_is_raised_as_it_is():
    class Bad(Count):
        def __iter__(self):
            yield 1
            raise KeyError("no such column")

    reader = OpenReader(Source(lambda _reader, _readers: Bad()), 0, 1, 0, ReaderPlace())
    reader.take()
    with pytest.raises(KeyError, match="no such column"):
        reader.take()


def test_the_epoch_is_told_to_a_dataset_that_wants_to_know_it():
    class Epochs(Count):
        def set_epoch(self, epoch):
            self.size = 10 * epoch

    source = Source(lambda _reader, _readers: Epochs())

    assert len(rest(OpenReader(source, 0, 1, 2, ReaderPlace()))) == 20


# ---- how it is divided


def stream(shards):
    return Dataset.from_dict({"i": list(range(60))}).to_iterable_dataset(num_shards=shards)


@pytest.mark.parametrize(("shards", "readers"), [(6, 6), (6, 4), (1, 3), (4, 6)])
def test_the_shares_of_all_readers_are_the_dataset(shards, readers):
    source = source_of(stream(shards), replay=False)

    shares = [OpenReader(source, n, readers, 0, ReaderPlace()) for n in range(readers)]

    assert sorted(row["i"] for reader in shares for row in rest(reader)) == list(range(60))
    assert source.shards == shards


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        ([1, 2], "a list gives its n-th sample when asked; take run.loader"),
        (Count(), "nobody says how a Count is divided; pass a function of"),
        (stream(4).shuffle(seed=1, buffer_size=9), "has a shuffle buffer"),
        (stream(4).shuffle(seed=1).map(lambda row: row).take(5), "has a shuffle buffer"),
        (3, "nobody says how a int is divided"),
    ],
)
def test_what_nobody_can_divide_is_refused_in_one_line(dataset, why):
    with pytest.raises(UsageError, match=why) as refused:
        source_of(dataset, replay=False)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda _reader, _readers: Stateless(), "a Stateless has no state_dict"),
        (lambda _reader, _readers: 5, "reader 0 is a int, which is no iterable"),
        (lambda _reader, _readers: [1], "a list has no state_dict and load_state_dict"),
    ],
)
def test_a_reader_that_cannot_be_resumed_is_refused_before_the_first_batch(make, why):
    with pytest.raises(UsageError, match=why):
        check_first(source_of(make, replay=False), 4)


def test_a_shuffle_buffer_is_taken_where_it_is_replayed():
    assert source_of(stream(4).shuffle(seed=1), replay=True).replay


# ---- states as JSON

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just(TAG), inner)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_a_state_comes_back_from_json_as_it_was(value):
    again = from_plain(json.loads(json.dumps(to_plain(value, "state"), allow_nan=False)))

    assert repr(again) == repr(value)


def test_tensors_and_arrays_come_back_as_they_were():
    state = {"a": torch.arange(6).reshape(2, 3), "b": np.array([0.5, np.inf]), "c": np.float32(2)}

    again = from_plain(json.loads(json.dumps(to_plain(state, "state"))))

    assert torch.equal(again["a"], state["a"])
    assert again["b"].tolist() == state["b"].tolist()
    assert again["c"].dtype == np.float32
    assert {again["c"]: 1} == {np.float32(2): 1}, "a number can be a key, an array cannot"


def test_what_no_checkpoint_holds_is_refused_by_its_place():
    with pytest.raises(UsageError, match=r"the state of reader 3\.a\[1\] is a object"):
        to_plain({"a": [1, object()]}, "reader 3")
