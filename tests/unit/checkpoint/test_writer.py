from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import platform
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

import hpctrain
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.tensors import writer
from hpctrain.checkpoint.tensors.arena import Arena, aligned
from hpctrain.checkpoint.tensors.writer import ShardWriter, WriterTimeout
from hpctrain.checkpoint.tensors.writer_process import WriteFailure, WriteRequest, frame
from hpctrain.core.base.process import OF_STEPS
from hpctrain.core.testing.faults import armed
from hpctrain.errors import CheckpointError
from tests.support import patience
from tests.support import small_disk as disks

small_disk = disks.small_disk

MIB = 1 << 20
BLOCK = 512 << 10
PATIENCE = 60.0
"""For what must come; no test waits so long when all is well."""
IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "ppc64le": 274}
WRITER = """
import os, sys
sys.path[:0] = {path!r}
from hpctrain.checkpoint.tensors.arena import Arena
from hpctrain.checkpoint.format.shard import ShardPiece
from hpctrain.checkpoint.tensors.writer_process import WriteRequest
from hpctrain.checkpoint.tensors.writer import ShardWriter
from pathlib import Path
arena = Arena(16 << 20)
arena.view(0, 4)[:] = b"abcd"
def request(path, pieces, nbytes):
    parts = [ShardPiece(f"w{{i}}", "U8", (nbytes,), (0,), (nbytes,)) for i in range(pieces)]
    return WriteRequest(Path(path), parts, [0] * pieces, 512 << 10, 1, 7, 0)
"""
"""How a rank of its own begins, in a test."""


@contextlib.contextmanager
def started():
    """A writer whose process is on its way."""
    with contextlib.closing(ShardWriter()) as made:
        made.ready()
        yield made


@pytest.fixture
def one():
    with started() as made:
        yield made


@pytest.fixture
def arena():
    with contextlib.closing(Arena(MIB)) as made:
        yield made


def filled(arena, sizes, seed=0):
    """Pieces with these sizes, their bytes in the arena; with their offsets."""
    offsets = np.cumsum([0, *map(aligned, sizes)]).tolist()
    arena.ensure(offsets[-1])
    random = np.random.default_rng(seed)
    for offset, size in zip(offsets, sizes, strict=False):
        view = np.frombuffer(arena.view(offset, size), np.uint8)
        view[:] = random.integers(0, 256, size, dtype=np.uint8)
    pieces = [ShardPiece(f"w{i}", "U8", (size,), (0,), (size,)) for i, size in enumerate(sizes)]
    return pieces, offsets[:-1]


def request(path, pieces, offsets, threads=1):
    return WriteRequest(path, pieces, offsets, BLOCK, threads, step=7, rank=3)


def small(path, arena):
    """A request that takes no time."""
    return request(path, *filled(arena, [1000, 0, 70_000]))


def endless(path, arena):
    """A request that takes seconds: much to write, though the arena is small."""
    arena.ensure(16 * MIB)
    piece = ShardPiece("w", "U8", (16 * MIB,), (0,), (16 * MIB,))
    return request(path, [piece] * 256, [0] * 256)


def until(condition):
    patience.until(condition, "it never came true")


def begun_to_write(path):
    return lambda: path.exists() and path.stat().st_size > 4 * MIB


def ready(one, arena, path):
    """The process's pid, when it is up and has served a request."""
    if threading.current_thread() is threading.main_thread():
        one.ready()
    one.begin(small(path, arena), arena)
    one.wait(PATIENCE)
    return one.pid


def gone(pid):
    """Neither there nor a zombie."""
    return not Path(f"/proc/{pid}").exists()


def same(report, other):
    return (report.size, report.digest) == (other.size, other.digest) and all(
        np.array_equal(getattr(report, name), getattr(other, name))
        for name in ("offsets", "digests")
    )


