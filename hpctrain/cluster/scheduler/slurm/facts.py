"""What a live SLURM tells of itself: its partitions, the user's accounts, the queue, and starts.

Functions that begin with `read_` are pure: they take what the commands printed. All queries for the
shape of a job together take `VIEW_S + STARTS_S` at most, also if SLURM does not answer.
tests/unit/site/test_draft.py, tests/unit/scheduler/test_slurm_queue_view.py,
tests/slurm/test_sites.py and test_shapes.py hold the promises.
"""

from __future__ import annotations

import getpass
import math
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.base import PartitionNodes, StartEstimate
from hpctrain.cluster.scheduler.slurm.command import run
from hpctrain.cluster.scheduler.slurm.parse import (
    NOTHING,
    parse_config,
    parse_config_seconds,
    parse_count,
    parse_records,
    parse_time,
    read_nodes,
)
from hpctrain.cluster.site.detect import ClusterFacts, PartitionFacts
from hpctrain.core.base import clock
from hpctrain.core.settings.check import time_s
from hpctrain.errors import ClusterError, ClusterUnreachable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpctrain.ledger.shapes.queue import JobShape, NodeClaim, QueueView

FACTS_TIMEOUT_S = 20.0
ACCOUNTING_TIMEOUT_S = 5.0
PARTITION_TIMEOUT_S = 5.0
CRED_EXPIRE_S = 120
"""SLURM's default of AuthInfo=cred_expire; a requeued job waits one second longer."""
_ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "association")
_NODES_FORMAT = "%P|%D|%c|%l|%G"
_UNLIMITED = NOTHING | {"INFINITE", "NO_VAL", "infinite", "n/a"}
Record = dict[str, str]


def ask_cluster() -> ClusterFacts:
    """Ask scontrol.

    Raises:
        ClusterUnreachable: scontrol is not here, or slurmctld is silent.
    """
    config = run(["scontrol", "show", "config"], timeout_s=FACTS_TIMEOUT_S)
    partitions = run(["scontrol", "show", "partition"], timeout_s=FACTS_TIMEOUT_S)
    nodes = run(["scontrol", "show", "node"], timeout_s=FACTS_TIMEOUT_S)
    return read_facts(config, partitions, nodes)


def of_user(column: str) -> frozenset[str] | None:
    """What accounting says of the user in a column, such as Account or QOS.

    None where it cannot be asked, or knows nothing of them.
    """
    words = [*_ASSOCIATIONS, f"user={getpass.getuser()}", f"format={column}"]
    text = _text_of(words, ACCOUNTING_TIMEOUT_S)
    names = (name for line in text.splitlines() for name in line.strip().split(","))
    return frozenset(filter(None, names)) or None


def cpus_per_gpu(partition: str) -> int | None:
    """CPUs that a job gets for each GPU where it asks for none; None where nobody can say.

    `partition` as in `ask_queue`.
    """
    config, partitions = (_shown(what) for what in ("config", "partition"))
    return read_cpus_per_gpu(config, partitions, partition) if config else None


def read_cpus_per_gpu(config: str, partitions: str, partition: str) -> int | None:
    """The same from what was printed: a partition's own default comes before the cluster's.

    Of several partitions the one that gives least, since SLURM chooses. 0 where there is none.
    """
    chosen = _chosen(partitions, partition)
    general = _def_cpus(parse_config(config).get("JobDefaults", ""))
    numbers = [_def_cpus(record.get("JobDefaults", "")) or general for record in chosen]
    return min(numbers, default=None)


def machines(partition: str) -> frozenset[str] | None:
    """What the nodes of a partition are, as `uname -m` says it; None where nobody can say.

    `partition` as in `ask_queue`.
    """
    return read_machines(_shown("partition"), _shown("node"), partition) or None


def _shown(what: str) -> str:
    return _text_of(["scontrol", "show", what], PARTITION_TIMEOUT_S)


def read_machines(partitions: str, nodes: str, partition: str) -> frozenset[str]:
    """The same from what was printed; a node that never registered says nothing."""
    own = {name for record in _chosen(partitions, partition) for name in _nodes(record)}
    records = [r for r in _records(nodes, "NodeName") if r["NodeName"] in own]
    return frozenset(record["Arch"] for record in records if record.get("Arch"))


def partitions() -> dict[str, PartitionNodes] | None:
    """What the partitions have that a user sees, by name; None where nobody can say."""
    text = _text_of(["sinfo", "--noheader", f"--format={_NODES_FORMAT}"], PARTITION_TIMEOUT_S)
    return read_partitions(text) if text else None


