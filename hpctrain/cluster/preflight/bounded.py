"""Acts that may never return, each in a child with a time-out: files, locks, the collective.

A mount whose server is gone blocks a process that looks at it, for ever and deaf to SIGKILL. So the
look is a child's, and a child that cannot be killed is left behind rather than waited for. Each
node writes a file as a checkpoint is written and looks for those of others (`checks_between` says
whose). Then the first node holds a lock that the others try. `CollectiveProcess` is this node's
part in the tries of `collective.py`, which imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpctrain.core.base import clock
from hpctrain.core.base.files import replace_text
from hpctrain.core.base.process import is_readable, own_program
from hpctrain.ledger.run.fence import look_anew

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path

REAP_S = 0.5
"""How long a killed child may take to be gone before it is left to the kernel."""
REAP_POLL_S = 0.002
_CHUNK = 65536
START_S = 120.0
"""Importing torch from a busy shared file system has been seen to take a minute."""
MARGIN_S = 10.0
MODULE = "hpctrain.cluster.preflight.collective"


class Unanswered(Exception):
    """The child gave no answer: it took too long, or it died."""


class Child:
    """A child at work; `answer` ends it."""

    def __init__(self, pid: int, reading: int) -> None:
        self._pid = pid
        self._reading = reading

    def answer(self, timeout_s: float) -> Any:
        """What it made, waited for at most so long; the child is gone afterwards.

        Raises:
            Unanswered: no answer in time, or it failed; the text says which.
        """
        try:
            text = _read_all(self._reading, clock.monotonic() + timeout_s)
        finally:
            os.close(self._reading)
            _end(self._pid)
        if text is None:
            raise Unanswered(f"no answer in {max(timeout_s, 0.0):g} s")
        if not text:
            raise Unanswered("the child died")
        answer = json.loads(text)
        if "error" in answer:
            raise Unanswered(answer["error"])
        return answer["value"]


def start(act: Callable[[], Any]) -> Child:
    """Begin `act` in a forked child; it must return plain data."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(act, writing)
    os.close(writing)
    return Child(pid, reading)


def bounded(act: Callable[[], Any], timeout_s: float) -> Any:
    """What `act` returns, which must be plain data.

    `act` runs in a forked child, which is killed after so many seconds.

    Raises:
        Unanswered: no answer in time, or `act` raised; the text says which.
    """
    return start(act).answer(timeout_s)


