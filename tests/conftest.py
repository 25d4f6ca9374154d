"""Fixtures for all tests, and what to do where a test's surroundings are missing.

`make check` runs five files at a time (pytest-xdist). Two workers begin with those that need
SLURM, each with a cluster of its own; they mostly wait for it. The others take what needs none
(`support.two_clusters`), and get what they leave of the CPUs (`nice`), so that no time limit of
a real job is missed because of a unit test. Whole local runs come last, when no cluster is left.

A test marked `slurm` is skipped with one reason line where no cluster can be started, and fails
there when HPCTRAIN_REQUIRE contains "slurm" (as on the project's own machines). The same holds for
`browser`, `fuse`, `container`, `strace` and `two_users`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from hpctrain.core.base import log
from hpctrain.node.agent.signals import STOP_SIGNALS
from tests.support import (
    browser,
    client_disk,
    container_image,
    cpus,
    file_operations,
    last_resort,
    network,
    second_run,
    tiers,
    users,
)
from tests.support.clocks import ManualClock, jumping
from tests.support.memory import folder_in_memory
from tests.support.slurm_boot import FOREIGN, missing
from tests.support.slurm_cluster import SlurmCluster
from tests.support.two_clusters import SLURM_TESTS, TwoClusters, place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

# Other tests run beside: how long an example takes says nothing about the code.
hypothesis_settings.register_profile(
    "beside", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("beside")

REQUIRE = "HPCTRAIN_REQUIRE"
PYTEST_CURRENT_TEST = "PYTEST_CURRENT_TEST"
BESIDE_NICENESS = 15
NEEDS = {
    "slurm": (missing, "no SLURM cluster here", "run tests/support/install_slurm.sh"),
    "browser": (browser.missing, "no browser here", "run tests/support/install_browser.sh"),
    "fuse": (client_disk.missing, "no FUSE here", "run tests/support/install_fuse.sh"),
    "container": (
        container_image.missing,
        "no containers here",
        "run tests/support/install_container.sh",
    ),
    "strace": (file_operations.missing, "no strace here", "run tests/support/install_strace.sh"),
    "two_users": (users.missing, "no second user here", "run the tests as root"),
}
"""Marker to: what of it is missing here, what to say then, how to come by it."""


LEFT_OUT = pytest.StashKey[Counter[str]]()
"""How many tests the tier left out, by what they need."""
LEFT_OUT_KEY = "hpctrain_left_out"
BESIDE_SLURM = pytest.StashKey[bool]()
"""Whether this session has tests with SLURM, to which the others leave the CPUs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hpctrain")
    names = [tier.name.lower() for tier in tiers.Tier]
    group.addoption("--tier", choices=names, help="run the tests of this tier (support/tiers.py)")
    group.addoption(
        "--second-run",
        action="store_true",
        help="run a failed test with the mark `realtime` once more, alone (support/second_run.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    config.pluginmanager.register(last_resort.LastResort(), last_resort.NAME)
    if config.getoption("--second-run") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(second_run.SecondRun(config), "hpctrain-second-run")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", default=None):
        network.enter_own()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "small_disk" in item.fixturenames:
            item.add_marker("two_users")  # only root mounts disks
    if faults := list(tiers.unproved(items)):
        raise pytest.UsageError("\n".join(faults))
    for item in items:
        second_run.note(item)
    if tier := config.getoption("--tier"):
        items[:], left, counts = tiers.divide(items, tiers.Tier[tier.upper()])
        config.hook.pytest_deselected(items=left)
        config.stash[LEFT_OUT].update(counts)
    items.sort(key=lambda item: place(item.nodeid))
    config.stash[BESIDE_SLURM] = any(item.get_closest_marker("slurm") for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[LEFT_OUT_KEY] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """Take what a worker left out; all workers collect the same tests."""
    node.config.stash[LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get(LEFT_OUT_KEY, {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print what was not run below pytest's own summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and (line := tiers.closing_line(config.stash[LEFT_OUT])):
        reporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> TwoClusters | None:
    """How files are shared out where several workers run whole ones."""
    return TwoClusters(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    os.umask(0o022)  # commands set it for their process, which is the tests' own here
    beside = "PYTEST_XDIST_WORKER" in os.environ and item.config.stash[BESIDE_SLURM]
    if beside and not item.nodeid.startswith(SLURM_TESTS):
        os.setpriority(os.PRIO_PROCESS, 0, BESIDE_NICENESS)
    for name, (missing_of, none, install) in NEEDS.items():
        if item.get_closest_marker(name) is not None and (lacking := missing_of()):
            reason = f"{none}, missing: {', '.join(lacking)}; {install}"
            required = name in os.environ.get(REQUIRE, "").replace(",", " ").split()
            (pytest.fail if required else pytest.skip)(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    with cpus.of_test(item), _stop_signals_as_they_were():
        return (yield)


@contextmanager
def _stop_signals_as_they_were() -> Iterator[None]:
    """A test that calls `hpctrain.init()` blocks them; processes of later tests would inherit that.

    Around the whole test, its fixtures included: those of a module begin before any of a test's.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: an fsync costs nothing there."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _log_on_stderr() -> Iterator[None]:
    """What a test's code logs is on its stderr, as a command's user sees it."""
    with log.for_user():
        yield


_TESTS = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state folder of what is made for several tests; never the user's own."""
    state = str(tmp_path_factory.getbasetemp() / "state")
    os.environ["XDG_STATE_HOME"] = state
    return state


@pytest.fixture(autouse=True)
def _environment(_state: str) -> Iterator[None]:
    """What a test's code exports ends with the test; each has an index of runs of its own.

    Agents export for the ranks of their process, torch where it compiles. What is left over would
    go with the next job that a test of the same worker submits, and make it another job.
    """
    before = dict(os.environ)
    if before["XDG_STATE_HOME"] == _state:
        os.environ["XDG_STATE_HOME"] = f"{_state}-{next(_TESTS)}"  # the first writer makes it
    yield
    if before["XDG_STATE_HOME"] == _state:
        os.environ["XDG_STATE_HOME"] = _state
    for name in set(os.environ) - set(before) - {PYTEST_CURRENT_TEST}:
        del os.environ[name]
    for name, value in before.items():
        if name != PYTEST_CURRENT_TEST and os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture
def hands() -> Iterator[ManualClock]:
    """The process's clock as the test moves it; by the thread that sleeps it moves itself."""
    with jumping() as hands:
        yield hands


@pytest.fixture
def common_path() -> Iterator[Path]:
    """A folder that every user of the machine can look into, other than tmp_path."""
    path = Path(tempfile.mkdtemp(prefix="hpctrain-common-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def container_image_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Charliecloud starts as an image, without a command of SLURM's."""
    return container_image.make_image(tmp_path_factory.mktemp("container") / "image")


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A SLURM cluster of four nodes, started once; use `slurm` unless tests share jobs."""
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(
    slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[SlurmCluster]:
    """The cluster with no job and all nodes up; SLURM commands of this process go to it too."""
    for name in [n for n in os.environ if n.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.at.slurm_conf))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # of bad nodes that were found
    monkeypatch.setenv(
        "XDG_CONFIG_HOME", str(tmp_path / "config")
    )  # nor a developer's own settings
    slurm_cluster.reset()
    yield slurm_cluster
    # An endless run of the last test here would take its share of the CPUs from all that follow.
    slurm_cluster.leave()
