"""Records that travel between the login node, the batch script and the ranks.

Standard library only; nothing here knows SLURM, torch or the disk. The tests are those of the rooms
that use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


TERMINAL_JOB = "pid-"
"""Beginning of the job id of a run whose ranks no agent started, as torchrun by hand."""
COPIES_PER_RANK = 2
"""Copies of its state that a node's memory holds of each rank (`alive.memory`)."""
HANG = "hang"
"""The kind of a failure that was seen from outside: ranks that do nothing any more."""
DESYNC = "desync"
"""The same of ranks that call other collectives than the others."""
INCIDENT = "incident"
"""News of what happens in the middle of an attempt, and not of its end."""


class EndReason(StrEnum):
    """Why an attempt ended: a closed set; contributing.md says what another one needs."""

    COMPLETED = "completed"
    """The program returned; the run is done."""
    PREEMPTED = "preempted"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    """scancel, or `hpctrain cancel`; never requeued."""
    STOPPED = "stopped"
    """`hpctrain cancel --save`: saved, left, never requeued."""
    NODE_FAILED = "node_failed"
    CRASHED = "crashed"
    """A rank or an agent died, by a signal or by an error after progress."""
    STORAGE_FAILED = "storage_failed"
    """The file system refused what the run needs, for longer than it waits; it may come back."""
    USER_ERROR = "user_error"
    """The program raised what it would raise at every start: starting again cannot help."""
    REQUEUED = "requeued"
    """Requeued from outside (scontrol requeue), for a reason that SLURM does not tell."""
    FENCED = "fenced"
    """A newer attempt took the run over."""
    UNKNOWN = "unknown"


class Next(StrEnum):
    """What follows an attempt."""

    REQUEUE = "requeue"
    """The job asks SLURM to run it again."""
    LEAVE = "leave"
    """SLURM requeues by itself: only leave."""
    RESTART = "restart"
    """The agents start the ranks again inside this allocation."""
    STOP = "stop"
    """Nothing follows."""
    ASK_BATCH = "ask_batch"
    """SLURM could not be asked from here; the batch side decides."""


class StopCause(StrEnum):
    """What asked for a stop."""

    TERM = "sigterm"
    WARNING = "sigusr2"
    CLOCK = "clock"
    USER = "user"
    """`hpctrain cancel --save`."""
    INTERRUPT = "sigint"


class JobState(StrEnum):
    """Where a job stands: a closed set, into which each scheduler translates its own words."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    """It has its nodes, and they are being made ready."""
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    """It keeps its nodes, and its processes stand still until the scheduler lets them continue."""
    COMPLETING = "COMPLETING"
    """The scheduler ends its processes, which may still write."""
    REQUEUED = "REQUEUED"
    """That start is over, and the job waits for its next."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMEOUT"
    NODE_FAILED = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """A node's memory, not a GPU's."""
    PREEMPTED = "PREEMPTED"
    OVER = "OVER"
    """No process of it is left, and the scheduler says no more than that."""


NODE_DOWN = "NodeDown"
"""`JobFacts.reason` where a job is run again because one of its nodes died. SLURM's own record says
None then, as it does after a preemption (measured on 22.05)."""


@dataclass(frozen=True)
class JobFacts:
    """What the scheduler says of our own job, asked from inside it.

    Times are seconds since the epoch. None means "the scheduler did not say".
    """

    state: JobState
    restarts: int | None = None
    reason: str | None = None
    """SLURM's Reason, None where it says "None"."""
    preempt_time: float | None = None
    end_time: float | None = None
    resumed_at: float | None = None
    """When it continued after a suspension; None where it never was suspended."""
    held: bool = False
    """It waits, and does not start before somebody releases it."""
    comes_back: bool = False
    """In its grace time: the scheduler runs the job again by itself, once it has left."""


