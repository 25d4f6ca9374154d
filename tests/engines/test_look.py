"""A look at ranks that really hang names who is to blame, and harms nobody."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from hpctrain.node.hangs.evidence import RankEvidence
from hpctrain.node.hangs.look import look
from hpctrain.node.hangs.verdict import verdict
from tests.support.hang_scenes import BAD, RANKS, SCENES, Scene
from tests.support.ports import free_port

EXPECTED = {
    "sleeps": ("behind", (BAD,), "fetch_rows"),
    "holds_gil": ("behind", (BAD,), "fetch_rows"),
    "spins": ("behind", (BAD,), "fetch_rows"),
    "stopped": ("stopped", (BAD,), "is stopped (by a signal)"),
    "traced": ("stopped", (BAD,), "is stopped (by a debugger)"),
    "extra_collective": ("mismatch", (BAD,), "calls barrier number 9 of all 8 ranks at"),
    "wrong_collective": ("mismatch", (BAD,), "calls all_gather number 9 [8] of all 8 ranks at"),
    "crossed_groups": ("deadlock", (0, 4), "all_reduce number 1 [3] of ranks 0 and 4 at"),
    "returns": ("returned", (BAD,), "whose program has returned, in all_reduce number 4"),
}


@pytest.mark.parametrize("scene", SCENES)
def test_who_holds_up_the_others_is_named(scene):
    with Scene(scene, free_port()) as ranks:
        ranks.wait_until_still()
        began_s = time.process_time()
        ruling = verdict(ranks.evidence())
        took_s = time.process_time() - began_s

    kind, blamed, words = EXPECTED[scene]
    assert (ruling.kind, ruling.ranks, ruling.is_certain) == (kind, blamed, True)
    assert words in ruling.summary
    assert took_s < 2  # of this process's CPU; it uses 0.04 s


def test_ranks_that_only_take_long_go_on_after_a_look():
    with Scene("slow", free_port()) as ranks:
        ranks.wait_for_step(5)
        evidence = ranks.evidence()
        ranks.wait_for_step(15)

    assert all(rank.recorded is not None and rank.frames for rank in evidence)
    assert len({rank.rank for rank in evidence}) == RANKS


def test_a_process_that_has_set_up_nothing_is_not_killed_by_a_look(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        (evidence,) = look(tmp_path, [(program.pid, RankEvidence(0, "n1", ""))])
        assert evidence.process in {"R", "S", "D"}
        assert (evidence.recorded, evidence.frames, evidence.groups) == (None, None, {})
        program.communicate(b"\n")
    assert program.returncode == 0


def test_a_process_that_is_gone_is_said_to_be_gone(tmp_path):
    program = subprocess.Popen([sys.executable, "-c", ""])
    program.wait()

    known = RankEvidence(3, "n1", "", step=7, phase="data")
    (evidence,) = look(tmp_path, [(program.pid, known)])
    assert (evidence.rank, evidence.process, evidence.step, evidence.phase) == (3, "", 7, "data")
