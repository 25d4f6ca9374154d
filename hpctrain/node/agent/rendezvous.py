"""The rendezvous of a job's agents before each round, and what they tell each other in its store.

The store is served by a process of its own (`StoreProcess`): torch's server looks up the name of
everyone who connects, in a thread, and a rank forked during such a lookup would inherit glibc's
resolver lock as taken. What agents believe decides how a run ends, so each value has a code of the
run's secret (`SignedStore`), and they believe nothing that another has written. Counts cannot be
signed and are hints at most. tests/unit/agent/test_signed_store.py and
tests/engines/test_store_process.py hold the promises.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hpctrain.core.base import clock
from hpctrain.core.base.listener import is_loopback, listen
from hpctrain.core.base.process import PORTS, connections_to, show_as
from hpctrain.core.base.secret import Forged, sign, verify
from hpctrain.core.base.text import fold_nodes
from hpctrain.errors import ClusterError, ControlLost
from hpctrain.node.control.node_process import ForkedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

    from hpctrain.node.control.node_process import Do

log = logging.getLogger("hpctrain.agent")

RENDEZVOUS_S = 600
"""So long may the nodes take to meet at first."""
POLL_S = 0.1
SAY_AGAIN_S = 1.0
"""So often an agent that waits for another's word looks whether its own still stands."""
ANSWER_S = 60.0
"""How long the store may take to answer. After that it counts as gone: it may be stopped."""
LAST_MEETING_S = 10.0
"""How long node 0 waits for the other agents when it has only an end to announce."""
SAY_S = 30.0
"""After this long node 0 says for whom it waits."""


@dataclass(frozen=True)
class Loss:
    """A node that takes part no more.

    Attributes:
        node: Its number in the job.
        was_member: Of the round that ran then; else it was a spare.
    """

    node: int
    name: str
    why: str
    was_member: bool


class LeftOut(Exception):
    """This node does not take part any more: its ranks must end.

    Attributes:
        first_is_gone: Nothing was heard from node 0, so that somebody else must see to the job.
        is_over: Node 0 has said that there is nothing more to do.
    """

    def __init__(self, why: str, *, first_is_gone: bool = False, is_over: bool = False) -> None:
        super().__init__(why)
        self.first_is_gone = first_is_gone
        self.is_over = is_over


class RoundBroken(Exception):
    """The round is over by the loss of a node: node 0 has announced the next one."""


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous; node 0's store is in a process of its own, and new each round.

    In an old round's store ranks would find dead ones' addresses.

    Attributes:
        round: Which start of the ranks it is, from 0 on.
        members: Of the round, by their places in it: the numbers of their nodes in the job.
        nodes: The names of all nodes of the job.
        node: This one's number in it.
    """

    @property
    def is_behind(self) -> bool:
        """Whether others are at a later round: here all continue together."""
        return False

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that live and wait, by name: none here."""
        return ()

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        nodes: Sequence[str],
        *,
        run_id: str,
        timeout_s: int,
    ) -> None:
        """Make node `rank`'s side; on node 0 this forks, so call it before any thread starts.

        `address` is node 0's, for all nodes. `port` is the first of the job's; each round takes the
        next. The nodes have `timeout_s` to meet.
        """
        super().__init__(address, port, rank, len(nodes), run_id, timeout_s)
        self.nodes, self.node = nodes, rank
        self.members = tuple(range(len(nodes)))
        self._first_port = port
        self.round = 0
        self._last: Any = None
        self._server = StoreProcess() if rank == 0 else None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all other agents; collective.

        Raises:
            ClusterError: node 0: its port is taken, or not all nodes came in time. Others: the
                store cannot be reached.
        """
        if self._server is not None:
            self._server.serve(self.master_addr, self.master_port)
        try:
            store = TCPStore(
                self.master_addr, self.master_port, None, is_master=False, timeout=self.timeout
            )
            self._store = store
            limit_answers(self.master_port)
            self._meet(PrefixStore(f"{self.run_id}/here", store))
            return super().next_rendezvous()
        except RuntimeError as error:  # torch's, with a stack of C++ behind its first line
            why = str(error).partition("\n")[0]
            place = f"{self.master_addr}:{self.master_port}"
            raise ClusterError(f"the agents cannot meet at {place}: {why}") from None

    def next_round(self) -> None:
        """Meet in a new store the next time.

        The old one is kept for another round, since agents may still be reading the verdict in it.
        """
        self._last, self._store = self._store, None
        self.round += 1
        self.master_port = self._first_port + self.round % PORTS

    def hasten(self) -> None:
        """Wait for the other agents only as long as is right where there is an end to announce."""
        self.timeout = timedelta(seconds=LAST_MEETING_S)

    def pids(self) -> list[int]:
        """Return the ids of this side's processes."""
        return [] if self._server is None else [self._server.pid]

    def names(self) -> tuple[str, ...]:
        """Of the round's nodes."""
        return tuple(self.nodes[node] for node in self.members)

    def switches(self) -> tuple[str, ...]:
        """Of the round's nodes what each hangs on: of no use here, where all go at once."""
        return ("",) * len(self.members)

    def look(self) -> None:
        """Whether this node still takes part in the round; here it does while there is one."""

    def losses(self) -> list[Loss]:
        """Nodes that were lost since the last call; this rendezvous sees none."""
        return []

    def drop(self, places: Sequence[int], why: str) -> list[Loss]:
        """Leave members out of all further rounds; here that cannot be."""
        del places, why
        return []

    def note_death(self, node: str) -> bool:
        """A rank of a node has died; returns whether the next round is without it."""
        del node
        return False

    def next_members(self) -> tuple[int, ...] | None:
        """The nodes of the next round; None where there can be none."""
        return self.members

    def can_do_without_first(self) -> bool:
        """Whether a round can be made without node 0: never here."""
        return False

    def left_out(self) -> LeftOut | None:
        """How this node came to take no part, where its store does not answer; None for unknown."""
        return None

    def leave_silent_first(self, why: str) -> None:
        """Leave the job, since the agent of node 0 is silent; here the round ends by that."""

    def close(self) -> None:
        """Serve no more. Harmless when repeated."""
        if self._server is not None:
            self._server.stop()

    def _meet(self, here: Any) -> None:
        here.set(str(self.rank), "")
        if self.rank != 0:
            return  # it waits for what node 0 says next
        limit_s, place = self.timeout.total_seconds(), f"{self.master_addr}:{self.master_port}"
        first_s = min(SAY_S, limit_s / 2)
        if absent := self._absent(here, first_s):
            log.warning("still waits at %s for the agents of %s", place, absent)
            if absent := self._absent(here, limit_s - first_s):
                raise ClusterError(
                    f"the agents of {absent} did not come to {place} within {limit_s:g} s"
                )

    def _absent(self, here: Any, wait_s: float) -> str:
        """The nodes whose agents do not come in that time, as SLURM writes them."""
        try:
            here.wait([str(rank) for rank in range(self.world_size)], timedelta(seconds=wait_s))
        except RuntimeError:
            return fold_nodes(
                [name for rank, name in enumerate(self.nodes) if not here.check([str(rank)])]
            )
        return ""


