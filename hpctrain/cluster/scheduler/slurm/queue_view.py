"""What SLURM says of starts: the queue with its planned starts, and `sbatch --test-only`.

All queries together take `VIEW_S + STARTS_S` at most, also if SLURM does not answer.
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

from hpctrain.cluster.scheduler.base import StartEstimate
from hpctrain.cluster.scheduler.slurm.command import run
from hpctrain.cluster.scheduler.slurm.parse import NOTHING, parse_count, parse_time, read_nodes
from hpctrain.core.base import clock
from hpctrain.core.settings.check import time_s
from hpctrain.errors import ClusterError, ClusterUnreachable, UsageError
from hpctrain.ledger.shapes.candidates import JobShape
from hpctrain.ledger.shapes.waits import WaitRecord
from hpctrain.ledger.shapes.windows import NodeClaim, QueueView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    return QueueView(now, frozenset(states), tuple(claims), unplanned, names, longest)


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


WAIT_FIELDS = ("JobID", "Partition", "NNodes", "TimelimitRaw", "Eligible", "Start", "State")
WAIT_DAYS = 14
"""Older waits were in another queue."""
WAIT_ROWS = 500


def ask_waits(user: str, *, timeout_s: float = VIEW_S) -> list[WaitRecord]:
    """Return the waits of a user's jobs of the last weeks by accounting; none where it is silent.

    Oldest first. A job that was requeued has a wait for each start.
    """
    words = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"]
    words += [f"--starttime=now-{WAIT_DAYS}days", f"--user={user}"]
    return read_waits(_text_of([*words, f"--format={','.join(WAIT_FIELDS)}"], timeout_s))


def read_waits(text: str) -> list[WaitRecord]:
    """The same from what sacct printed; jobs that never started have no wait."""
    waits = []
    for line in text.splitlines():
        columns = line.strip().split("|")
        if len(columns) != len(WAIT_FIELDS):
            continue
        _, partition, nodes, minutes, eligible, start, _ = columns
        since, until = parse_time(eligible), parse_time(start)
        size, limit = parse_count(nodes), parse_count(minutes)
        if since is not None and until is not None and size and limit:
            waits.append((until, WaitRecord(JobShape(size, 60 * limit), partition, until - since)))
    return [record for _, record in sorted(waits, key=lambda wait: wait[0])][-WAIT_ROWS:]


SHARE = ("sshare", "--noheader", "--parsable2", "--format=Account,User,FairShare")
LIMITS = ("Account", "Partition", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES", "GrpTRES")
ASSOCIATION = ("sacctmgr", "--noheader", "--parsable2", "show", "association")


def ask_own_limits(user: str, *, timeout_s: float = VIEW_S) -> list[str]:
    """Return what accounting says of a user, a line for each account; none where it is silent."""
    share = [*SHARE, f"--user={user}"]
    limits = [*ASSOCIATION, f"user={user}", f"format={','.join(LIMITS)}"]
    with ThreadPoolExecutor(2) as pool:
        shares, own = (pool.submit(_text_of, words, timeout_s) for words in (share, limits))
        return read_own_limits(shares.result(), own.result(), user)


def _text_of(words: list[str], timeout_s: float) -> str:
    try:
        return run(words, timeout_s=timeout_s)
    except ClusterError:  # many sites have no accounting, or no fair-share
        return ""


def read_own_limits(share: str, limits: str, user: str) -> list[str]:
    """The same from what sshare and sacctmgr printed."""
    shares: dict[str, str] = {}
    for line in share.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) == 3 and words[1] == user and words[2]:  # noqa: PLR2004 - its columns
            shares[words[0]] = f"fair-share {words[2]} of 1"
    lines = {account: [text] for account, text in shares.items()}
    for line in limits.splitlines():
        account, *values = line.strip().split("|")
        if len(values) == len(LIMITS) - 1:
            named = zip(LIMITS[1:], values, strict=True)
            lines.setdefault(account, []).extend(f"{n} {v}" for n, v in named if v)
    return [f"account {name}: {', '.join(texts) or 'no limits'}" for name, texts in lines.items()]
