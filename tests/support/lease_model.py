"""All that can happen to leases at small sizes: the protocol's own code, driven in every order.

Ranks, nodes and messages are tuples that can be compared; `Root`, `Subtree`, `merge` and
`Lease.covers` are those of hpctrain, set to a state and asked once. Time is left out: how far the
root would grant by the clock is chosen (`Setup.steps_s`). A message that was sent may be delivered
at any time later, again and again, before or after others, or never; an agent may die any time.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.node.control.lease import (
    AHEAD,
    KINDS,
    MOST,
    Decision,
    Lease,
    Report,
    Root,
    Subtree,
    Wishes,
    merge,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT_S = 0.15
"""A step of which the first lead covers two."""


class Broken(AssertionError):
    """A promise does not hold; the message says which, and how it came to that."""


@dataclass(frozen=True)
class Setup:
    """What is explored.

    Attributes:
        parents: Of each node, its parent's number; the first is the root.
        nodes_of: Of each rank, its node.
        last: The program's last tick.
        wishes: Of each rank, what it wishes one after the other, at any moment.
        steps_s: What may be measured as seconds of a tick; 0 for unknown.
        deaths: So many agents may die.
        in_flight: So many messages of a link are remembered; older ones are lost.
    """

    parents: tuple[int, ...]
    nodes_of: tuple[int, ...]
    last: int
    wishes: tuple[tuple[Wishes, ...], ...]
    steps_s: tuple[float, ...] = (0.0, SHORT_S)
    deaths: int = 0
    in_flight: int = 2


class ModelRank(NamedTuple):
    arrived: int = -1
    begun: int = -1
    wished: int = 0
    lease: Lease = Lease(0, -1)
    has_ended: bool = False


class Node(NamedTuple):
    is_alive: bool = True
    lease: Lease = Lease(0, -1)
    heard: tuple[tuple[int, Report], ...] = ()


class State(NamedTuple):
    ranks: tuple[ModelRank, ...]
    nodes: tuple[Node, ...]
    up: tuple[tuple[Report, ...], ...]
    down: tuple[tuple[Lease, ...], ...]
    root: tuple[tuple[str, Any], ...]
    decided: tuple[Decision, ...] = ()
    """Whatever the root has ever decided."""

    @property
    def granted(self) -> Lease:
        return dict(self.root)["_lease"]


class Model:
    """The protocol with so many nodes, ranks, ticks and wishes."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.states = 0
        self.transitions = 0
        self._report = cache(self._report)
        self._look_at_root = cache(self._look_at_root)
        self._deliver = cache(self._deliver)

    def explore(self, most_states: int = 10**9) -> None:
        """Visit every state that can be reached, nearest first.

        Raises:
            Broken: a promise does not hold in one of them, or on the way to it.
        """
        first = self._first()
        came: dict[State, tuple[State, str] | None] = {first: None}
        todo = deque([first])
        answered: set[Any] = set()
        while todo:
            state = todo.popleft()
            self.states += 1
            label = "a trip through the tree"
            try:
                asked = (state.ranks, state.nodes, state.root)
                if asked not in answered:
                    answered.add(asked)
                    self._check_trip(state)
                for label, following in self._followings(state):
                    self.transitions += 1
                    if following not in came:
                        came[following] = (state, label)
                        todo.append(following)
            except Broken as broken:
                raise Broken("\n".join([*_way(came, state), label, str(broken)])) from None
            if len(came) > most_states:
                raise AssertionError(f"more than {most_states} states")

    def _first(self) -> State:
        setup = self.setup
        root = tuple(_kept(Root(len(setup.nodes_of))))
        empty = ((),) * len(setup.parents)
        nodes = (Node(),) * len(setup.parents)
        return State((ModelRank(),) * len(setup.nodes_of), nodes, empty, empty, root)

    def _followings(self, state: State) -> Iterator[tuple[str, State]]:
        for number, rank in enumerate(state.ranks):
            yield from self._rank_does(state, number, rank)
        for number, node in enumerate(state.nodes):
            if node.is_alive:
                yield from self._node_does(state, number, node)
                if sum(not other.is_alive for other in state.nodes) < self.setup.deaths:
                    dead = _with(state.nodes, number, node._replace(is_alive=False))
                    yield f"node {number} dies", state._replace(nodes=dead)

    def _rank_does(self, state: State, number: int, rank: ModelRank) -> Iterator[tuple[str, State]]:
        if rank.wished < len(self.setup.wishes[number]):
            wished = rank._replace(wished=rank.wished + 1)
            yield f"rank {number} wishes", _with_rank(state, number, wished)
        if rank.has_ended:
            return
        if rank.arrived > rank.begun:
            begun = self._begin(state, number, rank)
            if begun is not None:
                yield f"rank {number} is let go", _with_rank(state, number, begun)
        elif rank.arrived < self.setup.last:
            arrived = rank._replace(arrived=rank.arrived + 1)
            begun = self._begin(state, number, arrived)
            label = f"rank {number} arrives at {arrived.arrived}"
            yield label, _with_rank(state, number, begun or arrived)

    def _begin(self, state: State, number: int, rank: ModelRank) -> ModelRank | None:
        """What `RankLease.tick` does; None where it waits."""
        tick, lease = rank.arrived, rank.lease
        if not tick <= lease.horizon:
            lease = state.nodes[self.setup.nodes_of[number]].lease
        if not lease.covers(tick):
            return None
        told = lease.at(tick)
        if tick > state.granted.horizon:
            raise Broken(f"rank {number} begins {tick} behind the horizon {state.granted.horizon}")
        made = tuple(decision for decision in state.decided if decision.tick == tick)
        if told != made:
            raise Broken(f"rank {number} is told {told} at tick {tick}, where {made} was decided")
        stops = any(decision.kind == "stop" for decision in told)
        return rank._replace(begun=tick, lease=lease, has_ended=stops or tick == self.setup.last)

    def _node_does(self, state: State, number: int, node: Node) -> Iterator[tuple[str, State]]:
        report = self._says(state, number)
        if number == 0:
            for longer, step_s in enumerate(self.setup.steps_s):
                yield f"the root looks, {step_s} s", self._root_looks(state, report, longer)
        elif report not in state.up[number]:
            up = (*state.up[number], report)[-self.setup.in_flight :]
            yield f"node {number} reports", state._replace(up=_with(state.up, number, up))
        for child, parent in enumerate(self.setup.parents):
            if parent == number and child:
                for report in state.up[child]:
                    heard = self._deliver(node.heard, child, report)
                    if heard != node.heard:
                        nodes = _with(state.nodes, number, node._replace(heard=heard))
                        yield f"node {number} hears {child}", state._replace(nodes=nodes)
        for lease in state.down[number]:
            if lease.number > node.lease.number:
                yield f"node {number} gets lease {lease.number}", self._put(state, number, lease)

    def _says(self, state: State, number: int) -> Report:
        """A node's report; its version grows with what it says, whichever way that came about."""
        rows = tuple(
            (rank.arrived, rank.wished, self._wishes(index, rank))
            for index, rank in enumerate(state.ranks)
            if self.setup.nodes_of[index] == number
        )
        return self._report(rows, state.nodes[number].heard)

    def _wishes(self, number: int, rank: ModelRank) -> Wishes:
        return self.setup.wishes[number][rank.wished - 1] if rank.wished else Wishes()

    def _report(self, rows: tuple[tuple[int, int, Wishes], ...], heard: Any) -> Report:
        subtree = Subtree()
        subtree._heard = {sender: (report, 0.0) for sender, report in heard}
        version = sum(report.version for _, report in heard)
        for local_rank, (arrived, wished, wishes) in enumerate(rows):
            version += arrived + 1 + wished
            lowest, ranks = (arrived, 1) if arrived >= 0 else (MOST, 0)
            own = Report(0, arrived, lowest, 0.0, 0.0, wishes, ranks)
            subtree.hear(f"rank {local_rank}", own, 0.0)
        return replace(subtree.merged(0.0), version=version)

    def _deliver(self, heard: Any, sender: int, report: Report) -> Any:
        subtree = Subtree()
        subtree._heard = {sender: (report, 0.0) for sender, report in heard}
        subtree.hear(sender, report, 0.0)
        return tuple(sorted((sender, report) for sender, (report, _) in subtree._heard.items()))

    def _look_at_root(self, kept: Any, report: Report, longer: int) -> tuple[Lease, Any]:
        """What it grants, and its state; with leases numbered by what they grant."""
        steps_s = self.setup.steps_s
        root = Root(len(self.setup.nodes_of))
        vars(root).update(kept)
        version = report.version * len(steps_s) + longer
        root.hear(replace(report, version=version, step_s=steps_s[longer]), 0.0)
        lease = root.lease(0.0)
        root._lease = replace(lease, number=lease.horizon + 1)
        return lease, tuple(_kept(root))

    def _root_looks(self, state: State, report: Report, longer: int) -> State:
        last = state.granted
        raw, root = self._look_at_root(state.root, report, longer)
        following = state._replace(root=root)
        lease = following.granted
        if lease == last and raw == last:
            return following
        self._check_grant(state, last, raw)
        made = tuple(each for each in lease.decisions if each not in last.decisions)
        return self._put(following._replace(decided=state.decided + made), 0, lease)

    def _put(self, state: State, number: int, lease: Lease) -> State:
        """A node has a newer lease: it lets its ranks read it and hands it to its children."""
        down = tuple(
            (*leases, lease)[-self.setup.in_flight :]
            if self.setup.parents[child] == number and child
            else leases
            for child, leases in enumerate(state.down)
        )
        node = state.nodes[number]._replace(lease=lease)
        return state._replace(nodes=_with(state.nodes, number, node), down=down)

    def _check_grant(self, state: State, last: Lease, lease: Lease) -> None:
        """What the root may do: go further, and decide what nobody can have passed, once."""
        if lease.horizon < last.horizon:
            raise Broken(f"the horizon falls from {last.horizon} to {lease.horizon}")
        if last.stops and lease.horizon != last.horizon:
            raise Broken(f"the horizon goes behind the stop at {last.horizon}")
        if lease != last and lease.number <= last.number:
            raise Broken(f"lease {lease.number} says something new")
        fastest = max(rank.arrived for rank in state.ranks)
        if lease.horizon > max(last.horizon + 1, fastest + AHEAD):
            raise Broken(f"{lease.horizon} is granted where the fastest is at {fastest}")
        for decision in set(lease.decisions) - set(last.decisions):
            made = [other for other in state.decided if other.kind == decision.kind]
            if decision.tick <= last.horizon:
                raise Broken(f"{decision} at a tick that was granted before")
            if decision.kind == "stop" and made:
                raise Broken(f"{decision} and {made}")
            if any(other.value >= decision.value for other in made):
                raise Broken(f"{decision} once more: {made}")

    def _check_trip(self, state: State) -> None:
        """One trip through the tree answers all that wait, and decides what was wished.

        So nobody waits for ever while agents live and messages come through; and no latency is
        longer than a trip, once the root has something to grant.
        """
        if not all(node.is_alive for node in state.nodes):
            return
        before = state
        for child in reversed(range(1, len(state.nodes))):
            parent, report = self.setup.parents[child], self._says(state, child)
            node = state.nodes[parent]
            node = node._replace(heard=self._deliver(node.heard, child, report))
            state = state._replace(nodes=_with(state.nodes, parent, node))
        state = self._root_looks(state, self._says(state, 0), 0)
        lease = state.granted
        for number, rank in enumerate(state.ranks):
            wishes = self._wishes(number, rank)
            if rank.arrived > rank.begun and not lease.covers(rank.arrived):
                raise Broken(f"rank {number} waits for ever at tick {rank.arrived}: {lease}")
            if wishes.stop and not lease.stops:
                raise Broken(f"rank {number} wishes a stop, and none is decided: {lease}")
        if lease.horizon > before.granted.horizon:
            self._check_wishes(state)

    def _check_wishes(self, state: State) -> None:
        """Whatever any rank wished before more was granted is decided with that grant."""
        wished = merge(
            Report(0, -1, MOST, 0.0, 0.0, self._wishes(number, rank), 0)
            for number, rank in enumerate(state.ranks)
        ).wishes
        for kind in KINDS[1:]:
            values = [decision.value for decision in state.decided if decision.kind == kind]
            if getattr(wished, kind) != max(values, default=0):
                raise Broken(f"wished {wished}, decided {state.decided}")


def _kept(root: Root) -> Iterator[tuple[str, Any]]:
    """Its whole state, but for when leases were made, which only its clock needs."""
    for name, value in sorted(vars(root).items()):
        if name != "_made_s":
            yield name, copy.copy(value)


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _with_rank(state: State, number: int, rank: ModelRank) -> State:
    return state._replace(ranks=_with(state.ranks, number, rank))


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    way = []
    while (step := came[state]) is not None:
        state, label = step
        way.append(label)
    return way[::-1]