def limit_answers(port: int) -> None:
    """Have torch's client raise where the store at a port does not answer.

    It waits without limit for the answer to a short question. Where this process is stopped itself,
    the limit begins again as it continues.
    """
    for connection in connections_to(port):
        with connection:
            limit = struct.pack("ll", int(ANSWER_S), int(ANSWER_S % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class SignedStore:
    """One round's store.

    Attributes:
        of: torch's client.
        look: See `__init__`.
        is_gone: It has not answered, or its connection has ended. Whatever it says later may be the
            answer to an earlier question: nobody asks it any more.
    """

    def __init__(self, store: Any, secret: str, look: Callable[[], None] = lambda: None) -> None:
        """Use this store of torch's; `look` is called repeatedly during waits, and may raise."""
        self.of = store
        self.is_gone = False
        self.look = look
        self._secret = secret
        self._sent: set[str] = set()
        self._said: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        """Say something that JSON holds, over what was said before."""
        self._said[key] = value
        self._ask(self.of.set, key, sign(self._secret, key, json.dumps(value)))

    def say_again(self) -> bool:
        """Repeat what was overwritten while others await it; return whether there was any."""
        lost = [key for key in self._said if self.get(key) is None]
        for key in lost:
            self.set(key, self._said[key])
        return bool(lost)

    def get(self, key: str) -> Any:
        """What an agent has said; None where none has, whatever somebody else has written there."""
        if not self._ask(self.of.check, [key]):
            return None
        try:
            return json.loads(verify(self._secret, key, self._ask(self.of.get, key)))
        except Forged:
            if key not in self._sent:
                self._sent.add(key)
                log.warning(
                    "another than this run's agents has written %s into their store; it is not "
                    "believed",
                    key,
                )
            return None

    def wait(self, key: str, timeout_s: float) -> Any:
        """What an agent says, once it has.

        What this one has said is said again meanwhile, where somebody has written over it: the
        other may wait for that, and with `key` of its own this one waits for itself.

        Raises:
            TimeoutError: none did.
        """
        begun = said_at = clock.monotonic()
        while (value := self.get(key)) is None:
            self.look()
            now = clock.monotonic()
            if now > begun + timeout_s:
                raise TimeoutError(f"no agent said {key} in {timeout_s:g} s")
            if now > said_at + SAY_AGAIN_S:
                self.say_again()
                said_at = now
                continue  # before it can be written over once more
            clock.sleep(POLL_S)
        return value

    def count(self, key: str, more: int = 0) -> int:
        """Add to a count that everybody can change."""
        return int(self._ask(self.of.add, key, more))

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        if self.is_gone:
            raise RuntimeError("the agents' store is gone")
        try:
            return question(*about)
        except RuntimeError:
            self.is_gone = True
            raise


KEPT = 2
"""Stores that are served at once: others may still be reading the last round's verdict."""


class StoreProcess(ForkedServer):
    """Serves one store after another, until `stop` or the end of the process that made it.

    Make it while this process has one thread and has imported torch, whose pages it then shares.
    """

    def __init__(self) -> None:
        """Fork it; nothing is served yet."""
        super().__init__(_stores, "the process that serves the agents' stores")

    def serve(self, address: str, port: int) -> None:
        """Serve an empty store on a port; the store before the last one ends.

        Clients reach this node under `address`; with the loopback nobody else can connect.

        Raises:
            ClusterError: the port is taken, or the process is gone at once.
        """
        try:
            self.ask_anew(lambda: {"serve": [address, port]})
        except ControlLost as error:
            raise ClusterError(
                f"the ranks cannot meet on port {port} of {socket.gethostname()}: {error}; "
                "start the run again"
            ) from None


def _stores() -> Do:
    """In the process: the stores that it serves."""
    show_as("hpctrain-store")
    stores: list[Any] = []

    async def serve(order: dict[str, Any]) -> int:
        try:
            stores[:] = [*stores[1 - KEPT :], _store(*order["serve"])]
        except RuntimeError as error:  # torch's
            raise ControlLost(str(error)) from error
        return 0

    return serve


def _store(address: str, port: int) -> Any:
    from torch._C._distributed_c10d import TCPStore

    # torch would listen on all of the machine's addresses.
    host = address if is_loopback(address) else ""
    listening = listen(address, port)
    return TCPStore(
        host or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
