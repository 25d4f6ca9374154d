"""Writes the configuration of a test cluster: four nodes, three partitions, on free ports."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.base.process import PORT_BASE

if TYPE_CHECKING:
    from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
CPUS_PER_NODE = 8
KILL_WAIT_S = 8
GRACE_S = 20
CLUSTER = "hpct"
ACCOUNT = "lab"
_PORTS = range(10_000, PORT_BASE)
"""Below hpctrain's own, and Linux's ephemeral range: neither a job of the cluster beside this one
nor an outgoing connection takes a daemon's port."""


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on, at random so that two clusters differ."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))  # as the daemons do: a listener on any address is in the way
            except OSError:
                continue  # taken
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"only {len(found)} of {count} ports are free in {_PORTS}")


@dataclass(frozen=True)
class Layout:
    """Where everything of one cluster lies, all of it under one folder."""

    folder: Path

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    @property
    def munge_key(self) -> Path:
        return self.folder / "munge" / "key"

    @property
    def database(self) -> Path:
        return self.folder / "db" / "data"

    @property
    def database_socket(self) -> Path:
        return self.folder / "db" / "socket"

    @property
    def work(self) -> Path:
        """Working folder of the jobs that the cluster itself submits."""
        return self.folder / "work"

    def log(self, daemon: str) -> Path:
        return self.folder / "log" / f"{daemon}.log"

    def out(self, daemon: str) -> Path:
        """What the daemon says on stdout and stderr."""
        return self.folder / "log" / f"{daemon}.out"

    def spool(self, node: str) -> Path:
        return self.folder / "spool" / node

    def create(self) -> None:
        """Make the folders, private to us but for what other users' jobs must reach."""
        self.folder.chmod(0o755)
        for name in ("db", "log", "state", "work", "run"):
            (self.folder / name).mkdir(mode=0o700)
        for name in ("munge", "spool"):  # munged's socket, the jobs' scripts
            (self.folder / name).mkdir(mode=0o711)
        for node in NODES:
            self.spool(node).mkdir()


@dataclass(frozen=True)
class Ports:
    """The cluster's listening ports."""

    slurmctld: int
    slurmdbd: int
    slurmd: tuple[int, ...]

    @classmethod
    def pick(cls) -> Ports:
        first, second, *rest = free_ports(2 + len(NODES))
        return cls(first, second, tuple(rest))


def slurm_conf(at: Layout, ports: Ports, *, user: str, user_signal: bool) -> str:
    """slurm.conf; `user_signal` says whether preemption sends the job's own --signal.

    Two clusters on one machine number their jobs differently: a job's ports derive from its id.
    """
    host = socket.gethostname()
    shape = f"CPUS={CPUS_PER_NODE} Sockets=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1"
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {shape}"
        " RealMemory=4000 State=UNKNOWN"
        for name, port in zip(NODES, ports.slurmd, strict=True)
    )
    everywhere = f"Nodes={','.join(NODES)} State=UP MaxTime=INFINITE"
    parameters = "SlurmctldParameters=preempt_send_user_signal" if user_signal else ""
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports.slurmctld}
FirstJobId={ports.slurmctld}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={at.munge_socket},cred_expire=5
StateSaveLocation={at.folder}/state
SlurmdSpoolDir={at.folder}/spool/%n
SlurmctldPidFile={at.folder}/run/slurmctld.pid
SlurmdPidFile={at.folder}/run/%n.pid
SlurmctldLogFile={at.log("slurmctld")}
SlurmdLogFile={at.folder}/log/%n.log
SlurmctldDebug=info
SlurmdDebug=info
LogTimeFormat=iso8601_ms
SlurmdParameters=config_overrides
{parameters}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillOnBadExit=0
KillWait={KILL_WAIT_S}
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=30
MessageTimeout=10
InactiveLimit=0
TreeWidth=64
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports.slurmdbd}
AccountingStoragePass={at.munge_socket}
{nodes}
PartitionName=work {everywhere} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=grace {everywhere} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}
PartitionName=urgent {everywhere} PriorityTier=10 PreemptMode=OFF
"""


def slurmdbd_conf(at: Layout, ports: Ports, *, user: str) -> str:
    """slurmdbd.conf; the database's socket comes to it through MYSQL_UNIX_PORT."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={at.munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports.slurmdbd}
SlurmUser={user}
LogFile={at.log("slurmdbd")}
PidFile={at.folder}/run/slurmdbd.pid
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm_acct
"""
