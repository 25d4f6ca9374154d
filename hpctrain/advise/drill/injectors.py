"""Inject a drill's faults into a run's processes and files, on their node.

A rank is recognised by the log that is its standard output, so no other program gets a signal.
tests/unit/drill/test_hands.py and tests/e2e/test_drill.py hold the promises.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

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
