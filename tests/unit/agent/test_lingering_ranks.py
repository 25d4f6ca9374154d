"""Ranks that stay behind: whatever prints, computes, reads or writes lives; the rest is still."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpctrain.core.base.text import fold_ranks
from hpctrain.node.agent.node_reports import LifeWatch, in_words, uses
from hpctrain.node.hangs.verdict import COMPUTES, IO_BYTES, Used

LIMIT_S = 300.0


class Machine:
    """Processes and a clock that a test turns."""

    def __init__(self, *pids: int) -> None:
        self.now = 1000.0
        self.used = {pid: Used(10.0, 0) for pid in pids}
        self.watch = LifeWatch(
            LIMIT_S, clock=lambda: self.now, look_at=lambda pids: {p: self.used[p] for p in pids}
        )

    def after(self, seconds: float, logs=(), *, cpu_s: float = 0.0, io_bytes: int = 0, of: int = 1):
        """Seconds pass, in each of which that process uses so much; how they look then."""
        life = "alive"
        for _ in range(round(seconds)):
            self.now += 1
            self.used[of] = Used(self.used[of].cpu_s + cpu_s, self.used[of].io_bytes + io_bytes)
            life = self.watch.look(list(self.used), list(logs))
        return life


def test_what_does_nothing_is_quiet_and_then_still():
    machine = Machine(1, 2)
    assert machine.after(29) == "alive"
    assert machine.after(10) == "quiet"
    assert machine.after(255) == "quiet"
    assert machine.after(10) == "still"


@pytest.mark.parametrize(
    "use", [{"cpu_s": 2 * COMPUTES}, {"io_bytes": IO_BYTES // 2}], ids=["computes", "writes"]
)
def test_one_that_works_keeps_all_alive(use):
    machine = Machine(1, 2)
    assert machine.after(1000, of=2, **use) == "alive"
    assert machine.after(310) == "still", "and not for ever"


def test_a_thread_that_looks_now_and_then_is_no_life():
    machine = Machine(1, 2)
    assert machine.after(310, cpu_s=0.5 * COMPUTES, io_bytes=1000) == "still"


def test_a_line_in_a_log_is_life(tmp_path):
    machine, log = Machine(1), tmp_path / "rank-00001.log"
    assert machine.after(290, [log]) == "quiet"
    log.write_text("evaluated 10 of 20\n")
    assert machine.after(20, [log]) == "alive"


def test_that_another_rank_returns_is_life():
    machine = Machine(1, 2)
    assert machine.after(290) == "quiet"
    del machine.used[2]
    assert machine.after(20) == "alive"


def test_a_child_that_ends_is_life():
    machine = Machine(1)
    machine.after(290)
    machine.used[1] = Used(3.0, 0)
    assert machine.after(20) == "alive"


def test_a_process_is_seen_with_all_that_it_has_started():
    work = "while True: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{work}'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as parent:
        before = uses([parent.pid])[parent.pid]
        while uses([parent.pid])[parent.pid].cpu_s < before.cpu_s + 0.5:
            pass
        os.killpg(parent.pid, 9)
    assert uses([parent.pid])[parent.pid] == Used(0.0, 0), "gone"


def test_who_has_not_returned_is_named():
    words = "3 ranks returned and rank 3 did not: it printed nothing and did nothing for 5 min"
    assert in_words(3, [3], 300).startswith(words[:60])
    assert "ranks 0-2,7 did not" in in_words(4, [0, 1, 2, 7], 300)
    assert "processes of theirs do not end" in in_words(4, [], 300)
    assert len(fold_ranks(range(0, 10000, 2))) < 100
