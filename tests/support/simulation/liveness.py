"""The processes that show that nodes live: both real sides, on simulated connections."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpctrain.node.agent import liveness as module
from tests.support.simulation.kernel import Bell
from tests.support.simulation.network import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.node.agent.liveness import LivenessPlace
    from tests.support.simulation.job import Job, Node
    from tests.support.simulation.network import End
    from tests.support.simulation.stores import Store

SPINS = 2000
"""So often may be asked what a process says that is gone: the real one's answer takes no time."""
LINE_S = 0.0005
"""Between an agent and its process."""


class LivenessChannel(module.LivenessChannel):
    """The agent's side."""

    def __init__(self, job: Job, place: LivenessPlace) -> None:
        self.place, self.pid = place, 1
        self._job, self._node = job, job.here()
        self._is_gone = self._is_stopped = False
        self._asked_in_vain = 0
        self._inbox: list[dict[str, Any]] = []
        self._spoke = Bell()
        self._orders = self._answers = 0.0
        side = First if place.node == 0 else Other
        self.side = side(job, self._node, place, self._put)
        self._node.children.append(self.side.end)
        self._node.liveness = self

    def say(self, message: dict[str, Any]) -> None:
        """See the real one; so below."""
        plain = json.dumps(message)
        self._later(lambda: self.side.obey(json.loads(plain)))

    def guard(self, connections: Sequence[Any]) -> None:
        self._later(lambda: self.side.guard(list(connections)))

    def news(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        if self._is_gone or self._is_stopped:
            self._asked_in_vain += 1
            if self._asked_in_vain > SPINS:
                raise AssertionError("it asks a process that is gone again and again")
            self._job.simulation.sleep(0.001)
            return []
        if wait_s and not self._inbox:
            self._job.simulation.wait((self._spoke,), wait_s)
        else:
            self._job.simulation.may_switch(self._job.switch_share)
        said, self._inbox = self._inbox, []
        self._is_gone = any("gone by itself" in one for one in said)
        return [module.OWN_END if "gone by itself" in one else one for one in said]

    def stop(self) -> None:
        self._is_stopped = True
        self.side.end()

    def die(self) -> None:
        """Its process ends by itself."""
        self.side.end()
        self._put({"gone by itself": True})

    def _later(self, call: Callable[[], None]) -> None:
        simulation = self._job.simulation
        self._orders = max(
            self._orders + 1e-9, simulation.now_s + simulation.random.random() * LINE_S
        )
        simulation.at(self._orders, call, self._node.machine)

    def _put(self, message: dict[str, Any]) -> None:
        simulation = self._job.simulation
        plain = json.dumps(message)

        def arrive() -> None:
            if not self._is_stopped:
                self._inbox.append(json.loads(plain))
                simulation.ring(self._spoke)

        self._answers = max(
            self._answers + 1e-9, simulation.now_s + simulation.random.random() * LINE_S
        )
        simulation.at(self._answers, arrive, self._node.machine)


class _Side:
    """What both sides have: turns, and an end."""

    def _begin_here(self, job: Job, node: Node, send: Callable[[dict[str, Any]], None]) -> None:
        self.job, self.node, self._put = job, node, send
        self.is_up = True
        self.ends: list[End] = []
        self._last_s = job.simulation.now_s
        self._turn_later()

    def obey(self, order: dict[str, Any]) -> None:
        """Do what the agent says."""
        if self.is_up:
            self._obey(order)

    def end(self) -> None:
        """The process has ended."""
        self.is_up = False
        for end in self.ends:
            end.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self.is_up:
            self._put(message)

    def _turn_later(self) -> None:
        lease_s = self._place.lease_s
        late_s = self.job.simulation.random.uniform(0, self.node.machine.slowness_s / 4)
        self.job.simulation.after(
            lease_s / module.BEATS + late_s, self._take_turn, self.node.machine
        )

    def _take_turn(self) -> None:
        if not self.is_up:
            return
        now_s = self.job.simulation.now_s
        stood_s, self._last_s = now_s - self._last_s, now_s
        self._turn(stood_s)
        self._turn_later()


class First(_Side, module._First):
    """The first node's process."""

    def __init__(
        self, job: Job, node: Node, place: LivenessPlace, send: Callable[[dict[str, Any]], None]
    ) -> None:
        module._First.__init__(self, place, "", None, 0)
        self.admitted: set[int] = set()
        self._begin_here(job, node, send)
        job.channels[place.port] = self

    def connect(self, node: int, end: End) -> bool:
        """Whether that node is let in, as `ChildrenListener` does."""
        if not self.is_up or node not in self._awaited or node in self.admitted:
            return False
        self.admitted.add(node)
        self.ends.append(end)
        self._admit(node, end)
        return True

    def guard(self, stores: list[Store]) -> None:
        """It waits for nobody's store."""


class Other(_Side, module._Other):
    """Any other node's process."""

    def __init__(
        self, job: Job, node: Node, place: LivenessPlace, send: Callable[[dict[str, Any]], None]
    ) -> None:
        module._Other.__init__(self, place, "", None, 0, None)
        self._stores: list[list[Store]] = []
        self._begin_here(job, node, send)
        self._until_s = job.simulation.now_s + module.FIRST_S
        self._connect()

    def guard(self, stores: list[Store]) -> None:
        """Keep those of the last two calls."""
        self._stores = [*self._stores[-1:], stores]

    def _connect(self) -> None:
        if not self.is_up:
            return
        job, machine = self.job, self.node.machine
        first = job.channels.get(self._place.port)
        if first is not None and job.network.reaches(machine, first.node.machine):
            own, others = connected(job.network, machine, first.node.machine)
            if first.connect(self._place.node, others):
                self.ends.append(own)
                self._met(own)
                return
        if job.simulation.now_s > self._until_s:
            self._leave("the first node's agent cannot be reached")
            return
        job.simulation.after(module.TRY_AGAIN_S, self._connect, machine)

    def _close_guarded(self) -> None:
        for store in [store for stores in self._stores for store in stores]:
            store.cut()
        self._stores = []

    def _kill_agent_after(self, seconds: float) -> None:
        job, node, task = self.job, self.node, self.node.task

        def kill() -> None:
            if self.is_up and node.task is task and not node.is_killed:
                job.kill_agent(node, "its liveness channel kills it")

        job.simulation.after(seconds, kill, node.machine)
