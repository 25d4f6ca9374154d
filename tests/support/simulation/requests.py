"""Nodes that a simulated job asks for: some come, some later, some never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.agent.growth import Growth
from hpctrain.errors import ClusterError
from hpctrain.scheduler.base import RequestEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.simulation.job import Job

PID = 7


class Request:
    """As `hpctrain.scheduler.base.NodeRequest`.

    Attributes:
        asked_s: When it was made.
        ended_s: When it was refused, or taken back; None where it was neither.
        came_s: When its node came; None for never.
    """

    pid = PID

    def __init__(self, job: Job, number: int) -> None:
        self._job, self.number = job, number
        self.node = job.add_node()
        assert self.node.number == number, "numbers are given in their order"
        self.asked_s = job.simulation.now_s
        self.came_s: float | None = None
        self.ended_s: float | None = None
        self.is_taken_back = self.is_final = False
        rng = job.simulation.random
        what = rng.choice(["comes", "comes", "comes", "refused", "never", "final", "dies"])
        delay_s = rng.choice([0.5, 4.0, 40.0])
        if what in {"comes", "dies"}:
            job.simulation.after(delay_s, self._come)
        if what == "dies":
            job.simulation.after(delay_s + rng.uniform(0.0, 3.0), self._die)
        if what in {"refused", "final"}:
            job.simulation.after(delay_s, lambda: self._refuse(is_final=what == "final"))

    def ended(self) -> RequestEnd | None:
        """See the protocol; so below."""
        if self.ended_s is None:
            return None
        return RequestEnd("refused" if self.came_s is None else "its node is gone", self.is_final)

    def take_back(self, timeout_s: float) -> None:
        self._job.simulation.sleep(self._job.simulation.random.uniform(0.0, min(timeout_s, 0.2)))
        assert not self.is_taken_back, "taken back twice"
        self.is_taken_back = True
        self.ended_s = self._job.simulation.now_s
        if self.came_s is not None:  # its agent is a process of the request's
            self._job.kill_agent(self.node, "is taken back")

    def _come(self) -> None:
        if self.ended_s is None:
            self.came_s = self._job.simulation.now_s
            self._job.join(self.node)

    def _die(self) -> None:
        if self.came_s is not None and self.ended_s is None:
            self._job.fault("dies", self.number)
            self.ended_s = self._job.simulation.now_s

    def _refuse(self, *, is_final: bool) -> None:
        if self.ended_s is None:
            self.ended_s, self.is_final = self._job.simulation.now_s, is_final


def growth(job: Job, *, saves: bool, never: bool = False) -> Growth:
    """Node 0's.

    Args:
        job: Its.
        saves: A round ends for a node behind a save only.
        never: The scheduler adds none to such a job.
    """

    job.grows_by_saves, job.never_grows = saves, never

    def ask(number: int) -> Request:
        if never:
            raise ClusterError("it never adds one")
        request = Request(job, number)
        job.requests.append(request)
        return request

    def joined(name: str, waited_s: float | None) -> None:
        job.joined.append((name, waited_s))

    def may_grow(why: str) -> bool:
        job.grown.append((job.simulation.now_s, why))
        return job.may_go_on and not job.is_left_behind()

    newest: Callable[[], int | None] | None = job.newest_save if saves else None
    return Growth(ask, newest, joined=joined, may_grow=may_grow)