def status_kib(pid, field):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_shard_and_its_report_are_those_that_the_rank_itself_would_have_made(
    one, arena, tmp_path, threads
):
    pieces, offsets = filled(arena, [5, 3 * MIB + 1, 0, 64, 700_000])
    behind = tmp_path / "behind" / shard.file_name(0)  # the name stands in the file
    behind.parent.mkdir()
    one.begin(request(behind, pieces, offsets, threads), arena)
    report = one.wait(PATIENCE)
    sources = [arena.view(at, piece.nbytes) for piece, at in zip(pieces, offsets, strict=True)]
    own = shard.write(tmp_path / shard.file_name(0), pieces, sources, block_bytes=BLOCK)
    assert behind.read_bytes() == (tmp_path / shard.file_name(0)).read_bytes()
    assert same(report, own)


def test_a_rank_without_bytes_gets_its_shard_too(one, tmp_path):
    with contextlib.closing(Arena()) as empty:
        piece = ShardPiece("nothing", "F32", (0, 4), (0, 0), (0, 4))
        one.begin(request(tmp_path / "shard", [piece], [0]), empty)
        assert one.wait(PATIENCE).size == (tmp_path / "shard").stat().st_size


def test_one_process_writes_shard_after_shard(one, arena, tmp_path):
    pids = set()
    for number in range(3):
        pids.add(ready(one, arena, tmp_path / f"{number}"))
    assert len(pids) == 1


