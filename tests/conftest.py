"""Fixtures for all tests, and what to do where a test's surroundings are missing.

`make test` runs two at a time (pytest-xdist): the tests that need SLURM mostly wait for it, so one
worker has all of them, and the other the rest, file by file and with what the first leaves of the
CPUs (`nice`), so that no time limit of a real job is missed because of a unit test.

A test marked `slurm` is skipped with one reason line where no cluster can be started, and fails
there when HPCTRAIN_REQUIRE contains "slurm" (as on the project's own machines).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.slurm_boot import FOREIGN, missing
from tests.support.slurm_cluster import SlurmCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUIRE = "HPCTRAIN_REQUIRE"
BESIDE_NICENESS = 15
SLURM_TESTS = "tests/slurm/"
INSTALL = "run tests/support/install_slurm.sh"


class _TwoSides(LoadScopeScheduling):
    """All tests that need SLURM go to one worker, the others file by file to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return SLURM_TESTS if path.startswith(SLURM_TESTS) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _TwoSides:
    return _TwoSides(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest side begins first.
    items.sort(key=lambda item: not item.nodeid.startswith(SLURM_TESTS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and not item.nodeid.startswith(SLURM_TESTS):
        os.setpriority(os.PRIO_PROCESS, 0, BESIDE_NICENESS)
    if item.get_closest_marker("slurm") is None:
        return
    if lacking := missing():
        reason = f"no SLURM cluster here, missing: {', '.join(lacking)}; {INSTALL}"
        required = "slurm" in os.environ.get(REQUIRE, "").replace(",", " ").split()
        (pytest.fail if required else pytest.skip)(reason)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A SLURM cluster of four nodes, started once; use `slurm` unless tests share jobs."""
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The cluster with no job and all nodes up; SLURM commands of this process go to it too."""
    for name in [n for n in os.environ if n.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.at.slurm_conf))
    slurm_cluster.reset()
    return slurm_cluster
