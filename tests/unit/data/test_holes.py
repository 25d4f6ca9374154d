"""What is left out of the data is left out by every resume, and all else is used once."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import CheckpointError
from hpctrain.train.data.batches import GlobalBatches, Holes, holes_of
from hpctrain.train.data.loader import BatchRules, DataPlace, Loader
from hpctrain.train.data.order import SampleOrder

SIZE, BATCH = 44, 8
RANGES = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 30)).map(lambda p: (p[0], p[0] + p[1])), max_size=4
)


def batches(holes=(), *, consumed=0, batch=BATCH):
    made = GlobalBatches(SampleOrder(SIZE, 7), batch, 0, 1, 0, consumed=consumed)
    made.leave_out(holes)
    return made


def loader(holes=(), *, batch=BATCH, drop_last=False):
    rules = BatchRules(batch, drop_last=drop_last, seed=7)
    made = Loader(list(range(SIZE)), rules, {}, place=lambda: DataPlace(0, 1), watch=nullcontext())
    made.leave_out(holes)
    return made


def taken(made, count):
    """The samples of the next batches."""
    found = []
    for _ in range(count):
        if isinstance(made, GlobalBatches):
            found += made.next_step().consumed
        else:
            found += next(made).tolist()
    return found


@given(ranges=RANGES, first=st.integers(0, 100), count=st.integers(1, 40))
def test_positions_are_those_that_are_in_no_hole(ranges, first, count):
    holes = Holes(ranges)
    outside = (n for n in itertools.count(first) if not any(a <= n < b for a, b in ranges))
    assert holes.positions(first, count) == list(itertools.islice(outside, count))


@pytest.mark.parametrize("batch", [BATCH, 5])
def test_all_batches_stay_whole_and_all_but_the_hole_is_used_once(batch):
    made = batches([(16, 32)], batch=batch)
    samples = taken(made, 6)
    order = SampleOrder(SIZE, 7)
    assert samples == order.take([n for n in range(100) if not 16 <= n < 32])[: 6 * batch]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("hole", [(16, 32), (32, 48), (24, 88), (0, 8)])
def test_a_loader_comes_by_a_hole_over_the_ends_of_epochs(hole, drop_last):
    whole = taken(loader(drop_last=drop_last), 20)
    around = taken(loader([hole], drop_last=drop_last), 7)
    assert len(around) > 6 * BATCH
    assert around == (whole[: hole[0]] + whole[hole[1] :])[: len(around)]


def test_a_loaders_batch_ends_where_a_hole_begins():
    made = loader([(12, 20)])
    assert [len(next(made)) for _ in range(3)] == [8, 4, 8]


def test_a_loop_over_an_epoch_ends_where_a_hole_takes_its_last_batches():
    made = loader([(24, 48)])
    assert [len(batch) for batch in made] == [8, 8, 8]
    assert made.epoch == 1
    assert [len(batch) for batch in made] == [8, 8, 8, 8, 8]


@pytest.mark.parametrize("make", [batches, loader])
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_resume_leaves_out_the_same_wherever_it_goes_on(make, stop):
    holes = [(16, 24), (40, 56)]
    undisturbed, first = make(holes), make(holes)
    whole = taken(undisturbed, 6)
    before = taken(first, stop)
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert before + taken(resumed, 6 - stop) == whole
    assert resumed.state_dict() == undisturbed.state_dict()


@pytest.mark.parametrize("make", [batches, loader])
def test_without_holes_a_state_is_as_before(make):
    assert "holes" not in make().state_dict()
    assert make([(8, 16)]).state_dict()["holes"] == [[8, 16]]


@pytest.mark.parametrize("holes", [3, [[1]], [["a", 2]], [[-1, 4]], [[True, 4]]])
def test_holes_that_are_no_ranges_are_refused(holes):
    with pytest.raises(CheckpointError, match="holes"):
        holes_of({"holes": holes})
