"""One SLURM command: bounded in time, deaf to a dying step's signals, with our own errors.

SLURM sends SIGTERM, SIGCONT and SIGUSR2 to every process of a step, also to those in a session of
their own, so an unprotected `scontrol requeue` dies of the very signal that asks for it.
tests/unit/scheduler/test_slurm_command.py holds the promises.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import threading
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.slurm.environment import clean
from hpctrain.core.base import clock
from hpctrain.errors import ClusterError, ClusterUnreachable

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

STORM = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
IGNORE_STORM = ("/bin/sh", "-c", 'trap "" TERM USR1 USR2 HUP; exec "$0" "$@"')
"""Ignored signals stay ignored in everything that is started from here. A blocked mask alone does
not do: dash clears it, and sites wrap SLURM's commands into shell scripts. The mask covers the
moment until the trap stands."""
QUERY_TIMEOUT_S = 20.0
CLUSTER_NAME_TIMEOUT_S = 3.0
SILENCE_S = 10.0
"""A slurmctld that did not tell its cluster's name is not asked for it again for so long."""
RETRY_PAUSE_S = 0.5
LONGEST_PAUSE_S = 4.0
"""Between two tries of a job, which may be one of thousands that wait for the same slurmctld."""
NO_ANSWER = (
    "unable to contact slurm controller",
    "connection refused",
    "connect failure",
    "connection failure",
    "socket timed out",
    "zero bytes were transmitted",
    "could not establish a configuration source",
    "unable to determine this slurmd's nodename",
    "slurm backup controller in standby mode",
    "temporarily unable to accept job",
    "resource temporarily unavailable",
    "authentication error",
    "authentication credential",
    "invalid credential",
    "munge encode failed",
    "munge decode failed",
    "unable to resolve",
    "try again",
)
"""What the commands print, in lower case, where slurmctld was silent, or munged was not there to
speak to it: the request may have been accepted."""
MUNGE_HINT = "If munged is up"
"""Begins what libmunge guesses first where there is no munged; what is wrong comes after it."""
REFUSALS = (
    "invalid job id",
    "invalid node name",
    "invalid partition",
    "access/permission denied",
    "already completing",
    "already finished",
    "pending execution",
    "only batch jobs",
    "operation is presently disabled",
)
"""What slurmctld says, in lower case, that it will say again. To a job every other error is no
answer: a fault of an hour that nobody has foreseen must not end a run of weeks."""


class CommandMissing(ClusterUnreachable):
    """SLURM's command is not on this machine, or not in this container: trying again is no use."""


@contextlib.contextmanager
def storm_held() -> Iterator[None]:
    """Block the step signals in this thread, and in a process while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STORM)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(
    args: Sequence[str],
    *,
    timeout_s: float = QUERY_TIMEOUT_S,
    query: bool = True,
    errors: bool = False,
) -> str:
    """What the command printed.

    Args:
        args: Command and arguments; no shell is involved.
        timeout_s: It is killed after this long.
        query: Times are printed as seconds since the epoch. Not for sbatch, which would hand that
            setting on to the job.
        errors: What it printed on stderr follows, where it succeeded.

    Raises:
        ClusterUnreachable: it is not installed here, or slurmctld did not answer in time; a request
            may have been accepted all the same.
        ClusterError: refused, in SLURM's own words.
    """
    import subprocess  # not for a dry run, which only asks what there is

    env = clean(os.environ).env
    if query:
        env["SLURM_TIME_FORMAT"] = "%s"
    name = args[0]
    path = shutil.which(name)
    if path is None:
        raise CommandMissing(f"{name} is not on PATH here: {_way_to_commands(os.environ)}")
    try:
        with storm_held():
            child = subprocess.Popen(
                [*IGNORE_STORM, path, *args[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
    except OSError as error:  # no more processes or descriptors for this user
        raise ClusterUnreachable(f"{name} cannot be started now: {error}; try again") from None
    out, err = _wait(child, name, timeout_s)
    if child.returncode != 0:
        raise _refusal(name, child.returncode, err)
    return out + err if errors else out


def _way_to_commands(environ: Mapping[str, str]) -> str:
    """Say what helps who lacks SLURM's commands, where the message is read."""
    if environ.get("SLURM_JOB_ID"):
        return (
            f"this is on a node of job {environ['SLURM_JOB_ID']}, so the node lacks them, or "
            "something in the job (slurm.setup, modules, a container) has taken them off PATH"
        )
    return "go where SLURM's commands are, or use --cluster local"


