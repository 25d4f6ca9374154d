"""What ends a test that nothing else can end, so that CI never waits for it until its own limit.

pytest-timeout raises in the test once. A test that waits in C does not see that; where its teardown
waits in vain, nobody is left to raise, since a failed test's clock is stopped. Here a thread of C
prints all stacks and ends the worker's process: xdist then reports the test as crashed and goes on.
tests/unit/support/test_last_resort.py holds the promises.
"""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from pytest_timeout import _get_item_settings  # there is no other way to its settings

if TYPE_CHECKING:
    from collections.abc import Generator

NAME = "hpctrain-last-resort"
LIMITS = 5.0
"""So many of its own time limits a test may take: it may wait for CPUs while its clock stands."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count from before a test's fixtures until behind them."""
    _arm(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Count anew: pytest itself stops it when a test fails."""
    if isinstance(node, pytest.Item):
        _arm(node)


def _arm(item: pytest.Item) -> None:
    if limit_s := _get_item_settings(item).timeout:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(LIMITS * limit_s, file=stderr, exit=True)
