"""One second run, alone, for a test that keeps a real clock and failed on a busy machine.

Only tests with the mark `realtime(proved_by=...)` have it, only with `--second-run` (`make check`),
once, after all other tests are over. Its promise is proved a second time by the test that
`proved_by` names, which keeps no real clock. The first failure is printed in any case, and
written to build/flakes.jsonl with the load of the machine. More than `BUDGET` such failures are
red at once: then the machine or the code is at fault, not a race.
tests/unit/test_second_run.py holds the promises.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

REALTIME = "realtime"
BUDGET = 3
"""Most tests of one session that may run a second time."""
RECORD = Path("build") / "flakes.jsonl"
SECOND = "passed in a second run"
KEY = "realtime"


class SecondRun:
    """The plugin of the process that reports (xdist's controller, or the only one)."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: list[pytest.TestReport] = []
        self._others = 0
        self._said: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            if dict(report.user_properties).get(KEY):
                self._failed.append(report)
            else:
                self._others += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        ids = list(dict.fromkeys(report.nodeid for report in self._failed))
        if not ids:
            return
        for report in self._failed:
            self._record(report)
        if len(ids) > BUDGET:
            self._said.append(f"{len(ids)} real-time tests failed; at most {BUDGET} run again")
            return
        passed = [nodeid for nodeid in ids if self._passes(nodeid)]
        self._forgive(session, passed)
        self._said.append(
            f"{len(ids)} real-time tests needed a second run, {len(passed)} passed in it"
            f" (first failures: {RECORD})"
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for report in terminalreporter.stats.get(SECOND, []):
            terminalreporter.section(f"first failure of {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)
        for line in self._said:
            terminalreporter.write_line(line)

    def _passes(self, nodeid: str) -> bool:
        """Run a test again, alone: nothing else of this session runs any more."""
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-m", "", nodeid],
            cwd=self._config.rootpath,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            self._said.append(f"second run of {nodeid}:\n{done.stdout}{done.stderr}")
        return done.returncode == 0

    def _forgive(self, session: pytest.Session, passed: Sequence[str]) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        for kind in ("failed", "error"):
            kept = []
            for report in reporter.stats.get(kind, []):
                if report.nodeid in passed:
                    reporter.stats.setdefault(SECOND, []).append(report)
                    session.testsfailed -= 1
                else:
                    kept.append(report)
            reporter.stats[kind] = kept
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not session.testsfailed:
            session.exitstatus = pytest.ExitCode.OK

    def _record(self, report: pytest.TestReport) -> None:
        path = self._config.rootpath / RECORD
        path.parent.mkdir(exist_ok=True)
        facts = {
            "test": report.nodeid,
            "phase": report.when,
            "load": os.getloadavg(),
            "pressure": _pressure(),
            "failure": report.longreprtext,
        }
        with path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def note(item: pytest.Item) -> None:
    """Write the mark into the test's report, which alone reaches the process that reports."""
    if item.get_closest_marker(REALTIME) is not None:
        item.user_properties.append((KEY, True))


def _pressure() -> str:
    """Return the kernel's word on how long work waited for a CPU; "" where it has none."""
    try:
        return Path("/proc/pressure/cpu").read_text(encoding="ascii").strip()
    except OSError:
        return ""
