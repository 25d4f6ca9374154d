"""The process of a node that shows that it lives, and hears which nodes do.

Every node of the job has a connection to the first one's process, on which both speak eight times
in a lease. A connection that closes is a node that died; silence for a lease is one that died
without a word, or stands still.

* The first node's process tells its agent who was lost. Nobody who was lost is let in again.
* Each process tells its own agent eight times in a lease that it runs. An agent that hears nothing
  for a lease takes it for ended: it may be stopped.
* Any other process that has not heard from the first node for a lease tells its agent to leave,
  closes what that may wait on, and kills it where it does not leave: it may have been left out
  meanwhile, and its ranks must not continue beside those of the next round. One that itself did not
  run for a lease asks first: where all nodes stood still, as in a suspended job, none was left out.

It is forked while the agent has one thread, and asks the file system for nothing.
tests/unit/agent/test_liveness.py holds the promises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_ALIVE
from hpctrain.core.base.process import PORTS, ForkedProcess, is_readable, show_as
from hpctrain.core.base.secret import code
from hpctrain.errors import ControlLost
from hpctrain.node.agent.control import addresses
from hpctrain.node.control.endpoint import ChildrenListener, Endpoint, meet_parent
from hpctrain.node.control.wire import Greeting, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.spec import Spec

LIVENESS_PORT = PORTS - 3
"""Of the job's ports; those below it are the rounds', those above the preflight's."""
BEATS = 8
"""In a lease."""
LEAVE_S = 5.0
"""So long may an agent take to leave, at most a lease; then it is killed, and its ranks with it."""
TRY_AGAIN_S = 0.2
EARLY_END_S = 30.0
"""Wait for agents that have yet to come, so that they learn that there is nothing to do."""
FIRST_S = 600.0
"""So long may the first node's agent take to come up."""
_LINE_BYTES = 1 << 20
LONGEST_GAP_S = 1.0
"""So much of the time between two looks at the process counts as its silence."""
RUNS = {"runs": True}
"""What a process tells its own agent in each turn."""
OWN_END = {"dropped": "the process that shows that this node lives has ended, or is stopped"}
"""The first node takes this one for lost by that. Of the first one it says nothing: who saw to the
job in its place would do so beside it."""
MOST_GUARDED = 8
"""Connections to one store; torch makes one."""


@dataclass(frozen=True)
class LivenessPlace:
    """Where a node's process stands.

    `address` and `port` are the first node's; silence for up to `lease_s` seconds counts as life.
    """

    node: int
    nodes: int
    address: str
    port: int
    lease_s: float


