"""Processes of ours: their commands, their first acts, their open files, and the job's ports.

A forked process dies with its parent and prints to its own log.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import socket
import sys
import traceback
import zlib
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.errors import ClusterError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping
    from typing import NoReturn, Protocol, Self

    class HasFileno(Protocol):
        """A file, a socket or a pipe."""

        def fileno(self) -> int:
            """Return its descriptor."""


OF_STEPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""SLURM sends them to every process of a step; the rank, or the agent, decides what they mean."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PER_RANK = 1
BASE = 256
"""Logs, data files, libraries, GPU devices, DataLoader workers' pipes."""
MOST = 1 << 20
"""Programs that go through all that may be open would take minutes where there is no limit."""
EXIT_LOOK_S = 0.001
EXIT_LOOKS = 1000  # the thread's number may be another's by then
PORT_BASE = 20000
PORTS = 8
"""Ports a job may use side by side. 20000..31999 lies below Linux' ephemeral range, from which any
outgoing connection may take a port at any moment (enroot#243)."""
PORT_BLOCK = PORTS + 1
"""The last port of a block is nobody's to listen on: who has it has claimed the others."""
PORT_BLOCKS = 12_000 // PORT_BLOCK


def join_before_fork(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait for a thread's end, at most so long; then also until the kernel has ended it.

    Python lets go of a thread a moment before that, and a fork in this moment is a fork of a
    process with two threads: a lock of the C library that it holds would be held for ever there.
    """
    thread.join(timeout_s)
    task = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(EXIT_LOOKS):
        if thread.is_alive() or not task.exists():
            return
        clock.sleep(EXIT_LOOK_S)


def own_program(module: str, *words: str, python: str = "", unbuffered: bool = False) -> list[str]:
    """The command that runs a module of ours, or of a library, as a program.

    With ``-P``: ``python -m`` alone puts the working directory in front of everything that can be
    imported, and a job runs where its user typed submit. A ``json.py`` that lies there would run in
    the place of the library's.
    """
    flags = ["-P", "-u"] if unbuffered else ["-P"]
    return [python or sys.executable, *flags, "-m", module, *words]


class ForkedProcess:
    """A process beside this one that takes orders over a line, as this one handles it."""

    def __init__(self, serve: Callable[[socket.socket, int], None]) -> None:
        """Fork it. To be made while this process has one thread.

        `serve` is its life, given its end of the line and the id of its parent; it must not return
        into the parent's code.
        """
        self._line, theirs = socket.socketpair()
        self._is_reaped = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            _serve_until_killed(serve, theirs, parent)
        theirs.close()

    def adopt(self, pid: int, line: int) -> None:
        """Handle a process that this one has forked as another program, before its exec."""
        os.set_inheritable(line, False)  # noqa: FBT003 - its own order
        self._line, self.pid, self._is_reaped = socket.socket(fileno=line), pid, False

    def stop(self) -> None:
        """End it, and wait for that. Harmless when repeated."""
        if self.pid > 0:
            if not self._is_reaped:  # else its number may be another's by now
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
            self._line.close()
            self.pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def ignore_signals() -> None:
    """Ignore SLURM's signals; the parent may have had them blocked, so that none came before."""
    for signum in OF_STEPS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_STEPS)


def _serve_until_killed(
    serve: Callable[[socket.socket, int], None], line: socket.socket, parent: int
) -> NoReturn:
    """The forked process: never comes back into its parent's code."""
    try:
        ignore_signals()
        die_with_parent(parent)
        serve(line, parent)
    except BaseException:  # noqa: BLE001 - who is beside it sees that it is gone, not why
        traceback.print_exc()
    finally:
        os._exit(1)


def connections_to(port: int) -> list[socket.socket]:
    """All connections of this process to a port; each a descriptor more."""
    connections = []
    sockets = [one for one in Path("/proc/self/fd").iterdir() if one.is_socket()]
    for descriptor in sockets:
        with suppress(OSError):  # closed meanwhile
            connection = socket.socket(fileno=os.dup(int(descriptor.name)))
            try:
                peer = connection.getpeername()
            except OSError:
                peer = ()
            if connection.family in {socket.AF_INET, socket.AF_INET6} and peer[1:2] == (port,):
                connections.append(connection)
            else:
                connection.close()
    return connections


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent dies: an orphan would hold its GPU, and continue writing.

    If `parent_pid` is no more, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def processes() -> dict[int, list[str]]:
    """What the kernel says of each process, by its id: `/proc/PID/stat` from its state on."""
    stats = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
                stat = (entry / "stat").read_text(errors="replace")
                stats[int(entry.name)] = stat.rpartition(")")[2].split()
    return stats


