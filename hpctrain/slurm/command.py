"""Run one SLURM command: bounded in time, deaf to a dying step's signals, with our own errors.

SLURM sends SIGTERM, SIGCONT and SIGUSR2 to every process of a step, also to those in a session of
their own, so an unprotected `scontrol requeue` dies of the very signal that asks for it
(`launch.md` section 3).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.slurm.leak import clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STORM = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
IGNORE_STORM = ("/bin/sh", "-c", 'trap "" TERM USR1 USR2 HUP; exec "$0" "$@"')
"""Ignored signals stay ignored in everything that is started from here. A blocked mask alone does
not do: dash clears it, and sites wrap SLURM's commands into shell scripts. The mask covers the
moment until the trap stands."""
QUERY_TIMEOUT_S = 20.0
RETRY_PAUSE_S = 0.5
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
)
"""What the commands print, in lower case, where slurmctld was silent: the request may have been
accepted."""


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


def run(args: Sequence[str], *, timeout_s: float = QUERY_TIMEOUT_S, query: bool = True) -> str:
    """What the command printed.

    Args:
        args: Command and arguments; no shell is involved.
        timeout_s: It is killed after this long.
        query: Times are printed as seconds since the epoch. Not for sbatch, which would hand that
            setting on to the job.

    Raises:
        ClusterUnreachable: it is not installed here, or slurmctld did not answer in time; a request
            may have been accepted all the same.
        ClusterError: refused, in SLURM's own words.
    """
    env = clean(os.environ).env
    if query:
        env["SLURM_TIME_FORMAT"] = "%s"
    name = args[0]
    path = shutil.which(name)
    if path is None:
        raise CommandMissing(
            f"{name} is not on PATH here: go where SLURM's commands are, or use --cluster local"
        )
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
    out, err = _wait(child, name, timeout_s)
    if child.returncode != 0:
        raise _refusal(name, child.returncode, err)
    return out


def run_until(args: Sequence[str], *, deadline: float, timeout_s: float = QUERY_TIMEOUT_S) -> str:
    """Like `run`, tried again while slurmctld is silent.

    Args:
        args: Command and arguments, safe to repeat.
        deadline: Monotonic instant after which no new try is made.
        timeout_s: Longest single try.

    Raises:
        ClusterUnreachable: silent until the deadline, or the command is not installed.
        ClusterError: refused.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            return run(args, timeout_s=max(min(timeout_s, left), RETRY_PAUSE_S))
        except CommandMissing:
            raise
        except ClusterUnreachable:
            if deadline - time.monotonic() < RETRY_PAUSE_S:
                raise
        time.sleep(
            RETRY_PAUSE_S
        )  # slurmctld announces its return to nobody: asking again is all there is


def _wait(child: subprocess.Popen[str], name: str, timeout_s: float) -> tuple[str, str]:
    """Both outputs of the child; it and what it started are killed where it takes too long."""
    try:
        return child.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise ClusterUnreachable(
                f"{name} gave no answer within {timeout_s:g} s: slurmctld may be down or busy, "
                "try again"
            ) from None
        raise


def _refusal(name: str, code: int, err: str) -> ClusterError:
    """The error for a failed command: SLURM's first line, which names the value that is wrong."""
    if code < 0:
        died_of = signal.Signals(-code).name
        return ClusterUnreachable(f"{name} was killed by {died_of} before it had an answer")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line] or lines
    first = errors[0] if errors else "no message"
    first = first.removeprefix(f"{name}: ").removeprefix("error: ")
    if any(sign in err.lower() for sign in NO_ANSWER):
        return ClusterUnreachable(
            f"{name}: {first}: slurmctld does not answer (exit {code}), try again"
        )
    return ClusterError(f"SLURM refused: {first} ({name}, exit {code})")