class LivenessChannel(ForkedProcess):
    """The agent's side."""

    def __init__(self, place: LivenessPlace, secret: str) -> None:
        """Fork the process while this one has one thread; `secret` is the same on all nodes."""
        self.place = place
        self._heard = b""
        self._is_gone = False
        self._looked_s, self._silent_s = clock.monotonic(), 0.0
        self._guarded, guarded = socket.socketpair()
        with guarded:
            serve = partial(_live, place, code(secret, "lifeline"), guarded)
            super().__init__(serve)
        self._line.settimeout(0)

    def say(self, message: dict[str, Any]) -> None:
        """Tell the process something; nothing where it is gone, which `news` says."""
        with suppress(OSError):
            self._line.settimeout(None)
            self._line.sendall(json.dumps(message).encode() + b"\n")
        with suppress(OSError):
            self._line.settimeout(0)

    def guard(self, connections: Sequence[socket.socket]) -> None:
        """Have the process close what this agent waits on, as soon as it is to leave.

        A node without power closes nothing: who reads from its store would wait for minutes. The
        connections go to the first node; those of the last two calls are guarded.
        """
        with suppress(OSError):  # the process is gone, which `news` says
            fds = [one.fileno() for one in connections]
            socket.send_fds(self._guarded, [b"guard"], fds)

    def news(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the process's reports since the last call; wait up to `wait_s` for the first."""
        deadline = clock.monotonic() + wait_s
        while not self._is_gone and self.pid:
            said = self._new()
            left_s = deadline - clock.monotonic()
            if said or left_s <= 0:
                return said
            is_readable(self._line, min(left_s, self._gap_s))
        return []

    def _new(self) -> list[dict[str, Any]]:
        while True:
            try:
                piece = self._line.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            if not piece:
                self._is_gone = True
                return [*self._split(), OWN_END]
            self._heard += piece
            self._silent_s = 0.0
        if self._count_silence() > self.place.lease_s:
            self._is_gone = True
            return [*self._split(), OWN_END]
        return self._split()

    @property
    def _gap_s(self) -> float:
        return min(LONGEST_GAP_S, self.place.lease_s / 4)

    def _count_silence(self) -> float:
        """How long nothing was heard while this process ran: it may have been stopped, too."""
        now = clock.monotonic()
        self._silent_s += min(now - self._looked_s, self._gap_s)
        self._looked_s = now
        return self._silent_s

    def stop(self) -> None:
        """End it, and wait for that. Harmless when repeated."""
        super().stop()
        self._guarded.close()

    def _split(self) -> list[dict[str, Any]]:
        *lines, self._heard = self._heard.split(b"\n")
        return [said for line in lines if (said := json.loads(line)) != RUNS]

    def end(self, why: str, patience_s: float) -> None:
        """First node: tell all others that the run is over; wait `patience_s` for late ones."""
        self.say({"over": why})
        deadline = clock.monotonic() + patience_s
        while not self._is_gone and (left := deadline - clock.monotonic()) > 0:
            if any("all_informed" in said for said in self.news(left)):
                return


def _live(
    place: LivenessPlace, secret: str, guarded: socket.socket, line: socket.socket, agent: int
) -> None:
    # asyncio has a line for each message to a node that is gone; here that is said once.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    show_as("hpctrain-liveness")
    if place.node == 0:
        asyncio.run(_First(place, secret, line, agent).serve())
    else:
        asyncio.run(_Other(place, secret, line, agent, guarded).serve())


class _LivenessSide:
    """What both sides have: the line to the agent, and a turn eight times in a lease."""

    def __init__(self, place: LivenessPlace, secret: str, line: socket.socket, agent: int) -> None:
        self._place, self._line, self._agent = place, line, agent
        self._greeting = partial(Greeting, secret, "liveness")
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._line, limit=_LINE_BYTES)
        turns = asyncio.create_task(self._turns())
        await self._begin()
        while order := await reader.readline():
            self._obey(json.loads(order))
        turns.cancel()

    async def _begin(self) -> None:
        raise NotImplementedError

    def _obey(self, order: dict[str, Any]) -> None:
        raise NotImplementedError

    def _turn(self, stood_s: float) -> None:
        raise NotImplementedError

    async def _turns(self) -> None:
        last = clock.boottime()
        while True:
            await asyncio.sleep(self._place.lease_s / BEATS)
            now = clock.boottime()
            stood_s, last = now - last, now
            self._turn(stood_s)
            self._send(RUNS)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None  # noqa: S101 - `serve` has made it
        self._writer.write(json.dumps(message).encode() + b"\n")


