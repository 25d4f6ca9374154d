"""A loader over any dataset: each sample once per epoch, in one order, whatever stops it."""

import inspect
import json
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpctrain.core.base.mesh import MicrobatchRules
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.data.batches import rank_positions
from hpctrain.train.data.loader import (
    OURS,
    BatchRules,
    DataPlace,
    Loader,
    LoaderOptions,
    length_of,
)
from hpctrain.train.data.order import FileOrder, SampleOrder

SEED = 7


class Squares(Dataset):
    def __init__(self, size, bad=()):
        self.size = size
        self.bad = set(bad)
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        if index in self.bad:
            self.bad.discard(index)
            raise OSError(f"sample {index}: stale file handle")
        return index, float(index) ** 2


def make(
    size=23,
    *,
    rank=0,
    ranks=1,
    global_batch=4,
    micro_batch=None,
    drop_last=False,
    seed=SEED,
    dataset=None,
    passes=None,
    **options,
):
    return Loader(
        dataset if dataset is not None else Squares(size),
        BatchRules(global_batch, micro_batch, drop_last, seed),
        options,
        place=lambda: DataPlace(rank, ranks, passes or MicrobatchRules()),
        watch=nullcontext(),
    )


def used(loader):
    """Samples of the next batch that count, from the batch itself."""
    indices, squares = next(loader)
    assert squares.tolist() == [i**2 for i in indices.tolist()]
    drawn = indices.tolist()
    weights = [weight for piece in loader.taken.pieces for weight in piece.weights]
    return [i for i, weight in zip(drawn, weights, strict=True) if weight]


class Life:
    """A run that is stopped and started again with other ranks; what its steps used, in order."""

    def __init__(self, **options):
        self.options = options
        self.state = None
        self.samples = []

    def attempt(self, ranks, steps, **changes):
        loaders = [
            make(rank=rank, ranks=ranks, **{**self.options, **changes}) for rank in range(ranks)
        ]
        for loader in loaders:
            if self.state is not None:
                loader.load_state_dict(json.loads(json.dumps(self.state)))
        for _ in range(steps):
            self.samples += [i for loader in loaders for i in used(loader)]
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * ranks
        self.state = states[0]


# ---- exactly once, in one order


