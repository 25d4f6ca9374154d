from __future__ import annotations

import contextlib
import os
import resource

import numpy as np
import pytest

from hpctrain.checkpoint.tensors import arena as arenas
from hpctrain.checkpoint.tensors.arena import CLAIM_BYTES, Arena, aligned, room
from hpctrain.errors import CheckpointError

MIB = 1 << 20
GIB = 1 << 30
MEMINFO = "MemTotal:       {total} kB\nMemFree:        5 kB\nMemAvailable:   {available} kB\n"


@pytest.fixture
def arena():
    with contextlib.closing(Arena()) as made:
        yield made


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose /proc and /sys/fs/cgroup are files of the test."""
    monkeypatch.setattr(arenas, "PROC", tmp_path / "proc")
    monkeypatch.setattr(arenas, "CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    put(tmp_path / "proc" / "self" / "cgroup", "0::/\n")
    host(tmp_path, available=100 * GIB, total=100 * GIB)
    return tmp_path


@contextlib.contextmanager
def limited(which, nbytes):
    """Lower a soft limit of this process."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def host(machine, *, available, total):
    text = MEMINFO.format(available=available >> 10, total=total >> 10)
    put(machine / "proc" / "meminfo", text)


def group_v2(machine, path, *, limit, used, cache=0):
    level = machine / "cgroup" / path
    put(level / "memory.max", f"{limit}\n")
    put(level / "memory.current", f"{used}\n")
    put(level / "memory.stat", f"anon 7\ninactive_file {cache}\nactive_file 0\n")


def group_v1(machine, path, *, limit, used, cache=0):
    level = machine / "cgroup" / "memory" / path
    put(level / "memory.limit_in_bytes", f"{limit}\n")
    put(level / "memory.usage_in_bytes", f"{used}\n")
    put(level / "memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def test_parts_begin_at_multiples_of_64_bytes():
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_what_is_written_to_a_view_is_what_the_receiver_of_the_descriptor_reads(arena):
    arena.ensure(3 * MIB)
    np.frombuffer(arena.view(2 * MIB, 5), np.uint8)[:] = [1, 2, 3, 4, 5]
    assert os.pread(arena.fd, 5, 2 * MIB) == bytes([1, 2, 3, 4, 5])
    assert os.fstat(arena.fd).st_size == arena.size


def test_an_arena_grows_in_place_and_what_is_in_it_stays(arena):
    arena.ensure(MIB)
    arena.view(0, 4)[:] = b"kept"
    arena.ensure(9 * MIB)
    assert arena.size == 9 * MIB
    assert bytes(arena.view(0, 4)) == b"kept"
    arena.view(9 * MIB - 1, 1)[:] = b"x"


def test_an_arena_never_shrinks(arena):
    arena.ensure(2 * MIB)
    arena.ensure(1)
    assert arena.size == 2 * MIB


def test_a_view_from_before_a_growth_is_still_a_view_of_the_same_bytes(arena):
    arena.ensure(MIB)
    old = np.frombuffer(arena.view(0, MIB), np.uint8)
    arena.ensure(8 * MIB)
    old[10] = 42
    assert arena.view(10, 1)[0] == 42
    arena.view(11, 1)[0] = 43
    assert old[11] == 43


def test_a_view_outlives_the_arena_it_is_of(arena):
    arena.ensure(MIB)
    view = arena.view(0, 3)
    arena.close()
    view[:] = b"abc"
    assert bytes(view) == b"abc"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, MIB + 1), (MIB, 1)])
def test_a_view_beyond_the_arena_is_refused(arena, offset, nbytes):
    arena.ensure(MIB)
    with pytest.raises(ValueError, match="is not in 1048576 bytes"):
        arena.view(offset, nbytes)


def test_an_empty_arena_has_an_empty_view(arena):
    assert arena.view(0, 0).nbytes == 0


def test_a_closed_arena_has_given_its_memory_back_and_closing_it_again_is_harmless(arena):
    arena.ensure(MIB)
    handle = arena.fd
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    with pytest.raises(ValueError, match="closed"):
        arena.ensure(2 * MIB)