class _First(_LivenessSide):
    """The first node's process: hears all others."""

    def __init__(self, place: LivenessPlace, secret: str, line: socket.socket, agent: int) -> None:
        super().__init__(place, secret, line, agent)
        self._others: dict[int, Endpoint] = {}
        self._spoken: set[int] = set()
        """Before it has, it may not know yet that it was let in, and would take a word amiss."""
        self._round: dict[str, Any] = {}
        self._awaited = set(range(1, place.nodes))
        self._heard: dict[int, float] = {}
        self._lost: set[int] = set()
        self._absent: set[int] = set()
        """Have not come, and nobody waits for them; they may come all the same."""
        self._over = ""
        self._over_sent: set[int] = set()

    async def _begin(self) -> None:
        listener = ChildrenListener(self._awaited, self._greeting, self._admit)
        listen, _ = addresses(self._place.address, 0)
        listener.open(listen, self._place.port)
        self._all_informed()

    def _admit(self, node: int, end: Endpoint) -> None:
        self._others[node], self._heard[node] = end, clock.boottime()
        self._absent.discard(node)
        end.on_message = partial(self._hear, node)
        end.on_end = lambda _, why: self._lose(node, why)

    def _hear(self, node: int, end: Endpoint, message: bytes) -> None:
        self._heard[node] = clock.boottime()
        if node not in self._spoken:
            self._spoken.add(node)
            if self._round:
                end.say(packed({"round": self._round}))
        head = unpacked(message)[0]
        if "beat" in head:
            end.say(packed({"beat": head["beat"]}))
        if "ready" in head:
            self._send({"ready": node, "switch": str(head.get("switch", ""))})
        if self._over and node not in self._over_sent:
            self._say_over(node)

    def _lose(self, node: int, why: str) -> None:
        if node in self._lost:
            return
        self._lost.add(node)
        if (end := self._others.pop(node, None)) is not None:
            end.close()
        self._send({"lost": node, "why": why})
        self._all_informed()

    def _obey(self, order: dict[str, Any]) -> None:
        if "round" in order:
            self._round = order["round"]
            for node in self._spoken & set(self._others):
                self._others[node].say(packed({"round": self._round}))
        for node in order.get("drop", []):
            if (end := self._others.pop(node, None)) is not None:
                end.say(packed({"dropped": order["why"]}))
                end.close()
            self._lost.add(node)
        self._absent.update(set(order.get("absent", [])) - set(self._others))
        if "over" in order:
            self._over = str(order["over"]) or "over"
            for node in self._spoken & set(self._others):
                self._say_over(node)
            self._all_informed()

    def _say_over(self, node: int) -> None:
        self._others[node].say(packed({"over": self._over}))
        self._over_sent.add(node)
        self._all_informed()

    def _all_informed(self) -> None:
        if self._over and self._awaited <= self._over_sent | self._lost | self._absent:
            self._send({"all_informed": True})

    def _turn(self, stood_s: float) -> None:
        lease_s, now = self._place.lease_s, clock.boottime()
        if stood_s > lease_s / 2:  # what came meanwhile has yet to be read
            self._heard = dict.fromkeys(self._heard, now)
            return
        for node in [node for node in self._others if now - self._heard[node] > lease_s]:
            self._lose(node, f"silent for {lease_s:g} s")


