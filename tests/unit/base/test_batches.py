"""Ranks share a step's samples evenly, and run no pass more than memory and the engine ask for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.base.mesh import MicrobatchRules, plan_micro_batches, shares

BATCHES = st.integers(1, 67)
ASKED = st.builds(
    MicrobatchRules,
    equal=st.booleans(),
    at_least=st.integers(1, 9),
    multiple_of=st.integers(1, 5),
    leaves=st.booleans(),
)


@settings(max_examples=100)
@given(global_batch=BATCHES, world_size=st.integers(1, 100))
def test_shares_differ_by_at_most_one(global_batch, world_size):
    sizes = shares(global_batch, world_size)

    assert sum(sizes) == global_batch
    assert len(sizes) == world_size
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100)
@given(global_batch=BATCHES, world_size=st.integers(1, 17), micro_batch=st.integers(1, 9))
def test_no_pass_more_is_run_than_memory_asks_for(global_batch, world_size, micro_batch):
    plan = plan_micro_batches(global_batch, world_size, micro_batch)

    assert (plan.micro_batches - 1) * micro_batch < max(shares(global_batch, world_size))


@settings(max_examples=200)
@given(
    asked=ASKED, world_size=st.integers(1, 17), micro_batch=st.integers(1, 9), global_batch=BATCHES
)
def test_no_pass_more_is_run_than_an_engine_asks_for(asked, world_size, micro_batch, global_batch):
    count = plan_micro_batches(global_batch, world_size, micro_batch, asked).micro_batches

    fewer = count - asked.multiple_of

    too_few = fewer < asked.at_least
    too_large = fewer * world_size * micro_batch < global_batch
    too_large |= fewer * micro_batch < max(shares(global_batch, world_size)) and not asked.leaves
    assert too_few or too_large


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: shares(0, 4), "0 samples"),
        (lambda: shares(4, 0), "0 ranks"),
        (lambda: plan_micro_batches(4, 2, -1), "-1"),
        (lambda: plan_micro_batches(4, 2, 0, MicrobatchRules(leaves=True)), "set a micro batch"),
        (lambda: plan_micro_batches(4, 2, 1, MicrobatchRules(at_least=0)), "at least 0 passes"),
        (lambda: plan_micro_batches(4, 2, 1, MicrobatchRules(multiple_of=0)), "multiple of 0"),
    ],
)
def test_impossible_numbers_are_refused(call, found):
    with pytest.raises(ValueError, match=found):
        call()
