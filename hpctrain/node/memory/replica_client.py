"""A rank's connection to its node's replica server: messages, memory for copies, and copies.

Messages are packets on a Unix socket: a head, which JSON holds, and descriptors beside it.
tests/unit/memory/test_replica_server.py holds the promises.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpctrain.errors import HpctrainError
from hpctrain.node.memory.slots import HeldCopy, Inventory, Mark

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.node.memory.copy_plan import CopyPlan

ANSWER_S = 120.0
"""So long may the replica server take to answer: it may clear some hundred gigabytes first."""
FETCH_S = 900.0
"""And so long where it brings copies from other nodes, of all ranks of this one at once."""


class ReplicaClient:
    """One rank's; one thread asks at a time, and another may report meanwhile.

    Each method that asks or reports raises ReplicaServerLost if the replica server is gone.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        """Connect to the replica server in the round's folder, as one of all ranks.

        Raises:
            ReplicaServerLost: it is not there, or does not know this rank.
        """
        self._lock = threading.Lock()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(ANSWER_S)
        self._slots: list[mmap.mmap] = []
        try:
            self._line.connect(str(folder / SOCKET))
            said, fds = self._ask({"is": "hello", "rank": rank, "attempt": attempt})
        except OSError as error:
            self._line.close()
            raise ReplicaServerLost(
                f"the replica server of this node cannot be met: {error}"
            ) from error
        except ReplicaServerLost:
            self._line.close()
            raise
        self._words = words_of(fds[0])
        os.close(fds[0])
        self._at = FIRST_FREE + int(said["local"])
        self.is_first = int(said["local"]) == 0

    @property
    def covered(self) -> int:
        """The newest step of this round that all ranks have whole; -1 before the first."""
        return int(self._words[COVERED]) - 1

    @property
    def settled(self) -> int:
        """The newest step of this round of which all ranks have spoken; -1 before the first."""
        return int(self._words[SETTLED]) - 1

    @property
    def covered_ns(self) -> int:
        """When that of `covered` was heard, by `time.monotonic_ns`."""
        return int(self._words[COVERED_NS])

    @property
    def is_off(self) -> bool:
        """Whether no copies are made any more."""
        return bool(self._words[OFF])

    def take_room(self, nbytes: int) -> str:
        """Take memory for copies of `nbytes` (slow); return why there is none, or ""."""
        said, fds = self._ask({"is": "room", "bytes": nbytes})
        if "sizes" not in said:
            return str(said.get("why"))
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            rows = zip(fds, said["sizes"], strict=True)
            self._slots = [mmap.mmap(fd, size, flags=flags) for fd, size in rows]
        finally:
            for fd in fds:
                os.close(fd)
        return ""

    @property
    def room(self) -> int:
        """Bytes of a slot; 0 before `take_room`."""
        return len(self._slots[0]) if self._slots else 0

    @property
    def slots(self) -> list[memoryview]:
        """The memory of each slot; only one that was taken may be written."""
        return [memoryview(slot) for slot in self._slots]

    def take_slot(self) -> int | None:
        """A slot to write; None where none is free."""
        free = int(self._words[self._at])
        if not free or not self._slots:
            return None
        self._words[self._at] = 0
        return free - 1

    def copied(self, slot: int, step: int, plan: CopyPlan) -> None:
        """Report that a copy is written; the replica server proves it from here on."""
        handle = text_fd(plan.dump())
        try:
            self._send({"is": "copied", "slot": slot, "step": step}, (handle,))
        finally:
            os.close(handle)

    def left_out(self, step: int, slot: int | None = None) -> None:
        """Report that this rank has no copy of a step; free the slot that was taken for it."""
        self._send({"is": "left", "step": step, "slot": slot})

    def chosen(self, mark: Mark | None) -> None:
        """Report what training resumes from: a copy, or none of them."""
        self._send({"is": "chosen", "mark": mark})

    def held(self) -> Inventory:
        """Return what this node has."""
        own, guests, *rest = self._ask_text({"is": "held"})["held"]
        return Inventory(
            [HeldCopy(*copy) for copy in own], [HeldCopy(*copy) for copy in guests], *rest
        )

    def facts(self, mark: Mark, ranks: Sequence[int]) -> dict[int, list[Any]]:
        """Return by rank, of copies on this node: size, digest, bytes of the header, facts."""
        said = self._ask_text({"is": "facts", "mark": mark, "ranks": list(ranks)})
        return {int(rank): facts for rank, facts in said["facts"].items()}

    def open(self, mark: Mark, rank: int, addresses: Sequence[Sequence[Any]] = ()) -> int | None:
        """Return a descriptor of a rank's copy, which the caller closes; None for none.

        If this node has no such copy, it is fetched from the replica servers at `addresses`.

        Raises:
            ReplicaServerLost: the replica server is gone, or has no memory to bring it into.
        """
        head = {"is": "open", "mark": mark, "rank": rank, "at": list(addresses)}
        said, fds = self._ask(head, FETCH_S)
        if said.get("why"):
            raise ReplicaServerLost(str(said["why"]))
        return fds[0] if fds else None

    def why_off(self) -> str:
        """Return why no copies are made any more."""
        return str(self._ask({"is": "why"})[0]["why"])

    def close(self) -> None:
        """Leave."""
        self._line.close()

    def _send(self, head: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            send(self._line, head, fds)
        except OSError as error:
            raise ReplicaServerLost(f"the replica server of this node is gone: {error}") from error

    def _ask(
        self, head: dict[str, Any], wait_s: float = ANSWER_S
    ) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._send(head)
            try:
                self._line.settimeout(wait_s)
                answer = receive(self._line)
            except OSError as error:
                raise ReplicaServerLost(
                    f"the replica server of this node does not answer: {error}"
                ) from error
            finally:
                self._line.settimeout(ANSWER_S)
        if answer is None:
            raise ReplicaServerLost("the replica server of this node is gone")
        if "error" in answer[0]:
            raise ReplicaServerLost(
                f"the replica server of this node has refused: {answer[0]['error']}"
            )
        return answer

    def _ask_text(self, head: dict[str, Any]) -> dict[str, Any]:
        _, fds = self._ask(head)
        value: dict[str, Any] = json.loads(text_of(fds[0]))
        return value


SOCKET = "memory"
"""In the folder of a round: where the replica server of the node is met."""
WORDS_BYTES = 8 * 1024
COVERED, SETTLED, COVERED_NS, OFF = range(4)
"""Steps are written one higher, since fresh memory is zero. COVERED_NS: when that was heard, by the
node's monotonic clock. OFF: no copies are made any more in this round."""
FIRST_FREE = 64
"""And one for each rank: the slot that it may write, one higher. The replica server sets it
where it is zero, the rank clears it as it takes the slot."""
MOST_RANKS = WORDS_BYTES // 8 - FIRST_FREE
PACKET_BYTES = 1 << 16
MOST_FDS = 200
"""In a packet; the kernel takes 253."""


class ReplicaServerLost(HpctrainError):
    """The replica server of this node is gone, or says what cannot be understood."""


def words_of(fd: int) -> memoryview:
    """The words in a memfd of WORDS_BYTES."""
    return memoryview(mmap.mmap(fd, WORDS_BYTES)).cast("q")


def text_fd(content: bytes) -> int:
    """A new descriptor of memory that holds this."""
    handle = os.memfd_create("hpctrain-text", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(handle), "wb") as file:
        file.write(content)
    return handle


def text_of(handle: int) -> bytes:
    """What `text_fd` was given; the descriptor is closed."""
    with os.fdopen(handle, "rb") as file:
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def send(peer: socket.socket, head: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a packet.

    Raises:
        OSError: the other end is gone.
    """
    socket.send_fds(peer, [json.dumps(head, separators=(",", ":")).encode()], fds)


def receive(peer: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next packet; None at the end.

    Raises:
        ReplicaServerLost: that is none.
        OSError: the connection broke.
    """
    content, fds, _, _ = socket.recv_fds(peer, PACKET_BYTES, MOST_FDS)
    if not content:
        return None
    with suppress(ValueError, RecursionError):
        head = json.loads(content)
        if isinstance(head, dict):
            return head, fds
    for fd in fds:
        os.close(fd)
    raise ReplicaServerLost("a packet that is none of the replica server's protocol")