def test_all_pages_are_there_before_the_first_save(arena):
    arena.ensure(64 * MIB)
    content = np.frombuffer(arena.view(0, 64 * MIB), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    content[:: os.sysconf("SC_PAGESIZE")] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000


def test_memory_that_is_not_to_be_had_is_one_line_that_says_what_to_do(arena):
    arena.ensure(4 * MIB)
    with (
        limited(resource.RLIMIT_FSIZE, 16 * MIB),
        pytest.raises(CheckpointError) as caught,
    ):
        arena.ensure(64 * MIB)
    message = str(caught.value)
    assert "\n" not in message
    assert "0.07 GB of host memory" in message
    assert "File too large" in message
    assert 'checkpoint.mode = "sync"' in message
    assert isinstance(caught.value.__cause__, OSError)


def test_an_arena_that_could_not_grow_is_as_it_was(arena):
    arena.ensure(4 * MIB)
    arena.view(0, 4)[:] = b"kept"
    with limited(resource.RLIMIT_FSIZE, 16 * MIB), pytest.raises(CheckpointError):
        arena.ensure(64 * MIB)
    about = os.fstat(arena.fd)
    assert (arena.size, about.st_size, about.st_blocks * 512) == (4 * MIB, 4 * MIB, 4 * MIB)
    assert bytes(arena.view(0, 4)) == b"kept"


def test_address_space_that_is_not_to_be_had_is_an_error_too(arena):
    with open("/proc/self/statm") as file:  # noqa: PTH123 - read at once
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    with (
        limited(resource.RLIMIT_AS, used + 128 * MIB),
        pytest.raises(CheckpointError, match="Cannot allocate memory"),
    ):
        arena.ensure(256 * MIB)
    assert os.fstat(arena.fd).st_blocks == 0


def test_too_many_open_files_is_an_error_of_the_same_kind():
    with (
        limited(resource.RLIMIT_NOFILE, 0),
        pytest.raises(CheckpointError, match="Too many open files"),
    ):
        Arena(MIB)


def test_no_more_is_taken_than_a_cgroup_has_left_since_the_kernel_kills_there(machine, arena):
    group_v2(machine, "job/step", limit=2 * GIB, used=GIB)
    put(machine / "proc" / "self" / "cgroup", "0::/job/step\n")
    with pytest.raises(CheckpointError, match=r"0\.97 GB can be had \(memory\.max of .*job/step"):
        arena.ensure(GIB)
    assert os.fstat(arena.fd).st_blocks == 0
    arena.ensure(8 * MIB)
    assert arena.size == 8 * MIB


def test_the_room_is_measured_again_before_each_bit_since_other_ranks_take_some(
    machine, arena, monkeypatch
):
    asked = []

    def shrinking():
        asked.append(os.fstat(arena.fd).st_size)
        return arenas.Room(10 * GIB if len(asked) < 3 else 0, "a neighbour")

    monkeypatch.setattr(arenas, "room", shrinking)
    with pytest.raises(CheckpointError, match=r"0\.00 GB can be had \(a neighbour\)"):
        arena.ensure(4 * CLAIM_BYTES)
    assert asked == [0, CLAIM_BYTES, 2 * CLAIM_BYTES]
    assert os.fstat(arena.fd).st_blocks == 0


def test_the_room_of_this_machine_can_be_measured():
    assert 0 < room().nbytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def test_without_a_limit_the_room_is_what_the_host_has_less_a_reserve(machine):
    host(machine, available=50 * GIB, total=100 * GIB)
    assert room() == (49 * GIB, f"MemAvailable in {machine / 'proc' / 'meminfo'}")


def test_the_reserve_of_a_small_machine_is_a_twentieth(machine):
    host(machine, available=GIB, total=2 * GIB)
    assert room().nbytes == GIB - 2 * GIB // 20


def test_the_tightest_of_all_nested_limits_counts(machine):
    group_v2(machine, "slurm/job", limit=20 * GIB, used=16 * GIB)
    group_v2(machine, "slurm/job/step", limit="max", used=15 * GIB)
    put(machine / "proc" / "self" / "cgroup", "0::/slurm/job/step\n")
    assert room() == (3 * GIB, f"memory.max of {machine / 'cgroup' / 'slurm' / 'job'}")


def test_page_cache_is_room_since_the_kernel_drops_it(machine):
    group_v2(machine, "job", limit=20 * GIB, used=20 * GIB, cache=8 * GIB)
    put(machine / "proc" / "self" / "cgroup", "0::/job\n")
    assert room().nbytes == 7 * GIB


def test_limits_of_the_first_cgroup_version_count(machine):
    group_v1(machine, "slurm/uid_1/job_2", limit=20 * GIB, used=10 * GIB, cache=2 * GIB)
    put(
        machine / "proc" / "self" / "cgroup", "4:cpu:/x\n3:cpuset,memory:/slurm/uid_1/job_2\n0::/\n"
    )
    assert room().nbytes == 11 * GIB


def test_a_container_that_sees_its_own_group_as_the_root_meets_its_limit(machine):
    group_v1(machine, "", limit=4 * GIB, used=GIB)
    put(machine / "proc" / "self" / "cgroup", "3:memory:/docker/0123abcd\n")
    assert room().nbytes == 3 * GIB - 4 * GIB // 20


@pytest.mark.parametrize("closes_at", [1, 2])
def test_an_arena_that_is_closed_while_it_grows_writes_into_no_other_file(
    monkeypatch, tmp_path, closes_at
):
    """Its thread went on with the number of the closed file, which is the next file's."""
    arena, seen = Arena(), []
    other = tmp_path / "checkpoint"
    other.write_bytes(b"weights")
    files = contextlib.ExitStack()

    def room_while_another_thread_closes():
        seen.append(arena.size)
        if len(seen) == closes_at:
            number = arena.fd
            arena.close()
            opened = [files.enter_context(other.open("r+b")) for _ in range(3)]
            assert number in [each.fileno() for each in opened]
        return arenas.Room(100 * GIB, "the test")

    monkeypatch.setattr(arenas, "room", room_while_another_thread_closes)

    with files, pytest.raises(CheckpointError, match="was given back"):
        arena.ensure(3 * CLAIM_BYTES)

    assert other.read_bytes() == b"weights"
    assert len(seen) == closes_at
    assert arena.size == 0
