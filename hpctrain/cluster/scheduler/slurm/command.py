"""SLURM's commands and variables: what a job learns from them, and what may not reach them.

A command is bounded in time, deaf to a dying step's signals, and fails with our own errors.

SLURM sends SIGTERM, SIGCONT and SIGUSR2 to every process of a step, also to those in a session of
their own, so an unprotected `scontrol requeue` dies of the very signal that asks for it. sbatch
takes SBATCH_* before the script's own header, and a shell inside salloc or srun carries SLURM_*
that would tell our srun of somebody else's allocation. squeue, sacct and scancel have such families
too: SQUEUE_STATES alone is enough to hide a job that is alive.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.core.base import clock
from hpctrain.core.base.env import (
    HPCTRAIN_JOB_END,
    HPCTRAIN_JOB_START,
    HPCTRAIN_KILL_WAIT_S,
    HPCTRAIN_MASTER_ADDR,
    HPCTRAIN_PORT,
    HPCTRAIN_TOKEN,
    OF_ONE_JOB,
)
from hpctrain.core.base.process import first_port
from hpctrain.errors import ClusterError, ClusterUnreachable

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hpctrain.core.base.records import JobContext

STORM = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
IGNORE_STORM = ("/bin/sh", "-c", 'trap "" TERM USR1 USR2 HUP; exec "$0" "$@"')
"""Ignored signals stay ignored in everything that is started from here. A blocked mask alone does
not do: dash clears it, and sites wrap SLURM's commands into shell scripts. The mask covers the
moment until the trap stands."""
QUERY_TIMEOUT_S = 20.0
CLUSTER_NAME_TIMEOUT_S = 3.0
_JOB_ID = re.compile(
    r"^[ \t]*(?:Submitted batch job )?([0-9]+)(?:(?:;| on cluster )(\S*))?[ \t\r]*$", re.MULTILINE
)
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
NO_CLUSTER = "could not establish a configuration source"
"""What a command prints, in lower case, that has found no controller it could have asked."""
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


class NoCluster(ClusterUnreachable):
    """SLURM's command knows no controller, so it has sent nothing. In a job that may pass."""


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
    if NO_CLUSTER in err.lower():
        return NoCluster(
            f"{name} finds no SLURM cluster from this machine: {first} (exit {code}). If it "
            "belongs to one, check SLURM_CONF; otherwise use --cluster local"
        )
    if any(sign in err.lower() for sign in NO_ANSWER):
        return ClusterUnreachable(
            f"{name}: {first}: {_daemon(name)} does not answer (exit {code}), try again"
        )
    return ClusterError(f"SLURM refused: {first} ({name}, exit {code})")


# ---- the cluster that answers: a site is known by its name, and so is a job of another


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
    """The job's id in what `sbatch --parsable` printed, a line `id` or `id;cluster`.

    A wrapper around sbatch may print more, drop --parsable, or use another cluster.

    Raises:
        ClusterUnreachable: no line is an id, or several are; the job is found by its token.
        ClusterError: the job went to another cluster. There it would look forgotten to us, so it is
            cancelled.
    """
    ids = _JOB_ID.findall(answer)
    if len(ids) != 1:
        raise ClusterUnreachable(f"sbatch printed no job id: {answer.strip()[:80]!r}")
    job_id, cluster = map(str, ids[0])
    here = cluster_name() if cluster else None
    if here is not None and here != cluster:
        with contextlib.suppress(ClusterError):  # a start that comes all the same ends itself
            run(["scancel", f"--clusters={cluster}", job_id])
        raise ClusterError(
            f"sbatch sent job {job_id} to the cluster {cluster}, and this is {here}: it was "
            "cancelled; submit on a login node of that cluster"
        )
    return job_id


KILL_WAIT_S = 30.0
"""SLURM's default, where it could not be asked."""
SHARED = frozenset({"switch", "block"})
"""What nodes hang on together, in SLURM's patterns. In a ring each has a place of its own."""
LONGEST_SWITCH = 1000
PREFIXES = (
    "PMI2_",
    "PMIX_NAMESPACE",  # PMIX_MCA_* are a user's
    "PMIX_RANK",
    "PMIX_SERVER",
    "PMI_",
    "SACCT_",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SLURMD_",
    "SLURM_",
    "SQUEUE_",
    "SRUN_",
)
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""How the commands reach and convince their slurmctld. SLURM_CLUSTERS is not among them: a job sent
to another cluster would look forgotten from the next shell, and a second writer would be let in."""
SETTINGS = {
    "SBATCH_ACCOUNT": "slurm.account",
    "SBATCH_CONSTRAINT": "slurm.constraint",
    "SBATCH_NETWORK": "slurm.network",
    "SBATCH_PARTITION": "slurm.partition",
    "SBATCH_QOS": "slurm.qos",
    "SBATCH_RESERVATION": "slurm.reservation",
    "SBATCH_TIMELIMIT": "slurm.time",
}
"""What a site may let its users' shells decide, and the setting that takes it."""
SHELL_DEFAULTS = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS")
"""What users set once for all their jobs: it counts where nothing else is said."""


