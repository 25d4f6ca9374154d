"""What a node's keeper does for last wills, in one round of the ranks.

Where each rank holds the whole state, any survivor's will do for all: the newest is taken, and one
rank of the node writes it. It counts when the agent has said how the round ended: what ranks have
left that are ended for what they computed is none. Then a will is told as a copy is, of one part
more than there are ranks: what each rank alone had, and what all hold alike.
tests/unit/memory/test_will_stock.py holds the promises.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.checkpoint.format import shard
from hpctrain.checkpoint.tensors.arena import Arena
from hpctrain.errors import CheckpointError
from hpctrain.memory.node_stock import CopyInMemory, room_refused
from hpctrain.memory.protocol import KeeperLost, send
from hpctrain.memory.slots import Mark
from hpctrain.memory.stock import ProvedCopy, digests_of
from hpctrain.memory.will_line import MOST_S
from hpctrain.memory.will_pages import CellState, WillPage, fits, pages_bytes

if TYPE_CHECKING:
    import socket

    from hpctrain.memory.copy_plan import CopyPlan
    from hpctrain.memory.node_stock import NodeStock
    from hpctrain.memory.will_pages import Cell

LEAST_S = 2.0
BYTES_PER_S = 1e9
"""So long may wills take: as much, and so long for their size."""
CLAIM_S = 1.0
"""So long is waited for a rank that has, or may yet have, a newer step than who asks."""
LOOK_S = 0.005
STILL = "ZXxTt"
"""States of a process, as the kernel says them, in which it does nothing: ended, or stopped."""


@dataclass
class _Heir:
    """A rank that may be asked."""

    peer: socket.socket
    pid: int
    page: WillPage
    own: CopyPlan
    has_answered: bool = False
    why: str = ""


class RoundWills:
    """The wills of one round, on one node. Each call is a rank's thread's, or the agent's."""

    def __init__(self, stock: NodeStock, first_rank: int, ranks: int) -> None:
        """Nobody is an heir.

        Args:
            stock: The node's memory.
            first_rank: Of this node.
            ranks: Of this node.
        """
        self._stock, self._first_rank = stock, first_rank
        self._fd = os.memfd_create("hpctrain-pages", os.MFD_CLOEXEC)
        self._nbytes = pages_bytes(ranks)
        os.ftruncate(self._fd, self._nbytes)
        self._pages = memoryview(mmap.mmap(self._fd, self._nbytes))
        self._heirs: dict[int, _Heir] = {}
        self._changed = threading.Condition()
        self._writer: int | None = None
        self._writing_peer: socket.socket | None = None
        self._whole: ProvedCopy | None = None
        self._is_over = False

    def be_heir(
        self, peer: socket.socket, local: int, pid: int, nbytes: int, own: CopyPlan
    ) -> None:
        """Take a rank as one that may be asked, and give it memory."""
        why = "" if fits(own) else f"{own.size:,} bytes of each rank alone are too many"
        with self._changed:
            try:
                self._stock.will.ensure(0 if why else nbytes)
            except CheckpointError as error:
                why = room_refused(error)
            if why:
                send(peer, {"why": why})
                return
            page = WillPage(self._pages, local)
            self._heirs[local] = _Heir(peer, pid, page, own)
            said = {"local": local, "pages": self._nbytes, "bytes": self._stock.will.size}
            send(peer, said, (self._fd, self._stock.will.fd))

    def leave(self, peer: socket.socket, local: int) -> None:
        """A line has ended: its rank is gone, or its will."""
        with self._changed:
            heir = self._heirs.get(local)
            if heir is not None and heir.peer is peer:
                heir.has_answered = True
                heir.pid = 0
            if self._writing_peer is peer and self._writer is not None:
                self._end_writing(self._writer, None)
            self._changed.notify_all()

    def claim(self, peer: socket.socket, local: int, step: int, *, may: bool) -> bool:
        """Whether this rank writes the node's will.

        Args:
            peer: The line on which it says so; that one's end is the end of its writing.
            local: The rank's number on this node.
            step: Its step.
            may: Whether what is in the memory for wills may be overwritten.
        """
        deadline = clock.monotonic() + CLAIM_S
        with self._changed:
            while may and not self._is_over:
                if self._whole is not None and self._whole.mark.step >= step:
                    break
                is_late = clock.monotonic() > deadline
                if self._writer is None and (is_late or not self._is_behind(local, step)):
                    if not self._stock.will_in_use.acquire(blocking=False):
                        break
                    self._writer, self._writing_peer, self._whole = local, peer, None
                    self._stock.drop_wills()
                    return True
                if is_late:
                    break
                clock.wait(self._changed, LOOK_S)
            self._answer(local)
            return False

    def written(
        self, local: int, mark: Mark, plan: CopyPlan | None, *, again: bool = False
    ) -> None:
        """The rank has written the node's will, or has found that it is not of one moment.

        Args:
            local: The rank's number on this node.
            mark: The will's.
            plan: How it lies in memory; None where it is none.
            again: The rank is about to write it once more, then.

        Raises:
            KeeperLost: it was not to, or is not as long as is said.
        """
        with self._changed:
            if self._writer != local:
                raise KeeperLost("another rank writes the node's will")
        copy = None
        try:
            if plan is not None:
                copy = self._proved(mark, plan)
        finally:
            self._end_writing(local, copy, again=again and plan is None)

    def refuse(self, local: int, why: str) -> None:
        """A rank leaves no will."""
        with self._changed:
            self._answer(local, why)

    def gather(self) -> dict[str, object]:
        """Ask all heirs, and wait until each has answered, or does nothing any more."""
        deadline = clock.monotonic() + min(LEAST_S + self._stock.will.size / BYTES_PER_S, MOST_S)
        with self._changed:
            for heir in self._heirs.values():
                if not heir.has_answered:
                    try:
                        send(heir.peer, {"is": "will"})
                    except OSError:
                        heir.has_answered = True
            while self._is_awaited() and (left_s := deadline - clock.monotonic()) > 0:
                clock.wait(self._changed, min(left_s, 10 * LOOK_S))
            step = None if self._whole is None else self._whole.mark.step
            whys = {str(local): heir.why for local, heir in self._heirs.items() if heir.why}
            return {"step": step, "why": whys}

    def settle(self, attempt: int, *, counts: bool) -> None:
        """The round is over, and its ranks are gone: what they have left counts, or does not."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            if counts:
                self._publish(attempt)
            for heir in self._heirs.values():
                heir.pid = 0

    def close(self) -> None:
        """Give the pages back."""
        self.settle(0, counts=False)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- within the lock

    def _is_behind(self, local: int, step: int) -> bool:
        """Whether another living rank has a newer step than this one's, or may yet come to it."""
        return any(
            heir.page.step > step or (heir.page.step == step and heir.page.is_changing)
            for other, heir in self._heirs.items()
            if other != local and not heir.has_answered and _acts(heir.pid)
        )

    def _is_awaited(self) -> bool:
        return any(not heir.has_answered and _acts(heir.pid) for heir in self._heirs.values())

    def _answer(self, local: int, why: str = "") -> None:
        if (heir := self._heirs.get(local)) is not None:
            heir.has_answered, heir.why = True, why
        self._changed.notify_all()

    def _end_writing(self, local: int, copy: ProvedCopy | None, *, again: bool = False) -> None:
        with self._changed:
            if self._writer != local:
                return
            self._writer, self._whole = None, copy
            self._stock.will_in_use.release()
            if not again:
                self._answer(local, "" if copy else "it was not of one moment")

    def _proved(self, mark: Mark, plan: CopyPlan) -> ProvedCopy:
        return _prove(self._stock.will, mark, plan)

    def _publish(self, attempt: int) -> None:
        """Tell of the will, and of what each rank alone had, as of copies."""
        parts: dict[tuple[Mark, int], CopyInMemory] = {}
        if self._whole is not None and self._whole.mark.attempt == attempt:
            whole = self._whole
            parts[whole.mark, whole.plan.rank] = CopyInMemory(whole, self._stock.will)
        kept = {local: heir.page.kept(_bytes_of(heir.own)) for local, heir in self._heirs.items()}
        odd = {
            cell.step for cells in kept.values() for cell in cells if cell.state == CellState.OTHER
        }
        for local, cells in kept.items():
            for cell in cells:
                if cell.state == CellState.AHEAD and cell.step in odd:
                    continue  # programs that draw random numbers behind an update
                plan = self._heirs[local].own
                mark = Mark(attempt, cell.step, will=1)
                parts[mark, self._first_rank + local] = _part_of(cell, mark, plan)
        self._stock.publish_wills(parts)


def _part_of(cell: Cell, mark: Mark, plan: CopyPlan) -> CopyInMemory:
    """What a rank alone had of a step, as a copy of its own."""
    arena = Arena(plan.size)
    arena.view(0, len(cell.content))[:] = cell.content
    return CopyInMemory(_prove(arena, mark, plan), arena)


def _prove(arena: Arena, mark: Mark, plan: CopyPlan) -> ProvedCopy:
    if plan.size > arena.size:
        raise KeeperLost(f"a last will of {plan.size:,} bytes in memory of {arena.size:,}")
    view = arena.view(0, plan.size)
    ends = shard.proof(bytes(view[: plan.head]), digests_of(view, plan))
    view[plan.size - len(ends) :] = ends
    return ProvedCopy(mark, plan, plan.size, shard.proof_digest(ends))


def _bytes_of(plan: CopyPlan) -> int:
    """Header and parts, without the proof."""
    return plan.head + sum(plan.sizes)


def _acts(pid: int) -> bool:
    """Whether anything is to be expected of a process: it has not ended, and is not stopped."""
    if not pid:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in STILL
