"""A board is seen by all processes of a node, whole, and by nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from hpctrain.errors import HpctrainError
from hpctrain.node.control import board as boards
from hpctrain.node.control.board import Board
from hpctrain.node.control.lease import MOST, Decision, Lease, Wishes


@pytest.fixture
def board(tmp_path):
    board = Board.create(tmp_path / "board", first_rank=8, ranks=2)
    yield board
    board.close()


def test_another_process_reads_what_was_written(board, tmp_path):
    lease = Lease(3, 7, (Decision(7, "save", 1),))
    board.put_lease(lease)
    program = (
        "import sys, pathlib; from hpctrain.node.control.board import *\n"
        "board = Board.open(pathlib.Path(sys.argv[1]))\n"
        "print(board.first_rank, board.ranks, board.newer_lease(0)[1])\n"
        "board.words[board.at(1) + FIRST_WISH] = 4\n"
        "board.close()\n"
    )

    told = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "board"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert told == f"8 2 {lease}\n"
    assert board.wishes(1) == Wishes(stop=4)
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


def test_a_fresh_board_has_no_lease_and_reports_no_rank(board):
    assert board.newer_lease(0) is None
    report = board.report(1)
    assert (report.ranks, report.arrived, report.behind) == (0, -1, MOST)


def test_an_older_lease_is_not_put_over_a_newer_one(board):
    assert board.put_lease(Lease(5, 9))
    assert not board.put_lease(Lease(4, 8))
    assert not board.put_lease(Lease(5, 9))

    stamp, lease = board.newer_lease(0)
    assert lease == Lease(5, 9)
    assert board.newer_lease(stamp) is None


def test_a_lease_that_is_replaced_all_the_time_is_read_whole(board, tmp_path):
    reader = Board.open(tmp_path / "board")
    leases = [Lease(n, n, (Decision(n, "save", n),) * (n % 60)) for n in range(1, 1500)]
    writing = threading.Thread(target=lambda: [board.put_lease(lease) for lease in leases])
    writing.start()
    stamp, numbers = 0, []
    while not numbers or numbers[-1] < len(leases):
        newer = reader.newer_lease(stamp)
        if newer is not None:
            stamp, lease = newer
            assert lease == leases[lease.number - 1]
            numbers.append(lease.number)
    writing.join()
    reader.close()

    assert numbers == sorted(numbers)


def test_what_was_half_written_is_not_read(board):
    board.put_lease(Lease(1, 1))
    board.put_lease(Lease(2, 2))
    cell = board._lease
    cell._memory[cell._place(cell._stamp[0]) + boards._FRAME.size] ^= 1

    assert board.newer_lease(0) is None
    board.put_lease(Lease(3, 3))
    assert board.newer_lease(0)[1] == Lease(3, 3)


def test_what_is_too_long_is_refused_and_the_last_lease_stays(board):
    board.put_lease(Lease(1, 1))
    most = board._lease._most_bytes
    with pytest.raises(ValueError, match=f"room for {most}"):
        board._lease.write(b"y" * (most + 1))

    assert board.newer_lease(0)[1] == Lease(1, 1)


def test_a_board_is_made_once(board, tmp_path):
    with pytest.raises(FileExistsError):
        Board.create(tmp_path / "board", 0, 1)


def test_where_there_is_no_room_it_is_said_with_the_path_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"No space left.*{tmp_path}"):
        Board.create(tmp_path / "board", 0, 1)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["empty", "short", "magic", "version", "longer", "link", "fifo"])
def test_what_is_no_board_is_refused_in_a_line(board, tmp_path, damage):
    path, whole = tmp_path / "other", (tmp_path / "board").read_bytes()
    if damage == "link":
        path.symlink_to(tmp_path / "board")
    elif damage == "fifo":
        os.mkfifo(path)
    else:
        changed = {
            "empty": b"",
            "short": whole[:-8],
            "magic": b"x" + whole[1:],
            "version": whole[:8] + b"\x09" + whole[9:],
            "longer": whole + bytes(8),
        }
        path.write_bytes(changed[damage])

    with pytest.raises((HpctrainError, OSError), match=str(path)):
        Board.open(path)
