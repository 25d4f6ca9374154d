"""A rank's lines to its node's keeper for the case that another rank is killed: its last will.

On one of them the rank waits, on a thread of its own, to be asked for it; that line's end tells the
keeper that the rank is gone. It is no signal: one that a rank has no handler for would kill it. For
the will itself there is another line. tests/unit/memory/test_will_stock.py holds the promises.
"""

from __future__ import annotations

import mmap
import os
import socket
from typing import TYPE_CHECKING, Any

from hpctrain.memory.protocol import KeeperLost, receive, text_fd
from hpctrain.memory.rank_line import KeeperLine
from hpctrain.memory.will_pages import WillPage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.memory.copy_plan import CopyPlan

MOST_S = 30.0
"""So long may all wills of a node take, however large they are."""
BEYOND_S = 5.0
"""The keeper answers as much later at most."""


class WillLine(KeeperLine):
    """One rank's, or its agent's; one thread at a time."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        """Meet the keeper; see `KeeperLine`."""
        super().__init__(folder, rank, attempt)
        self._where = (folder, rank, attempt)
        self._memory = memoryview(b"")

    def again(self) -> WillLine:
        """Another line of the same rank.

        Raises:
            KeeperLost: the keeper is gone.
        """
        line = WillLine(*self._where)
        line._memory = self._memory
        return line

    def be_heir(self, nbytes: int, own: CopyPlan) -> WillPage:
        """Have memory for a will of so many bytes, and a page; from here on this rank is asked.

        Args:
            nbytes: Of the will.
            own: How what this rank alone has lies in a cell of its page.

        Raises:
            KeeperLost: the keeper is gone, or there is not so much memory.
        """
        handle = text_fd(own.dump())
        try:
            said, fds = self._ask({"is": "heir", "bytes": nbytes}, fds=(handle,))
        finally:
            os.close(handle)
        if "why" in said:
            raise KeeperLost(str(said["why"]))
        try:
            pages = mmap.mmap(fds[0], int(said["pages"]))
            self._memory = memoryview(mmap.mmap(fds[1], int(said["bytes"])))
        finally:
            for fd in fds:
                os.close(fd)
        return WillPage(memoryview(pages), int(said["local"]))

    def wait(self) -> bool:
        """Wait until the will is asked for; False where the keeper is gone."""
        self._line.settimeout(None)
        try:
            packet = receive(self._line)
        except (OSError, KeeperLost):
            return False
        return packet is not None and packet[0].get("is") == "will"

    def may_write(self, step: int) -> bool:
        """Whether this rank is to write the node's will, of this step; else another one does.

        Raises:
            KeeperLost: the keeper is gone.
        """
        return bool(self._ask({"is": "will", "step": step})[0]["granted"])

    @property
    def memory(self) -> memoryview:
        """Where a will is written once `may_write` was True."""
        return self._memory

    def written(self, step: int, plan: CopyPlan | None, *, again: bool = False) -> None:
        """The will is written; the keeper has proved it when this returns.

        Args:
            step: Its step.
            plan: How it lies in its memory; None where it is not of one moment.
            again: Then it is about to be written once more.

        Raises:
            KeeperLost: the keeper is gone, or the will is not as long as it is said to be.
        """
        handle = text_fd(b"" if plan is None else plan.dump())
        try:
            self._ask({"is": "willed", "step": step, "again": again}, fds=(handle,))
        finally:
            os.close(handle)

    def refuse(self, why: str) -> None:
        """This rank leaves no will.

        Raises:
            KeeperLost: the keeper is gone.
        """
        self._ask({"is": "no will", "why": why[:1000]})

    def gather(self) -> dict[str, Any]:
        """The agent: have all ranks of the node asked, and wait until they have answered.

        Returns:
            `step` of the node's will, or None, and `why` some left none, by their numbers.

        Raises:
            KeeperLost: the keeper is gone, or does not answer.
        """
        return self._ask({"is": "gather"}, MOST_S + BEYOND_S)[0]

    def leave(self) -> None:
        """End the line, also where another thread waits on it."""
        try:
            self._line.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            return
        finally:
            self.close()


_here: Callable[[], None] | None = None


def stand_by(write: Callable[[], None]) -> None:
    """Have this process leave its will by this, when `leave_will` is called."""
    global _here  # noqa: PLW0603 - a process has one
    _here = write


def leave_will() -> None:
    """Leave this process's will, if it has one: its main thread is about to end it."""
    if _here is not None:
        _here()
