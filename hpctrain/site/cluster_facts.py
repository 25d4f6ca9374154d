"""What a live SLURM tells of itself: the source of a preset's draft. Plain data.

A value that SLURM does not tell, or tells differently for different nodes, is None or "".
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PartitionFacts:
    """One partition."""

    name: str
    is_default: bool = False
    is_up: bool = True
    max_time: str = ""
    """SLURM's form, "" where there is no limit."""
    min_nodes: int = 0
    max_nodes: int | None = None
    nodes: int = 0
    """How many there are."""
    cpus_per_node: int | None = None
    """As SLURM counts them, less what it keeps for itself; the fewest of all nodes."""
    mem_mib: int | None = None
    gpus_per_node: int | None = None
    """None where nodes differ."""
    gpu: str = ""
    """Their type, where all have one."""
    differing: str = ""
    """What differs between its nodes, in words."""
    preempt_mode: str = ""
    """SLURM's word; "" where nothing can preempt a job here."""
    preempted_by: tuple[str, ...] = ()
    grace_s: int = 0
    qos: str = ""
    exclusive: bool = False


@dataclass(frozen=True)
class ClusterFacts:
    """The whole cluster."""

    name: str
    version: str = ""
    partitions: tuple[PartitionFacts, ...] = ()
    preempt_type: str = ""
    """preempt/none, preempt/partition_prio, preempt/qos."""
    qos_preemption: tuple[str, ...] = ()
    """With preempt/qos, in words: who preempts whom, how."""
    exempt_s: int = 0
    job_requeue: bool | None = None
    kill_wait_s: int | None = None
    send_user_signal: bool | None = None
    requeue_wait_s: int | None = None
    """For which a requeued job waits."""
    select_type: str = ""
    has_gpus: bool = False
    accounts: tuple[str, ...] = ()
    """Those of the user who asks."""
    unasked: tuple[str, ...] = field(default=())
    """What could not be asked, in words."""
