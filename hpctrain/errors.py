"""Every error that a user can meet, and the exit code of each.

A message is one line: what is wrong with its value, where it came from, what to do. Instances
survive pickling, since ranks send them to each other. Standard library only: both halves import it.
"""

from __future__ import annotations

import errno
from typing import ClassVar

OF_A_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""What a full or failing file system says: no bug of ours, whose traceback would tell something."""


class HpctrainError(Exception):
    """Root of the tree; its message is meant for the user as it stands."""

    exit_code: ClassVar[int] = 1


class UsageError(HpctrainError):
    """A flag, a setting or a file of the user's is wrong."""

    exit_code = 2


class ChecksFailed(HpctrainError):
    """Something that could be checked before the run does not hold."""

    exit_code = 3


class NotFound(HpctrainError):
    """The run, site, checkpoint or script that was named is not there."""

    exit_code = 4


class RunExists(HpctrainError):
    """A run of that name is there already; going on with it is `resume`'s job."""

    exit_code = 5


class RunAlive(HpctrainError):
    """The run has a job that may still write; a second writer is refused."""

    exit_code = 5


class WrongState(HpctrainError):
    """The run is in a state in which this cannot be done: it is done, or does not run."""

    exit_code = 5


class ClusterError(HpctrainError):
    """SLURM refused a request."""

    exit_code = 6


class ClusterUnreachable(ClusterError):
    """SLURM gave no answer: its commands are missing or slurmctld is silent."""


class AccountingSilent(ClusterUnreachable):
    """The scheduler has forgotten a job, and its accounting, which may not have, did not answer."""


class CheckpointError(HpctrainError):
    """A checkpoint could not be written or read."""

    exit_code = 7


class TornCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not what its manifest says."""


class IncompleteCheckpoint(TornCheckpoint):
    """A file of it is missing, or not of its size; a node's stale view of it looks the same."""


class FileSystemFault(CheckpointError):
    """The file system gave an error: nobody knows whether what lies there is whole or damaged."""


class NotWritten(CheckpointError):
    """The file system did not take a checkpoint: no room, or a fault; it may the next time."""


class OtherFormat(CheckpointError):
    """A checkpoint in another version's format: neither damaged, nor to be passed over."""


class NoCheckpoint(CheckpointError):
    """A checkpoint was asked for and there is no valid one."""


class Fenced(CheckpointError):
    """A newer attempt has taken the run over; this one must write nothing more."""


class RunLocked(CheckpointError):
    """Another process has the run's lock and keeps it."""

    exit_code = 75


class ControlLost(HpctrainError):
    """What carries the ranks' agreement is gone or silent: a rank may not continue by itself."""


class GuardStopped(HpctrainError):
    """A guard has ended training: what goes wrong would go wrong at every start."""


class RewindNeeded(HpctrainError):
    """A guard has ended the round; the next one resumes from before what it has seen."""


class ReplicasDiverged(HpctrainError):
    """Ranks that should hold the same weights do not: what they train is none's any more."""


EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "the run or the command failed",
    2: "wrong usage: a flag, a setting or a file",
    3: "a check failed",
    4: "not found",
    5: "the run exists already, is alive, or has ended, so that this cannot be done to it",
    6: "SLURM refused or cannot be reached",
    7: "a checkpoint cannot be written or read",
    75: "try again later",
    93: "stopped: no progress, budget used up, no shared folder; do not requeue",
    130: "interrupted",
}