def test_an_arena_that_has_grown_or_is_another_reaches_the_process(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    with contextlib.closing(Arena()) as other:
        for name, which, sizes in [
            ("grown", arena, [9 * MIB]),
            ("other", other, [9 * MIB]),
            ("back", arena, [2 * MIB]),
        ]:
            pieces, offsets = filled(which, sizes, seed=len(name))
            one.begin(request(tmp_path / name, pieces, offsets), which)
            one.wait(PATIENCE)
            written = (tmp_path / name).read_bytes()
            assert bytes(which.view(0, sizes[0])) in written
    assert one.pid == pid


def test_begin_returns_at_once_even_if_the_process_does_not_move(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    os.kill(pid, signal.SIGSTOP)
    many = [
        ShardPiece(f"a.long.name.of.a.tensor.{i}", "U8", (9,), (0,), (9,)) for i in range(20_000)
    ]
    one.begin(request(tmp_path / "shard", many, [0] * len(many)), arena)
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T ")
    os.kill(pid, signal.SIGCONT)
    assert one.wait(PATIENCE).size == (tmp_path / "shard").stat().st_size


def test_a_second_request_is_refused_while_one_is_in_flight(one, arena, tmp_path):
    one.begin(small(tmp_path / "first", arena), arena)
    with pytest.raises(RuntimeError, match="first is still being written"):
        one.begin(small(tmp_path / "second", arena), arena)
    one.wait(PATIENCE)
    assert not (tmp_path / "second").exists()


def test_waiting_for_nothing_is_a_mistake(one):
    with pytest.raises(RuntimeError, match="nothing is being written"):
        one.wait(1)


def test_other_threads_run_while_one_waits(one, arena, tmp_path):
    os.kill(ready(one, arena, tmp_path / "before"), signal.SIGSTOP)
    one.begin(small(tmp_path / "shard", arena), arena)
    waiter = threading.Thread(target=lambda: reports.append(one.wait(PATIENCE)))
    reports = []
    waiter.start()
    os.kill(one.pid, signal.SIGCONT)
    waiter.join(PATIENCE)
    assert [report.name for report in reports] == ["shard"]


def test_a_directory_that_is_not_there_is_the_writers_own_line_and_the_process_lives(
    one, arena, tmp_path
):
    pid = ready(one, arena, tmp_path / "before")
    one.begin(small(tmp_path / "no" / "shard", arena), arena)
    with pytest.raises(CheckpointError, match=r"cannot be written: \[Errno 2\] No such file") as it:
        one.wait(PATIENCE)
    assert isinstance(it.value.__cause__, FileNotFoundError)
    assert "\n" not in str(it.value)
    assert ready(one, arena, tmp_path / "after") == pid


def test_a_shard_that_is_there_already_is_not_written_over(one, arena, tmp_path):
    (tmp_path / "shard").write_bytes(b"of another attempt")
    one.begin(small(tmp_path / "shard", arena), arena)
    with pytest.raises(CheckpointError, match="File exists"):
        one.wait(PATIENCE)
    assert (tmp_path / "shard").read_bytes() == b"of another attempt"


def test_a_file_that_the_system_lets_not_grow_is_an_error_with_its_errno(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (MIB, MIB))
    one.begin(request(tmp_path / "shard", *filled(arena, [4 * MIB])), arena)
    with pytest.raises(CheckpointError, match=r"shard cannot be written: .*File too large") as it:
        one.wait(PATIENCE)
    assert it.value.__cause__.errno == errno.EFBIG
    assert one.pid == pid


def test_a_full_disk_is_an_error_with_its_errno(one, arena, small_disk):
    path = small_disk(2 * MIB) / "shard"
    one.begin(request(path, *filled(arena, [4 * MIB])), arena)
    with pytest.raises(CheckpointError, match=r"shard cannot be written: .*No space left") as it:
        one.wait(PATIENCE)
    assert it.value.__cause__.errno == errno.ENOSPC


def test_the_process_reaches_its_point_with_rank_and_step_before_it_begins(arena, tmp_path):
    with armed("fail:writer.request,rank=3,step=7,error=EDQUOT"), started() as failing:
        failing.begin(small(tmp_path / "shard", arena), arena)
        with pytest.raises(CheckpointError, match="Disk quota exceeded") as caught:
            failing.wait(PATIENCE)
    assert caught.value.__cause__.errno == errno.EDQUOT
    assert not (tmp_path / "shard").exists()


def test_a_piece_beyond_the_arena_is_an_error_and_no_short_shard(one, arena, tmp_path):
    pieces, offsets = filled(arena, [1000])
    one.begin(request(tmp_path / "shard", pieces, [arena.size - 999]), arena)
    with pytest.raises(CheckpointError, match=r"ValueError: .* is not in 1048576 bytes"):
        one.wait(PATIENCE)
    assert offsets == [0]
    assert not (tmp_path / "shard").exists()


@pytest.mark.parametrize(
    ("signum", "fate"),
    [
        (
            signal.SIGKILL,
            r"killed by SIGKILL \(the kernel does that when memory is short\); the next",
        ),
        (signal.SIGSEGV, "killed by SIGSEGV; the next"),
    ],
)
def test_a_process_that_is_killed_as_it_writes_is_an_error_that_names_the_signal(
    one, arena, tmp_path, signum, fate
):
    one.begin(endless(tmp_path / "shard", arena), arena)
    until(begun_to_write(tmp_path / "shard"))
    pid = one.pid
    os.kill(pid, signum)
    with pytest.raises(CheckpointError, match="shard was not written: .* was " + fate) as it:
        one.wait(PATIENCE)
    assert "\n" not in str(it.value)
    assert gone(pid)
    assert ready(one, arena, tmp_path / "after") != pid


def test_the_end_of_the_process_is_seen_though_another_one_holds_its_socket(
    one, arena, tmp_path, monkeypatch
):
    handles = []
    popen = subprocess.Popen

    def leaky(*args, **kwargs):
        handles.append(os.dup(kwargs["pass_fds"][0]))  # as a DataLoader forked in that moment
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", leaky)
    with started() as leaking:
        leaking.begin(endless(tmp_path / "shard", arena), arena)
        os.kill(leaking.pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="killed by SIGKILL"):
            leaking.wait(PATIENCE)
    os.close(handles[0])


def test_a_process_that_dies_between_two_requests_is_replaced(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    os.kill(pid, signal.SIGKILL)
    until(one._process.dead)
    assert ready(one, arena, tmp_path / "after") != pid
    assert (tmp_path / "after").exists()


def in_thread(work):
    """The error that some work ends with in another thread, or None."""
    errors = []

    def run():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    return errors[0] if errors else None


def test_another_thread_can_have_a_shard_written_by_a_process_that_was_made_ready(
    one, arena, tmp_path
):
    pid = ready(one, arena, tmp_path / "before")
    os.kill(pid, signal.SIGKILL)
    until(one._process.dead)
    one.ready()
    assert one.pid != pid
    assert in_thread(lambda: ready(one, arena, tmp_path / "shard")) is None
    assert (tmp_path / "shard").exists()


def test_another_thread_meets_the_death_of_the_process_as_a_failed_save(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    os.kill(pid, signal.SIGKILL)
    until(one._process.dead)
    error = in_thread(lambda: ready(one, arena, tmp_path / "shard"))
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(f"{tmp_path / 'shard'} was not written: its writer process has")
    assert ready(one, arena, tmp_path / "after") != pid


def test_a_process_that_is_alive_is_ready(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    one.ready()
    assert one.pid == pid


def test_no_new_process_is_made_ready_while_a_request_is_in_flight(one, arena, tmp_path):
    one.begin(small(tmp_path / "shard", arena), arena)
    with pytest.raises(RuntimeError, match="shard is still being written"):
        one.ready()
    assert one.wait(PATIENCE).name == "shard"


def test_a_process_that_hangs_is_killed_when_its_time_is_up_and_replaced(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    os.kill(pid, signal.SIGSTOP)
    one.begin(small(tmp_path / "shard", arena), arena)
    with pytest.raises(WriterTimeout, match="shard was not written in time") as caught:
        one.wait(0.05)
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, TimeoutError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
    assert gone(pid)
    assert ready(one, arena, tmp_path / "after") != pid
    assert not (tmp_path / "shard").exists()


def test_what_is_abandoned_ends_at_once_and_the_next_request_is_served(one, arena, tmp_path):
    one.begin(endless(tmp_path / "shard", arena), arena)
    until(begun_to_write(tmp_path / "shard"))
    pid = one.pid
    one.abandon()
    assert gone(pid)
    with pytest.raises(CheckpointError, match="it was abandoned"):
        one.wait(PATIENCE)
    assert ready(one, arena, tmp_path / "after") != pid


def test_a_wait_in_another_thread_ends_when_its_shard_is_abandoned(one, arena, tmp_path):
    os.kill(ready(one, arena, tmp_path / "before"), signal.SIGSTOP)
    one.begin(small(tmp_path / "shard", arena), arena)
    errors = []

    def wait():
        try:
            one.wait(PATIENCE)
        except CheckpointError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(one._lock.locked)
    one.abandon()
    waiter.join(PATIENCE)
    assert errors == [f"{tmp_path / 'shard'} was not written: it was abandoned"]


def test_abandoning_nothing_leaves_the_process_alone(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    one.abandon()
    assert ready(one, arena, tmp_path / "after") == pid


def test_closing_kills_and_leaves_no_zombie_and_can_be_repeated(arena, tmp_path):
    closing = ShardWriter()
    closing.ready()
    closing.begin(endless(tmp_path / "shard", arena), arena)
    until(begun_to_write(tmp_path / "shard"))
    pid = closing.pid
    closing.close()
    closing.close()
    assert gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        closing.begin(small(tmp_path / "after", arena), arena)


def test_a_process_that_the_rank_forked_does_not_close_the_ranks_writer(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    os.kill(pid, signal.SIGSTOP)
    one.begin(small(tmp_path / "shard", arena), arena)
    child = os.fork()
    if child == 0:
        one.abandon()
        one.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.kill(pid, signal.SIGCONT)
    assert one.wait(PATIENCE).name == "shard"
    assert one.pid == pid


def test_a_writer_is_not_started_by_a_thread_that_may_end_before_it():
    refused = []

    def start():
        with contextlib.suppress(RuntimeError), started():
            return
        refused.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert refused == [True]


def test_a_process_that_cannot_be_started_is_one_line_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(
        CheckpointError, match=r'No such file.* set checkpoint\.mode = "sync"'
    ) as it:
        ShardWriter().ready()
    assert "\n" not in str(it.value)


def test_a_process_that_ends_as_it_starts_is_an_error_with_its_exit_code(
    arena, tmp_path, monkeypatch
):
    monkeypatch.setattr(writer, "BOOT", "raise SystemExit(3)")
    with started() as failing:
        failing.begin(small(tmp_path / "shard", arena), arena)
        with pytest.raises(CheckpointError, match="ended with exit code 3"):
            failing.wait(PATIENCE)


GOOD = pickle.dumps(WriteFailure("made up", None))
FORGED = {
    "noise": (b"\xff" * 100, "it answers request 18446744073709551615, not 1"),
    "half a frame": (frame(1, GOOD)[:10], "ended with exit code 0"),
    "half a body": (frame(1, GOOD) + GOOD[:-1], "ended with exit code 0"),
    "an answer to another request": (frame(2, GOOD) + GOOD, "it answers request 2, not 1"),
    "a digest of other bytes": (frame(1, GOOD) + GOOD[:-2] + b"x.", "its digest is another"),
    "no pickle": (frame(1, b"noise") + b"noise", "UnpicklingError"),
    "no report": (frame(1, pickle.dumps("fine")) + pickle.dumps("fine"), "TypeError: str"),
    "a body without end": (frame(1, b"")[:8] + b"\xff" * 16, "announces 18,446,744,073"),
    "nothing": (b"", "ended with exit code 0"),
}
FORGER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[2])) as connection:
    connection.recv(24)
    connection.sendall({answer!r})
"""


@pytest.mark.parametrize(("answer", "reason"), FORGED.values(), ids=FORGED)
def test_an_answer_that_makes_no_sense_fails_the_save_and_the_process_is_replaced(
    arena, tmp_path, monkeypatch, answer, reason
):
    with monkeypatch.context() as forging:
        forging.setattr(writer, "BOOT", FORGER.format(answer=answer))
        broken = ShardWriter()
        broken.ready()
    with contextlib.closing(broken):
        pid = broken.pid
        broken.begin(small(tmp_path / "shard", arena), arena)
        with pytest.raises(CheckpointError, match=reason) as caught:
            broken.wait(PATIENCE)
        assert str(tmp_path / "shard") in str(caught.value)
        assert "\n" not in str(caught.value)
        assert gone(pid)
        assert ready(broken, arena, tmp_path / "after") != pid


def test_a_process_that_hangs_up_but_lives_is_killed(arena, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PATIENCE_S", 0.05)
    monkeypatch.setattr(writer, "BOOT", FORGER.format(answer=b"") + "import time; time.sleep(600)")
    with started() as deaf:
        pid = deaf.pid
        deaf.begin(small(tmp_path / "shard", arena), arena)
        with pytest.raises(CheckpointError, match="has stopped answering"):
            deaf.wait(PATIENCE)

        def is_gone():
            deaf.close()
            return gone(pid)

        until(is_gone)


ORPHANED = """
import signal
one = ShardWriter()
one.ready()
one.begin(request({path!r}, 256, 16 << 20), arena)
print(one.pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_is_gone_when_its_rank_is_killed(tmp_path):
    script = WRITER.format(path=[]) + ORPHANED.format(path=f"{tmp_path}/shard")
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        handle = os.pidfd_open(int(rank.stdout.readline()))
        try:
            until(begun_to_write(tmp_path / "shard"))
            rank.communicate("die\n")
            ended, _, _ = select.select([handle], [], [], 2.0)
        finally:
            os.close(handle)
    assert rank.returncode == -signal.SIGKILL
    assert ended == [handle]
    assert (tmp_path / "shard").stat().st_size < 256 * 16 * MIB


def test_slurms_signals_do_not_end_the_process_not_even_as_it_starts(arena, tmp_path):
    with started() as one:
        pid = one.pid
        for signum in OF_STEPS:
            os.kill(pid, signum)
        assert ready(one, arena, tmp_path / "first") == pid
        for signum in OF_STEPS:
            os.kill(pid, signum)
        assert ready(one, arena, tmp_path / "second") == pid


def test_the_ranks_own_signals_are_as_they_were(one):
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_process_has_no_descriptor_of_the_ranks(arena, tmp_path):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)  # noqa: FBT003 - the only form it has
    try:
        pipe = Path(f"/proc/self/fd/{writing}").readlink()
        with contextlib.closing(ShardWriter()) as one:
            pid = ready(one, arena, tmp_path / "shard")
            open_there = {entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()}
    finally:
        os.close(reading)
        os.close(writing)
    assert pipe not in open_there


def test_the_process_steps_back_before_it_has_begun():
    """An interpreter's start is 0.1 s of CPU, beside training."""
    with started() as one:
        assert os.getpriority(os.PRIO_PROCESS, one.pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_without_being_told_to_there_is_no_process_until_it_is_needed(arena, tmp_path):
    with contextlib.closing(ShardWriter()) as one:
        assert one.pid is None
        one.ready()
        assert ready(one, arena, tmp_path / "shard") == one.pid


def test_the_process_steps_back_behind_training(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "shard")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 10, 19)
    number = IOPRIO_GET[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 1, pid) == (2 << 13 | 7)


def test_the_process_has_the_ranks_environment_and_one_thread(arena, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("HPCTRAIN_FAULTS", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with contextlib.closing(ShardWriter()) as one:
        pid = ready(one, arena, tmp_path / "shard")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        threads = status_kib(pid, "Threads")
    assert {b"RANK=3", b"HPCTRAIN_FAULTS="} <= set(environment)
    assert threads == 1


def test_the_process_writes_from_the_arena_without_a_copy_of_it(one, arena, tmp_path):
    pid = ready(one, arena, tmp_path / "before")
    pieces, offsets = filled(arena, [128 * MIB])
    private = (status_kib(pid, "VmData") << 10) + 48 * MIB
    resource.prlimit(pid, resource.RLIMIT_DATA, (private, private))
    one.begin(request(tmp_path / "shard", pieces, offsets), arena)
    assert one.wait(PATIENCE).size > 128 * MIB


def test_what_the_process_says_goes_to_the_ranks_log(arena, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(writer, "BOOT", "print('these words'); raise SystemExit(1)")
    with started() as failing:
        failing.begin(small(tmp_path / "shard", arena), arena)
        with pytest.raises(CheckpointError, match="last words"):
            failing.wait(PATIENCE)
    assert "these words" in capfd.readouterr().err


@pytest.mark.parametrize("module", ["writer_process", "writer"])
def test_neither_side_imports_torch_or_what_else_is_slow(module):
    code = f"import sys, hpctrain.checkpoint.tensors.{module}; print(*sys.modules)"
    names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert f"hpctrain.checkpoint.tensors.{module}" in names
    assert {"torch", "click", "submitit", "rich", "tensorboard", "multiprocessing"} & {
        *names
    } == set()


FOREIGN = """
os.environ["PYTHONPATH"] = {traps!r}
one = ShardWriter()
one.ready()
one.begin(request({path!r}, 1, 4), arena)
print(one.wait(60).size, one.pid)
one.close()
"""


def test_the_process_finds_the_ranks_hpctrain_and_nothing_of_the_current_directory(tmp_path):
    traps = tmp_path / "traps"
    (traps / "hpctrain").mkdir(parents=True)
    (traps / "hpctrain" / "__init__.py").write_text("raise SystemExit('another hpctrain')")
    for name in ("pickle.py", "numpy.py", "array.py"):
        (tmp_path / name).write_text("raise SystemExit('a module of the current directory')")
    # An interpreter that has neither hpctrain nor xxhash until its program extends the path.
    bare = Path(sys.base_prefix) / "bin" / "python3"
    path = [str(Path(hpctrain.__file__).parents[1]), str(Path(xxhash.__file__).parents[1])]
    script = WRITER.format(path=path) + textwrap.dedent(
        FOREIGN.format(traps=str(traps), path=f"{tmp_path}/shard")
    )
    run = subprocess.run(
        [bare, "-I", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert int(run.stdout.split()[0]) == (tmp_path / "shard").stat().st_size
    assert (tmp_path / "shard").read_bytes()[:-16].endswith(b"abcd")
