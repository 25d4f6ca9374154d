"""Nodes that are added to a job in the place of lost ones.

Where the scheduler can add a node to a running job, node 0's agent asks for one as soon as the job
has fewer than at its start. Who asks waits as long as the queue is; then it starts an agent on the
new node, which comes to the others with a number of its own and waits there as a spare does. A
round that has fewer nodes than it may have ends for it right behind a save, and the next one takes
it in. tests/unit/agent/test_growth.py and tests/slurm/test_growth.py hold the promises.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hpctrain.agent.swaps import newest_save
from hpctrain.base import clock
from hpctrain.base.env import HPCTRAIN_JOINS
from hpctrain.base.text import duration
from hpctrain.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.base.records import JobContext
    from hpctrain.run.layout import RunDir
    from hpctrain.scheduler.base import NodeRequest
    from hpctrain.settings.schema import AliveSettings

log = logging.getLogger("hpctrain.agent")

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 1800.0
"""Between two requests, the first of which has failed; each pause is twice the one before."""
AGAIN_S = 5.0
"""After so long a round that could not be ended for a node is looked at again."""
LOOK_S = 0.2
"""So often it is looked whether there is a new save."""
STOP_S = 10.0
"""So long is waited until a request is taken back."""


@dataclass(frozen=True)
class Joining:
    """What the agent of an added node has to know of the job.

    Attributes:
        number: Its own in the job.
        nodes: The names of the nodes before it, by their numbers; "" for one that has not come.
        address: Of the first node.
        port: The first of the job's ports.
    """

    number: int
    nodes: tuple[str, ...]
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """The same for the environment of its process."""
        return {HPCTRAIN_JOINS: json.dumps(asdict(self))}

    def name(self, of_first: JobContext) -> str:
        """Of the request for it.

        Args:
            of_first: The first node's place in the job.
        """
        return f"{of_first.token or of_first.job_id}-joins-{self.number}"

    def context(self, of_task: JobContext) -> JobContext:
        """The node's place in the job.

        Args:
            of_task: As the scheduler has started it: alone.
        """
        own = of_task.nodes[of_task.node_rank]
        return replace(
            of_task,
            nodes=[*self.nodes, own],
            node_rank=self.number,
            master_addr=self.address,
            port=self.port,
        )


def joining_of(environ: Mapping[str, str]) -> Joining | None:
    """What this process was started with; None where its node is one of the job's first ones."""
    text = environ.get(HPCTRAIN_JOINS)
    if not text:
        return None
    said = json.loads(text)
    return Joining(**{**said, "nodes": tuple(said["nodes"])})


def growth_of(
    run: RunDir,
    alive: AliveSettings,
    context: JobContext,
    add_node: Callable[[Joining], NodeRequest],
    *,
    joined: Callable[[str, float | None], None],
    may_grow: Callable[[str], bool],
) -> Growth | None:
    """That of a run; None where its settings want none.

    Args:
        run: The run.
        alive: Its.
        context: The first node's place in the job.
        add_node: Asks the scheduler.
        joined: See `Growth`.
        may_grow: See `Growth`.
    """
    if alive.grow != "auto":
        return None

    def ask(number: int) -> NodeRequest:
        before = tuple(context.nodes[:number])
        return add_node(Joining(number, before, context.master_addr, context.port))

    save = None if alive.memory != "no" else partial(newest_save, run)
    return Growth(ask, save, joined=joined, may_grow=may_grow)


class Growth:
    """Node 0: asks for nodes, one at a time, and says when a round is to take them in."""

    def __init__(
        self,
        ask: Callable[[int], NodeRequest],
        newest_save: Callable[[], int | None] | None,
        *,
        joined: Callable[[str, float | None], None],
        may_grow: Callable[[str], bool],
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """Nothing is asked for yet.

        Args:
            ask: Asks the scheduler for a node that is to have this number. Raises ClusterError
                where it never adds one to this job.
            newest_save: The step of the newest checkpoint; None where a round may end at any
                moment, since the nodes' memory has copies of the state.
            joined: Told of each node that has come, and how long after it was asked for (s).
            may_grow: Writes down why a round ends; whether the ranks may start again.
            clock: Seconds on a clock that never jumps.
        """
        self._ask, self._newest_save, self._clock = ask, newest_save, clock
        self._joined, self._may_grow = joined, may_grow
        self._requests: dict[int, NodeRequest] = {}
        self._open: int | None = None
        self._asked_s = self._not_before_s = self._not_due_s = self._looked_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._is_in_vain = False
        self._saved: int | None = None
        self._waits_for_save = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that ask, and stay with what they have started."""
        return [request.pid for request in self._requests.values()]

    def look(self, missing: int, number: Callable[[], int]) -> None:
        """Ask for a node where one is missing; see what became of the request. To be called often.

        Args:
            missing: So many fewer live than the job had at its start.
            number: Makes the number of one more node.
        """
        for joined in [n for n, request in self._requests.items() if n != self._open]:
            if self._requests[joined].ended() is not None:
                del self._requests[joined]  # its node was lost, which the lifeline tells
        if self._open is not None:
            if missing <= 0:
                self._take_back(self._open)
            elif (ended := self._requests[self._open].ended()) is not None:
                self._failed(ended.why, is_final=ended.is_final)
        elif missing > 0 and not self._is_in_vain and self._clock() >= self._not_before_s:
            self._begin(number())

    def came(self, number: int, name: str) -> None:
        """An added node is there, and waits.

        Args:
            number: Its.
            name: Its.
        """
        waited_s = None
        if number == self._open:
            self._open, self._pause_s = None, FIRST_PAUSE_S
            waited_s = self._clock() - self._asked_s
        log.info("%s has joined the job", name)
        self._joined(name, waited_s)

    def is_due(self, *, can_grow: bool) -> bool:
        """Whether the round is to end now; to be asked all the time.

        Args:
            can_grow: A round of the nodes that live would have more of them.
        """
        now_s = self._clock()
        if not can_grow or now_s < self._not_due_s:
            return False
        if self._newest_save is None:
            return True
        if not self._waits_for_save:
            self._waits_for_save, self._saved, self._looked_s = True, self._newest_save(), now_s
            return False
        if now_s < self._looked_s + LOOK_S:
            return False
        self._looked_s = now_s
        newest = self._newest_save()
        return newest is not None and newest != self._saved

    def may_end(self, why: str) -> bool:
        """Whether the round may end, which is written down then; if not, that is asked later.

        Args:
            why: In words.
        """
        self._waits_for_save = False
        self._not_due_s = self._clock() + AGAIN_S
        return self._may_grow(why)

    def stop(self) -> None:
        """Take back what is still asked for, and wait for that. Harmless when repeated."""
        if self._open is not None:
            self._take_back(self._open)

    def _begin(self, number: int) -> None:
        try:
            self._requests[number] = self._ask(number)
        except ClusterError as error:
            self._is_in_vain = True
            log.warning("no node is added to the job: %s", error)
            return
        self._open, self._asked_s = number, self._clock()
        log.info("asks for a node in the place of a lost one")

    def _failed(self, why: str, *, is_final: bool) -> None:
        assert self._open is not None  # noqa: S101 - it has failed just now
        del self._requests[self._open]
        self._open, self._is_in_vain = None, is_final
        again = "" if is_final else f"; asks again in {duration(self._pause_s)}"
        log.warning("no node was added to the job: %s%s", why, again)
        self._not_before_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _take_back(self, number: int) -> None:
        self._requests.pop(number).take_back(STOP_S)
        self._open = None
