"""Other users' jobs: recorded ones (Standard Workload Format) and a published model of such.

The model is Lublin and Feitelson's, "The workload on parallel supercomputers: modeling the
characteristics of rigid jobs", Journal of Parallel and Distributed Computing 63(11), 2003, with the
parameters that they fitted to all jobs of their logs. It has no time limits: users' limits here
are the run time divided by an accuracy that is uniform on (0, 1], as Mu'alem and Feitelson found it
(IEEE Transactions on Parallel and Distributed Systems 12(6), 2001), rounded up to a usual value.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.support.queue_sim.controller import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
USUAL_LIMITS_S = tuple(
    [minutes * MINUTE_S for minutes in (5, 15, 30)]
    + [hours * HOUR_S for hours in (1, 2, 3, 4, 6, 8, 12, 18, 24, 36, 48)]
)


# -- recorded: the Standard Workload Format


def read_swf(lines: Iterable[str], *, processors_per_node: int = 1) -> list[Request]:
    """Return the jobs of a log in the Standard Workload Format, version 2.2, by submission.

    Jobs without a run time, processors or a submission are left out; a job without a limit has its
    run time as its limit. Times count from the first submission.

    Raises:
        ValueError: A line does not have 18 numbers; the message has its number.
    """
    jobs = []
    for number, line in enumerate(lines, 1):
        text = line.split(";", 1)[0].strip()
        if text:
            jobs += _swf_job(text, number, processors_per_node)
    jobs.sort(key=lambda job: job.submit_s)
    first_s = jobs[0].submit_s if jobs else 0
    return [replace(job, submit_s=job.submit_s - first_s) for job in jobs]


def _swf_job(text: str, number: int, processors_per_node: int) -> list[Request]:
    try:
        fields = [float(field) for field in text.split()]
    except ValueError as problem:
        raise ValueError(f"line {number} of the log: {problem}") from problem
    if len(fields) != 18:
        raise ValueError(f"line {number} of the log: {len(fields)} fields, 18 expected")
    submit_s, run_s, used, wanted, limit_s, user = (fields[at] for at in (1, 3, 4, 7, 8, 11))
    processors = wanted if wanted > 0 else used
    if submit_s < 0 or run_s <= 0 or processors <= 0:
        return []
    nodes = math.ceil(processors / processors_per_node)
    return [Request(submit_s, nodes, max(limit_s, run_s), run_s, f"{user:.0f}", name=f"{number}")]


# -- the model of Lublin and Feitelson


@dataclass(frozen=True)
class _Model:
    """Parameters for all jobs, without a difference between interactive and batch ones."""

    serial: float = 0.244
    power_of_two: float = 0.576
    size_low: float = 0.8
    size_split: float = 0.86
    short_job: tuple[float, float] = (4.2, 0.94)
    long_job: tuple[float, float] = (312, 0.03)
    short_share: tuple[float, float] = (-0.0054, 0.78)
    between: tuple[float, float] = (10.2303 * 1.0225, 0.4871)
    day: tuple[float, float] = (8.1737, 3.9631)
    longest_log_s: float = 12
    longest_gap_log_s: float = 13


_BUCKETS, _DAY_BEGINS = 48, 11


def lublin(
    nodes: int, load: float, days: float, *, seed: int, max_time_s: float = 48 * HOUR_S
) -> list[Request]:
    """Return jobs for so many days that use `load` of the nodes, if none ever waited.

    The time between jobs is scaled to the load; the daily cycle stays.
    """
    rng = random.Random(seed)
    model, jobs, work_s = _Model(), [], 0.0
    while work_s < load * nodes * days * DAY_S:
        size = _size(rng, model, nodes)
        run_s = min(_run_time(rng, model, size), max_time_s)
        limit_s = _limit(rng, run_s, max_time_s)
        jobs.append(Request(0, size, limit_s, run_s, f"user{rng.randrange(50)}"))
        work_s += size * run_s
    times = _arrivals(rng, model, len(jobs), days)
    return [
        replace(job, submit_s=at_s, name=f"w{number}")
        for number, (job, at_s) in enumerate(zip(jobs, times, strict=True))
    ]


def _size(rng: random.Random, model: _Model, nodes: int) -> int:
    """Nodes of a job: one, a power of two, or any, on a two-stage uniform scale of log2."""
    kind, high = rng.random(), math.log2(nodes)
    if kind <= model.serial:
        return 1
    middle = high - 2.5
    ends = (model.size_low, middle) if rng.random() <= model.size_split else (middle, high)
    log = rng.uniform(*ends)
    if kind <= model.serial + model.power_of_two:
        log = round(log)
    return min(round(2**log), nodes)


def _run_time(rng: random.Random, model: _Model, nodes: int) -> float:
    """Seconds: two gamma distributions of the logarithm, mixed by the number of nodes."""
    slope, base = model.short_share
    share = min(max(slope * nodes + base, 0), 1)
    while True:
        chosen = model.short_job if rng.random() <= share else model.long_job
        if (log_s := rng.gammavariate(*chosen)) <= model.longest_log_s:
            return math.exp(log_s)


def _limit(rng: random.Random, run_s: float, max_time_s: float) -> float:
    wanted_s = run_s / (1 - rng.random())
    at = bisect.bisect_left(USUAL_LIMITS_S, wanted_s)
    usual_s = USUAL_LIMITS_S[at] if at < len(USUAL_LIMITS_S) else max_time_s
    return max(min(usual_s, max_time_s), run_s)


def _arrivals(rng: random.Random, model: _Model, count: int, days: float) -> Iterator[float]:
    """Times of submission: gaps of a gamma distribution, stretched where the day is quiet."""
    gaps: list[float] = []
    while len(gaps) < count:
        if (log_s := rng.gammavariate(*model.between)) <= model.longest_gap_log_s:
            gaps.append(math.exp(log_s))
    scale = days * DAY_S / sum(gaps)
    weights, bucket_s = _day_weights(model), DAY_S / _BUCKETS
    at_s = 0.0
    for gap in gaps:
        points = gap * scale
        while True:
            weight = weights[int(at_s // bucket_s) % _BUCKETS]
            room_s = (at_s // bucket_s + 1) * bucket_s - at_s
            if points <= weight * room_s:
                at_s += points / weight
                break
            points -= weight * room_s
            at_s = (at_s // bucket_s + 1) * bucket_s
        yield at_s


def _day_weights(model: _Model) -> Sequence[float]:
    """The share of each half hour of the day, 1 on average; the day begins at 5:30."""
    shape, scale = model.day
    weights = [0.0] * _BUCKETS
    for at in range(_DAY_BEGINS, _DAY_BEGINS + _BUCKETS):
        log = (shape - 1) * math.log(at) - at / scale - math.lgamma(shape)
        weights[(at - 1) % _BUCKETS] = math.exp(log - shape * math.log(scale))
    mean = sum(weights) / _BUCKETS
    return [max(weight / mean, 0.01) for weight in weights]


def scaled_to_load(jobs: Sequence[Request], nodes: int, load: float) -> list[Request]:
    """Return recorded jobs with the time between them scaled so that they use `load` of the nodes.

    Jobs that need more nodes than there are are left out.
    """
    fitting = [job for job in jobs if job.nodes <= nodes]
    work_s = sum(job.nodes * min(job.run_s, job.limit_s) for job in fitting)
    span_s = max(job.submit_s for job in fitting) - fitting[0].submit_s
    factor = work_s / (load * nodes * span_s)
    return [replace(job, submit_s=job.submit_s * factor) for job in fitting]
