"""Inject a drill's faults into a run's processes and files, on their node; find unflushed bytes.

A rank is recognised by the log that is its standard output, so no other program gets a signal.
cachestat(2) (Linux 6.5) counts pages that are on no disk. A probe that was never flushed comes
first: where the file system does not account for such pages (tmpfs), the answer is "not known".
tests/unit/drill/test_hands.py and tests/e2e/test_drill.py hold the promises.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from hpctrain.advise.drill.promises import WRITTEN_ELSEWHERE
from hpctrain.checkpoint.format.manifest import parse_step
from hpctrain.core.base import clock

if TYPE_CHECKING:
    from hpctrain.ledger.run.layout import RunDir


_LOG = re.compile(r"rank-(\d+)\.log")
_BLOCK = 4096


class LiveRank(NamedTuple):
    """A rank that lives on this machine."""

    rank: int
    pid: int
    agent: int


def ranks_here(run: RunDir, attempt: int) -> list[LiveRank]:
    """The ranks of an attempt on this machine, by rank."""
    folder = str(run.attempt(attempt).resolve())
    ranks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (rank := _rank(entry, folder)) is not None:
            ranks[int(entry.name)] = rank
    parents = {pid: _parent(pid) for pid in ranks}
    # A rank's own children, its writer among them, have its log too.
    return sorted(
        LiveRank(rank, pid, parents[pid])
        for pid, rank in ranks.items()
        if parents[pid] > 1 and parents[pid] not in ranks
    )


def _rank(entry: Path, folder: str) -> int | None:
    try:
        target = (entry / "fd" / "1").readlink()
    except OSError:  # it has ended, or is another user's
        return None
    match = _LOG.fullmatch(target.name)
    return int(match[1]) if match and str(target.parent) == folder else None


def _parent(pid: int) -> int:
    """The parent of a process; 0 where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rsplit(")", 1)[1].split()[1])


class Done(NamedTuple):
    """What was done to a rank; `why` says what was not.

    Attributes:
        why: Why nothing was done; "" where it was.
        step: Of the checkpoint that was damaged; None where none was.
        name: Its name.
    """

    why: str = ""
    step: int | None = None
    name: str = ""


def plant(run: RunDir, fault: str, attempt: int, rank: int, seconds: float) -> Done:
    """Plant a fault in a rank that lives on this machine.

    Args:
        run: The run.
        fault: Its name in the catalogue, of those that meet a rank or its agent.
        attempt: Of which attempt.
        rank: Which rank.
        seconds: So long it stands, where it is to be frozen.
    """
    victim = next((one for one in ranks_here(run, attempt) if one.rank == rank), None)
    if victim is None:
        return Done(why=f"rank {rank} of attempt {attempt} was not found on its node")
    if fault == "freeze_rank":
        freeze(victim.pid, seconds)
        return Done()
    if fault == "kill_agent":
        send(victim.agent, signal.SIGKILL)
        return Done()
    done = Done()
    if fault != "kill_rank":
        saved = newest(run)
        if saved is None:
            return Done(why="it has no checkpoint of hpctrain's form")
        damage(run.checkpoints / saved[1], cut=fault == "tear_checkpoint")
        done = Done("", *saved)
    send(victim.pid, signal.SIGKILL)
    return done


def freeze(pid: int, seconds: float) -> None:
    """Stop a process for a while; it is continued also if this process ends."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        send(pid, signal.SIGSTOP)
        clock.sleep(seconds)  # this is the fault
    finally:
        send(pid, signal.SIGCONT)
        signal.signal(signal.SIGTERM, before)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that has ended needs none."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def committed(run: RunDir) -> frozenset[str]:
    """Names of the checkpoints that are committed."""
    try:
        names = [one.name for one in run.checkpoints.iterdir()]
    except FileNotFoundError:
        return frozenset()
    return frozenset(name for name in names if parse_step(name) is not None)


def newest(run: RunDir) -> tuple[int, str] | None:
    """Step and name of the newest committed checkpoint."""
    steps = [(step, name) for name in committed(run) if (step := parse_step(name)) is not None]
    return max(steps, default=None)


def damage(folder: Path, *, cut: bool) -> None:
    """Cut the largest file of a checkpoint in half, or turn one bit in its last block."""
    path = max(
        (one for one in folder.iterdir() if one.is_file()), key=lambda one: one.stat().st_size
    )
    size = path.stat().st_size
    if cut:
        os.truncate(path, size // 2)
        return
    with path.open("r+b", buffering=0) as file:
        at = max(0, size - min(size, _BLOCK) // 2 - 1)
        (value,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([value ^ 1]), at)


_CACHESTAT = 451
"""The number of the call, the same on every architecture."""
_PROBE = b"\x5a" * 65536


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")
    )


def unflushed_pages(descriptor: int) -> tuple[int, int] | None:
    """Pages of a file that are on no disk yet, and all that are in memory; None: nobody can say."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = _Pages()
    whole = _Range(0, 0)
    if libc.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(pages), 0) != 0:
        return None
    return int(pages.dirty + pages.writeback), int(pages.cached)


def unflushed_files(folder: Path) -> list[str] | str:
    """Names of the files in a folder with bytes that a power cut would take.

    Returns:
        The names, or why nobody can say.
    """
    with tempfile.TemporaryFile(dir=folder.parent, buffering=0) as probe:
        probe.write(_PROBE)
        seen = unflushed_pages(probe.fileno())
    if seen is None:
        return "this kernel does not tell what lies in memory alone (cachestat, Linux 6.5)"
    if not seen[0]:
        return "this file system does not tell what lies in memory alone"
    unflushed, cached = [], 0
    for path in sorted(one for one in folder.iterdir() if one.is_file()):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = unflushed_pages(descriptor)
        finally:
            os.close(descriptor)
        if pages is None:
            return f"{path.name} cannot be asked about"
        cached += pages[1]
        unflushed += [path.name] if pages[0] else []
    if not cached:
        return WRITTEN_ELSEWHERE
    return unflushed
