"""Writes the configuration of a test cluster: nodes, three partitions, on free ports."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.core.base.process import PORT_BASE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
CPUS_PER_NODE = 8
KILL_WAIT_S = 8
FEW = 32
"""So many nodes are as quick as four."""
GRACE_S = 20
CLUSTER = "hpct"
ACCOUNT = "lab"


@dataclass(frozen=True)
class Shape:
    """How large a cluster is, and how patient.

    Attributes:
        nodes: Their names.
        kill_wait_s: From SIGTERM to SIGKILL.
        slurmd_timeout_s: A node that is silent for so long is down.
        message_timeout_s: Of one request between daemons.
        credential_s: So long may a step take to reach its last node.
        unkillable_s: A node that has not ended a step within so long after SIGKILL is drained.
        nodes_a_munged: Nodes have one each; a thousand that ask one at once are turned away.
        switches: The nodes on each switch, by its name, all below one switch; none for no topology.
        gpus: What each node has, `gpu:a100:2`, by its name. SLURM counts them; nobody has any.
    """

    nodes: tuple[str, ...] = NODES
    kill_wait_s: int = KILL_WAIT_S
    slurmd_timeout_s: int = 30
    message_timeout_s: int = 10
    credential_s: int = 5
    unkillable_s: int = 60
    nodes_a_munged: int = 50
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    gpus: Mapping[str, str] = field(default_factory=dict)

    def group(self, node: str) -> int:
        """Which munged a node asks; commands ask the first, with the first nodes."""
        return self.nodes.index(node) // self.nodes_a_munged

    @property
    def groups(self) -> range:
        """Of nodes that share a munged."""
        return range(-(-len(self.nodes) // self.nodes_a_munged))

    @classmethod
    def of(cls, count: int) -> Shape:
        """So many nodes, n0001 and so on; many may take their time on few CPUs."""
        names = tuple(f"n{number:04d}" for number in range(1, count + 1))
        if count <= FEW:
            return cls(names)
        return cls(
            names,
            30,
            slurmd_timeout_s=600,
            message_timeout_s=100,
            credential_s=300,
            unkillable_s=900,
        )


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


def free_range(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    while True:
        first = free_ports(1)[0]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first


@dataclass(frozen=True)
class Layout:
    """Where everything of one cluster lies, all of it under one folder."""

    folder: Path

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def topology_conf(self) -> Path:
        """Beside slurm.conf, where SLURM looks for it."""
        return self.folder / "topology.conf"

    @property
    def gres_conf(self) -> Path:
        """The same."""
        return self.folder / "gres.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "socket"

    def munge_socket_of(self, group: int) -> Path:
        """Of the munged that a group of nodes asks."""
        return self.folder / "munge" / f"socket.{group}" if group else self.munge_socket

    def slurm_conf_of(self, group: int) -> Path:
        """What a group of nodes reads: as the others', but for its munged."""
        return self.folder / f"slurm.{group}.conf" if group else self.slurm_conf

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

    def create(self, nodes: Sequence[str]) -> None:
        """Make the folders, private to us but for what other users' jobs must reach."""
        self.folder.chmod(0o755)
        for name in ("db", "log", "state", "work", "run"):
            (self.folder / name).mkdir(mode=0o700)
        for name in ("munge", "spool"):  # munged's socket, the jobs' scripts
            (self.folder / name).mkdir(mode=0o711)
        for node in nodes:
            self.spool(node).mkdir()


@dataclass(frozen=True)
class Ports:
    """The cluster's listening ports."""

    slurmctld: int
    slurmdbd: int
    slurmd: tuple[int, ...]

    @classmethod
    def pick(cls, nodes: int) -> Ports:
        first, second, *rest = free_ports(2 + nodes)
        return cls(first, second, tuple(rest))


def slurm_conf(at: Layout, ports: Ports, size: Shape, *, user: str, user_signal: bool) -> str:
    """slurm.conf; `user_signal` says whether preemption sends the job's own --signal.

    Two clusters on one machine number their jobs differently: a job's ports derive from its id.
    """
    host = socket.gethostname()
    shape = f"CPUS={CPUS_PER_NODE} Sockets=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1"
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {shape}"
        f" RealMemory=4000 State=UNKNOWN{f' Gres={size.gpus[name]}' if name in size.gpus else ''}"
        for name, port in zip(size.nodes, ports.slurmd, strict=True)
    )
    everywhere = f"Nodes={','.join(size.nodes)} State=UP MaxTime=INFINITE"
    parameters = "SlurmctldParameters=preempt_send_user_signal" if user_signal else ""
    topology = "TopologyPlugin=topology/tree" if size.switches else ""
    gres = "GresTypes=gpu" if size.gpus else ""
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports.slurmctld}
FirstJobId={ports.slurmctld}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={at.munge_socket},cred_expire={size.credential_s}
StateSaveLocation={at.folder}/state
SlurmdSpoolDir={at.folder}/spool/%n
SlurmctldPidFile={at.folder}/run/slurmctld.pid
SlurmdPidFile={at.folder}/run/%n.pid
SlurmctldLogFile={at.log("slurmctld")}
SlurmdLogFile={at.folder}/log/%n.log
SlurmctldDebug=info
SlurmdDebug=info
DebugFlags=NO_CONF_HASH
LogTimeFormat=iso8601_ms
SlurmdParameters=config_overrides
{parameters}
{topology}
{gres}
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
KillWait={size.kill_wait_s}
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout={size.slurmd_timeout_s}
MessageTimeout={size.message_timeout_s}
UnkillableStepTimeout={size.unkillable_s}
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


def topology_conf(size: Shape) -> str:
    """topology.conf: the switches, below one."""
    leaves = [f"SwitchName={name} Nodes={','.join(on)}" for name, on in size.switches.items()]
    return "\n".join([*leaves, f"SwitchName=top Switches={','.join(size.switches)}", ""])


_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""A slurmd counts the GPUs whose files are there."""


def gres_conf(size: Shape) -> str:
    """gres.conf: a device file that every machine has for each GPU."""
    lines = []
    for node, text in size.gpus.items():
        name, kind, count = text.split(":")
        lines += [
            f"NodeName={node} Name={name} Type={kind} File={path}\n"
            for path in _DEVICES[: int(count)]
        ]
    return "".join(lines)


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
