"""What processes ask of a file system, counted by strace: which rank, which agent, in which phase.

Counted is what a client of a shared file system may have to ask its servers: names that are looked
up, opened, listed, changed, locked, and bytes. What is asked of a file that is open already (its
size, its position) is not. A process is known by what it does: an agent by its program, or by the
name that it takes where it was forked; a rank by the log that it opens; what they have started
counts as theirs. A program says in which phase it is by `/phase/NAME`, a path that it asks for and
that is not there (`PHASE` has the lines for it).
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

START = "start"
"""The phase before any is named."""
LOGIN = "login"
"""The program that was traced, with what it has started and is neither agent nor rank."""
_KINDS = {
    "open": ("open", "openat", "openat2", "creat"),
    "look": (
        *("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2"),
        *("readlink", "readlinkat", "statfs", "getxattr", "lgetxattr"),
    ),
    "list": ("getdents64",),
    "change": (
        *("mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "link", "linkat", "symlink"),
        *("symlinkat", "rename", "renameat", "renameat2", "chmod", "fchmodat", "utimensat"),
        "truncate",
    ),
    "lock": ("flock",),
    "read": ("read", "pread64", "readv", "preadv", "preadv2", "sendfile", "copy_file_range"),
    "write": ("write", "pwrite64", "writev", "pwritev", "pwritev2"),
    "flush": ("fsync", "fdatasync"),
}
_BY_DESCRIPTOR = frozenset({"list", "lock", "read", "write", "flush"})
METADATA = frozenset({"open", "look", "list", "change", "lock"})
_KIND_OF = {call: kind for kind, calls in _KINDS.items() for call in calls}
_STARTS = ("clone", "clone3", "fork", "vfork")
_CALLS = ",".join(f"?{call}" for call in (*_KIND_OF, *_STARTS, "execve", "prctl"))
STRACE = (
    *("strace", "-f", "--seccomp-bpf", "-y", "-qq", "-s", "64", "-ttt", "-e", f"trace={_CALLS}"),
)
"""The command that counts, but for `-o FILE` and the program."""
_LINE = re.compile(r"(\d+) +(\d+\.\d+) (.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|\?)")
_CHILD = re.compile(r"=> \{parent_tid=\[(\d+)\]|\) = (\d+)$")
_DESCRIPTOR = re.compile(r"(?:AT_FDCWD|\d+)<([^>]*)>")
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
_AGENT = re.compile(r'"hpctrain\.entry\.(?:local_node|slurm_task)"')
_FORKED_AGENT = re.compile(r'PR_SET_NAME, "hpctrain local\d')
_RANK_LOG = re.compile(r"rank-(\d{5})\.log$")


@cache
def missing() -> list[str]:
    """What this machine lacks for counting; empty where it can be done."""
    return [] if shutil.which("strace") else ["strace"]


@dataclass(frozen=True)
class Operation:
    """One question to a file system.

    Attributes:
        owner: "rank 3", "agent 0" (of node 0), or `LOGIN`.
        phase: The rank's own; of the others rank 0's at that time.
        kind: One of `METADATA`, or "read", "write", "flush".
        path: Of what; absolute.
        nbytes: Read or written.
    """

    owner: str
    phase: str
    kind: str
    path: str
    nbytes: int


def trace(command: Sequence[str], out: Path, **given: object) -> list[Operation]:
    """Run a program to the end of all that it has started; what all of them asked.

    Args:
        command: The program.
        out: Where strace writes, some megabytes.
        given: As of `subprocess.run`.
    """
    subprocess.run([*STRACE, "-o", str(out), *command], check=True, **given)
    return traced(out)


def traced(out: Path) -> list[Operation]:
    """What was asked, from what `STRACE` has written."""
    with out.open(errors="replace") as lines:
        return _Traced(lines).operations()


def tally(
    operations: Iterable[Operation], *, phase: str, below: Path, kinds: Iterable[str] = METADATA
) -> dict[str, Counter[str]]:
    """By owner and kind, how many operations there were on what lies below a folder."""
    kinds = frozenset(kinds)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for operation in of(operations, phase=phase, below=below):
        if operation.kind in kinds:
            counts[operation.owner][operation.kind] += 1
    return dict(counts)


def of(
    operations: Iterable[Operation], *, phase: str, below: Path, owner: str = ""
) -> list[Operation]:
    """Those of a phase on what lies below a folder, perhaps of one owner."""
    root = str(below)
    return [
        operation
        for operation in operations
        if operation.phase == phase
        and owner in {"", operation.owner}
        and (operation.path == root or operation.path.startswith(root + "/"))
    ]


@dataclass(frozen=True)
class _Call:
    pid: int
    t: float
    name: str
    words: str
    result: int

    @property
    def path(self) -> str:
        folder = _DESCRIPTOR.match(self.words)
        base = folder[1] if folder else ""
        if folder and _KIND_OF[self.name] in _BY_DESCRIPTOR:
            return base
        name = _NAME.search(self.words, folder.end() if folder else 0)
        return posixpath.normpath(posixpath.join(base, name[1] if name else ""))


class _Traced:
    """One trace, as strace writes it."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._calls: list[_Call] = []
        self._parent: dict[int, int] = {}
        self._role: dict[int, str] = {}
        self._phases: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        unfinished: dict[int, tuple[str, str]] = {}
        for line in lines:
            parts = _LINE.match(line)
            if parts is None:
                continue
            pid, t, text = int(parts[1]), parts[2], parts[3]
            if text.endswith("<unfinished ...>"):
                unfinished[pid] = t, text.removesuffix("<unfinished ...>")
            elif text.startswith("<... "):
                t, begun = unfinished.pop(pid, (t, ""))
                self._take(pid, float(t), begun + text.partition("resumed>")[2])
            else:
                self._take(pid, float(t), text)

    def _take(self, pid: int, t: float, text: str) -> None:
        name = text.partition("(")[0]
        if name in _STARTS:
            if child := _CHILD.search(text):
                self._parent[int(child[1] or child[2])] = pid
        elif name in {"execve", "prctl"}:
            if _AGENT.search(text) or _FORKED_AGENT.search(text):
                self._role[pid] = "agent"
        elif name in _KIND_OF and (call := _CALL.match(text)):
            result = -1 if call[3] == "?" else int(call[3])
            self._calls.append(_Call(pid, t, name, call[2], result))

    def operations(self) -> list[Operation]:
        """All, in the order in which they began."""
        for call in self._calls:
            is_made = _KIND_OF[call.name] == "open" and "O_CREAT" in call.words
            if is_made and (rank := _RANK_LOG.search(call.path)):
                self._role[call.pid] = f"rank {int(rank[1])}"
        self._number_agents()
        for call in self._calls:
            if call.name in _KINDS["look"] and call.path.startswith("/phase/"):
                name = call.path.removeprefix("/phase/")
                self._phases[self._owner(call.pid)].append((call.t, name))
        return [operation for call in self._calls if (operation := self._operation(call))]

    def _number_agents(self) -> None:
        """An agent has the number of its node, which its ranks tell."""
        ranks = sorted(
            (int(role.split()[1]), pid) for pid, role in self._role.items() if "rank" in role
        )
        for _, pid in ranks:
            agent = self._parent.get(pid)
            while agent is not None and self._role.get(agent) != "agent":
                agent = self._parent.get(agent)
            if agent is not None:
                numbered = sum(role.startswith("agent ") for role in self._role.values())
                self._role[agent] = f"agent {numbered}"

    def _owner(self, pid: int) -> str:
        above: int | None = pid
        while above is not None:
            if above in self._role:
                return self._role[above]
            above = self._parent.get(above)
        return LOGIN

    def _operation(self, call: _Call) -> Operation | None:
        kind = _KIND_OF[call.name]
        path = call.path
        if path.startswith("/phase/") or (kind == "look" and '"",' in call.words):
            return None
        if kind == "list" and call.result == 0:
            return None  # the end of a listing
        nbytes = max(0, call.result) if kind in {"read", "write"} else 0
        owner = self._owner(call.pid)
        return Operation(owner, self._phase(owner, call.t), kind, path, nbytes)

    def _phase(self, owner: str, t: float) -> str:
        marks = self._phases[owner if owner.startswith("rank") else "rank 0"]
        at = bisect_right(marks, (t, "\U0010ffff"))
        return marks[at - 1][1] if at else START
