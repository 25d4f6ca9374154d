"""What the benchmarks of checkpoints share: options, a folder that goes away, turns, and lines."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPARE_BYTES = 1 << 30
RANKS_MAY_TAKE_S = 3600
BYTES_PER_PARAMETER = 12
"""fp32 weights and the two moments of Adam."""


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    params: int
    repeats: int
    ranks: int
    dir: str
    json: bool

    @property
    def state_bytes(self) -> int:
        """Of weights and moments, about."""
        return self.params * 1_000_000 * BYTES_PER_PARAMETER


def options(about: str) -> Options:
    """The command line's; the same for all benchmarks of checkpoints."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--params", type=int, default=200, help="millions of parameters, fp32")
    parser.add_argument("--repeats", type=int, default=4, help="turns; the best one counts")
    parser.add_argument("--ranks", type=int, default=4, help="that save")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where files are written")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    return Options(given.params, given.repeats, given.ranks, given.dir, given.json)


@contextmanager
def scratch(asked: Options, need_bytes: int) -> Iterator[Path]:
    """A folder for files, removed at the end, also after Ctrl-C and SIGTERM."""
    free = shutil.disk_usage(asked.dir).free
    if free < need_bytes + SPARE_BYTES:
        sys.exit(
            f"{asked.dir} has {free / 1e9:.1f} GB free and {(need_bytes + SPARE_BYTES) / 1e9:.1f} "
            "GB are needed; take another place with --dir, or less with --params"
        )
    signal.signal(signal.SIGTERM, _interrupted)
    folder = Path(tempfile.mkdtemp(dir=asked.dir, prefix="hpctrain-bench-"))
    try:
        yield folder
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _end_ranks()
        _remove(folder)


def require_memory(need_bytes: int) -> None:
    """End in one line where ranks would be killed for memory half-way."""
    from hpctrain.checkpoint.tensors.arena import room

    left = room()
    if left.nbytes < need_bytes:
        sys.exit(
            f"{left.nbytes / 1e9:.1f} GB of memory can be had ({left.said_by}) and "
            f"{need_bytes / 1e9:.1f} GB are needed; take less with --params"
        )


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _end_ranks() -> None:
    """Nobody may write into the folder any more: the ranks and what they started."""
    ranks = multiprocessing.active_children()
    below = [pid for rank in ranks if rank.pid for pid in _descendants(rank.pid)]
    for rank in ranks:
        rank.kill()
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # died with its rank
            continue
    for rank in ranks:
        rank.join()


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while folder.exists():
        # A process that was just killed may still finish its last call.
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)


def _descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [lower for child in below for lower in _descendants(child)]


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are there."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


# ---- ranks


def on_ranks(fn: Callable[..., Any], ranks: int, **given: Any) -> list[Any]:
    """What `fn(world, **given)` returns on each of so many gloo ranks."""
    from tests.support import gloo

    gloo.TIMEOUT_S = RANKS_MAY_TAKE_S
    return gloo.launch(functools.partial(_rank, fn, given), ranks)


def _rank(fn: Callable[..., Any], given: dict[str, Any]) -> Any:
    import logging
    import warnings

    from hpctrain.train.joining_ranks import join_world

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks, without tracebacks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # torch's, of its own checkpoints
    logging.disable(logging.WARNING)
    return fn(join_world(), **given)


class Turn(NamedTuple):
    """One rank's side of one measurement."""

    wall: float
    cpu: float
    """Of all its threads."""
    read: int
    """Bytes that its calls of read gave, from the page cache or not."""


Turns = dict[str, list[Turn]]


def alternate(
    world: Any,
    acts: dict[str, Callable[[], object]],
    repeats: int,
    *,
    before: Callable[[str], object] = lambda _: None,
    after: Callable[[str], object] = lambda _: None,
) -> Turns:
    """Do each in turn, so that a busy moment hits all of them alike. Collective.

    Args:
        world: The ranks.
        acts: What to measure, by name.
        repeats: How often.
        before: Not measured; told the name.
        after: Not measured; told the name.
    """
    turns: Turns = {name: [] for name in acts}
    for _ in range(repeats):
        for name, act in acts.items():
            before(name)
            turns[name].append(turn(world, act))
            after(name)
    return turns


