"""On a torch older than ours an engine that refuses it in one line has kept its promise.

`make torch-versions` runs these tests on the oldest torch that the bounds allow, where some engines
need a newer one and say so. Such a test counts as skipped there, with the refusal as its reason. On
the torch of continuous integration nothing is ever refused: there it fails.
"""

from __future__ import annotations

import re

import pytest
import torch

REFUSALS = (
    re.compile(
        r"(?P<what>engine\.\S+(?: with engine\.kind \S+)?) .*needs torch (?P<since>\d+\.\d+)"
    ),
    re.compile(r"(?P<what>.+) needs torch\S+, which torch (?P<version>\S+) has not"),
)
CI = (2, 13)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if not report.failed or call.excinfo is None or numbers(torch.__version__) >= CI:
        return
    for refusal in REFUSALS:
        found = refusal.search(str(call.excinfo.value))
        if found and torch.__version__ in str(call.excinfo.value):
            report.outcome = "skipped"
            path, line, _ = item.location
            report.longrepr = (path, line or 0, f"Skipped: refused by this torch: {found[0]}")
            return


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
