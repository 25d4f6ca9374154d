"""CPUs that tests share: all of them together start no more than three ranks or agents for each.

Three, since a rank waits for the others, for SLURM or for a disk most of the time: with two for
each CPU two cores stood half idle. A test takes a token for each rank or agent before it starts
them, and waits until enough are free; one that needs more than there are takes all. A token is a
POSIX lock on a file that all tests of this user have: forked ranks do not inherit it, and it ends
with its process. Who holds some takes no more: a test that starts two things cannot wait for
itself. While one test gathers tokens none else does, so two cannot hold a part each and wait for
the other's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

POLL_S = 0.05
PER_CPU = 3


class Tokens:
    """The tokens of a folder, as one process sees them."""

    def __init__(self, folder: Path, count: int) -> None:
        """Hold none.

        Args:
            folder: Of the locks; the same for all who share the CPUs.
            count: How many there are.
        """
        self._folder = folder
        self._count = count
        self._held: list[int] = []
        self._owner = os.getpid()

    @property
    def held(self) -> int:
        """How many this process holds; of a forked one, its parent's."""
        return len(self._held)

    def take(self, wanted: int, waits: Callable[[], None] = lambda: None) -> bool:
        """Take so many, or all; nothing where some are held.

        Args:
            wanted: How many.
            waits: Called once, before the first wait for somebody else.

        Returns:
            Whether they were taken by this call, so that the caller has to release them.
        """
        if self._held:
            return False
        self._folder.mkdir(mode=0o700, exist_ok=True)
        turn = _open(self._folder / "turn")
        try:
            said = _lock(turn, waits)
            for number in range(self._count):
                (self._folder / f"{number}").touch()
            self._gather(min(wanted, self._count), (lambda: None) if said else waits)
        finally:
            os.close(turn)
        self._owner = os.getpid()
        return True

    def _gather(self, wanted: int, waits: Callable[[], None]) -> None:
        left = [_open(self._folder / f"{number}") for number in range(self._count)]
        said = False
        while True:
            for one in [*left]:
                if len(self._held) < wanted and _try_lock(one):
                    left.remove(one)
                    self._held.append(one)
            if len(self._held) == wanted:
                break
            if not said:
                waits()
                said = True
            time.sleep(POLL_S)
        for one in left:
            os.close(one)

    def release(self) -> None:
        """Give back what this process holds. Harmless when repeated, and in a forked process."""
        held, self._held = self._held, []
        if os.getpid() == self._owner:
            for one in held:
                os.close(one)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _lock(descriptor: int, waits: Callable[[], None]) -> bool:
    """Lock it; returns whether it had to wait."""
    if _try_lock(descriptor):
        return False
    waits()
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    return True


_TOKENS = Tokens(
    Path(tempfile.gettempdir(), f"hpctrain-test-cpus-{os.getuid()}"),
    PER_CPU * len(os.sched_getaffinity(0)),
)
_running: pytest.Item | None = None


def take(wanted: int) -> bool:
    """Take tokens until the test's end, see `Tokens.take`. The wait is not part of its limit."""
    item, stopped = _running, []

    def stop_clock() -> None:
        if item is not None:
            item.ihook.pytest_timeout_cancel_timer(item=item)
            stopped.append(item)

    try:
        return _TOKENS.take(wanted, stop_clock)
    finally:
        for one in stopped:
            _start_clock(one)


@contextlib.contextmanager
def taken(wanted: int) -> Iterator[None]:
    """Hold tokens for a block; those that the test has already it keeps."""
    mine = take(wanted)
    try:
        yield
    finally:
        if mine:
            _TOKENS.release()


@contextlib.contextmanager
def of_test(item: pytest.Item) -> Iterator[None]:
    """Give back at the end of a test what it has taken, however it ends."""
    global _running  # noqa: PLW0603 - one test runs at a time
    _running = item
    try:
        yield
    finally:
        _running = None
        _TOKENS.release()


def _start_clock(item: pytest.Item) -> None:
    from pytest_timeout import _get_item_settings  # there is no other way to its settings

    settings = _get_item_settings(item)
    if settings.timeout:
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
