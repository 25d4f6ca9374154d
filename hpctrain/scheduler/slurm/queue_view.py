"""What SLURM says of starts: the queue with its planned starts, and `sbatch --test-only`.

All questions together take `VIEW_S + STARTS_S` at most, whoever is silent.
tests/unit/scheduler/test_slurm_queue_view.py holds the promises, tests/slurm/test_shapes.py those
against the real thing.
"""

from __future__ import annotations

import math
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.errors import ClusterError, ClusterUnreachable, UsageError
from hpctrain.scheduler.base import StartEstimate
from hpctrain.scheduler.slurm.command import run
from hpctrain.scheduler.slurm.parse import NOTHING, parse_time, read_nodes
from hpctrain.settings.check import time_s
from hpctrain.shapes.windows import NodeClaim, QueueView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.shapes.candidates import JobShape

VIEW_S, STARTS_S = 2.0, 3.0
NEVER_S = 300 * 86400.0
"""A start so far away is SLURM's word for "not as things are"."""
NODES_FORMAT = "%P|%N|%t|%l"
JOBS_FORMAT = "%i|%T|%P|%N|%Y|%S|%e|%l"
_TAKES_JOBS = re.compile(r"(idle|alloc|mix|comp|plnd)[a-z]*[*~#!%@^-]?")
_TO_START = re.compile(r"to start at (\S+)")
_HOLDS = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING"})


def ask_queue(partition: str, *, timeout_s: float = VIEW_S) -> QueueView | None:
    """Return what this user sees of a partition; None where nobody answers, or it has no nodes.

    Args:
        partition: Its name, or several with commas between them; "" for the default one.
        timeout_s: Of each of the two questions, which are put at once.
    """
    nodes = ("sinfo", "--noheader", "--Node", f"--format={NODES_FORMAT}")
    jobs = ("squeue", "--noheader", "--states=all", f"--format={JOBS_FORMAT}")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(run, words, timeout_s=timeout_s) for words in (nodes, jobs)]
        try:
            texts = [answer.result() for answer in asked]
        except ClusterError:
            return None
    return read_queue(texts[0], texts[1], partition, now=clock.now())


def read_queue(nodes: str, jobs: str, partition: str, *, now: float) -> QueueView | None:
    """The same from what sinfo and squeue printed."""
    states, limits, names = _read_nodes(nodes, partition)
    if not limits:
        return None
    claims: list[NodeClaim] = []
    unplanned = 0
    for line in jobs.splitlines():
        columns = line.strip().split("|")
        if len(columns) != JOBS_FORMAT.count("|") + 1:
            continue
        job_id, state, where, held, planned, start, end, limit = columns
        claim = _claim(job_id, state, (held, planned), (start, end, limit), now)
        if claim is not None and claim.nodes & states.keys():
            claims.append(claim)
        elif claim is None and state == "PENDING" and names & set(where.split(",")):
            unplanned += 1
    # Sites may show users nobody else's jobs: such a node is taken for nobody knows how long.
    taken = frozenset(node for node, state in states.items() if not state.startswith("idle"))
    unseen = taken.difference(*(claim.nodes for claim in claims))
    if unseen:
        claims.append(NodeClaim("", unseen, now, math.inf))
    longest = None if any(limit in _UNLIMITED for limit in limits) else max(map(time_s, limits))
    return QueueView(now, frozenset(states), tuple(claims), unplanned, longest)


def _read_nodes(text: str, partition: str) -> tuple[dict[str, str], list[str], frozenset[str]]:
    """The states of the nodes that take jobs, their partitions' time limits and names."""
    names = frozenset(partition.split(",")) if partition else frozenset()
    states: dict[str, str] = {}
    limits: list[str] = []
    for line in text.splitlines():
        columns = line.strip().split("|")
        if len(columns) != NODES_FORMAT.count("|") + 1:
            continue
        name, node, state, limit = columns
        if (name.rstrip("*") in names) if partition else name.endswith("*"):
            names |= {name.rstrip("*")}
            limits.append(limit)
            if _TAKES_JOBS.fullmatch(state):
                states[node] = state
    return states, limits, names


_UNLIMITED = NOTHING | {"infinite", "INFINITE", "n/a"}


def _claim(
    job_id: str, state: str, nodes: tuple[str, str], times: tuple[str, str, str], now: float
) -> NodeClaim | None:
    """The nodes that a job has or is to get; None where SLURM names none."""
    held, planned = nodes
    start, end = parse_time(times[0]), parse_time(times[1])
    if state in _HOLDS and held not in NOTHING:
        return NodeClaim(job_id, frozenset(read_nodes(held)), now, max(end or math.inf, now + 1.0))
    if state != "PENDING" or planned in NOTHING or start is None:
        return None
    until = math.inf
    if times[2] not in _UNLIMITED:
        try:
            until = start + time_s(times[2])
        except UsageError:  # a form that nobody has seen: as if it had no limit
            until = math.inf
    return NodeClaim(job_id, frozenset(read_nodes(planned)), max(start, now), until)


def ask_starts(
    scripts: Mapping[JobShape, str],
    *,
    timeout_s: float = STARTS_S,
    ask: Callable[..., str] = run,
) -> dict[JobShape, StartEstimate]:
    """Return what `sbatch --test-only` says of each script, all asked at once.

    Args:
        scripts: A batch script for each shape.
        timeout_s: For all of them together.
        ask: Runs a command of SLURM's, as `command.run`.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-shapes-") as folder:
        paths = {shape: Path(folder) / f"{n}.sh" for n, shape in enumerate(scripts)}
        for shape, path in paths.items():
            path.write_text(scripts[shape])
        with ThreadPoolExecutor(max(1, len(paths))) as pool:
            asked = {s: pool.submit(_ask_start, p, timeout_s, ask) for s, p in paths.items()}
            return {shape: answer.result() for shape, answer in asked.items()}


def _ask_start(script: Path, timeout_s: float, ask: Callable[..., str]) -> StartEstimate:
    command = ["sbatch", "--test-only", str(script)]
    try:
        return read_start(ask(command, timeout_s=timeout_s, errors=True), now=clock.now())
    except ClusterUnreachable as error:
        return StartEstimate(unknown=str(error))
    except ClusterError as error:
        return StartEstimate(refused=str(error))


def read_start(text: str, *, now: float) -> StartEstimate:
    """The same from what sbatch printed."""
    match = _TO_START.search(text)
    start = parse_time(match[1]) if match else None
    if start is None:
        said = " ".join(text.split())[:80]
        return StartEstimate(unknown=f"sbatch --test-only named no start: {said!r}")
    if start - now > NEVER_S:
        return StartEstimate(unknown="sbatch --test-only names a start that never comes")
    return StartEstimate(wait_s=max(0.0, start - now))
