"""The plugin of pytest that writes each outcome into the results: `-p tests.gpu.recording`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu.results import FAILED, NOT_RUN, PASSED, REHEARSED, Results, Row

if TYPE_CHECKING:
    import pytest

ON_CUDA, NUMBER, NEEDS_CUDA = "on_cuda", "number", "needs_cuda"
"""Names under which a test's report carries what its fixtures noted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-results", type=Path, help="folder of the results to add to")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--gpu-results")))


class Recorder:
    """Writes down what becomes of each test, as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results = Results.read(folder)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid, Row(FAILED, _last_line(report.longreprtext)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._results.tests.setdefault(item.nodeid, Row(NOT_RUN, "the run ended before it"))
        self._results.write(self._folder)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._results.tests[report.nodeid]
        row.seconds = round(row.seconds + report.duration, 2)
        if report.when == "call" or not report.passed:
            row = _row_of(report, row.seconds)
        self._note(report.nodeid, row)

    def _note(self, nodeid: str, row: Row) -> None:
        self._results.tests[nodeid] = row
        self._results.write(self._folder)


def _row_of(report: pytest.TestReport, seconds: float) -> Row:
    noted: dict[str, list[Any]] = {}
    for name, value in report.user_properties:
        noted.setdefault(name, []).append(value)
    row = Row(
        seconds=seconds,
        numbers=noted.get(NUMBER, []),
        needs_cuda=[] if noted.get(ON_CUDA) else noted.get(NEEDS_CUDA, []),
    )
    if report.failed:
        row.outcome, row.why = FAILED, _last_line(report.longreprtext)
    elif report.skipped:
        row.outcome, row.why = NOT_RUN, _last_line(report.longreprtext)
    else:
        row.outcome = PASSED if noted.get(ON_CUDA) else REHEARSED
    return row


def _last_line(text: str) -> str:
    """Return what an error says: pytest marks these lines with E."""
    said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return said[0] if said else text.strip().splitlines()[-1] if text.strip() else ""
