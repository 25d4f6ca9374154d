"""The rendezvous of rounds whose nodes change: lost ones are replaced, or left out.

`liveness.LivenessChannel` reports to node 0's agent who lives. It chooses the members of each round
(`choose_members`, which is pure), and announces them with the round's number, which is part of the
store's prefix and of every signed key: ranks and agents meet those of their own round alone.
tests/engines/test_in_place.py and tests/unit/agent/test_members.py hold the promises.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from hpctrain.core.base import clock
from hpctrain.core.base.process import connections_to
from hpctrain.core.settings.check import node_range
from hpctrain.errors import ClusterError
from hpctrain.ledger.plan.mesh import Planner, shape_of
from hpctrain.node.agent.liveness import LEAVE_S, LIVENESS_PORT
from hpctrain.node.agent.rendezvous import (
    RENDEZVOUS_S,
    SAY_S,
    LeftOut,
    Loss,
    Rendezvous,
    RoundBroken,
    limit_answers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hpctrain.core.base.records import JobContext
    from hpctrain.core.settings.spec import Spec
    from hpctrain.node.agent.liveness import LivenessChannel
    from hpctrain.node.agent.loss_ending import Generation

log = logging.getLogger("hpctrain.agent")

GATHER_S = 15.0
"""Agents that continue after others have seen the same claim, and start at once."""
MEET_S = 60.0
"""So long may a member of a later round take to come; then it is left out."""
LOOK_S = 0.05
CONNECT_S = LEAVE_S / 2
"""Of one try to connect to a round's store."""


class NoMembers(ClusterError):
    """No round can be made of the nodes that are left."""


