"""However the ranks of a program end, their round ends, and with a reason."""

from __future__ import annotations

import collections
import random
import time

import pytest

from hpctrain.node.agent import ranks
from tests.support.processes import alive
from tests.support.rank_agents import Agents

pytestmark = pytest.mark.usefixtures("preloaded")

RANKS = 3
BEGIN = """
import atexit, os, pathlib, signal, subprocess, sys, threading, time
rank = int(os.environ["RANK"])
pids = pathlib.Path(os.environ["HPCTRAIN_ATTEMPT_DIR"], f"pids-{rank}")
"""
THREAD = "threading.Thread(target=time.sleep, args=[1000]"
FOREVER = "import time; time.sleep(1000)"
CHILD = f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n"
LATE = "import time\nfor n in range(20): print(n, flush=True); time.sleep(0.1)"
ENDS = {
    "returns": ("print('done')", "left"),
    "exits with 0": ("sys.exit(0)", "left"),
    "exits with 5": ("sys.exit(5)", "failed"),
    "raises": ("raise ValueError('x')", "failed"),
    "one raises, others sleep": ("time.sleep(100 * (rank != 1)); raise ValueError('x')", "failed"),
    "os._exit(0)": ("os._exit(0)", "left"),
    "os._exit(7)": ("os._exit(7)", "failed"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "failed"),
    "daemon thread": (f"{THREAD}, daemon=True).start()", "left"),
    "thread": (f"{THREAD}).start()", "left"),
    "zombie": ("if not os.fork(): os._exit(0)", "left"),
    "leftover child": (CHILD + "pids.write_text(str(child.pid))", "left"),
    "child that prints": (f"subprocess.Popen([sys.executable, '-c', {LATE!r}])", "left"),
    "hanging hook": ("atexit.register(time.sleep, 1000)", "left"),
    "at different times": ("time.sleep(0.4 * rank)", "left"),
    "last one hangs": ("if rank == 2: signal.pause()", "hung"),
    "first one hangs": ("if rank == 0: threading.Lock().acquire(); signal.pause()", "hung"),
}
SOON_S = 30.0
"""With the processor of others."""


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(ranks, "EXIT_HANG_S", 0.3)
    monkeypatch.setattr(ranks, "HOOKS_HANG_S", 0.3)


def _ends(folder, name):
    """How a program ended, and whether something of it is left."""
    folder.mkdir()
    script, expected = ENDS[name]
    agents = Agents(folder, RANKS)
    try:
        [end] = agents.run(BEGIN + script, patience_s=SOON_S)
    finally:
        agents.close()
    assert end is not None, f"{name}: it has not ended"
    assert end[0] == expected, name
    assert expected != "failed" or end[3], f"{name}: nobody said why"
    assert expected != "hung" or "did not: " in end[1]
    left = [pid for path in folder.rglob("pids-*") if alive(pid := int(path.read_text()))]
    assert not left, name
    return end


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ENDS)
def test_each_way_to_end_ends(tmp_path, name):
    _ends(tmp_path / "a", name)


@pytest.mark.soak
@pytest.mark.usefixtures("soon")
def test_200_mixed_programs_end_with_a_reason(tmp_path):
    drawn, took = random.Random(14), collections.Counter()
    for number in range(200):
        name = drawn.choice(list(ENDS))
        began = time.monotonic()
        _ends(tmp_path / str(number), name)
        took[name] = max(took[name], time.monotonic() - began)
    print({name: round(seconds, 1) for name, seconds in took.items()})