def _answer(act: Callable[[], Any], writing: int) -> None:
    """The child's whole life; it must not come back into its parent's code."""
    os.setsid()  # what it starts is killed with it
    try:
        try:
            answer = {"value": act()}
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the answer
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _read_all(descriptor: int, deadline: float) -> bytes | None:
    """All that comes until the other end is closed; None where that does not happen in time."""
    parts: list[bytes] = []
    while True:
        if not is_readable(descriptor, deadline - clock.monotonic()):
            return None
        part = os.read(descriptor, _CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _end(child: int) -> None:
    """Kill and reap, without ever waiting for a child that hangs in the kernel."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
        os.killpg(child, signal.SIGKILL)
    deadline = clock.monotonic() + REAP_S
    with contextlib.suppress(ChildProcessError):
        while not os.waitpid(child, os.WNOHANG)[0] and clock.monotonic() < deadline:
            clock.sleep(REAP_POLL_S)


class CollectiveProcess:
    """Starts the process at once, so that torch is imported while the node is being looked at."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it; the job's own environment wins over `env`, as it does for ranks."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            own_program(MODULE),
            stdin=pipe,
            stdout=pipe,
            text=True,
            bufsize=1,
            env={**env, **os.environ},
        )
        self._orders = cast("TextIO", self._process.stdin)
        self._answers = cast("TextIO", self._process.stdout)

    def ready(self, *, host: bool, address: str, port: int) -> str:
        """Wait for torch, and on the first node for the store; why they do not come, or ""."""
        return str(
            self._ask({"store": port, "host": host, "address": address}, START_S).get("error", "")
        )

    def attempt(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """What this node's ranks measured: {"ranks": [...]}, or {"error": why}."""
        return self._ask(order, float(order["timeout_s"]) + MARGIN_S)

    def _ask(self, order: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._orders.write(json.dumps(order) + "\n")
        except OSError:
            return {"error": self._end()}
        ready = is_readable(self._answers, timeout_s)
        line = self._answers.readline() if ready else ""
        if not line:
            return {"error": self._end() if ready else f"no answer in {timeout_s:g} s"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(MARGIN_S)
            died = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"{MODULE} ended {died}; its output is in the job's"
        return f"{MODULE} closed its output"

    def close(self) -> None:
        """End it; its ranks die with it."""
        self._process.kill()
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MARGIN_S)


TIMEOUT_S = 20.0
SEE_S = 10.0
"""So long may a file take to be seen on another node that asks the server anew."""
POLL_S = 0.1
LONGEST_POLL_S = 1.0
LOCK = "@lock"
COHERENT, LOCAL, NONE, UNKNOWN = "coherent", "local", "none", "unknown"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def leave_file(folder: Path, name: str, nonce: str, timeout_s: float = TIMEOUT_S) -> str:
    """Write this node's file; why it could not, or "".

    A mount that hangs is given up after `timeout_s`.
    """
    try:
        bounded(lambda: replace_text(folder / name, nonce, durable=True), timeout_s)
    except Unanswered as error:
        return str(error)
    return ""


def unseen_files(
    folder: Path,
    nonces: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    wait_s: float = SEE_S,
    *,
    listed: bool = True,
) -> list[str]:
    """The names whose file with its nonce is not seen from here; all of them if nobody can look.

    A file may take `wait_s` to come. With `listed` it must stand in the folder's list too, which
    has a line for each node.
    """
    look = partial(_unseen, folder, nonces, wait_s, listed=listed)
    try:
        missing: list[str] = bounded(look, timeout_s)
    except Unanswered:
        return list(nonces)
    return missing


def try_lock(folder: Path, timeout_s: float = TIMEOUT_S) -> str:
    """What a lock that another node holds looks like from here: coherent, local, none, unknown."""
    try:
        kind: str = bounded(lambda: _try_lock(folder / LOCK), timeout_s)
    except Unanswered:
        return UNKNOWN
    return kind


class HeldLock:
    """The first node's lock, held by a child until `release`."""

    def __init__(self, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        """Take it."""
        reading, self._go = os.pipe()
        answer, lock_answer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._go)
            os.close(answer)
            _hold(folder / LOCK, lock_answer, reading)
        os.close(reading)
        os.close(lock_answer)
        self.held = _heard(answer, timeout_s)
        os.close(answer)

    def release(self) -> None:
        """Let go; the child ends when the pipe closes, also where this process is killed."""
        os.close(self._go)
        with contextlib.suppress(ChildProcessError):
            deadline = clock.monotonic() + 1.0
            while not os.waitpid(self._child, os.WNOHANG)[0] and clock.monotonic() < deadline:
                clock.sleep(0.002)


def _unseen(folder: Path, nonces: Mapping[str, str], wait_s: float, *, listed: bool) -> list[str]:
    deadline, pause_s = clock.monotonic() + wait_s, POLL_S
    left = dict(nonces)
    while True:
        there: Container[str] = left
        if listed:
            there = set(os.listdir(folder)) if folder.is_dir() else ()  # noqa: PTH208 - names only
        left = {n: v for n, v in left.items() if n not in there or _content(folder / n) != v}
        if not left or clock.monotonic() > deadline:
            return list(left)
        look_anew(folder)  # else this node's client may show the same list for a minute
        clock.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_POLL_S)


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _try_lock(path: Path) -> str:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return COHERENT
    except OSError as error:
        return NONE if error.errno in _NO_LOCKS else UNKNOWN
    finally:
        os.close(descriptor)
    return LOCAL


def _hold(path: Path, report: int, reading: int) -> None:
    """The child's whole life."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(report, b"1")
        os.read(reading, 1)
    finally:
        os._exit(0)


def _heard(answer: int, timeout_s: float) -> bool:
    return is_readable(answer, timeout_s) and os.read(answer, 1) == b"1"