def read_partitions(text: str) -> dict[str, PartitionNodes]:
    """The same from what sinfo printed: a line for each kind of node, the default with a star."""
    by_name: dict[str, PartitionNodes] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != _NODES_FORMAT.count("|") + 1:
            continue
        name, nodes, cpus, limit, gres = words
        gpus, kind = _gpus(gres)
        before = by_name.get(name.rstrip("*"), PartitionNodes(name.endswith("*"), 0, 0, 0, (), ""))
        by_name[name.rstrip("*")] = replace(
            before,
            nodes=before.nodes + (parse_count(nodes) or 0),
            cpus=max(before.cpus, parse_count(cpus.rstrip("+")) or 0),
            gpus=max(before.gpus, gpus),
            gpu_types=tuple(sorted({*before.gpu_types, kind} - {""})),
            max_time="" if limit in _UNLIMITED else limit,
        )
    return by_name


def srun_help() -> str | None:
    """What `srun --help` prints, plugins' options with it; None where there is no srun."""
    return _text_of(["srun", "--help"], PARTITION_TIMEOUT_S) or None


def read_facts(config: str, partitions: str, nodes: str) -> ClusterFacts:
    """A cluster's facts from what `scontrol show config`, `partition` and `node` printed."""
    settings = parse_config(config)
    by_name = {record["NodeName"]: record for record in _records(nodes, "NodeName")}
    records = _records(partitions, "PartitionName")
    preempt_type = settings.get("PreemptType", "")
    facts = [_partition(record, by_name) for record in records]
    if preempt_type == "preempt/partition_prio":
        facts = [_with_preemption(one, record, records, by_name)
                 for one, record in zip(facts, records, strict=True)]  # fmt: skip
    expire = re.search(r"cred_expire=(\d{1,9})", settings.get("AuthInfo", ""))
    words = settings.get("SchedulerParameters", "")
    delay = re.search(r"requeue_delay=(\d{1,9})", words) or expire  # since 25.11
    signal_words = settings.get("SlurmctldParameters", "") + settings.get("PreemptParameters", "")
    requeue = settings.get("JobRequeue")
    kill_wait = parse_config_seconds(config, "KillWait")
    return ClusterFacts(
        name=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=tuple(facts),
        preempt_type=preempt_type,
        job_requeue=None if requeue is None else requeue == "1",
        kill_wait_s=None if kill_wait is None else int(kill_wait),
        send_user_signal="send_user_signal" in signal_words,
        requeue_wait_s=1 + (int(delay[1]) if delay else CRED_EXPIRE_S),
        select_type=settings.get("SelectType", ""),
        has_gpus="gpu" in settings.get("GresTypes", "").split(","),
    )


def _chosen(partitions: str, partition: str) -> list[Record]:
    """The partitions that a job names, or the default one."""
    names = frozenset(partition.split(",")) if partition else None
    return [
        record
        for record in _records(partitions, "PartitionName")
        if (record["PartitionName"] in names if names else record.get("Default") == "YES")
    ]


def _def_cpus(defaults: str) -> int:
    named = re.search(r"\bDefCpuPerGPU=(\d{1,9})\b", defaults, re.IGNORECASE)
    return int(named[1]) if named else 0


def _records(text: str, head: str) -> list[Record]:
    """The records that scontrol printed, one dict of fields each."""
    return [record for record in parse_records(text) if head in record]


def _partition(record: Record, by_name: dict[str, Record]) -> PartitionFacts:
    own = [by_name[name] for name in _nodes(record) if name in by_name]
    gpus = {_gpus(node.get("Gres", "")) for node in own}
    counts, kinds = {count for count, _ in gpus}, {kind for _, kind in gpus}
    cpus = {parse_count(node.get("CPUEfctv") or node.get("CPUTot") or "") or 0 for node in own}
    memory = {
        (parse_count(node.get("RealMemory", "")) or 0)
        - (parse_count(node.get("MemSpecLimit", "")) or 0)
        for node in own
    }
    sets = (("GPUs", counts), ("CPUs", cpus), ("memory", memory))
    limit = record.get("MaxTime", "")
    return PartitionFacts(
        name=record["PartitionName"],
        is_default=record.get("Default") == "YES",
        is_up=record.get("State", "UP") == "UP",
        max_time="" if limit in _UNLIMITED else limit,
        min_nodes=parse_count(record.get("MinNodes", "")) or 0,
        max_nodes=parse_count(record.get("MaxNodes", "")),
        nodes=len(own) or parse_count(record.get("TotalNodes", "")) or 0,
        cpus_per_node=min(cpus, default=0) or None,
        mem_mib=min(memory, default=0) or None,
        gpus_per_node=next(iter(counts)) if len(counts) == 1 else None,
        gpu=next(iter(kinds)) if len(kinds) == 1 else "",
        differing=", ".join(_spread(what, found) for what, found in sets if len(found) > 1),
        grace_s=parse_count(record.get("GraceTime", "")) or 0,
        qos="" if record.get("QoS", "N/A") in _UNLIMITED else record["QoS"],
        exclusive=_is_exclusive(record),
    )


def _is_exclusive(record: Record) -> bool:
    """Whether jobs get whole nodes; since 26.05 a word of its own says so."""
    shared, alone = record.get("OverSubscribe", ""), record.get("Exclusive", "")
    return shared.startswith("EXCLUSIVE") or alone in {"NODE", "TOPO"}


