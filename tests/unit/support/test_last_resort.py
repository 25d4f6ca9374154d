"""A test that hangs where pytest-timeout cannot reach it ends as a crash, and the others run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import last_resort
from tests.support.patience import PATIENCE_S

PLUGIN = """
import sys

sys.path.insert(0, {root!r})
from tests.support import last_resort

last_resort.LIMITS = 0.5  # pytest-timeout's own clock is not the one that is proved here

def pytest_configure(config):
    config.pluginmanager.register(last_resort.LastResort(), last_resort.NAME)
"""
ROOT = Path(__file__).parents[3]
HANGS = {
    "test": """
@pytest.mark.timeout(2)
def test_hangs():
    threading.Event().wait()
""",
    "teardown of a failed test": """
@pytest.fixture
def ends_never():
    yield
    threading.Event().wait()

@pytest.mark.timeout(2)
def test_hangs(ends_never):
    assert False
""",
}


@pytest.mark.parametrize("where", HANGS)
def test_a_hang_is_a_crash_with_stacks_and_the_next_test_runs(tmp_path, where):
    (tmp_path / "conftest.py").write_text(PLUGIN.format(root=str(ROOT)))
    text = f"import threading\nimport pytest\n{HANGS[where]}\n\ndef test_behind():\n    pass\n"
    (tmp_path / "test_a.py").write_text(text)
    words = ["-q", "-p", "no:cacheprovider", "-n", "1", "-rA"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )

    assert "crashed while running 'test_a.py::test_hangs'" in done.stdout, done.stdout + done.stderr
    assert "PASSED test_a.py::test_behind" in done.stdout
    assert "Fatal Python error: Aborted" in done.stderr, "all stacks"


def test_the_kernel_sends_the_signal_and_a_forked_process_has_no_such_timer():
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    timer = last_resort.KernelTimer(signal.SIGUSR1)
    pid = os.fork()
    if not pid:
        with contextlib.suppress(OSError):
            timer.start(60)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

    timer.start(0.01)
    assert heard.wait(PATIENCE_S)
    signal.signal(signal.SIGUSR1, before)


def test_every_test_of_this_session_has_it(request):
    assert request.config.pluginmanager.has_plugin(last_resort.NAME)
