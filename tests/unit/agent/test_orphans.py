"""What a program started and left behind ends with its attempt; the agent's own processes stay."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tests.support import processes

AGENT = """
import json, os, subprocess, sys
from hpctrain.node.agent.signals import Orphans

own = subprocess.Popen(["sleep", "600"])
orphans = Orphans()
child = subprocess.Popen(["sleep", "600"])
script = 'trap "" TERM; setsid sleep 600 >/dev/null & echo $!'
orphan = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE).stdout)
script = 'sleep 600 >/dev/null & echo $!; wait'
spared = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
below = int(spared.stdout.readline())
print(json.dumps([own.pid, child.pid, orphan, spared.pid, below]), flush=True)
sys.stdin.readline()
orphans.end(spare={spared.pid})
print("ended", flush=True)
sys.stdin.readline()
own.kill()
"""


def test_children_and_orphans_of_ranks_are_killed_and_the_agents_own_processes_are_not():
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        pids = json.loads(agent.stdout.readline())
        try:
            assert all(map(processes.alive, pids))
            agent.stdin.write("\n")
            agent.stdin.flush()
            assert agent.stdout.readline() == "ended\n"

            left = [processes.alive(pid) for pid in pids]
            assert left == [True, False, False, True, True]
        finally:
            processes.kill_all(pids)
            agent.send_signal(signal.SIGKILL)