def _spread(what: str, numbers: set[int]) -> str:
    """How far nodes differ: `GPUs 4 to 8`."""
    return f"{what} {min(numbers)} to {max(numbers)}"


def _with_preemption(
    partition: PartitionFacts, record: Record, records: Sequence[Record], by_name: dict[str, Record]
) -> PartitionFacts:
    """With what preempts its jobs: partitions of a higher tier that share one of its nodes."""
    mode = record.get("PreemptMode", "").split(",")[-1]
    own, tier = (
        set(_nodes(record)) & by_name.keys(),
        parse_count(record.get("PriorityTier", "")) or 0,
    )
    above = [
        other["PartitionName"]
        for other in records
        if (parse_count(other.get("PriorityTier", "")) or 0) > tier and own & set(_nodes(other))
    ]
    if mode == "OFF" or not above:
        return partition
    return replace(partition, preempt_mode=mode, preempted_by=tuple(above))


def _nodes(record: Record) -> list[str]:
    named = record.get("Nodes", "")
    return [] if named in _UNLIMITED else read_nodes(named)


def _gpus(gres: str) -> tuple[int, str]:
    """Number and type of the GPUs in a node's Gres: `gpu:a100:4(S:0-1),nvme:1`."""
    count, kinds = 0, set()
    for entry in re.sub(r"\([^()]*\)", "", gres).split(","):
        name, *rest = entry.split(":")
        if name == "gpu":
            count += (parse_count(rest[-1]) or 1) if rest and rest[-1].isdecimal() else 1
            kinds.add(rest[0] if rest and not rest[0].isdigit() else "")
    return count, kinds.pop() if len(kinds) == 1 else ""


VIEW_S, STARTS_S = 2.0, 3.0
NEVER_S = 300 * 86400.0
"""A start so far away is SLURM's word for "not as things are"."""
NODES_FORMAT = "%P|%N|%t|%l"
JOBS_FORMAT = "%i|%T|%P|%N|%Y|%S|%e|%l"
_TAKES_JOBS = re.compile(r"(idle|alloc|mix|comp|plnd)[a-z]*[*~#!%@^+-]?")
_TO_START = re.compile(r"to start at (\S+)")
_HOLDS = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING"})


def ask_queue(partition: str, *, timeout_s: float = VIEW_S) -> QueueView | None:
    """Return what this user sees of a partition; None where nobody answers, or it has no nodes.

    `partition` is a name, or several with commas between them; "" for the default one. `timeout_s`
    is of each of the two queries, which are put at once.
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
    from hpctrain.ledger.shapes.queue import NodeClaim, QueueView

    states, limits = _read_nodes(nodes, partition)
    if not limits:
        return None
    claims: list[NodeClaim] = []
    for line in jobs.splitlines():
        columns = line.strip().split("|")
        if len(columns) != JOBS_FORMAT.count("|") + 1:
            continue
        job_id, state, _, held, planned, start, end, limit = columns
        claim = _claim(job_id, state, (held, planned), (start, end, limit), now)
        if claim is not None and claim.nodes & states.keys():
            claims.append(claim)
    # Sites may show users nobody else's jobs: such a node is taken for nobody knows how long.
    taken = frozenset(node for node, state in states.items() if not state.startswith("idle"))
    unseen = taken.difference(*(claim.nodes for claim in claims))
    if unseen:
        claims.append(NodeClaim("", unseen, now, math.inf))
    longest = None if any(limit in _UNLIMITED for limit in limits) else max(map(time_s, limits))
    return QueueView(now, frozenset(states), tuple(claims), longest)


def _read_nodes(text: str, partition: str) -> tuple[dict[str, str], list[str]]:
    """The states of the nodes that take jobs, and their partitions' time limits."""
    names = partition.split(",")
    states: dict[str, str] = {}
    limits: list[str] = []
    for line in text.splitlines():
        columns = line.strip().split("|")
        if len(columns) != NODES_FORMAT.count("|") + 1:
            continue
        name, node, state, limit = columns
        if (name.rstrip("*") in names) if partition else name.endswith("*"):
            limits.append(limit)
            if _TAKES_JOBS.fullmatch(state):
                states[node] = state
    return states, limits


def _claim(
    job_id: str, state: str, nodes: tuple[str, str], times: tuple[str, str, str], now: float
) -> NodeClaim | None:
    """The nodes that a job has or is to get; None where SLURM names none."""
    from hpctrain.ledger.shapes.queue import NodeClaim

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

    `timeout_s` is for all of them together.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-shapes-") as folder:
        paths = {shape: Path(folder) / f"{n}.sh" for n, shape in enumerate(scripts)}
        for shape, path in paths.items():
            path.write_text(scripts[shape], errors="surrogateescape")
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


def _text_of(words: list[str], timeout_s: float) -> str:
    try:
        return run(words, timeout_s=timeout_s)
    except ClusterError:  # many sites have no accounting
        return ""
