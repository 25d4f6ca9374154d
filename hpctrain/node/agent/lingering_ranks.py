"""Ranks that stay behind when others have returned: do they live, and for how long not?

A rank that returned will never answer again. What stays behind may have work of its own (rank 0
evaluates, writes, uploads), or wait for the others for ever: in a destructor, for a lock, for a
thread that never ends. Only a rank that does nothing at all is at its end: it prints nothing, uses
no processor, reads and writes nothing, nor does anything that it has started.
tests/unit/agent/test_lingering_ranks.py, tests/engines/test_lingering_ranks.py: the promises.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpctrain.core.base import clock
from hpctrain.core.base.text import count, duration, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

SAMPLE_S = 5.0
LONGEST_GAP_S = 10.0
"""So much of the time between two looks at another agent counts as its silence."""
SAY_S = 30.0
"""After so long a silence of all that are left it is said who is waited for."""
CPU_SHARE = 0.02
"""Of one processor: threads that look now and then whether there is something to do use less."""
IO_BYTES = 64 * 1024
"""In a sample: so much is read or written by who works, a look at a small file is less."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Life = Literal["alive", "quiet", "still"]
"""Of the ranks that are left on a node: some do something; none does; none has for too long."""


class Use(NamedTuple):
    """What a process and all that it has started have used so far."""

    cpu_s: float
    io_bytes: int


@dataclass(frozen=True)
class NodeEnds:
    """Which ranks of a node have returned.

    Attributes:
        node: Its name.
        returned: With 0; the processes of some may be there all the same.
        left: All others.
        life: Of all whose processes are there.
    """

    node: str
    returned: tuple[int, ...]
    left: tuple[int, ...]
    life: Life = "alive"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> NodeEnds:
        """As its agent has said it."""
        returned, left = tuple(said["returned"]), tuple(said["left"])
        return cls(said["node"], returned, left, said["life"])


def uses(pids: Collection[int]) -> dict[int, Use]:
    """What these processes have used, each with all that is below it; none for one that is gone."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    own: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        pid = int(entry.name)
        children[int(fields[1])].append(pid)
        own[pid] = sum(map(int, fields[11:15])) / _TICKS_PER_S  # those it has awaited included
    used = {}
    for pid in pids:
        tree, queue = set[int](), [pid]
        while queue:
            child = queue.pop()
            tree.add(child)
            queue += children.get(child, [])
        used[pid] = Use(sum(own.get(one, 0.0) for one in tree), sum(map(_io_bytes, tree)))
    return used


def _io_bytes(pid: int) -> int:
    """Read and written, sockets and pipes included; 0 where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


class FirstAgent:
    """Whether the agent of node 0 still runs, as another one sees it whose ranks have ended.

    Only time counts that this agent has seen pass: a suspended job stands still as a whole.
    """

    def __init__(self, wait_s: float) -> None:
        """Start without a report; the agent may be silent for `wait_s` seconds, 0 for any time."""
        self._wait_s = wait_s
        self._said: object = self
        self._quiet_s = 0.0
        self._looked_s = clock.monotonic()

    def is_silent(self, said: object) -> bool:
        """Return whether the newest report, `said`, has not changed for too long."""
        now = clock.monotonic()
        gap_s, self._looked_s = min(now - self._looked_s, LONGEST_GAP_S), now
        self._quiet_s = self._quiet_s + gap_s if said == self._said else 0.0
        self._said = said
        return bool(self._wait_s) and self._quiet_s > self._wait_s


class LifeWatch:
    """Watches the ranks that are left on one node, from its first look on."""

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = clock.monotonic,
        look_at: Callable[[Collection[int]], Mapping[int, Use]] = uses,
    ) -> None:
        """Watch from now on; ranks without a sign of life for `limit_s` are still."""
        self._limit_s = limit_s
        self._clock = clock
        self._look_at = look_at
        self._sample_s = min(SAMPLE_S, limit_s / 4)
        self._life_at = self._looked_at = clock()
        self._used: dict[int, Use] = {}
        self._written: dict[Path, int] = {}

    def look(self, pids: Collection[int], logs: Sequence[Path]) -> Life:
        """Return whether a rank or its log shows life; look no more often than necessary."""
        now = self._clock()
        if set(pids) != set(self._used):
            self._life_at = now  # another has returned
        elif now - self._looked_at < self._sample_s:
            return self._judge(now)
        used, written = dict(self._look_at(pids)), {log: _length(log) for log in logs}
        if written != self._written or self._has_worked(used, now - self._looked_at):
            self._life_at = now
        self._used, self._written, self._looked_at = used, written, now
        return self._judge(now)

    def _judge(self, now: float) -> Life:
        quiet_s = now - self._life_at
        if quiet_s >= self._limit_s:
            return "still"
        return "quiet" if quiet_s >= min(SAY_S, self._limit_s / 2) else "alive"

    def _has_worked(self, used: Mapping[int, Use], seconds: float) -> bool:
        for pid, now in used.items():
            before = self._used.get(pid)
            if before is None or now.cpu_s < before.cpu_s:  # what it had started has ended
                return True
            if now.cpu_s - before.cpu_s > CPU_SHARE * seconds:
                return True
            if abs(now.io_bytes - before.io_bytes) > IO_BYTES:
                return True
        return False


def in_words(returned: int, left: Sequence[int], seconds: float) -> str:
    """Say who has returned; `left` is empty if processes outlive programs that have ended."""
    if not left:
        why = "all ranks returned, and processes of theirs do not end"
        return f"{why}: nothing printed and nothing done for {duration(seconds)}"
    those = "it" if len(left) == 1 else "they"
    return (
        f"{count(returned, 'rank')} returned and {fold_ranks(left)} did not: {those} printed "
        f"nothing and did nothing for {duration(seconds)}"
    )


def _length(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0
