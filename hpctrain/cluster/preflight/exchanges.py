"""Measure clock differences between nodes, and try the shared directory and its locks.

The first node asks for clocks a few nodes at a time: one by one, silent nodes would add up their
time-outs; all at once, answers would queue at the first node and look slow. Each node writes a file
as a checkpoint is written and looks for those of others (`checks_between` says whose). Then the
first node holds a lock that the others try. Each look is a child's, with a time-out.
tests/unit/preflight/test_rendezvous.py and test_probe.py hold the promises.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from hpctrain.cluster.preflight.bounded import Unanswered, bounded
from hpctrain.core.base import clock
from hpctrain.core.base.process import is_readable
from hpctrain.ledger.run.fence import look_anew

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path


PINGS = 5
ASKED_AT_ONCE = 16
ANSWER_S = 5.0


class SignedLine(Protocol):
    """What is needed of a connection; see `rendezvous.Connection`."""

    def fileno(self) -> int:
        """For a selector."""
        ...

    def tell(self, value: Any) -> None:
        """Say something."""
        ...

    def hear(self, timeout_s: float) -> Any:
        """What the other end says next."""
        ...


@dataclass(frozen=True)
class Skew:
    """How far a node's clock is from the first node's.

    Attributes:
        offset_s: Positive where it is ahead.
        bound_s: By so much the offset may be wrong: half of the exchange's time.
    """

    offset_s: float
    bound_s: float


@dataclass(frozen=True)
class _Ping:
    """A question that is not answered yet.

    Attributes:
        began: By the clock that is compared.
        mark: The same moment on the monotonic clock.
        left: How many questions follow this one.
    """

    began: float
    mark: float
    left: int


def ask_clocks(
    peers: Mapping[int, SignedLine],
    clock: Callable[[], float],
    leave_out: Callable[[int, Exception], None],
) -> dict[int, Skew]:
    """Each node's clock against this one's, by the midpoint of the quickest of its exchanges.

    Args:
        peers: Rank to connection.
        clock: This node's, in seconds.
        leave_out: Told of a node that has gone or gives no answer, with the error; closes it.
    """
    with _Asking(peers, clock, leave_out) as asking:
        return asking.all()


class _Asking:
    """Who is asked now, and what the others have said."""

    def __init__(
        self,
        peers: Mapping[int, SignedLine],
        clock: Callable[[], float],
        leave_out: Callable[[int, Exception], None],
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._leave_out = leave_out
        self._selector = selectors.DefaultSelector()
        self._asked: dict[int, _Ping] = {}
        self._skews: dict[int, Skew] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def all(self) -> dict[int, Skew]:
        waiting = list(self._peers)[::-1]
        while waiting or self._asked:
            while waiting and len(self._asked) < ASKED_AT_ONCE:
                rank = waiting.pop()
                self._selector.register(self._peers[rank], selectors.EVENT_READ, rank)
                self._ask(rank, PINGS - 1)
            oldest = min((ping.mark for ping in self._asked.values()), default=0.0)
            for key, _ in self._selector.select(max(oldest + ANSWER_S - clock.monotonic(), 0.0)):
                self._hear(key.data)
            self._give_up()
        return self._skews

    def _ask(self, rank: int, left: int) -> None:
        self._asked[rank] = _Ping(self._clock(), clock.monotonic(), left)
        try:
            self._peers[rank].tell({"ask": "clock"})
        except OSError as error:
            self._finish(rank, error)

    def _hear(self, rank: int) -> None:
        ping = self._asked[rank]
        try:
            answer = float(self._peers[rank].hear(ANSWER_S))
        except (OSError, ValueError, TypeError) as error:
            self._finish(rank, error)
            return
        half = (clock.monotonic() - ping.mark) / 2
        skew = Skew(round(answer - (ping.began + half), 6), round(half, 6))
        self._skews[rank] = min(self._skews.get(rank, skew), skew, key=lambda one: one.bound_s)
        if ping.left:
            self._ask(rank, ping.left - 1)
        else:
            self._finish(rank)

    def _give_up(self) -> None:
        now = clock.monotonic()
        for rank in [rank for rank, ping in self._asked.items() if now >= ping.mark + ANSWER_S]:
            self._finish(rank, TimeoutError())

    def _finish(self, rank: int, error: Exception | None = None) -> None:
        self._selector.unregister(self._peers[rank])
        del self._asked[rank]
        if error is not None:
            self._leave_out(rank, error)


TIMEOUT_S = 20.0
SEE_S = 10.0
"""So long may a file take to be seen on another node that asks the server anew."""
POLL_S = 0.1
LONGEST_POLL_S = 1.0
LOCK = "@lock"
COHERENT, LOCAL, NONE, UNKNOWN = "coherent", "local", "none", "unknown"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def write(folder: Path, name: str, nonce: str, timeout_s: float = TIMEOUT_S) -> str:
    """Write this node's file; why it could not, or "".

    Args:
        folder: The directory that is tried.
        name: The node's.
        nonce: The file's content.
        timeout_s: A mount that hangs is given up after so long.
    """
    try:
        bounded(lambda: _write(folder, name, nonce), timeout_s)
    except Unanswered as error:
        return str(error)
    return ""


def unseen(
    folder: Path,
    nonces: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    wait_s: float = SEE_S,
    *,
    listed: bool = True,
) -> list[str]:
    """The names whose file with its nonce is not seen from here; all of them if nobody can look.

    Args:
        folder: The directory that is tried.
        nonces: Name to the nonce that its file has.
        timeout_s: A mount that hangs is given up after so long.
        wait_s: So long may a file take to come.
        listed: Whether they must stand in the folder's list too, which has a line for each node.
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
    """The first node's lock, held by a child until `release`.

    Attributes:
        held: Whether it could be taken at all.
    """

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


def _write(folder: Path, name: str, nonce: str) -> None:
    staged = folder / f".{name}.staged"
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, nonce.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    staged.rename(folder / name)
    parent = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


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