class InPlaceRendezvous(Rendezvous):
    """One side of it."""

    def __init__(
        self,
        liveness: LivenessChannel,
        nodes: list[str],
        *,
        port: int,
        run_id: str,
        timeout_s: int,
        size: RoundSize,
        fits: Callable[[int], bool],
        gather_s: float | None = None,
        switch: str = "",
    ) -> None:
        """Make this node's side; on node 0 this forks, so call it before any thread starts.

        The nodes have `timeout_s` to meet at first. After `gather_s` the round starts without nodes
        that may be dead; with None each has to come. `port` is the first of the job's ports. `fits`
        says whether the ranks of so many nodes have a mesh. `switch` is what this node hangs on
        with others; "" for not known.
        """
        place = liveness.place
        super().__init__(place.address, port, place.node, nodes, run_id=run_id, timeout_s=timeout_s)
        self._liveness = liveness
        self._job = run_id
        self._size, self._fits, self._gather_s = size, fits, gather_s
        self.round = -1
        self.members = ()
        self._announced: dict[str, Any] = {}
        self._living = {0}
        self._switches = {place.node: switch}
        self._losses: list[Loss] = []
        self._deaths: dict[int, float] = {}
        self._out: LeftOut | None = None

    @property
    def spares(self) -> tuple[str, ...]:
        """Nodes that live and wait, by name."""
        return tuple(self.nodes[node] for node in sorted(self._living - set(self.members)))

    def switches(self) -> tuple[str, ...]:
        """Node 0: of the round's nodes what each hangs on; "" for not known."""
        return tuple(self._switches.get(node, "") for node in self.members)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other members of the next round that has this node; a spare waits for one.

        Raises:
            NoMembers: node 0: no round can be made.
            LeftOut: another node: there will be none for it.
        """
        store = self._lead() if self.node == 0 else self._follow()
        self._store = store
        return RendezvousInfo(
            PrefixStore(self.run_id, store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def next_round(self) -> None:
        """Meet in a new store the next time; the old one is kept for another round."""
        self._last, self._store = self._store, None

    def look(self) -> None:
        """Whether this node still takes part in the round.

        Raises:
            LeftOut: it takes part in none any more.
            RoundBroken: the next one was announced.
        """
        self._hear()
        if self._out is not None and not self._out.is_over:
            raise self._out
        if self.node != 0 and self.is_behind:
            raise RoundBroken(f"round {self.round} is over")

    def losses(self) -> list[Loss]:
        """Node 0: nodes that were lost since the last call."""
        self._hear()
        losses, self._losses = self._losses, []
        return losses

    def drop(self, places: Sequence[int], why: str) -> list[Loss]:
        """Node 0: leave members, by place, out of further rounds; their agents end their ranks."""
        nodes = [self.members[place] for place in places if self.members[place] != 0]
        return self._drop(nodes, why)

    def _drop(self, nodes: list[int], why: str) -> list[Loss]:
        self._liveness.say({"drop": nodes, "why": why})
        self._living -= set(nodes)
        named = [(node, self.nodes[node]) for node in nodes]
        return [Loss(node, name, why, was_member=node in self.members) for node, name in named]

    def leave_out(self, bad: Mapping[str, str]) -> list[Loss] | None:
        """Node 0: leave nodes, spares too, out of all further rounds; `bad` says why, by name.

        Return those that were not out yet; None and nothing done if no round can do without them.
        """
        out = [node for node in sorted(self._living) if self.nodes[node] in bad]
        if 0 in out or not self.can_do_without(out):
            return None
        return [loss for node in out for loss in self._drop([node], bad[self.nodes[node]])]

    def can_do_without(self, nodes: Sequence[int]) -> bool:
        """Node 0: whether a round can be made of the nodes that live, without these."""
        others = self._living - set(nodes)
        return choose_members(self.members, others, self._size, self._fits) is not None

    def note_death(self, node: str) -> bool:
        """Node 0: a rank of a node has died; return whether that was once too often for the node.

        The first node is kept, and so is one that no round could do without.
        """
        if node not in self.names():
            return False
        number = self.members[self.names().index(node)]
        again = dies_often(self._deaths, number, clock.monotonic())
        # One that is out already, since guards have named it, is not lost twice.
        return again and number in self._living - {0} and self.can_do_without([number])

    def next_members(self) -> tuple[int, ...] | None:
        """Node 0: the nodes of the next round; None where there can be none."""
        return choose_members(self.members, self._living, self._size, self._fits)

    def can_do_without_first(self) -> bool:
        """Whether a round can be made of the other nodes, if they live."""
        return choose_members((), range(1, len(self.nodes)), self._size, self._fits) is not None

    def left_out(self) -> LeftOut | None:
        """How this node came to take no part, as far as that is known within a lease."""
        deadline = clock.monotonic() + 1.5 * self._liveness.place.lease_s
        while self._out is None and not self.is_behind and clock.monotonic() < deadline:
            self._hear(LOOK_S)
        return self._out

    def lost_first(self) -> LeftOut | None:
        """Wait until node 0 has left; return how it was lost, None where it told the others."""
        while self._out is None:
            self._hear(1.0)
        return self._out if self._out.first_is_gone else None

    def leave_silent_first(self, why: str) -> None:
        """Leave the job; another agent may lead it.

        Raises:
            LeftOut: always.
        """
        raise LeftOut(why, first_is_gone=True)

    @property
    def is_behind(self) -> bool:
        """Whether a later round was announced, as far as this node has heard."""
        return bool(self._announced.get("round", -1) > self.round)

    # ---- node 0

    def _lead(self) -> Any:
        if self.round < 0:
            self._await_all()
        while True:
            members = self.next_members()
            if members is None:
                names = ", ".join(self.nodes[node] for node in sorted(self._living))
                raise NoMembers(f"no round can be made of {names}")
            announced = {"round": self.round + 1, "members": members}
            self._take(announced)
            assert self._server is not None  # noqa: S101 - node 0 has one
            self._server.serve(self.master_addr, self.master_port)
            self._liveness.say({"round": announced})
            store = self._connected()
            if self._have_met(store):
                return store

    def _await_all(self) -> None:
        """Before the first round: wait for all nodes, and at last for as many as a round needs."""
        limit_s, said = self.timeout.total_seconds(), False
        begun = clock.monotonic()
        while len(self._living) + len({loss.node for loss in self._losses}) < len(self.nodes):
            self._hear(LOOK_S)
            self._check_liveness()
            waited = clock.monotonic() - begun
            away = [node for node in range(len(self.nodes)) if node not in self._living]
            absent = ", ".join(self.nodes[node] for node in away)
            if self._gather_s is not None and waited > self._gather_s:
                log.warning("continues without %s, which did not come", absent)
                self._liveness.say({"absent": away})  # else the job's end waits for them
                return
            if not said and waited > SAY_S:
                said = True
                log.warning("still waits for the agents of %s", absent)
            if waited > limit_s:
                raise ClusterError(f"the agents of {absent} did not come within {limit_s:g} s")

    def _have_met(self, store: Any) -> bool:
        """Whether all members came; not where one of them was lost meanwhile."""
        here = PrefixStore(f"{self.run_id}/here", store)
        here.set("0", "")
        deadline = clock.monotonic() + MEET_S
        while not here.check([str(place) for place in range(self.world_size)]):
            self._hear(LOOK_S)
            self._check_liveness()
            if not set(self.members) <= self._living:
                return False
            if clock.monotonic() > deadline:
                absent = [n for n in range(self.world_size) if not here.check([str(n)])]
                self._losses += self.drop(absent, f"its agent did not come within {MEET_S:g} s")
                return False
        return True

    def _check_liveness(self) -> None:
        """Its own liveness channel has ended, so it would ask the others in vain."""
        if self._out is not None:
            raise ClusterError(str(self._out))

    # ---- the others

    def _follow(self) -> Any:
        if self.round < 0:
            self._liveness.say({"ready": True, "switch": self._switches[self.node]})
        while True:
            while not self.is_behind:
                self._hear(1.0)
                if self._out is not None:
                    raise self._out
            self._take(self._announced)
            if self.node not in self.members:
                continue  # a spare
            try:
                store = self._connected()
                PrefixStore(f"{self.run_id}/here", store).set(str(self.rank), "")
            except RuntimeError:  # torch's: node 0 is gone, or at a round further on
                self._hear(LOOK_S)
                # `left_out` waits for news, by which this node may learn that it is behind.
                if not self.is_behind and self.left_out() is None and not self.is_behind:
                    raise
                continue
            return store

    # ---- both

    def _connected(self) -> Any:
        store = self._connect()
        store.set_timeout(self.timeout)
        limit_answers(self.master_port)
        if self.node != 0:
            connections = connections_to(self.master_port)
            self._liveness.guard(connections)
            for connection in connections:
                connection.close()
        return store

    def _connect(self) -> Any:
        """Connect to the round's store, in turns: nothing breaks off one that is under way.

        A node without power answers nothing, and an agent that is still in it `LEAVE_S` after that
        loss is killed by its liveness process: nobody would be left to see to the job. Node 0's
        store is beside it, and a busy node may be slow to answer.
        """
        until = clock.monotonic() + self.timeout.total_seconds()
        turn = self.timeout if self.node == 0 else timedelta(seconds=CONNECT_S)
        while True:
            try:
                return TCPStore(
                    self.master_addr, self.master_port, None, is_master=False, timeout=turn
                )
            except RuntimeError:
                if clock.monotonic() >= until:
                    raise
                self._hear(LOOK_S)
                if self._out is not None or self.is_behind:
                    raise

    def _take(self, announced: dict[str, Any]) -> None:
        self.round, self.members = int(announced["round"]), tuple(announced["members"])
        self.master_port = self._first_port + self.round % LIVENESS_PORT
        self.run_id = f"{self._job}.{self.round}"
        self.world_size = len(self.members)
        self.rank = self.members.index(self.node) if self.node in self.members else -1

    def _hear(self, wait_s: float = 0.0) -> None:
        for said in self._liveness.news(wait_s):
            if "ready" in said:
                self._living.add(said["ready"])
                self._switches[said["ready"]] = said["switch"]
            if "lost" in said:
                self._lose(said["lost"], said["why"])
            if "round" in said:
                self._announced = said["round"]
            if "over" in said:
                self._out = LeftOut(said["over"], is_over=True)
            if "gone" in said:
                self._out = LeftOut(said["gone"], first_is_gone=True)
            if "dropped" in said:
                self._out = LeftOut(said["dropped"])

    def _lose(self, node: int, why: str) -> None:
        self._living.discard(node)
        name, was_member = self.nodes[node], node in self.members
        self._losses.append(Loss(node, name, why, was_member=was_member))


OFTEN_S = 3600.0
"""A node whose ranks died twice within so long is left out, where the round can do without it."""


@dataclass(frozen=True)
class RoundSize:
    """How many nodes a round may have.

    Attributes:
        most: No round has more; the nodes beyond are spares.
        least: No round has fewer.
    """

    most: int
    least: int


def round_size(least: int, most: int, *, allocated: int, spares: int, shrinks: bool) -> RoundSize:
    """Return the sizes that the settings allow in a job.

    `least` and `most` are of `slurm.nodes`, `spares` is `alive.spares`; `allocated` includes
    spares. A run that `shrinks` may have fewer nodes than in the round before.
    """
    # A job that SLURM has run again after a loss may have fewer than were asked for.
    wanted = min(max(allocated - spares, least), most, allocated)
    return RoundSize(wanted, min(least, wanted) if shrinks else wanted)


def choose_members(
    before: Sequence[int],
    living: Collection[int],
    size: RoundSize,
    fits: Callable[[int], bool] = lambda _count: True,
) -> tuple[int, ...] | None:
    """Return the nodes of the next round by their place in it; None if there can be none.

    `before` is by place, empty for the first round; `fits`: whether so many nodes' ranks have a
    mesh.
    """
    order = [node for node in before if node in living]
    order += sorted(set(living) - set(order))
    for count in range(min(size.most, len(order)), max(size.least, 1) - 1, -1):
        if fits(count):
            return tuple(order[:count])
    return None


def dies_often(last: dict[int, float], node: int, now: float) -> bool:
    """Record a rank's death in `last`, in monotonic seconds; return whether that is too often."""
    before, last[node] = last.get(node), now
    return before is not None and now - before < OFTEN_S


def rendezvous_of(
    liveness: LivenessChannel,
    spec: Spec,
    context: JobContext,
    *,
    run_id: str,
    generation: Generation | None = None,
) -> InPlaceRendezvous:
    """Return where this node's agent meets the others.

    Agents that continue after others pass their `generation`: some nodes may be lost.
    """
    settings, nodes = spec.settings, context.nodes
    least, most = node_range(settings.slurm.nodes)
    at_start = len(nodes) + (0 if generation is None else len(generation.lost))
    size = round_size(
        least,
        most,
        allocated=at_start,
        spares=settings.alive.spares,
        shrinks=settings.alive.shrink == "auto",
    )
    shape = shape_of(settings.train) if spec.entry.kind == "recipe" else None
    planner = Planner(settings.engine, settings.slurm.ranks(), shape)
    return InPlaceRendezvous(
        liveness,
        nodes,
        port=context.port,
        run_id=run_id,
        timeout_s=RENDEZVOUS_S,
        size=size,
        fits=lambda count: planner.at(count) is not None,
        gather_s=None if generation is None else GATHER_S,
        switch=context.switch,
    )
