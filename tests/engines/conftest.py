"""On a torch older than ours an engine that refuses it in one line has kept its promise.

`make torch-versions` runs these tests on the oldest torch that the bounds allow, where some engines
need a newer one and say so. Such a test counts as skipped there, with the refusal as its reason. On
the torch of continuous integration nothing is ever refused: there it fails.
"""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.gloo import preload

REFUSALS = (
    re.compile(
        r"(?P<what>engine\.\S+(?: with engine\.kind \S+)?) .*needs torch (?P<since>\d+\.\d+)"
    ),
    re.compile(r"(?P<what>.+) needs [\w.]+\.\w+, which torch (?P<version>\S+) has not"),
)
NOT_HELD = {
    "test_a_stranger_cannot_end_a_run": "the test needs TCPStore.list_keys",
    "test_a_verdict_that_somebody_writes_over_is_said_again": "the test needs TCPStore.list_keys",
    "test_a_state_goes_through_other_meshes_and_back_bit_for_bit": (
        "full_tensor(), which the test compares by, mixes up parts of unequal sizes; what is saved "
        "and loaded was the same"
    ),
    "test_every_parameter_gets_the_gradient_of_one_process[tp 2, whole sequence-full aot]": (
        "one graph of 18 is not compiled"
    ),
    "test_fsdp2_shards_layers_of_several_classes_one_by_one_and_says_where_there_are_none": (
        "gloo prints to stdout"
    ),
}
"""What torch 2.8 lacks for a test; docs/reliability.md tells it."""
NOT_HELD_BELOW = (2, 9)
CI = (2, 13)


@pytest.fixture(scope="module")
def preloaded() -> None:
    """What ranks import is there when they are forked; else each would import torch for itself."""
    preload()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if not report.failed or call.excinfo is None or numbers(torch.__version__) >= CI:
        return
    if item.name in NOT_HELD and numbers(torch.__version__) < NOT_HELD_BELOW:
        _skip(report, item, f"not held on this torch: {NOT_HELD[item.name]}")
        return
    for refusal in REFUSALS:
        found = refusal.search(str(call.excinfo.value))
        if found and torch.__version__ in str(call.excinfo.value):
            _skip(report, item, f"refused by this torch: {found[0]}")
            return


def _skip(report, item, why):
    path, line, _ = item.location
    report.outcome, report.longrepr = "skipped", (path, line or 0, f"Skipped: {why}")


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