@settings(max_examples=60)
@given(
    size=st.integers(1, 60),
    lives=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=6
    ),
    shuffle=st.booleans(),
)
def test_any_stops_ranks_and_batch_sizes_use_each_sample_once_in_the_same_order(
    size, lives, shuffle
):
    order = SampleOrder(size, SEED) if shuffle else FileOrder(size)
    life = Life(size=size, seed=SEED if shuffle else None)

    for ranks, steps, global_batch in lives:
        life.attempt(ranks, steps, global_batch=global_batch)

    assert life.samples == order.take(range(len(life.samples)))
    assert life.state["samples_consumed"] == len(life.samples)
    for epoch in range(len(life.samples) // size):
        assert sorted(life.samples[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=30)
@given(
    size=st.integers(5, 40),
    stops=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=5),
)
def test_dropping_the_last_batch_leaves_out_the_same_samples_however_often_it_is_stopped(
    size, stops
):
    whole = size // 5 * 5
    life = Life(size=size, global_batch=5, drop_last=True)

    for ranks, steps in stops:
        life.attempt(ranks, steps)

    order = SampleOrder(size, SEED)
    expected = [order.index(e * size + n) for e in range(len(life.samples)) for n in range(whole)]
    assert life.samples == expected[: len(life.samples)]
    assert life.state["samples_consumed"] == len(life.samples)


@settings(max_examples=20)
@given(micro_batch=st.integers(0, 4), ranks=st.integers(1, 4), multiple=st.integers(1, 3))
def test_micro_batches_are_equally_many_on_all_ranks_and_count_each_sample_once(
    micro_batch, ranks, multiple
):
    passes = MicrobatchRules(multiple_of=multiple)
    loaders = [
        make(size=31, rank=r, ranks=ranks, global_batch=9, micro_batch=micro_batch, passes=passes)
        for r in range(ranks)
    ]

    counted = []
    for _ in range(4):  # the fourth has 4 samples
        batches = [next(loader) for loader in loaders]
        assert len({len(pieces) for pieces in batches}) == 1
        assert len(batches[0]) % multiple == 0
        for loader, pieces in zip(loaders, batches, strict=True):
            told = [piece.indices for piece in loader.taken.pieces]
            assert [indices.tolist() for indices, _ in pieces] == told
            assert all(0 < len(indices) <= (micro_batch or 9) for indices in told)
            counted += loader.taken.consumed

    assert sorted(counted) == list(range(31))


def test_a_rank_gets_the_part_that_global_batches_would_give_it():
    loaders = [make(rank=rank, ranks=3, global_batch=7, size=100) for rank in range(3)]

    drawn = [used(loader) for loader in loaders]

    order = SampleOrder(100, SEED)
    assert drawn == [order.take(rank_positions(0, 7, rank, 3)) for rank in range(3)]
    assert [len(part) for part in drawn] == [3, 2, 2]


# ---- workers, and what they have read ahead


# A spawned worker of torch 2.13 has once aborted as it ended (C++ "terminate called"): torch tells
# of that in a destructor, when all batches have long been read.
@pytest.mark.filterwarnings("ignore:.*_MultiProcessingDataLoaderIter.__del__")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_what_workers_read_ahead_is_not_consumed(start_method):
    first = make(size=50, workers=2, start_method=start_method)
    drawn = used(first) + used(first)
    state = first.state_dict()
    first.close()

    second = make(size=50)
    second.load_state_dict(state)

    assert state["samples_consumed"] == 8
    for _ in range(11):
        drawn += used(second)
    assert sorted(drawn[:50]) == list(range(50))


def test_workers_live_over_the_end_of_an_epoch():
    def pids(batch):
        return set(batch.tolist())

    loader = make(size=8, dataset=Pids(8), workers=2, start_method="fork")
    epochs = [Counter(pid for batch in loader for pid in pids(batch)) for _ in range(3)]

    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert len(epochs[0]) == 2


class Pids(Squares):
    def __getitem__(self, index):
        import os

        return os.getpid()


def test_a_batch_that_could_not_be_read_is_the_next_one_again():
    loader = make(dataset=Squares(23, bad=[SampleOrder(23, SEED).index(5)]))
    drawn = used(loader)
    with pytest.raises(OSError, match="stale file handle"):
        next(loader)

    assert loader.consumed == 4
    for _ in range(5):
        drawn += used(loader)
    assert sorted(drawn) == list(range(23))


def test_the_programs_own_random_numbers_do_not_depend_on_restarts():
    torch.manual_seed(3)
    before = torch.get_rng_state()

    used(make())

    assert torch.equal(torch.get_rng_state(), before)


def test_batches_are_collated_by_torch_or_by_the_programs_own_function():
    plain = next(make())
    own = next(make(collate_fn=lambda samples: samples))

    assert isinstance(plain[0], torch.Tensor)
    assert own == list(zip(plain[0].tolist(), plain[1].tolist(), strict=True))


# ---- epochs


def test_iterating_gives_one_epoch_and_the_next_one_when_iterated_again():
    loader = make(size=10)

    first, second = list(loader), list(loader)

    order = SampleOrder(10, SEED)
    assert [i for batch in first for i in batch[0].tolist()] == order.indices(0, 10)
    assert [i for batch in second for i in batch[0].tolist()] == order.indices(10, 20)
    assert len(first) == len(second) == len(loader) == 3
    assert (loader.epoch, loader.consumed) == (2, 20)


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 3), (True, 2)])
def test_after_a_restart_what_is_left_of_the_epoch_comes_first(drop_last, batches):
    stopped = make(size=10, drop_last=drop_last)
    next(stopped)
    loader = make(size=10, drop_last=drop_last)
    loader.load_state_dict(stopped.state_dict())

    assert len(list(loader)) == batches - 1
    assert loader.epoch == 1
    assert len(list(loader)) == batches