@dataclass(frozen=True)
class JobInfo:
    """What the scheduler says of a job, asked from the login node."""

    job_id: str
    state: JobState
    alive: bool
    """True while the job may still write: pending, running, completing, requeued, suspended."""
    reason: str | None = None
    nodes: str = ""
    restarts: int = 0
    explained: str = ""
    """The reason in words, and what helps; "" where there is none, or none that is known."""
    held: bool = False
    """It waits, and does not start before somebody releases it."""
    suspended_at: float | None = None
    """Since when it is suspended; None where it is not, or nobody says."""
    start_time: float | None = None
    """Start, or the expected start of a pending job; None where no start can be counted on."""
    end_time: float | None = None
    script: str = ""
    """Path of the batch script that it runs; "" where the scheduler does not say."""
    said: str = ""
    """The scheduler's own word for the state, where it is another."""

    @property
    def shown(self) -> str:
        """The state for people, in capitals."""
        return self.said or str(self.state)


@dataclass(frozen=True)
class JobStart:
    """One start of a job, as the scheduler's accounting remembers it.

    Attributes:
        index: 0, 1... in the order of the job's starts; a requeue begins another.
        start: Seconds since the epoch; None while it is pending.
        end: The same; None while it runs.
        nodes: Host names with commas between them.
    """

    job_id: str
    index: int
    state: JobState
    start: float | None = None
    end: float | None = None
    nodes: str = ""


@dataclass(frozen=True)
class JobRequest:
    """What a cluster needs to start a run's job."""

    run_dir: Path
    token: str
    """Unique for this submission; also the stem of the script's name, by which a job is found."""
    script_path: Path
    """runs/<name>/jobs/<token>.sh, already written."""
    script: str
    after: Sequence[str] = ()
    """Jobs that must have ended well before this one starts."""


@dataclass(frozen=True)
class JobContext:
    """Where this agent stands in its job, as `slurm/` or `local/` read it in their environment."""

    job_id: str
    restarts: int
    """How often the scheduler has restarted this job id; 0 in its first run."""
    node_rank: int
    nodes: list[str]
    """Host names in node_rank order."""
    master_addr: str
    port: int
    token: str
    """The submission's token; "" for a hand-written batch script."""
    end_time: float | None = None
    """When the scheduler will end the job, seconds since the epoch."""
    kill_wait_s: float = 30.0
    """Seconds from SIGTERM to SIGKILL."""
    start_time: float | None = None
    """When the scheduler began this start of the job, seconds since the epoch; None if unknown."""
    cluster: str = ""
    """The name of the scheduler's cluster, which counts its jobs for itself; "" if it has none."""
    on_this_machine: bool = False
    """All nodes are processes of one machine: they share its CPUs, and none is bad by itself."""
    switch: str = ""
    """What this node hangs on with others, and goes down with; "" for not known. Names of one
    cluster: they are only compared."""


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was looked at and not taken."""

    step: int
    name: str
    reason: str


@dataclass
class FailureReport:
    """The first causal failure of an attempt."""

    rank: int
    node: str
    kind: str
    """"exception", "signal", "exit", "hang" or "desync"."""
    summary: str
    """One line: the exception, or "killed by SIGKILL"."""
    traceback: str = ""
    time: float = 0.0
    exit_code: int | None = None
    others: list[int] = field(default_factory=list)
    """Ranks that failed after it."""


@dataclass(frozen=True)
class RankTask:
    """What every rank of a node runs; picklable, for ranks that are spawned."""

    module: str
    """Module with a ``main()`` to call, or "" to run one of the next three."""
    script: str = ""
    args: list[str] = field(default_factory=list)
    cwd: str = ""
    python_path: list[str] = field(default_factory=list)
    cpus: list[str] = field(default_factory=list)
    """The CPUs of each of the node's ranks, such as "49-55"; empty where they are not bound."""
    as_module: str = ""
    """Module to run as `python -m` does."""
    program: str = ""
    """Executable that is no Python of ours, to be started as a child."""
    local_rank: str = ""
    """Option with which the rank's number on its node stands in front of `args`."""
