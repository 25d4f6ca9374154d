"""Slurmctld's schedulers over counted nodes: order, backfill, limits, preemption, failures.

As SLURM has it (slurm.conf, SchedulerParameters): the main scheduler starts jobs in the order of
priority until one does not fit, at each submission and each end. The backfill scheduler runs every
`bf_interval_s` if something changed. It gives every waiting job within `bf_window_s` the earliest
place beside the running jobs and all jobs of higher priority, all by their time limits, and starts
what may start now.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.support.queue_sim.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMPLETED, TIMEOUT, PREEMPTED, NODE_FAIL = "COMPLETED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"


@dataclass(frozen=True)
class Partition:
    """What a partition allows, and which jobs come first.

    Attributes:
        max_nodes: Of one job.
        max_time_s: Of one job.
        tier: Jobs of a higher tier come before all others, and preempt where `preempts`.
        preempts: Whether its jobs requeue running jobs of lower tiers.
    """

    name: str = "work"
    max_nodes: int = 10**9
    max_time_s: float = math.inf
    tier: int = 1
    preempts: bool = False


@dataclass(frozen=True)
class Settings:
    """Slurm.conf, as far as it concerns when jobs start.

    Attributes:
        age_weight: Of the wait, full after `max_age_s`. With no other weight: first come, first
            served.
        fairshare_weight: Of a user's little use of the last time, `half_life_s`.
        failures_per_node_day: Nodes that die; each is back after `repair_s`.
    """

    nodes: int
    partitions: tuple[Partition, ...] = (Partition(),)
    bf_interval_s: float = 30
    bf_window_s: float = 86_400
    bf_resolution_s: float = 60
    bf_max_job_test: int = 500
    age_weight: float = 1
    max_age_s: float = 7 * 86_400
    fairshare_weight: float = 0
    half_life_s: float = 7 * 86_400
    failures_per_node_day: float = 0
    repair_s: float = 6 * 3600
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """What a user asks for, and how long the program would run."""

    submit_s: float
    nodes: int
    limit_s: float
    run_s: float
    user: str = ""
    partition: str = "work"
    name: str = ""
    requeue: bool = True


@dataclass(eq=False)
class Job:
    """A job in the queue; times are None until they are known.

    Attributes:
        number: The order of submission.
        queued_s: Since when it waits, anew with each requeue.
        ended: How the last start ended; empty while it waits or runs.
    """

    request: Request
    number: int
    queued_s: float
    started_s: float | None = None
    ended_s: float | None = None
    ended: str = ""
    starts: list[float] = field(default_factory=list)

    @property
    def limit_end_s(self) -> float:
        """When its time limit ends it."""
        return (self.started_s or 0) + self.request.limit_s

    @property
    def wait_s(self) -> float:
        """From the last time that it was queued to its start."""
        return (self.started_s if self.started_s is not None else math.inf) - self.queued_s


class Controller:
    """The queue of one cluster.

    Args:
        settings: Nodes, partitions and scheduler parameters.
        workload: Requests in the order of their submission, handed in as time reaches them.
    """

    def __init__(self, settings: Settings, workload: Sequence[Request] = ()) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.free = settings.nodes
        self.down = 0
        self.jobs: list[Job] = []
        """All that were started, in the order of their starts."""
        self._workload = workload
        self._next = 0
        self._count = 0
        self._pending: list[Job] = []
        self._running: dict[int, Job] = {}
        self._ends: list[tuple[float, int, float]] = []
        self._repairs: list[float] = []
        self._partitions = {part.name: part for part in settings.partitions}
        self._used: dict[str, tuple[float, float]] = {}
        self._backfill_s = math.inf
        self._random = random.Random(settings.seed)
        self._failure_s = self._next_failure()

    # -- what users do

    def submit(self, request: Request) -> Job:
        """Queue a job now.

        Raises:
            ValueError: The partition does not allow so many nodes or so long a time.
        """
        part = self._partitions[request.partition]
        if request.nodes > min(part.max_nodes, self.settings.nodes):
            raise ValueError(f"{request.nodes} nodes: partition {part.name} has fewer for one job")
        if request.limit_s > part.max_time_s:
            raise ValueError(f"{request.limit_s} s: above MaxTime of partition {part.name}")
        job = self._queue(request)
        self._schedule()
        return job

    def _queue(self, request: Request) -> Job:
        self._count += 1
        self._pending.append(job := Job(request, self._count, self.now_s))
        return job

    def cancel(self, job: Job) -> None:
        """End a job, waiting or running."""
        if job in self._pending:
            self._pending.remove(job)
        elif self._running.get(job.number) is job:
            self._release(job, "CANCELLED")
        self._schedule()

    def queue(self) -> list[Job]:
        """Waiting jobs, the next one first."""
        return self._ordered()

    def running(self) -> list[Job]:
        """Running jobs, in the order of their starts."""
        return list(self._running.values())

    # -- what SLURM says of a job that is not submitted

    def start_estimate(self, nodes: int, limit_s: float, partition: str = "work") -> float:
        """Return what `sbatch --test-only` says: when such a job would start.

        Slurmctld takes the first time at which running jobs, by their limits, leave enough nodes.
        It adds the nodes times limits of all jobs that wait in the partition, spread over all
        nodes. It does not try backfill.
        """
        beside_running = self._profile().earliest(nodes, limit_s)
        waiting = [job.request for job in self._pending if job.request.partition == partition]
        ahead = sum(request.nodes * request.limit_s for request in waiting)
        return beside_running + ahead / self.settings.nodes

    def plan(self) -> Profile:
        """Return what backfill's plan of this moment leaves free, behind all that wait."""
        profile = self._profile()
        for job in self._ordered()[: self.settings.bf_max_job_test]:
            self._reserve(profile, job.request)
        return profile

    def planned_start(self, nodes: int, limit_s: float) -> float:
        """Return when that plan would start such a job."""
        return self.plan().earliest(nodes, limit_s)

    # -- time

    def run(self, until_s: float = math.inf) -> None:
        """Let time pass; without a limit until no job waits, runs or comes."""
        while (at_s := self._next_event()) <= until_s and at_s < math.inf:
            self._advance(at_s)
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)

    def run_until_ended(self, job: Job) -> None:
        """Let time pass until the job has ended, requeues included.

        Raises:
            RuntimeError: It never will.
        """
        while not job.ended:
            at_s = self._next_event()
            if at_s == math.inf:
                raise RuntimeError(f"job {job.number} waits for ever: {job.request}")
            self._advance(at_s)

    def fork(self) -> Controller:
        """Return a copy that goes its own way, with copies of all jobs that wait or run."""
        other = Controller(self.settings, self._workload)
        other.now_s, other.free, other.down = self.now_s, self.free, self.down
        other._next, other._count = self._next, self._count
        other._pending = [replace(job, starts=[*job.starts]) for job in self._pending]
        other._running = {
            number: replace(job, starts=[*job.starts]) for number, job in self._running.items()
        }
        other._ends, other._repairs = [*self._ends], [*self._repairs]
        other._used = {**self._used}
        other._backfill_s, other._failure_s = self._backfill_s, self._failure_s
        other._random.setstate(self._random.getstate())
        return other

    def _next_event(self) -> float:
        busy = bool(self._pending or self._running or self._next < len(self._workload))
        return min(
            self._workload[self._next].submit_s if self._next < len(self._workload) else math.inf,
            self._ends[0][0] if self._ends else math.inf,
            self._repairs[0] if self._repairs else math.inf,
            self._backfill_s,
            self._failure_s if busy else math.inf,
        )

    def _advance(self, at_s: float) -> None:
        """Do all that happens at one moment: ends first, then submissions, then the schedulers."""
        self.now_s = at_s
        while self._ends and self._ends[0][0] <= at_s:
            _, number, started_s = heapq.heappop(self._ends)
            job = self._running.get(number)
            if job is not None and job.started_s == started_s:
                late = job.request.run_s > job.request.limit_s
                self._release(job, TIMEOUT if late else COMPLETED)
        while self._repairs and self._repairs[0] <= at_s:
            heapq.heappop(self._repairs)
            self.free, self.down = self.free + 1, self.down - 1
        if self._failure_s <= at_s:
            self._fail_node()
        while self._next < len(self._workload) and self._workload[self._next].submit_s <= at_s:
            self._queue(self._workload[self._next])
            self._next += 1
        if self._backfill_s <= at_s:
            self._backfill_s = math.inf
            self._backfill()
        else:
            self._schedule()

    # -- schedulers

    def _schedule(self) -> None:
        """Start jobs in order until one of the partition does not fit; ask for a backfill pass."""
        blocked: set[str] = set()
        for job in self._ordered() if self._pending else ():
            name = job.request.partition
            if name in blocked:
                continue
            if job.request.nodes <= self.free or self._preempt_for(job):
                self._start(job)
            else:
                blocked.add(name)
                if len(blocked) == len(self._partitions):
                    break
        if self._pending:
            step_s = self.settings.bf_interval_s
            self._backfill_s = min(self._backfill_s, (self.now_s // step_s + 1) * step_s)

    def _backfill(self) -> None:
        """Start every job that has its earliest place now, beside all of higher priority.

        A pass ends where no job that is left would fit on the nodes that are free: places later on
        start nothing, and the next pass makes them anew.
        """
        order = self._ordered()[: self.settings.bf_max_job_test]
        fewest = [*itertools.accumulate((j.request.nodes for j in reversed(order)), min)][::-1]
        if not order or fewest[0] > self.free:
            return
        profile = self._profile()
        for job, least in zip(order, fewest, strict=True):
            if least > self.free:
                break
            if self._reserve(profile, job.request) <= self.now_s:
                self._start(job)

    def _reserve(self, profile: Profile, request: Request) -> float:
        """Take the request's earliest place, unless it lies beyond the window; return its start,
        infinity then.

        As slurmctld does, the end is rounded down to the resolution. It rounds the start too, of
        named nodes; where nodes are counted, that would take some twice.
        """
        step_s = self.settings.bf_resolution_s
        window_end_s = self.now_s + self.settings.bf_window_s
        start_s = profile.earliest_within(request.nodes, request.limit_s, window_end_s)
        if start_s < math.inf:
            end_s = (start_s + request.limit_s) // step_s * step_s
            profile.take(start_s, max(start_s, end_s), request.nodes)
        return start_s

    def _profile(self) -> Profile:
        ends = [(job.limit_end_s, job.request.nodes) for job in self._running.values()]
        return Profile(self.now_s, self.free, [*ends, *((end_s, 1) for end_s in self._repairs)])

    def _ordered(self) -> list[Job]:
        """Waiting jobs by tier, priority and number."""
        if self.settings.fairshare_weight or len(self._partitions) > 1:
            return sorted(self._pending, key=self._rank)
        return [*self._pending]  # each comes to the end: this is the order of their waits

    def _rank(self, job: Job) -> tuple[float, float, int]:
        settings = self.settings
        age = min((self.now_s - job.queued_s) / settings.max_age_s, 1)
        share = 2 ** -(self._usage(job.request.user) / (settings.nodes * settings.half_life_s))
        priority = settings.age_weight * age + settings.fairshare_weight * share
        return -self._partitions[job.request.partition].tier, -priority, job.number

    def _usage(self, user: str) -> float:
        """Node-seconds of a user's ended jobs, halved with each half-life."""
        used, at_s = self._used.get(user, (0.0, self.now_s))
        return float(used * 0.5 ** ((self.now_s - at_s) / self.settings.half_life_s))

    # -- starts and ends

    def _start(self, job: Job) -> None:
        self._pending.remove(job)
        job.started_s, job.ended_s, job.ended = self.now_s, None, ""
        job.starts.append(self.now_s)
        self.free -= job.request.nodes
        self._running[job.number] = job
        self.jobs.append(job)
        end_s = self.now_s + min(job.request.run_s, job.request.limit_s)
        heapq.heappush(self._ends, (end_s, job.number, self.now_s))

    def _release(self, job: Job, how: str) -> None:
        del self._running[job.number]
        self.free += job.request.nodes
        job.ended_s, job.ended = self.now_s, how
        user, spent = job.request.user, job.request.nodes * (self.now_s - (job.started_s or 0))
        self._used[user] = (self._usage(user) + spent, self.now_s)

    def _requeue(self, job: Job, how: str) -> None:
        """End a job and queue it again, behind all that wait, where it allows that."""
        self._release(job, how)
        if job.request.requeue:
            job.started_s, job.ended_s, job.ended = None, None, ""
            job.queued_s = self.now_s
            self._pending.append(job)

    def _preempt_for(self, job: Job) -> bool:
        """Requeue the youngest jobs of lower tiers, if that makes room."""
        part = self._partitions[job.request.partition]
        if not part.preempts:
            return False
        victims = [
            other
            for other in reversed(self._running.values())
            if self._partitions[other.request.partition].tier < part.tier
        ]
        room = self.free
        for count, victim in enumerate(victims, 1):
            room += victim.request.nodes
            if room >= job.request.nodes:
                for chosen in victims[:count]:
                    self._requeue(chosen, PREEMPTED)
                return True
        return False

    def _next_failure(self) -> float:
        rate = self.settings.failures_per_node_day * self.settings.nodes / 86_400
        return self.now_s + self._random.expovariate(rate) if rate else math.inf

    def _fail_node(self) -> None:
        """Take a node, any one alike, and the job that runs on it, out of the cluster."""
        at = self._random.randrange(self.settings.nodes)
        for job in list(self._running.values()):
            at -= job.request.nodes
            if at < 0:
                self._requeue(job, NODE_FAIL)
                break
        if self.free:
            self.free, self.down = self.free - 1, self.down + 1
            heapq.heappush(self._repairs, self.now_s + self.settings.repair_s)
        self._failure_s = self._next_failure()


def starts(settings: Settings, requests: Sequence[Request]) -> dict[str, float]:
    """Return when each job would first start, by its name."""
    queue = Controller(settings, requests)
    queue.run()
    return {job.request.name: job.starts[0] for job in queue.jobs if len(job.starts) == 1}


def starts_with_ends(
    settings: Settings, requests: Sequence[Request], ended: Mapping[str, float]
) -> dict[str, float]:
    """Return starts of jobs that end when real ones did, however late these had started.

    A job that really started a second late then makes no other one late.

    Raises:
        ValueError: No starts fit these ends.
    """
    seen = starts(settings, requests)
    for _ in requests:
        requests = [replace(r, run_s=max(0.1, ended[r.name] - seen[r.name])) for r in requests]
        before, seen = seen, starts(settings, requests)
        if before == seen:
            return seen
    raise ValueError(f"no starts fit these ends: {ended}")