def run_until(args: Sequence[str], *, deadline: float, timeout_s: float = QUERY_TIMEOUT_S) -> str:
    """Like `run`, tried again while there is no answer; for a job, whose run hangs on it.

    Args:
        args: Command and arguments, safe to repeat.
        deadline: Monotonic instant after which no new try is made.
        timeout_s: Longest single try.

    Raises:
        ClusterUnreachable: silent until the deadline, or the command is not installed.
        ClusterError: refused (`REFUSALS`), or an error of another kind until the deadline.
    """
    pause_s = RETRY_PAUSE_S
    while True:
        left = deadline - clock.monotonic()
        try:
            return run(args, timeout_s=max(min(timeout_s, left), RETRY_PAUSE_S))
        except ClusterError as error:
            left = deadline - clock.monotonic()
            if _is_final(error) or left < RETRY_PAUSE_S:
                raise
        # slurmctld announces its return to nobody: asking again is all there is
        clock.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_final(error: ClusterError) -> bool:
    """Whether asking again is no use."""
    if isinstance(error, ClusterUnreachable):
        return isinstance(error, CommandMissing)
    return any(sign in str(error).lower() for sign in REFUSALS)


def _wait(child: subprocess.Popen[str], name: str, timeout_s: float) -> tuple[str, str]:
    """Both outputs of the child; it and what it started are killed where it takes too long."""
    import subprocess

    try:
        return child.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ClusterUnreachable(
                f"{name} gave no answer within {round(timeout_s, 1):g} s: {_daemon(name)} may be "
                "down or busy, try again"
            ) from None
        raise


def _daemon(name: str) -> str:
    """Who answers this command."""
    return "slurmdbd" if name in {"sacct", "sacctmgr"} else "slurmctld"


def _refusal(name: str, code: int, err: str) -> ClusterError:
    """The error for a failed command: SLURM's first line, which names the value that is wrong."""
    if code < 0:
        died_of = signal.Signals(-code).name
        return ClusterUnreachable(f"{name} was killed by {died_of} before it had an answer")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    error_lines = [line for line in lines if "error:" in line and MUNGE_HINT not in line]
    errors = error_lines or lines
    first = errors[0] if errors else "no message"
    first = first.removeprefix(f"{name}: ").removeprefix("error: ")
    if any(sign in err.lower() for sign in NO_ANSWER):
        return ClusterUnreachable(
            f"{name}: {first}: {_daemon(name)} does not answer (exit {code}), try again"
        )
    return ClusterError(f"SLURM refused: {first} ({name}, exit {code})")


# ---- the cluster that answers: a site is known by its name, and a job of another is told by it


def cluster_name() -> str | None:
    """ClusterName of the slurmctld that answers here; None without SLURM or without an answer.

    A site can be known by other means, so a silent slurmctld is no error here, and is not waited
    for longer than `CLUSTER_NAME_TIMEOUT_S`.
    """
    try:
        text = run(["scontrol", "show", "config"], timeout_s=CLUSTER_NAME_TIMEOUT_S)
    except ClusterError:
        return None
    match = re.search(r"^ClusterName\s*=\s*(\S+)\s*$", text, re.MULTILINE)
    return match[1] if match else None


_KNOWN: dict[tuple[str | None, ...], str] = {}
_SILENT_AT: dict[tuple[str | None, ...], float] = {}
_ASKING = threading.Lock()


def name_here() -> str:
    """The same, asked once in a process, whichever of its threads want it; "" where not known.

    After no answer nobody is asked again for `SILENCE_S`.
    """
    whose = tuple(os.environ.get(name) for name in ("PATH", "SLURM_CONF", "SLURM_CLUSTERS"))
    with _ASKING:  # `status` asks about a job and its accounts at once, and both want the name
        if whose not in _KNOWN:
            if clock.monotonic() < _SILENT_AT.get(whose, -math.inf) + SILENCE_S:
                return ""
            cluster = cluster_name()
            if cluster is None:
                _SILENT_AT[whose] = clock.monotonic()
                return ""
            _KNOWN[whose] = cluster
        return _KNOWN[whose]


def submitted_here(answer: str) -> str:
    """The job's id in what `sbatch --parsable` printed, `id` or `id;cluster`, after any greeting.

    Raises:
        ClusterError: there is none, or the job went to another cluster (a wrapper around sbatch can
            do that). There it would look forgotten to us, so it is cancelled.
    """
    words = answer.split()
    job_id, _, cluster = words[-1].partition(";") if words else ("", "", "")
    if not job_id.isdigit():
        raise ClusterError(f"sbatch printed no job id: {answer.strip()[:80]!r}")
    here = cluster_name() if cluster else None
    if here is not None and here != cluster:
        with contextlib.suppress(ClusterError):  # a start that comes all the same ends itself
            run(["scancel", f"--clusters={cluster}", job_id])
        raise ClusterError(
            f"sbatch sent job {job_id} to the cluster {cluster}, and this is {here}: it was "
            "cancelled; submit on a login node of that cluster"
        )
    return job_id
