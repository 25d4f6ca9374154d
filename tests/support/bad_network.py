"""A network between nodes that delays, repeats, tears and changes what is sent: a proxy of frames.

It is a process of its own between a node and its parent in the control tree, and knows no more of
what they say than where a frame begins. What it does at which frame is planned before.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpctrain.core.base.process import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

HERE = "127.0.0.1"
FrameFault = Literal[
    "delay", "duplicate", "cut", "reset", "tear", "flip", "flip_length", "swap", "swallow", "tell"
]
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Disturbance:
    """What happens to a frame.

    Attributes:
        child: On the link of which node to its parent.
        way: "up" is from the child to its parent.
        frame: The how-manieth of that way, from 0, over all connections of the link. The greeting
            is two frames down and one up.
        kind: `delay`, `duplicate`, `cut` (the connection closes before the frame), `reset`, `tear`
            (it closes within the frame), `flip` (a bit), `flip_length` (a bit of how long it is),
            `swap` (it comes after the next one), `swallow` (from here on nothing passes), `tell`
            (nothing but a byte to whoever listens).
        where: 0 to 1, of the frame: where it is torn or changed.
        delay_s: Of `delay`.
    """

    child: int
    way: Literal["up", "down"]
    frame: int
    kind: FrameFault
    where: float = 0.5
    delay_s: float = 0.0


class BadNetwork:
    """Links between nodes. A context manager."""

    def __init__(self, disturbances: Iterable[Disturbance], tell: int = -1) -> None:
        """Fork its process.

        Args:
            disturbances: All that will happen.
            tell: A descriptor that gets a byte at each `tell`.
        """
        self._line, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(parent)
                self._line.close()
                asyncio.run(_Links(theirs, list(disturbances), tell).serve())
            finally:
                os._exit(1)
        theirs.close()
        self._answers = self._line.makefile("rb")

    def link(self, child: int, port: int) -> int:
        """Where a child finds its parent, which listens at a port."""
        return int(self._ask({"child": child, "port": port}))

    def happened(self) -> list[str]:
        """The disturbances that came to pass, by kind."""
        return list(self._ask({}))

    def _ask(self, order: dict[str, int]):
        self._line.sendall(json.dumps(order).encode() + b"\n")
        return json.loads(self._answers.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._answers.close()
        self._line.close()


class _Links:
    """The process: listens for children, and carries their frames."""

    def __init__(self, line: socket.socket, disturbances: list[Disturbance], tell: int) -> None:
        self._line, self._tell = line, tell
        self._planned = {(plan.child, plan.way, plan.frame): plan for plan in disturbances}
        self._count: dict[tuple[int, str], int] = {}
        self._happened: list[str] = []
        self._swallowing: set[tuple[int, str]] = set()
        self._servers: list[asyncio.Server] = []

    async def serve(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._line)
        while line := await reader.readline():
            order = json.loads(line)
            answer = await self._link(**order) if order else self._happened
            writer.write(json.dumps(answer).encode() + b"\n")

    async def _link(self, child: int, port: int) -> int:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                above, to_above = await asyncio.open_connection(HERE, port)
            except OSError:  # the parent is gone
                writer.transport.abort()
                return
            both = (writer, to_above)
            up, down = (
                self._pump(child, "up", reader, to_above, both),
                self._pump(child, "down", above, writer, both),
            )
            await asyncio.gather(up, down)

        server = await asyncio.start_server(carry, HERE, 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _pump(
        self,
        child: int,
        way: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
    ) -> None:
        held = b""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readexactly(_LENGTH.size)
                frame = head + await reader.readexactly(_LENGTH.unpack(head)[0])
                plan = self._plan(child, way)
                kind = plan.kind if plan is not None else ""
                if kind == "swap":
                    held = frame
                    continue
                if kind == "reset":
                    for end in both:
                        end.transport.abort()
                    return
                if plan is not None:
                    frame = await _disturbed(plan, frame)
                if (child, way) not in self._swallowing:
                    writer.write(frame + held)
                    await writer.drain()
                held = b""
                if kind in {"cut", "tear"}:
                    break
        for end in both:
            end.close()

    def _plan(self, child: int, way: str) -> Disturbance | None:
        """What is to happen to the next frame."""
        number = self._count[child, way] = self._count.get((child, way), -1) + 1
        plan = self._planned.get((child, way, number))
        if plan is None:
            return None
        self._happened.append(plan.kind)
        if plan.kind == "tell":
            os.write(self._tell, b"!")
        if plan.kind == "swallow":
            self._swallowing.add((child, way))
        return plan


async def _disturbed(plan: Disturbance, frame: bytes) -> bytes:
    """What is sent in the place of a frame."""
    match plan.kind:
        case "delay":
            await asyncio.sleep(plan.delay_s)
        case "duplicate":
            return frame + frame
        case "cut":
            return b""
        case "tear":
            return frame[: int(plan.where * len(frame))]
        case "flip":
            return _flipped(frame, _LENGTH.size + int(plan.where * (len(frame) - _LENGTH.size)))
        case "flip_length":
            return _flipped(frame, int(plan.where * _LENGTH.size))
    return frame


def _flipped(frame: bytes, at: int) -> bytes:
    at = min(at, len(frame) - 1)
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]