class _Other(_LivenessSide):
    """Any other node's process: hears the first one."""

    def __init__(
        self,
        place: LivenessPlace,
        secret: str,
        line: socket.socket,
        agent: int,
        guarded: socket.socket,
    ) -> None:
        super().__init__(place, secret, line, agent)
        self._guarded = guarded
        self._guards: list[list[int]] = []
        self._first: Endpoint | None = None
        self._heard = clock.boottime()
        self._waiting: list[dict[str, Any]] = []
        self._is_over = self._is_leaving = False
        self._may_have_ranks = False
        """Its agent has told that it is ready for a round."""
        self._stood_s = 0.0
        """For how long this process stood still, until the first node has answered since."""
        self._woke = self._heard
        self._question = 0

    async def _begin(self) -> None:
        self._meeting = asyncio.create_task(self._meet())
        self._guarded.setblocking(False)  # noqa: FBT003 - its own order
        asyncio.get_running_loop().add_reader(self._guarded, self._guard)

    def _guard(self) -> None:
        with suppress(OSError):  # the agent has ended; the line says so too
            said, fds, _, _ = socket.recv_fds(self._guarded, 64, MOST_GUARDED)
            if not said:
                asyncio.get_running_loop().remove_reader(self._guarded)
            self._guards.append(fds)
            if len(self._guards) > 2:  # noqa: PLR2004 - the round's, and the one's before it
                for fd in self._guards.pop(0):
                    os.close(fd)
            if self._is_leaving:  # came late: nothing would close it
                self._close_guarded()

    async def _meet(self) -> None:
        place, until = self._place, clock.boottime() + FIRST_S
        while True:
            try:
                first = await meet_parent(place.address, place.port, self._greeting(), place.node)
                break
            except (OSError, TimeoutError, ControlLost) as error:
                if clock.boottime() > until:
                    self._leave(f"the first node's agent cannot be reached: {error}")
                    return
            await asyncio.sleep(TRY_AGAIN_S)
        self._met(first)

    def _met(self, first: Endpoint) -> None:
        self._heard = clock.boottime()
        first.on_message = self._hear
        first.on_end = self._lose_first
        self._first = first
        first.say(packed({"beat": 0}))
        for message in self._waiting:
            first.say(packed(message))

    def _lose_first(self, end: Endpoint, why: str) -> None:
        del end
        if self._stood_s:  # the first node has done without this one
            self._leave(f"this node stood still for {self._stood_s:.1f} s", dropped=True)
        else:
            self._leave(f"the first node's agent is gone: {why}")

    def _hear(self, end: Endpoint, message: bytes) -> None:
        del end
        self._heard = clock.boottime()
        head = unpacked(message)[0]
        if head.get("beat") == self._question:  # asked after it woke: it was not left out
            self._stood_s = 0.0
        if "round" in head:
            self._send({"round": head["round"]})
        if "over" in head:
            self._is_over = True
            self._send({"over": head["over"]})
        if "dropped" in head:
            self._leave(head["dropped"], dropped=True)

    def _obey(self, order: dict[str, Any]) -> None:
        self._may_have_ranks = self._may_have_ranks or "ready" in order
        if self._first is None:
            self._waiting.append(order)
        else:
            self._first.say(packed(order))

    def _turn(self, stood_s: float) -> None:
        lease_s, now = self._place.lease_s, clock.boottime()
        if self._first is None:
            return
        if stood_s > lease_s:
            self._stood_s, self._woke = stood_s, now
            self._question += 1
        if self._stood_s and now - self._woke > lease_s:
            self._leave(f"this node stood still for {self._stood_s:.1f} s", dropped=True)
        elif not self._stood_s and now - self._heard > lease_s:
            self._leave(f"nothing was heard from the first node for {lease_s:g} s")
        self._first.say(packed({"beat": self._question}))

    def _leave(self, why: str, *, dropped: bool = False) -> None:
        """Have the agent end its ranks and leave, by force where it does not."""
        if self._is_over:
            return
        self._is_over = self._is_leaving = True
        self._send({"dropped" if dropped else "gone": why})
        self._close_guarded()
        if self._may_have_ranks:  # else it still imports, and sees to the job as it hears of this
            self._kill_agent_after(min(LEAVE_S, self._place.lease_s))

    def _close_guarded(self) -> None:
        for fd in [fd for fds in self._guards for fd in fds]:
            with suppress(OSError), socket.socket(fileno=fd) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # the agent's descriptor is another one
        self._guards = []

    def _kill_agent_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, os.kill, self._agent, signal.SIGKILL)


def liveness_of(spec: Spec, context: JobContext, secret: str) -> LivenessChannel | None:
    """Return this node's liveness process; None if the run does not outlive a node.

    It does only where the batch script has said so (`HPCTRAIN_ALIVE`): under a scheduler that ends
    the job with the first lost node it would be in vain. Call it while this process has one thread.
    """
    alive = spec.settings.alive
    if not (alive.is_on() and os.environ.get(HPCTRAIN_ALIVE) and len(context.nodes) > 1):
        return None
    place = LivenessPlace(
        context.node_rank,
        len(context.nodes),
        context.master_addr,
        context.port + LIVENESS_PORT,
        alive.lease_s,
    )
    return LivenessChannel(place, secret)
