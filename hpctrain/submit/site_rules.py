"""Which partition takes a job, from the limits in a site's preset. Pure.

A limit that the preset does not have is unknown, and refuses nothing: SLURM will.
tests/unit/test_site_submit.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.text import duration
from hpctrain.errors import UsageError
from hpctrain.settings.check import time_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.site.schema import Partition


@dataclass(frozen=True)
class Need:
    """What a job asks for."""

    least: int
    """Fewest nodes."""
    most: int
    gpus_per_node: int
    walltime_s: int
    cpus_per_node: int = 0
    """Of all ranks of a node; 0 where it is not said."""

    @property
    def nodes(self) -> str:
        """The nodes as the user wrote them."""
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    @property
    def text(self) -> str:
        """The whole in words: `2-4 nodes with 8 GPUs for 2 h`."""
        plural = "" if self.most == 1 else "s"
        gpus = f" with {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} node{plural}{gpus} for {duration(self.walltime_s)}"


def time_limit(partition: Partition, need: Need) -> tuple[int, str] | None:
    """Longest job in seconds, and what sets that limit; None where it is not known.

    Of a range of nodes every number must fit: SLURM decides when it starts the job.
    """
    limits = []
    if partition.max_time:
        limits.append((time_s(partition.max_time), "max_time"))
    for nodes, limit in partition.walltime_bins.items():
        low, dash, high = nodes.partition("-")
        top = int(high) if high else None if dash else int(low)
        if need.most >= int(low) and (top is None or need.least <= top):
            limits.append((time_s(limit), f"jobs of {nodes} nodes"))
    return min(limits, default=None)


def misfits(partition: Partition, need: Need, *, time: bool = True) -> list[str]:
    """Why the partition does not take the job, in words; empty where nothing speaks against it."""
    found = []
    if partition.max_nodes is not None and need.most > partition.max_nodes:
        found.append(f"at most {partition.max_nodes} nodes")
    if partition.min_nodes is not None and need.least < partition.min_nodes:
        found.append(f"at least {partition.min_nodes} nodes")
    if partition.gpus_per_node is not None and need.gpus_per_node > partition.gpus_per_node:
        found.append(f"{partition.gpus_per_node or 'no'} GPUs per node")
    if partition.cpus_per_node is not None and need.cpus_per_node > partition.cpus_per_node:
        found.append(f"{partition.cpus_per_node} usable CPUs per node")
    limit = time_limit(partition, need) if time else None
    if limit is not None and need.walltime_s > limit[0]:
        by = "" if limit[1] == "max_time" else f" ({limit[1]})"
        found.append(f"at most {duration(limit[0])}{by}")
    return found


def choose(partitions: Mapping[str, Partition], need: Need, where: str) -> tuple[str, str]:
    """The partition that a job goes to where the user named none, and why in a line.

    One that is not known to preempt comes before one that does; then the one whose nodes have the
    fewest GPUs to spare; then the preset's own order. Those with `auto = false` are left out.

    Args:
        partitions: The site's, in the order of its preset.
        need: What the job asks for.
        where: The preset, for messages.

    Raises:
        UsageError: none fits, with what each would take.
    """
    offered = {name: one for name, one in partitions.items() if one.auto}
    reasons = {name: misfits(one, need) for name, one in offered.items()}
    fitting = [name for name, why in reasons.items() if not why]
    if not fitting:
        each = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise UsageError(
            f"no partition of {where} takes {need.text} ({each}); ask for less, "
            "or name one with --partition"
        )
    best = min(fitting, key=lambda name: _rank(offered[name], need))
    others = [name for name in fitting if name != best]
    why = f"partition {best} is taken, as {where} says it takes {need.text}"
    if others:
        why += f" (so would {', '.join(others)}: --partition)"
    return best, why


def is_preemptable(partition: Partition) -> bool:
    """Whether the preset says that jobs there are preempted."""
    return partition.preemption.mode in {"requeue", "cancel", "suspend"}


def _rank(partition: Partition, need: Need) -> tuple[bool, int]:
    spare = (partition.gpus_per_node or 0) - need.gpus_per_node
    return is_preemptable(partition), max(spare, 0)
