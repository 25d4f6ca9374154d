"""A first preset from what SLURM tells of a cluster. Pure: facts in, TOML text out.

What SLURM does not know (interfaces, adapters, file systems) is left out with a word on how to find
it. tests/unit/site/test_draft.py holds the promises.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.site.detect import ClusterFacts, PartitionFacts

SOURCE = "slurm"
_MODES = {"REQUEUE": "requeue", "CANCEL": "cancel", "SUSPEND": "suspend", "GANG": "suspend"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def site_name(cluster: str) -> str:
    """SLURM's name of a cluster as the name of a preset."""
    name = re.sub(r"[^a-z0-9_-]+", "-", cluster.lower()).strip("-_")[:32]
    return name if re.fullmatch(r"[a-z][a-z0-9_-]+", name) else f"site-{name}".rstrip("-")


def draft(facts: ClusterFacts, *, name: str, today: str) -> str:
    """The text of a preset that says what SLURM says, each value with its source.

    Args:
        facts: Of the cluster.
        name: Of the preset.
        today: The day, as 2026-01-31.
    """
    told_by = f"scontrol and sacctmgr of {facts.name}, SLURM {facts.version}, {today}"
    lines = [
        f"# A draft from SLURM {facts.version} itself, made by `hpctrain sites init --from-slurm`.",
        "# What SLURM does not tell is left out: unknown stays unknown. To do:",
        "#   contact       who answers for this file",
        "#   [network]     `hpctrain sites probe --toml`, run on a compute node, prints a draft",
        "#   then          `hpctrain sites validate FILE` and `hpctrain sites test FILE`",
        *(f"# Could not be asked: {what}" for what in facts.unasked),
        "",
        "schema = 1",
        f"name = {_text(name)}",
        f"description = {_text(_described(facts))}",
        'contact = ""',
        f"reviewed = {_text(today)}",
        'stability = "local"',
        "",
        "[sources]",
        f"{SOURCE} = {_text(told_by)}",
        "",
        "[detect]",
        f"slurm_cluster = [{_text(re.escape(facts.name))}]",
        "",
        *_slurm(facts),
    ]
    for partition in facts.partitions:
        lines += _partition(partition, facts)
    return "\n".join(lines).rstrip("\n") + "\n"


def _described(facts: ClusterFacts) -> str:
    kinds = sorted({one.gpu for one in facts.partitions if one.gpu})
    with_gpus = f" ({', '.join(kinds)})" if kinds else ""
    count = len(facts.partitions)
    return f"{facts.name}: {count} partition{'' if count == 1 else 's'}{with_gpus}"


def _slurm(facts: ClusterFacts) -> list[str]:
    lines = ["[slurm]", f'source = "{SOURCE}"']
    if facts.has_gpus and facts.select_type not in {"", "select/cons_tres"}:
        lines.append(f'gpu_request = "gres" # {facts.select_type} knows no other way')
    if facts.job_requeue:
        lines.append("requeue = true")
    elif facts.job_requeue is False:
        lines.append("# JobRequeue=0: only jobs that ask for it are requeued, as hpctrain's do")
    if facts.kill_wait_s is not None:
        lines.append(f"kill_wait_s = {facts.kill_wait_s}")
    if facts.send_user_signal is not None:
        lines.append(f"send_user_signal = {_value(facts.send_user_signal)}")
    if facts.requeue_wait_s is not None:
        lines.append(
            f"# A requeued job waits {facts.requeue_wait_s} s (cred_expire): hpctrain help sites.md"
        )
    if facts.accounts:
        shown = ", ".join(facts.accounts[:3]) + (", ..." if len(facts.accounts) > 3 else "")  # noqa: PLR2004 - an example
        lines.append(f"# account_required = true # if jobs without one are refused; yours: {shown}")
    return [*lines, ""]


def _partition(partition: PartitionFacts, facts: ClusterFacts) -> list[str]:
    head = (
        f"partitions.{partition.name if _BARE.fullmatch(partition.name) else _text(partition.name)}"
    )
    default = ", SLURM's default" if partition.is_default else ""
    lines = [
        f"[{head}]",
        f'source = "{SOURCE}"',
        f"description = {_text(f'{partition.nodes} nodes{default}')}",
    ]
    if partition.differing:
        lines.append(f"# nodes differ: {partition.differing}")
    values: dict[str, Any] = {
        "gpus_per_node": partition.gpus_per_node or None,
        "gpu": partition.gpu or None,
        "cpus_per_node": partition.cpus_per_node,
        "mem_gib": round(partition.mem_mib / 1024, 1) if partition.mem_mib else None,
        "max_time": partition.max_time or None,
        "min_nodes": partition.min_nodes if partition.min_nodes > 1 else None,
        "max_nodes": partition.nodes if partition.max_nodes is None else partition.max_nodes,
        "exclusive": partition.exclusive or None,
    }
    lines += [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
    if partition.qos:
        lines.append(f"# its jobs are held to quality of service {partition.qos} besides their own")
    victims = [other.name for other in facts.partitions if partition.name in other.preempted_by]
    if not partition.is_up:
        lines.append("auto = false # it is not up")
    elif victims:
        lines.append(f"auto = false # preempts {', '.join(victims)}: to be asked for by name")
    return [*lines, "", f"[{head}.preemption]", *_preemption(partition, facts), ""]


def _preemption(partition: PartitionFacts, facts: ClusterFacts) -> list[str]:
    if facts.preempt_type == "preempt/qos":
        words = [f"# {line}" for line in facts.qos_preemption]
        return ['mode = "unknown" # it depends on the quality of service:', *words]
    if not partition.preempt_mode:
        return ['mode = "none"']
    mode = _text(_MODES.get(partition.preempt_mode, "unknown"))
    lines = [
        f"mode = {mode} # by {', '.join(partition.preempted_by)}",
        f"grace_s = {partition.grace_s}",
    ]
    if partition.grace_s and facts.send_user_signal:
        lines.append('signal = "SIGUSR2" # the one that the job asked for with --signal')
    elif partition.grace_s or facts.kill_wait_s:
        lines.append('signal = "SIGTERM"')
    if facts.exempt_s:
        lines.append(f"exempt_s = {facts.exempt_s}")
    return lines


def _text(value: str) -> str:
    """As TOML's basic string, which JSON's is too."""
    return json.dumps(value, ensure_ascii=False)


def _value(value: str | float | bool) -> str:
    """As TOML has it; JSON has texts, numbers and truth in the same form."""
    return _text(value) if isinstance(value, str) else json.dumps(value)
