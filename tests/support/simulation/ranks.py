"""The ranks of a simulated job: a program that takes steps together, and what goes wrong in it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.base.records import FailureReport
from hpctrain.node.control.heartbeat import PHASES, STEP
from hpctrain.node.hangs.evidence import Collective, Frame, Front, RankEvidence, Recorded
from hpctrain.node.hangs.verdict import Used
from tests.support.simulation.kernel import EPOCH_S, Bell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.simulation.job import Job, Node

PEER_GONE = "ConnectionError: Connection closed by peer"


class Rank:
    """A process as `multiprocessing` shows it.

    Attributes:
        state: "starts", "runs", "hangs" (in Python), "computes" (so long that it seems to hang),
            "returned" (its program, not its process), or "ended".
    """

    _pids = itertools.count(1000)

    def __init__(self, job: Job, node: Node, number: int, attempt: Attempt) -> None:
        self._job, self.node, self.number, self.attempt = job, node, number, attempt
        self.pid = next(self._pids)
        self.exitcode: int | None = None
        self.sentinel = self.ended = Bell()
        self.state = "starts"
        self.step, self.since_s = 0, job.simulation.now_s
        self.phase = 1
        self.frame = 0
        self.cpu_s = 0.0
        self.ended_s = float("inf")

    @property
    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self.exitcode is None and self.node.machine.has_power

    def terminate(self) -> None:
        """Ranks ignore SIGTERM."""

    def kill(self) -> None:
        """SIGKILL by its agent."""
        self.end(-9)

    def end(self, code: int) -> None:
        """Its process ends."""
        if self.exitcode is None:
            self.exitcode, self.state = code, "ended"
            self.ended_s = self._job.simulation.now_s
            self._job.simulation.ring(self.ended)
            self._job.note(f"rank {self.number} of attempt {self.attempt.number} ends: {code}")
            self.attempt.look()

    def fail(self, code: int, summary: str, *, kind: str = "exception") -> None:
        """Its program raises, or something kills it."""
        if self.exitcode is None:
            now = EPOCH_S + self._job.simulation.now_s + self.node.machine.ahead_s
            if kind == "exception":
                report = FailureReport(
                    self.number, self.node.machine.name, kind, summary, time=now, exit_code=code
                )
                self.attempt.reports[self.number] = report
            self.end(code)


@dataclass
class Program:
    """What the ranks of a job do.

    Attributes:
        steps: So many, then all return.
        step_s: A step takes so long.
        start_s: A rank takes up to so long to come to its first step.
        peers_raise: Ranks whose peer has gone raise that; else they wait for ever.
        save_s: A rank that is to leave saves for so long.
        every: A save after so many steps.
        saved: The step of the newest save.
        stays_s: After the program's end up to so long until the process has ended.
        heeds_stop: Ranks leave when they are told to.
        lingers: In the first attempt, by rank, what it does at the end: "stays" (its process does,
            and does nothing), "hangs" (it does not return), "works" (it returns, but later).
        works_s: So long.
        done_at: Attempts whose program came to its end.
        came_s: When ranks of the first attempt returned.
    """

    steps: int = 12
    step_s: float = 0.5
    start_s: float = 1.5
    peers_raise: bool = True
    save_s: float = 1.0
    every: int = 4
    saved: int = 0
    stays_s: float = 0.0
    heeds_stop: bool = True
    lingers: dict[int, str] = field(default_factory=dict)
    works_s: float = 0.0
    done_at: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)


class Attempt:
    """The ranks of one round, on all nodes."""

    def __init__(self, job: Job, number: int, world_size: int) -> None:
        self._job, self.number, self.world_size = job, number, world_size
        self.ranks: dict[int, Rank] = {}
        self.reports: dict[int, FailureReport] = {}
        self.step = job.program.saved
        self.is_stopping = False
        self._is_stepping = False
        self.began_s = job.simulation.now_s

    def start(self, node: Node, numbers: Sequence[int]) -> list[Rank]:
        """Ranks of one node begin."""
        simulation = self._job.simulation
        begun = [Rank(self._job, node, number, self) for number in numbers]
        for rank in begun:
            self.ranks[rank.number] = rank
            node.ranks.append(rank)
            start_s = simulation.random.uniform(0.05, self._job.program.start_s)
            simulation.after(start_s, lambda rank=rank: self._ready(rank), node.machine)
        return begun

    def told(self, rank: Rank) -> None:
        """A rank hears that it should leave; all do so together, at their next step."""
        if self._job.program.heeds_stop and rank.is_alive:
            self.is_stopping = True
            self.look()

    def look(self) -> None:
        """Somebody has ended, or stands: what do the others do?"""
        living = [rank for rank in self.ranks.values() if rank.exitcode is None]
        gone = [
            rank
            for rank in self.ranks.values()
            if rank.exitcode not in (None, 0) or not rank.node.machine.has_power
        ]
        if gone and self._job.program.peers_raise:
            simulation = self._job.simulation
            for rank in living:
                if rank.state == "runs":
                    rank.state = "waits"
                    simulation.after(
                        simulation.random.uniform(0.05, 2.0),
                        lambda rank=rank: rank.fail(1, PEER_GONE),
                        rank.node.machine,
                    )

    def _ready(self, rank: Rank) -> None:
        if rank.exitcode is None and rank.state == "starts":
            self._move(rank, self.step, STEP)
            rank.state = "runs"
        self.begin_steps()

    def begin_steps(self) -> None:
        """All ranks have come to their first step, or some have yet to come."""
        are_all = len(self.ranks) == self.world_size and not self._is_stepping
        if are_all and all(rank.state == "runs" for rank in self.ranks.values()):
            self._is_stepping = True
            self._next_step()

    def _move(self, rank: Rank, step: int, phase: int) -> None:
        rank.step, rank.phase, rank.since_s = step, phase, self._job.simulation.now_s
        rank.frame += 1

    def _next_step(self) -> None:
        simulation, program = self._job.simulation, self._job.program
        simulation.after(program.step_s * simulation.random.uniform(0.8, 1.2), self._stepped)

    def _stepped(self) -> None:
        """All have called the step's all_reduce, or some do not come."""
        if any(rank.state != "runs" or not self._runs(rank) for rank in self.ranks.values()):
            living = [one for one in self.ranks.values() if one.exitcode is None]
            if living and all(one.state not in {"ended", "returned"} for one in living):
                self._job.simulation.after(0.05, self._stepped)  # they wait in it
            return
        self.step += 1
        program = self._job.program
        if self.step % program.every == 0:
            program.saved = max(program.saved, self.step)
        if self.is_stopping:
            self._leave(program.save_s)
        elif self.step >= program.steps:
            program.done_at.append(self.number)
            self._leave(0.0)
        else:
            for rank in self.ranks.values():
                self._move(rank, self.step, STEP)
            self._next_step()

    def _runs(self, rank: Rank) -> bool:
        machine = rank.node.machine
        others = {one.node.machine for one in self.ranks.values()}
        is_cut = any(self._job.network.is_cut(machine, other) for other in others)
        return rank.is_alive and not machine.is_frozen and not is_cut

    def _leave(self, after_s: float) -> None:
        simulation = self._job.simulation
        if after_s:
            self._job.program.saved = max(self._job.program.saved, self.step)
        for rank in self.ranks.values():
            self._move(rank, self.step, PHASES.index("end"))
            rank.state = "leaves"
            stays_s = self._job.program.stays_s * simulation.random.random()
            how = self._job.program.lingers.get(rank.number) if self.number == 1 else None
            if how in {"stays", "hangs"}:
                rank.state = "returned" if how == "stays" else "hangs"
                if how == "stays":
                    self._job.program.came_s.append(simulation.now_s)
                continue
            if how == "works":
                rank.state = "works"
                stays_s = self._job.program.works_s
            simulation.after(
                after_s + simulation.random.uniform(0.0, 0.3) + stays_s,
                lambda rank=rank: self._end(rank),
                rank.node.machine,
            )

    def _end(self, rank: Rank) -> None:
        if rank.state in {"leaves", "works"}:
            if self.number == 1:
                self._job.program.came_s.append(self._job.simulation.now_s)
            rank.end(0)

    # ---- what a look finds

    def evidence(self, rank: Rank) -> RankEvidence:
        """Of a rank that is there."""
        members = tuple(range(self.world_size))
        waits = rank.state in {"runs", "waits"} and not self._is_whole()
        called = self.step + (1 if waits else 0)
        calls = (Collective("0", called, "all_reduce", ((4,),), ("float",)),) if called else ()
        return RankEvidence(
            rank.number,
            rank.node.machine.name,
            "T" if rank.state == "stopped" else "S",
            recorded=Recorded({"0": Front(called, self.step)}, calls),
            groups={"0": members},
            frames=(Frame("/train.py", 10 + rank.frame, "step"),),
            step=rank.step,
            phase=PHASES[rank.phase],
            has_returned=rank.state == "returned" or rank.exitcode == 0,
        )

    def _is_whole(self) -> bool:
        return all(rank.state == "runs" and self._runs(rank) for rank in self.ranks.values())

    def used(self, rank: Rank) -> Used:
        """What a rank has used so far."""
        return Used(rank.cpu_s, 0)
