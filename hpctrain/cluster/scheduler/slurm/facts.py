"""Facts of a live SLURM: what a site's preset can be drafted from.

`read_facts` is pure: it takes what scontrol and sacctmgr printed. tests/unit/site/test_draft.py
holds its promises, tests/slurm/test_sites.py those against the real thing.
"""

from __future__ import annotations

import getpass
import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.base import PartitionNodes
from hpctrain.cluster.scheduler.slurm.command import run
from hpctrain.cluster.scheduler.slurm.parse import (
    NOTHING,
    parse_config,
    parse_config_seconds,
    parse_count,
    read_nodes,
)
from hpctrain.cluster.site.detect import ClusterFacts, PartitionFacts
from hpctrain.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FACTS_TIMEOUT_S = 20.0
ACCOUNTING_TIMEOUT_S = 5.0
PARTITION_TIMEOUT_S = 5.0
CRED_EXPIRE_S = 120
"""SLURM's default of AuthInfo=cred_expire; a requeued job waits one second longer."""
_ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "association")
_QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,Preempt,PreemptMode")
_NAME = re.compile(r"(?:^|\s)(\w+)=")
_NODES_FORMAT = "%P|%D|%c|%l|%G"
_UNLIMITED = NOTHING | {"INFINITE", "NO_VAL"}
Record = dict[str, str]


def ask_cluster() -> ClusterFacts:
    """Ask scontrol, and sacctmgr where it answers.

    Raises:
        ClusterUnreachable: scontrol is not here, or slurmctld is silent.
    """
    config = run(["scontrol", "show", "config"], timeout_s=FACTS_TIMEOUT_S)
    partitions = run(["scontrol", "show", "partition"], timeout_s=FACTS_TIMEOUT_S)
    nodes = run(["scontrol", "show", "node"], timeout_s=FACTS_TIMEOUT_S)
    facts = read_facts(config, partitions, nodes)
    try:
        facts = replace(facts, accounts=tuple(sorted(_column("Account"))))
        if facts.preempt_type == "preempt/qos":
            text = run(_QOS, timeout_s=ACCOUNTING_TIMEOUT_S)
            facts = replace(facts, qos_preemption=read_qos(text))
    except ClusterError as error:
        facts = replace(facts, unasked=(f"accounting ({error})",))
    return facts


def accounts() -> frozenset[str] | None:
    """Accounts of the user; None where accounting cannot be asked or knows nothing of them."""
    return _asked("Account")


def qos() -> frozenset[str] | None:
    """Qualities of service that the user has; None as for `accounts`."""
    return _asked("QOS")


def cpus_per_gpu(partition: str) -> int | None:
    """CPUs that a job gets for each GPU where it asks for none; None where nobody can say.

    Args:
        partition: Its name, or several with commas between them; "" for the default one.
    """
    try:
        partitions = run(["scontrol", "show", "partition"], timeout_s=PARTITION_TIMEOUT_S)
        config = run(["scontrol", "show", "config"], timeout_s=PARTITION_TIMEOUT_S)
    except ClusterError:
        return None
    return read_cpus_per_gpu(config, partitions, partition)


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

    Args:
        partition: Its name, or several with commas between them; "" for the default one.
    """
    try:
        partitions = run(["scontrol", "show", "partition"], timeout_s=PARTITION_TIMEOUT_S)
        nodes = run(["scontrol", "show", "node"], timeout_s=PARTITION_TIMEOUT_S)
    except ClusterError:
        return None
    return read_machines(partitions, nodes, partition) or None


def read_machines(partitions: str, nodes: str, partition: str) -> frozenset[str]:
    """The same from what was printed; a node that never registered says nothing."""
    own = {name for record in _chosen(partitions, partition) for name in _nodes(record)}
    records = [r for r in _records(nodes, "NodeName") if r["NodeName"] in own]
    return frozenset(record["Arch"] for record in records if record.get("Arch"))


def partitions() -> dict[str, PartitionNodes] | None:
    """What the partitions have that a user sees, by name; None where nobody can say."""
    try:
        text = run(
            ["sinfo", "--noheader", f"--format={_NODES_FORMAT}"], timeout_s=PARTITION_TIMEOUT_S
        )
    except ClusterError:
        return None
    return read_partitions(text)


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
            max_time="" if limit in _UNLIMITED or limit == "infinite" else limit,
        )
    return by_name


def srun_help() -> str | None:
    """What `srun --help` prints, plugins' options with it; None where there is no srun."""
    try:
        return run(["srun", "--help"], timeout_s=PARTITION_TIMEOUT_S)
    except ClusterError:
        return None


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
    # since 25.11
    words = settings.get("SchedulerParameters", "")
    delay = re.search(r"requeue_delay=(\d{1,9})", words) or expire
    signal_words = settings.get("SlurmctldParameters", "") + settings.get("PreemptParameters", "")
    requeue = settings.get("JobRequeue")
    kill_wait = parse_config_seconds(config, "KillWait")
    return ClusterFacts(
        name=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=tuple(facts),
        preempt_type=preempt_type,
        exempt_s=_seconds(settings.get("PreemptExemptTime", "")),
        job_requeue=None if requeue is None else requeue == "1",
        kill_wait_s=None if kill_wait is None else int(kill_wait),
        send_user_signal="send_user_signal" in signal_words,
        requeue_wait_s=1 + (int(delay[1]) if delay else CRED_EXPIRE_S),
        select_type=settings.get("SelectType", ""),
        has_gpus="gpu" in settings.get("GresTypes", "").split(","),
    )


def read_qos(text: str) -> tuple[str, ...]:
    """Which quality of service preempts which, in words, from sacctmgr's rows."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 2]  # noqa: PLR2004 - three columns
    mode = {name: how for name, _, how, *_ in rows}
    return tuple(
        f"{name} preempts {victim} ({mode.get(victim) or 'cluster'})"
        for name, victims, *_ in rows
        for victim in victims.split(",")
        if victim
    )


def _asked(column: str) -> frozenset[str] | None:
    try:
        return frozenset(_column(column)) or None
    except ClusterError:  # many sites have no accounting: SLURM itself refuses what is wrong then
        return None


def _column(name: str) -> set[str]:
    text = run(
        [*_ASSOCIATIONS, f"user={getpass.getuser()}", f"format={name}"],
        timeout_s=ACCOUNTING_TIMEOUT_S,
    )
    return {word for line in text.splitlines() for word in line.strip().split(",") if word}


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
    blocks = re.split(rf"^(?={head}=)", text, flags=re.MULTILINE)
    return [
        {key: value for line in block.splitlines() for key, value in _pairs(line)}
        for block in blocks
        if block.startswith(f"{head}=")
    ]


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    """The fields of a line; a value ends where the next name begins."""
    for name, following in pairwise([*_NAME.finditer(line), None]):
        if name is not None:
            end = len(line) if following is None else following.start()
            yield name[1], line[name.end() : end].strip()


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


def _seconds(text: str) -> int:
    """Seconds of [days-]hours:minutes:seconds; 0 for anything else."""
    parts = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9}):(\d\d):(\d\d)", text)
    if parts is None:
        return 0
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