def below(root: int, parents: Mapping[int, int], spare: Collection[int] = ()) -> set[int]:
    """Return all processes below one, without those to spare and what is below them."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid, parent in parents.items():
        if pid not in spare:
            children[parent].append(pid)
    tree, queue = set[int](), [root]
    while queue:
        pids = children.pop(queue.pop(), [])
        tree.update(pids)
        queue += pids
    return tree


def signal_masks(pid: int) -> tuple[set[int], set[int]]:
    """The signals that a process blocks and those that it catches; none of one that is gone."""
    masks: dict[str, set[int]] = {"SigBlk": set(), "SigCgt": set()}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in masks:
                mask = int(value, 16)
                masks[name] = {bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1}
    return masks["SigBlk"], masks["SigCgt"]


def show_as(name: str) -> None:
    """Have `top` and `ps` show this process under a name, of which the kernel keeps 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def print_to(path: Path) -> None:
    """Append what this process prints, and what its libraries print, to a file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        log = os.open(path, flags, 0o644)
    except FileNotFoundError:  # an agent has made the folder for all of its ranks
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, flags, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def raise_limit() -> int:
    """Raise the soft limit to the hard one, for this process and all that it starts.

    Returns the limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def needed(world_size: int) -> int:
    """What each of so many ranks may have open at a time."""
    return BASE + PER_RANK * world_size


def warning(world_size: int, limit: int, node: str) -> str:
    """What to say where a limit is too small for so many ranks; "" where it is not."""
    if limit >= needed(world_size):
        return ""
    return (
        f"each of {world_size} ranks may need {needed(world_size)} open files, and {node} allows "
        f"{limit} (ulimit -Hn): connections may fail with 'Too many open files'; have the limit "
        "raised (limits.conf, or LimitNOFILE of slurmd), or use fewer ranks"
    )


def first_port(job_id: str, restarts: int, turn: int = 0) -> int:
    """The first of PORTS ports for this start of this job; the same on every node.

    The restart count takes part, since a port is not free at once after a requeue (TIME_WAIT).
    """
    block = zlib.crc32(f"{job_id}/{restarts}".encode()) + turn
    return PORT_BASE + PORT_BLOCK * (block % PORT_BLOCKS)


def free_port(job_id: str, restarts: int) -> int:
    """The first port of a block that is free on this node, starting from the job's own.

    No other call gives the same block for the next minute, in which the job's agents come up.

    Raises:
        ClusterError: none of the blocks is free.
    """
    for turn in range(PORT_BLOCKS):
        port = first_port(job_id, restarts, turn)
        if all(_is_free(port + n) for n in range(PORTS)) and _claim(port + PORTS):
            return port
    raise ClusterError(
        f"no {PORTS} free ports in a row between {PORT_BASE} and "
        f"{PORT_BASE + PORT_BLOCK * PORT_BLOCKS} on {socket.gethostname()}: see what listens there "
        "with `ss -ltn`"
    )


def _claim(port: int) -> bool:
    """Take a port for the next minute, without a process that holds it; False where another has.

    The kernel keeps the port of the side that ends a connection first (TIME_WAIT, 60 s). Two jobs
    that begin on one node in the same seconds would else both see a block free that neither's
    agents listen on yet, and the second one's would not come up.
    """
    with socket.socket() as listener, socket.socket() as client:
        listener.settimeout(1)  # another user's connection may come before ours
        client.settimeout(1)
        try:
            listener.bind(("127.0.0.1", port))  # without SO_REUSEADDR, which passes over TIME_WAIT
            listener.listen(1)
            client.connect(("127.0.0.1", port))
            accepted, _ = listener.accept()
            accepted.close()
            client.recv(1)
        except OSError as error:  # others: a node without loopback can claim nothing, and can train
            return error.errno != errno.EADDRINUSE
    return True


def _is_free(port: int) -> bool:
    """Whether nobody has the port, over IPv4 or IPv6: of two, clients may reach the other one."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # a kernel without IPv6
            continue
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return False
    return True


def is_readable(source: int | HasFileno, timeout_s: float) -> bool:
    """Wait until there is something to read, or the other end is closed; whether that came in time.

    Not by `select.select`, which takes no descriptor above 1023: a rank of a large job, or a
    program with many files, has some.
    """
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(max(0.0, timeout_s) * 1000))
