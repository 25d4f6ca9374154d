"""A test that calls `hpctrain.init()` leaves the stop signals of its process as they were."""

from __future__ import annotations

import signal

import pytest

from hpctrain.node.agent.signals import STOP_SIGNALS
from hpctrain.train.runtime.stops import RankSignals


def _blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, [])) & set(STOP_SIGNALS)


@pytest.fixture(scope="module")
def before_any_test():
    """What a run in this process does, begun by a fixture that several tests share."""
    RankSignals().start()
    yield
    assert not _blocked()


def test_a_fixture_of_the_module_has_them_blocked_for_its_first_test(before_any_test):
    assert _blocked() == set(STOP_SIGNALS)


def test_and_the_next_has_them_as_they_were(before_any_test):
    assert not _blocked()
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == [signal.SIG_DFL] * 2
