"""The process behind a rank that writes its shards while training continues.

A process of its own, so that digests and writes never hold the Python lock that training needs;
exec'd, since a rank has threads and a CUDA context. It imports numpy and xxhash, and no torch. The
rank's half is `writer.py`. Both talk over a socket, one request at a time:

- the rank sends a FRAME and two descriptors: the arena's, and a memfd with the pickled
  `WriteRequest` (so that sending never waits for this process);
- this process answers with a FRAME and a pickled `ShardReport` or `WriteFailure`.
"""

from __future__ import annotations

import array
import ctypes
import mmap
import os
import pickle
import platform
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from hpctrain.checkpoint.format import shard
from hpctrain.core.base.process import die_with_parent, ignore_signals, show_as
from hpctrain.core.testing import points
from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpctrain.checkpoint.format.shard import ShardPiece, ShardReport

FRAME = struct.Struct("<QQQ")
"""Number of the request, bytes of the body, digest of the body."""
IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
IOPRIO_WHO_PROCESS = 1
IOPRIO_LOWEST = 2 << 13 | 7
"""The last of the best-effort class: other users of the node's disk come first."""


@dataclass(frozen=True)
class WriteRequest:
    """A shard to write from the arena.

    Attributes:
        path: Where nothing is yet.
        pieces: What goes into it.
        offsets: Where each piece's bytes begin in the arena.
        block_bytes: See `shard.write`, as for the next.
        threads: How many write at a time.
    """

    path: Path
    pieces: Sequence[ShardPiece]
    offsets: Sequence[int]
    block_bytes: int
    threads: int
    step: int
    rank: int


@dataclass(frozen=True)
class WriteFailure:
    """Why a shard was not written."""

    message: str
    errno: int | None


def main(handle: int, rank_pid: int) -> None:
    """Write what the rank requests over socket `handle`, until the rank closes its end or dies."""
    ignore_signals()  # the rank started this process with them blocked
    die_with_parent(rank_pid)
    show_as("hpctrain-writer")
    _step_back()
    arena = _Mapped()
    with socket.socket(fileno=handle) as connection:
        while (received := _receive(connection)) is not None:
            number, request, arena_fd = received
            _answer(connection, number, _work(request, arena, arena_fd))


def frame(number: int, body: bytes) -> bytes:
    """What stands before a body on the socket."""
    return FRAME.pack(number, len(body), xxhash.xxh3_64_intdigest(body))


def _step_back() -> None:
    """Take the lowest priority of the disk; a refusal costs training a little speed, no save."""
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, IOPRIO_WHO_PROCESS, 0, IOPRIO_LOWEST)


class _Mapped:
    """The arena as this process sees it: mapped for reading, again only when it has changed."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._id = (-1, -1, 0)
        self._view = memoryview(b"")

    def take(self, fd: int) -> None:
        about = os.fstat(fd)
        identity = (about.st_dev, about.st_ino, about.st_size)
        if identity == self._id:
            os.close(fd)
            return
        self.drop()
        # Kept open: as long as it is, no other arena can have the same inode number.
        self._fd = fd
        if about.st_size:
            self._view = memoryview(mmap.mmap(fd, about.st_size, prot=mmap.PROT_READ))
        self._id = identity

    def drop(self) -> None:
        """Let go of the arena: as long as it is mapped here, its memory is not free."""
        fd, self._fd, self._id, self._view = self._fd, None, (-1, -1, 0), memoryview(b"")
        if fd is not None:
            os.close(fd)

    def part(self, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or offset + nbytes > len(self._view):
            raise ValueError(f"[{offset}, {offset} + {nbytes}) is not in {len(self._view)} bytes")
        return self._view[offset : offset + nbytes]


def _receive(connection: socket.socket) -> tuple[int, WriteRequest, int] | None:
    """The next request and the arena's descriptor; None when the rank has closed its end."""
    descriptors = array.array("i")
    head, controls, _, _ = connection.recvmsg(
        FRAME.size, socket.CMSG_SPACE(2 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    if not head:
        return None
    for _, _, content in controls:
        descriptors.frombytes(content)
    arena_fd, request_fd = descriptors
    number, nbytes, _ = FRAME.unpack(head)
    with os.fdopen(request_fd, "rb") as file:
        # Written by the rank that started this process, into memory that nobody else has.
        request: WriteRequest = pickle.loads(os.pread(file.fileno(), nbytes, 0))  # noqa: S301
    return number, request, arena_fd


def _answer(connection: socket.socket, number: int, answer: ShardReport | WriteFailure) -> None:
    body = pickle.dumps(answer)
    # An error here means that the rank is gone, and then so is this process.
    connection.sendall(frame(number, body) + body)


def _work(request: WriteRequest, arena: _Mapped, arena_fd: int) -> ShardReport | WriteFailure:
    try:
        arena.take(arena_fd)
        points.reach("writer.request", path=request.path, step=request.step, rank=request.rank)
        sources = [
            arena.part(offset, piece.nbytes)
            for piece, offset in zip(request.pieces, request.offsets, strict=True)
        ]
        return shard.write(
            request.path,
            request.pieces,
            sources,
            block_bytes=request.block_bytes,
            threads=request.threads,
            step=request.step,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, the rank must hear of it
        return _failure(request.path, error)


def _failure(path: Path, error: Exception) -> WriteFailure:
    if isinstance(error, OSError):
        return WriteFailure(f"{path} cannot be written: {_one_line(error)}", error.errno)
    if isinstance(error, HpctrainError):
        cause = error.__cause__
        return WriteFailure(_one_line(error), cause.errno if isinstance(cause, OSError) else None)
    traceback.print_exception(error, file=sys.stderr)  # a defect: the rank's log shows where
    return WriteFailure(
        f"{path} cannot be written: {type(error).__name__}: {_one_line(error)}", None
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