def test_a_state_of_the_very_end_of_an_epoch_begins_with_the_next():
    stopped = make(size=10)
    list(stopped)
    loader = make(size=10)
    loader.load_state_dict(stopped.state_dict())

    assert loader.epoch == 1
    assert len(list(loader)) == 3


def test_a_loop_that_was_left_goes_on_where_it_stood():
    loader = make(size=10)
    for _ in loader:
        break

    assert len(list(loader)) == 2


def test_next_goes_on_over_epochs_for_ever():
    loader = make(size=10)

    drawn = [i for _ in range(9) for i in used(loader)]

    assert drawn == SampleOrder(10, SEED).indices(0, 30)


# ---- shares that are not equal


@pytest.mark.parametrize("ranks", range(1, 8))
def test_weighted_means_of_ranks_average_to_the_mean_of_the_samples(ranks):
    loaders = [make(size=20, rank=rank, ranks=ranks, global_batch=6) for rank in range(ranks)]

    for _ in range(4):  # the last one has 2 samples
        means = [float(next(loader)[1].double().mean()) * loader.weight for loader in loaders]
        samples = [i for loader in loaders for i in loader.taken.consumed]
        assert sum(means) / ranks == pytest.approx(sum(i**2 for i in samples) / len(samples))


def test_a_rank_without_a_sample_is_told_of(caplog):
    loaders = [make(size=5, rank=rank, ranks=3, global_batch=4) for rank in range(3)]

    for loader in loaders:
        list(loader)

    assert [loader.weight for loader in loaders] == [3.0, 0.0, 0.0]
    assert "a batch of 1 samples has none for some of 3 ranks" in caplog.text


# ---- what is refused


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("dataset", [Stream(), NoLength(), iter([1]), {1, 2}])
def test_a_dataset_without_length_is_refused_in_one_line(dataset):
    with pytest.raises(UsageError, match=f"a {type(dataset).__name__} has no length") as refused:
        length_of(dataset)

    assert "\n" not in str(refused.value)


def test_an_empty_dataset_is_refused():
    with pytest.raises(UsageError, match="this Squares has no samples"):
        length_of(Squares(0))


@pytest.mark.parametrize("name", [*OURS, "in_order"])
def test_options_that_are_torchs_and_not_the_loaders_are_refused(name):
    with pytest.raises(UsageError, match=f"{name} is not an option of the loader; "):
        make(**{name: 1})


def test_torch_has_every_option_that_is_named():
    torchs = inspect.signature(DataLoader).parameters.keys()

    renamed = {"workers", "start_method", "prefetch"}
    assert OURS.keys() | LoaderOptions.__annotations__.keys() - renamed <= torchs


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"global_batch": 0}, "global_batch=0 is not"),
        ({"micro_batch": -1}, "micro_batch=-1 is"),
        ({"workers": -2}, "workers=-2 is"),
        ({"size": 3, "drop_last": True}, "drop_last leaves nothing of a dataset of 3 samples"),
    ],
)
def test_numbers_that_make_no_batch_are_refused(options, why):
    with pytest.raises(UsageError, match=why):
        make(**options)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 8}, "has seed 8, this run 7"),
        ({"seed": None}, "has seed None, this run 7"),
        ({"size": 24}, "has size 24, this run 23"),
        ({"samples_consumed": -1}, "samples_consumed -1"),
        ({"samples_consumed": True}, "samples_consumed True"),
        ({"epoch": "1"}, "epoch '1'"),
        ({"epoch_samples": None}, "epoch_samples None"),
    ],
)
def test_a_state_of_another_order_is_refused(change, why):
    loader = make()

    with pytest.raises(CheckpointError, match=why):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_a_state_of_global_batches_is_taken_over():
    from hpctrain.train.data.batches import GlobalBatches

    before = GlobalBatches(SampleOrder(23, SEED), 5, 0, 1, 0)
    drawn = [i for _ in range(6) for i in before.next_step().consumed]
    loader = make(global_batch=5)
    loader.load_state_dict(before.state_dict())

    drawn += [i for _ in range(4) for i in used(loader)]
    assert drawn == SampleOrder(23, SEED).indices(0, len(drawn))
