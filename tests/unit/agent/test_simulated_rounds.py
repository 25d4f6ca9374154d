"""Whole jobs of real agents in simulated time: thousands of random schedules, each by its seed.

What must hold in all of them is in tests/support/simulation/checks.py; what is done to the jobs in
tests/support/simulation/campaign.py. A failure says how it is played again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.core.base import clock
from tests.support.simulation.campaign import CAMPAIGNS, RECORDED, play, seeds

FEW, MANY = 40, 1000
BATCH = 20
ALL = [*CAMPAIGNS, *RECORDED]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("batch", range(FEW // BATCH))
def test_every_schedule_keeps_the_contract(name, batch):
    for seed in seeds(FEW)[batch * BATCH : (batch + 1) * BATCH]:
        play(name, seed)


FAILED_ONCE = (
    ("hanging", 5171),
    ("hanging", 5314),
    ("succeeding", 770371),
    ("succeeding", 771541),
    ("succeeding", 771777),
    ("succeeding", 2000052),
)
"""Jobs that broke the contract before the product or a check was repaired."""


@pytest.mark.parametrize(("name", "seed"), FAILED_ONCE)
def test_jobs_that_failed_once_keep_the_contract(name, seed):
    play(name, seed)


@pytest.mark.soak
@pytest.mark.parametrize("name", ALL)
def test_very_many_schedules_keep_the_contract(name):
    for seed in seeds(MANY, fixed=0):
        play(name, seed)


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_is_the_same_run(name):
    first, again = (play(name, seeds(1)[0]).simulation.trace for _ in range(2))
    assert first == again


def test_a_thread_of_an_earlier_test_has_no_part_in_a_simulation():
    """One that looked for requests twice a second gave a simulated agent's turn away."""
    ended, looked = threading.Event(), threading.Event()

    def looks_on():
        while not ended.is_set():
            clock.sleep(0.0001)
            clock.wait(threading.Event(), 0.0001)
            assert abs(clock.now() - time.time()) < 1000
            looked.set()

    with ThreadPoolExecutor() as threads:
        thread = threads.submit(looks_on)
        looked.wait()
        play("staying", 1)
        ended.set()

        assert thread.result() is None
