"""What a drill does to processes and files: to those of its run alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hpctrain.advise.drill import injectors
from hpctrain.ledger.run.layout import RunDir

WAITS = "import sys; print('here', flush=True); sys.stdin.read()"
FORKS = "import os; pid = os.fork(); " + WAITS.replace("'here'", "'here', pid")


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "lm")
    found.checkpoints.mkdir(parents=True)
    found.attempt(2).mkdir(parents=True)
    return found


def waiting(path, program=WAITS, lines=1):
    """A process whose standard output is a file."""
    with path.open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=out)
    while path.read_bytes().count(b"\n") < lines:
        assert child.poll() is None
    return child


def test_ranks_are_found_by_their_logs_and_no_other_process_is(run, tmp_path):
    ranks = [waiting(run.rank_log(2, rank)) for rank in (1, 0)]
    others = [waiting(tmp_path / "rank-00003.log")]
    try:
        found = injectors.ranks_here(run, 2)
        assert [(one.rank, one.pid, one.agent) for one in found] == [
            (0, ranks[1].pid, os.getpid()), (1, ranks[0].pid, os.getpid()),
        ]  # fmt: skip
        assert injectors.ranks_here(run, 1) == []
        injectors.send(ranks[0].pid, signal.SIGKILL)
        assert ranks[0].wait(30) == -signal.SIGKILL
        injectors.send(ranks[0].pid, signal.SIGKILL)  # it has ended: nothing to do
    finally:
        for child in [*ranks, *others]:
            child.kill()
            child.communicate()


def test_a_ranks_own_child_is_not_taken_for_it(run):
    """Its writer has the same log, and would be stopped or killed in its place."""
    rank = waiting(run.rank_log(2, 0), FORKS, lines=2)
    try:
        assert [one.pid for one in injectors.ranks_here(run, 2)] == [rank.pid]
    finally:
        rank.communicate()  # both read to the end of what nobody writes


def checkpoint(run, step, sizes=(100, 9000)):
    folder = run.checkpoints / f"step-{step:010d}"
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / f"shard-{number}").write_bytes(bytes(size))
    return folder


def test_the_newest_is_that_of_the_latest_step_and_staged_ones_do_not_count(run):
    assert injectors.newest(run) is None
    checkpoint(run, 40)
    checkpoint(run, 100)
    (run.checkpoints / ".staged").mkdir()
    assert injectors.newest(run) == (100, "step-0000000100")
    assert injectors.committed(run) == {"step-0000000040", "step-0000000100"}


def test_a_cut_and_a_turned_bit_meet_the_largest_file_once(run):
    torn, flipped = checkpoint(run, 1), checkpoint(run, 2)
    injectors.damage(torn, cut=True)
    injectors.damage(flipped, cut=False)

    assert [len((torn / f"shard-{n}").read_bytes()) for n in (0, 1)] == [100, 4500]
    small, large = ((flipped / f"shard-{n}").read_bytes() for n in (0, 1))
    assert (len(small), any(small), len(large)) == (100, False, 9000)
    assert sum(byte.bit_count() for byte in large) == 1
