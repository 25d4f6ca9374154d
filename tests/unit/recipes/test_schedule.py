"""The learning rate is a function of the step alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.recipes.lm.train import lr_at


def rates(**changed):
    shape = {"peak": 1.0, "warmup": 10, "total": 100} | changed
    return [lr_at(step, **shape) for step in range(shape["total"] + 20)]


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor():
    curve = rates()

    assert curve[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert curve[10] == 1.0
    assert curve[55] == pytest.approx(0.55)
    assert curve[10:101] == sorted(curve[10:101], reverse=True)
    assert curve[100:] == [pytest.approx(0.1)] * 20


def test_the_first_update_already_learns():
    assert rates()[0] > 0


def test_without_warm_up_it_begins_at_the_peak():
    assert rates(warmup=0)[0] == 1.0


def test_a_run_shorter_than_its_warm_up_only_rises():
    assert rates(warmup=50, total=20)[:20] == pytest.approx([n / 50 for n in range(1, 21)])


@settings(max_examples=100)
@given(
    step=st.integers(0, 10**7),
    peak=st.floats(1e-6, 1.0),
    warmup=st.integers(0, 1000),
    total=st.integers(1, 10**6),
    floor=st.floats(0, 1),
)
def test_the_rate_stays_within_its_bounds(step, peak, warmup, total, floor):
    rate = lr_at(step, peak=peak, warmup=warmup, total=total, floor=floor)

    assert 0 <= rate <= peak * (1 + 1e-9)
    assert step < warmup or rate >= peak * floor * (1 - 1e-9)
