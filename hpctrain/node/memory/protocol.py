"""Messages between ranks and their replica server, and the words of memory that both see.

Packets on a Unix socket: a head, which JSON holds, and descriptors beside it. What may be long goes
in a memfd, so that a rank never waits for the replica server to read it. In the words each side
says what the other must know without asking. tests/unit/memory/test_replica_server.py holds the
promises.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any

from hpctrain.errors import HpctrainError

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
    try:
        head = json.loads(content)
        if isinstance(head, dict):
            return head, fds
    except (ValueError, RecursionError):
        pass
    for fd in fds:
        os.close(fd)
    raise ReplicaServerLost("a packet that is none of the replica server's protocol")
