"""What of torch's own is asked for, and that it disturbs nobody."""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S

SERVES = """
import signal, sys
from pathlib import Path
from hpctrain.node.hangs.witness import serve_recorder

def threads():
    return set(Path("/proc/self/task").iterdir())


import torch  # begins threads of its own

before = threads()
assert serve_recorder(Path(sys.argv[1]))
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
for task in threads() - before:
    line = next(each for each in (task / "status").read_text().split("\\n") if "SigBlk" in each)
    print(*(int(line.split()[1], 16) >> (number - 1) & 1 for number in (10, 12, 15)))
"""


def test_a_stop_is_never_handed_to_the_thread_that_serves_the_recorder(tmp_path):
    """Else Python's handler waits for the main thread, which may sleep or stand in a collective."""
    argv = [sys.executable, "-c", SERVES, str(tmp_path / "fr")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()
    assert set(done.stdout.splitlines()) == {"1 1 1"}
