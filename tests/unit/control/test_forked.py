"""A process beside an agent outlives the program that has forked it, where it is handed over."""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S

PROGRAM = """
import os, sys
from hpctrain.node.control.node_process import ForkedServer

orders = []

def make():
    async def do(order):
        orders.append(order["word"])
        return len(orders)
    return do

def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

handed_over = sys.argv[1] if len(sys.argv) > 1 else ""
with ForkedServer(make, "the server", handed_over) as server:
    answer = server.ask({"word": "x"})
    print(server.pid, answer, os.get_inheritable(server._line.fileno()), flush=True)
    if not handed_over:
        orders.append("of the parent alone")
        given = server.hand_over()
        assert server.pid == 0
        server.stop()
        assert lives(int(given.split(":")[0])), "it is another one's now"
        os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], given])
    pid = server.pid
assert not lives(pid)

with ForkedServer(make, "the server") as server:
    os.kill(server.pid, 9)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    assert server.hand_over() == "", "there is nothing to hand over"
"""


def test_it_does_orders_of_the_program_that_takes_the_agents_place_and_keeps_what_it_had():
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PROGRAM": PROGRAM},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    (first, one, closed), (later, two, still) = (line.split() for line in child.stdout.splitlines())
    assert (first, one, two) == (later, "1", "2")
    assert (closed, still) == ("False", "False")
