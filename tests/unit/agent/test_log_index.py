"""When lines of a rank's log were written is noted beside it, cheaply, and read back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from hpctrain.core.base import clock
from hpctrain.ledger.run.attempt_files import Guess, LogMark, LogTimes, first_offset, times_path
from hpctrain.node.agent import log_index
from hpctrain.node.agent.log_index import LogIndexer
from tests.support.clocks import ManualClock
from tests.support.patience import PATIENCE_S


class LoggingRank:
    """A log that grows, and a clock that looks at it at moments of the test's own."""

    def __init__(self, folder):
        self.log = folder / "rank-00000.log"
        self.t = 1000.0
        self.clock = LogIndexer([self.log], now=lambda: self.t)

    def prints(self, size):
        with self.log.open("ab") as file:
            file.write(b"x" * (size - 1) + b"\n")

    def looked_at(self, t, *, last=False):
        self.t = t
        self.clock.look(last=last)

    @property
    def marks(self):
        return [(mark.t, mark.size) for mark in LogTimes(self.log).read()]


@pytest.fixture
def rank(tmp_path):
    return LoggingRank(tmp_path)


def test_a_log_that_grows_steadily_is_marked_once_a_minute(rank):
    for t in range(1000, 1300, 2):
        rank.prints(10)
        rank.looked_at(t)
    assert [t for t, _ in rank.marks] == [1000, 1060, 1120, 1180, 1240]
    assert [size for _, size in rank.marks] == [10, 310, 610, 910, 1210]


def test_a_log_that_grows_fast_is_marked_every_few_seconds(rank):
    for t in range(1000, 1020, 2):
        rank.prints(40_000)
        rank.looked_at(t)
    assert [t for t, _ in rank.marks] == [1000, 1006, 1012, 1018]


def test_a_month_of_lines_takes_little_room(rank):
    """A rank that prints each ten seconds; counted over ten hours, since each look is alike."""
    for t in range(0, 36_000, 2):
        if t % 10 == 0:
            rank.prints(50)
        rank.looked_at(1_800_000_000 + t)
    month = times_path(rank.log).stat().st_size * 24 * 30 / 10
    assert month < 1_100_000


def test_what_comes_after_a_silence_is_not_of_the_time_of_the_silence(rank):
    rank.prints(10)
    for t in (1000, 1002, 4000):
        rank.looked_at(t)
    rank.prints(5)
    rank.looked_at(4002)
    assert rank.marks == [(1000, 10), (4000, 10), (4002, 15)]
    assert first_offset(LogTimes(rank.log).read(), 4001) == 10


def test_the_last_words_are_marked_at_once(rank):
    rank.prints(10)
    rank.looked_at(1000)
    rank.prints(10)
    rank.looked_at(1004)
    rank.looked_at(1005, last=True)
    rank.looked_at(1006, last=True)
    assert rank.marks == [(1000, 10), (1005, 20)]


def test_a_rank_without_output_and_a_disk_without_room_disturb_nobody(rank, monkeypatch):
    rank.looked_at(1000)
    assert not times_path(rank.log).exists()
    rank.prints(10)
    times_path(rank.log).mkdir()
    rank.looked_at(1002)
    times_path(rank.log).rmdir()
    rank.looked_at(1004)
    assert rank.marks == [(1004, 10)]


def test_a_clock_that_was_put_back_does_not_stop_the_marks(rank):
    rank.prints(10)
    rank.looked_at(5000)
    rank.prints(10)
    rank.looked_at(1000)
    rank.prints(10)
    rank.looked_at(5100)
    assert rank.marks == [(5000, 10), (5100, 30)]  # a mark that goes back is not read


def test_it_looks_by_itself_while_the_ranks_run_and_once_more_at_the_end(rank):
    hands = ManualClock()
    with clock.use(hands), rank.clock:
        hands.until_waiting()
        rank.prints(10)
        hands.advance(log_index.LOOK_S - 0.1)
        hands.until_waiting()
        early = rank.marks
        hands.advance(0.1)
        hands.until_waiting()
        seen = rank.marks
        rank.prints(10)
    assert (early, seen) == ([], [(1000, 10)])
    assert rank.marks == [(1000, 10), (1000, 20)]


def test_a_file_system_that_hangs_keeps_nobody_waiting(rank, monkeypatch):
    monkeypatch.setattr(log_index, "PATIENCE_S", 0.01)
    hangs, freed = threading.Event(), threading.Event()

    def look(*, last=False):
        hangs.set()
        freed.wait(PATIENCE_S)

    monkeypatch.setattr(rank.clock, "look", look)
    with rank.clock:
        pass
    assert hangs.wait(PATIENCE_S)
    assert rank.clock._thread.is_alive()
    freed.set()