def job_context(environ: Mapping[str, str] | None = None) -> JobContext:
    """This node's place in the job.

    Raises:
        ClusterError: this process was not started by srun inside a job.
    """
    # the batch side uses this module without them
    from hpctrain.core.base.host_list import expand_nodes
    from hpctrain.core.base.records import JobContext

    env = os.environ if environ is None else environ
    for name in ("SLURM_JOB_ID", "SLURM_NODEID"):
        if name not in env:
            raise ClusterError(f"{name} is not set: an agent is started by srun inside a SLURM job")
    job_id, restarts = own_job_id(env), own_restarts(env)
    try:
        nodes = expand_nodes(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    except ValueError as error:
        raise ClusterError(f"{error}: nobody can say which nodes the job has") from None
    return JobContext(
        job_id=job_id,
        restarts=restarts,
        node_rank=int(env["SLURM_NODEID"]),
        nodes=nodes,
        master_addr=master_addr(env, nodes),
        port=int(env.get(HPCTRAIN_PORT) or first_port(job_id, restarts)),
        token=env.get(HPCTRAIN_TOKEN, ""),
        end_time=own_end(env),
        kill_wait_s=float(env.get(HPCTRAIN_KILL_WAIT_S) or KILL_WAIT_S),
        start_time=own_start(env),
        cluster=env.get("SLURM_CLUSTER_NAME", ""),
        switch=own_switch(env),
    )


def own_job_id(env: Mapping[str, str]) -> str:
    """The id that means this job only: ``A_t`` in an array, since a raw id may mean all of it."""
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def own_restarts(env: Mapping[str, str]) -> int:
    """How often SLURM has restarted this job; the variable is not there in the first run."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


def own_start(env: Mapping[str, str]) -> float | None:
    """When SLURM began this start of the job: what slurmctld said, else SLURM's own variable."""
    begun = env.get(HPCTRAIN_JOB_START) or env.get("SLURM_JOB_START_TIME")
    return float(begun) if begun else None


def own_end(env: Mapping[str, str]) -> float | None:
    """When SLURM will end this start of the job: what slurmctld said, else SLURM's own variable."""
    end = env.get(HPCTRAIN_JOB_END) or env.get("SLURM_JOB_END_TIME")
    return float(end) if end else None


def own_switch(env: Mapping[str, str]) -> str:
    """The switches above this node, or its block, down to the one it hangs on; "" for not known.

    slurmd says it to each task, so no command is asked that could be late or wrong: `top.s2.n3`
    with the pattern `switch.switch.node`, `b8.n3` with `block.node`, and without a topology the
    node alone. A level at which it has none is empty (`top..n3`).
    """
    address = env.get("SLURM_TOPOLOGY_ADDR", "")
    *kinds, last = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    above = address.removesuffix(f".{env.get('SLURMD_NODENAME', '')}")  # names may have dots
    is_plain = above.isprintable() and len(above) <= LONGEST_SWITCH
    is_known = bool(kinds) and last == "node" and set(kinds) <= SHARED and above != address
    return above if is_known and is_plain else ""


def master_addr(env: Mapping[str, str], nodes: Sequence[str]) -> str:
    """An address of the first node that every node of the job can connect to.

    The batch script exports what it has found out (`entry/slurm_batch.py`). Where it could not ask,
    the node's name does if it resolves, else the address from which srun was launched: that is the
    first node.
    """
    if exported := env.get(HPCTRAIN_MASTER_ADDR):
        return exported
    first = nodes[0] if nodes else "localhost"
    if resolves(first):
        return first
    return env.get("SLURM_LAUNCH_NODE_IPADDR") or first


def resolves(name: str) -> bool:
    """Whether this host can turn the name into an address."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):  # no name that could be asked for at all
        return False
    return True


OF_DEVICES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
    }
)
"""What SLURM sets for the GPUs of a job, without a name that says so."""


def script_environment(pid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for what a job submits: the batch script's, before its setup.

    So another job gets what the user's shell had, and nothing of this job. `environ` counts if that
    of `pid`, the batch script, cannot be read.
    """
    try:
        pairs = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        pairs = []
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair) or dict(environ)
    job_id = given.get("SLURM_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    temporary = given.get("TMPDIR", "")
    gone = set(OF_DEVICES)
    if job_id and job_id in temporary:  # a prolog's, which goes with the job
        gone.add("TMPDIR")
    return {name: value for name, value in clean(given).env.items() if name not in gone}


class CleanedEnvironment(NamedTuple):
    """An environment fit for SLURM's commands."""

    env: dict[str, str]
    dropped: list[str]
    """Names of what was not passed on, sorted."""


def clean(environ: Mapping[str, str], kept: Collection[str] = ()) -> CleanedEnvironment:
    """Leave out everything by which a shell could change a submission or an answer.

    SBATCH_* variables that are `kept` (`slurm.sbatch_env` of a site) count as settings
    (`kept_settings`). They do not reach sbatch, where they would win over the script's header and
    the user's flags.
    """
    dropped = sorted(name for name in environ if _leaks(name) and name not in kept)
    return CleanedEnvironment(
        env={name: value for name, value in environ.items() if not _leaks(name)}, dropped=dropped
    )


def kept_settings(environ: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """The setting behind each SBATCH_* variable that is set and kept: {"slurm.account": its name}.

    Those of `kept` that no setting can take are left out here, and stay dropped.
    """
    return {
        setting: name
        for name, setting in SETTINGS.items()
        if name in kept and environ.get(name, "")
    }


def _leaks(name: str) -> bool:
    return name in OF_ONE_JOB or (name.startswith(PREFIXES) and name not in KEPT)
