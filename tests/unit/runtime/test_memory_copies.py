"""The ledger has what copies in memory cost, and how many of them were left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.core.base import clock
from hpctrain.ledger.run.event_types import MemoryCopiesSet
from hpctrain.train.runtime import kept_state
from hpctrain.train.runtime.kept_state import MemoryCopies

STALL_S, COVERED_S = 0.25, 0.5
NBYTES = 4096


class Made:
    """Copies of rank 0 at each step, of which the replica server says what the test sets."""

    def __init__(self, monkeypatch, hands):
        self.facts = []
        self._hands = hands
        self._line = SimpleNamespace(
            is_off=False, settled=0, covered=0, covered_ns=0, held=lambda: self
        )
        self.nbytes = NBYTES
        copies = SimpleNamespace(is_ready=True, copy=lambda *_: hands.advance(STALL_S))
        monkeypatch.setattr(kept_state, "RankCopies", lambda *_: copies)
        world = SimpleNamespace(rank=0, world_size=1)
        times = SimpleNamespace(step_s=1.0)
        self._copies = MemoryCopies(world, self._line, 1, times, self.facts.append)

    def step(self, number, *, is_covered):
        assert self._copies.wishes(number, 0)
        began_ns = clock.monotonic_ns()
        self._copies.copy(number, lambda: ({}, None))
        self._line.settled = number
        if is_covered:
            self._line.covered = number
            self._line.covered_ns = began_ns + round(COVERED_S * 1e9)
        self._hands.advance(1.0)


@pytest.fixture
def made(monkeypatch, hands):
    return Made(monkeypatch, hands)


def test_what_the_first_copy_costs_is_recorded_once(made):
    for number in (1, 2, 3):
        made.step(number, is_covered=True)

    [fact] = made.facts
    assert (fact.steps, fact.bytes, fact.left_out) == (1, NBYTES, None)
    assert (fact.stall_s, fact.covered_s) == (STALL_S, COVERED_S)


def test_copies_that_are_left_out_are_counted_and_recorded_as_they_double(made):
    for number in range(1, 9):
        made.step(number, is_covered=False)

    why = "alive.memory_steps"
    assert made.facts == [
        MemoryCopiesSet(steps=1, bytes=NBYTES, left_out=count, why=why) for count in (3, 7)
    ]