# ---- reading ------------------------------------------------------------------------------------


def test_marks_that_are_torn_or_go_back_are_left_out(rank):
    times_path(rank.log).write_bytes(b"10 5\n\0\0\nx y\n9 8\n12 4\n20 9\n30 1")
    assert rank.marks == [(10, 5), (20, 9)]


def test_marks_are_read_as_they_grow(rank):
    times = LogTimes(rank.log)
    assert list(times.read()) == []
    times_path(rank.log).write_bytes(b"10 5\n2")
    assert list(times.read()) == [LogMark(10, 5)]
    with times_path(rank.log).open("ab") as file:
        file.write(b"0 9\n")
    assert list(times.read()) == [LogMark(10, 5), LogMark(20, 9)]


@pytest.mark.parametrize(
    ("offset", "t"),
    [(0, 0), (5, 5), (10, 10), (15, 60), (20, 110), (25, 115), (30, 120), (99, 120)],
)
def test_between_two_marks_a_lines_place_tells_its_time(offset, t):
    guess = Guess([LogMark(10, 10), LogMark(110, 20)], begin=0, end=LogMark(120, 30))
    assert guess.at(offset) == pytest.approx(t)


def test_without_marks_a_lines_place_in_the_file_tells_its_time():
    guess = Guess([], begin=100, end=LogMark(200, 10))
    assert [guess.at(offset) for offset in (0, 5, 10)] == [100, 150, 200]


def test_times_never_go_back_where_clocks_differ():
    guess = Guess([LogMark(10, 10), LogMark(110, 20)], begin=50, end=LogMark(90, 30))
    found = [guess.at(offset) for offset in range(31)]
    assert found == sorted(found)


@pytest.mark.parametrize(("since", "offset"), [(9, 0), (10, 0), (11, 10), (110, 10), (111, 20)])
def test_what_was_written_before_is_known_by_the_last_mark_before(since, offset):
    assert first_offset([LogMark(10, 10), LogMark(110, 20)], since) == offset


@pytest.mark.parametrize(("ranks", "every_s"), [(8, 2), (1000, 2), (10_000, 20)])
def test_all_nodes_together_ask_for_no_more_than_500_logs_a_second(tmp_path, ranks, every_s):
    clock = LogIndexer([tmp_path / f"rank-{rank:05d}.log" for rank in range(8)], in_all=ranks)

    assert clock.every_s == every_s
    assert ranks / clock.every_s <= log_index.LOOKS_PER_S


class Printing:
    """A process that prints what it is told into a log, as a rank does; never looked at."""

    program = """
import sys
for line in sys.stdin:
    print(line, end="", flush=True)
    print(file=sys.stderr, flush=True)
"""

    def __init__(self, log):
        pipe = subprocess.PIPE
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self.program],
                stdin=pipe,
                stdout=file,
                stderr=pipe,
                text=True,
            )
        self.pid = self.process.pid

    def says(self, line):
        self.process.stdin.write(line)
        self.process.stdin.flush()
        assert self.process.stderr.readline() == "\n"

    def end(self):
        self.process.communicate()


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run" / "attempts" / "0001" / "rank-00000.log"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def prints(log):
    process = Printing(log)
    yield process
    if process.process.poll() is None:
        process.end()


def test_the_length_of_a_log_is_known_without_the_file_system(log, prints, monkeypatch):
    clock = LogIndexer([log], now=lambda: 1000.0, pids=[prints.pid])
    prints.says("a line\n")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", None)
        clock.look()
    assert [mark.size for mark in LogTimes(log).read()] == [7]


def test_a_rank_that_prints_elsewhere_has_its_log_looked_at(log, prints, tmp_path):
    prints.says("into another run's log of the same name\n")
    other = tmp_path / "other" / "attempts" / "0001" / log.name
    other.parent.mkdir(parents=True)
    other.write_text("six..\n")
    clock = LogIndexer([other], now=lambda: 1000.0, pids=[prints.pid])
    clock.look()
    assert [mark.size for mark in LogTimes(other).read()] == [6]


def test_the_log_of_a_rank_that_has_ended_is_looked_at(log, prints):
    prints.says("a line\n")
    prints.end()
    clock = LogIndexer([log], now=lambda: 1000.0, pids=[prints.pid])
    clock.look(last=True)
    assert [mark.size for mark in LogTimes(log).read()] == [7]