def turn(world: Any, act: Callable[[], object]) -> Turn:
    """Measure one call that all ranks begin together. Collective."""
    world.control.gather(None)
    read, cpu, wall = bytes_read(), time.process_time(), time.perf_counter()
    act()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    read = bytes_read() - read
    world.control.gather(None)
    return Turn(wall, cpu, read)


def clear(world: Any, *folders: Path) -> None:
    """Rank 0 removes what one turn has written. Collective."""
    world.control.gather(None)
    for folder in folders if world.rank == 0 else ():
        shutil.rmtree(folder, ignore_errors=True)
    world.control.gather(None)


def best_wall(results: list[Turns], name: str, *, skip: int = 0) -> float:
    """Of the best turn, the seconds of its slowest rank."""
    walls = [[one.wall for one in rank[name]] for rank in results]
    return min(max(ranks) for ranks in list(zip(*walls, strict=True))[skip:])


def best_cpu(results: list[Turns], name: str) -> float:
    """Of the best turn, the CPU seconds of all ranks together."""
    cpus = [[one.cpu for one in rank[name]] for rank in results]
    return min(sum(ranks) for ranks in zip(*cpus, strict=True))


def least_read(results: list[Turns], name: str) -> int:
    """Of the turn with the fewest, the bytes of all ranks together."""
    reads = [[one.read for one in rank[name]] for rank in results]
    return min(sum(ranks) for ranks in zip(*reads, strict=True))


# ---- probes


def bytes_read() -> int:
    """Bytes that this process's calls of read gave so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def memory(key: str, pid: int | str = "self") -> int:
    """A field of a process's status, such as VmRSS, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(key))


class Peak:
    """Memory beyond what there was when this was made; processes started since count as well."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        self._before = memory("VmRSS:")
        self._others = set(children(os.getpid()))

    @property
    def nbytes(self) -> int:
        """Of this process at its peak, and of those that it started, their own pages now."""
        new = [pid for pid in children(os.getpid()) if pid not in self._others]
        return memory("VmHWM:") - self._before + sum(memory("RssAnon:", pid) for pid in new)


# ---- lines


@dataclass(frozen=True)
class Line:
    """One measure: what the goal is about, and whether it was reached.

    Attributes:
        measure: What was measured.
        value: In its own unit, for people.
        number: What the goal is about.
        goal: What it has to be at most, or at least; None where it is shown only.
        unit: Of number and goal.
        peers: The same number of others, in the same run.
        at_least: The goal is a lower limit.
    """

    measure: str
    value: str
    number: float
    goal: float | None = None
    unit: str = "x"
    peers: dict[str, float] = field(default_factory=dict)
    at_least: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the goal was met."""
        if self.goal is None:
            return None
        return self.number >= self.goal if self.at_least else self.number <= self.goal

    @property
    def _verdict(self) -> str:
        if self.goal is None:
            return ""
        sign = ">=" if self.at_least else "<="
        return f"goal {sign} {self.goal:g} {'reached' if self.reached else 'MISSED'}"

    def __str__(self) -> str:
        peers = "".join(f"; {name} {number:.2f}" for name, number in self.peers.items())
        return (
            f"{self.measure:44} {self.value:>12} {self.number:7.2f} {self.unit:20} "
            f"{self._verdict:20}{peers}"
        )


def show(asked: Options, lines: list[Line], **conditions: Any) -> None:
    """Print all lines, and under which conditions they were measured."""
    load = os.getloadavg()[0]
    about = {"cores": os.cpu_count(), "load": round(load, 1), "best_of": asked.repeats}
    about.update(conditions)
    if asked.json:
        rows = [{**asdict(line), "reached": line.reached} for line in lines]
        print(json.dumps({"conditions": about, "measures": rows}, indent=1))
        return
    print("; ".join(f"{name} {value}" for name, value in about.items()))
    for line in lines:
        print(line)
