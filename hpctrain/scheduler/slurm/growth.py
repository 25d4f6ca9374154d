"""One more node for a running job of ours: asked for, merged into the job, with an agent on it.

SLURM adds nodes by a second job that depends on the first (`--dependency=expand:ID`): once it has a
node it gives that to the first, and is over. Sites have to permit it, by `permit_job_expansion` in
their SchedulerParameters. sbatch does not do for it, since a job with a script gives nothing away.
Seen to work with 22.05, 24.11 and 26.05; never tried with GPUs, nor where other users' jobs wait.

`AddedNode` is the agent's side: a process that waits in the queue, and then stays with the srun of
the new node (`entry/slurm_grow.py`). tests/slurm/test_growth.py holds the promises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

from hpctrain.base import clock
from hpctrain.base.env import HPCTRAIN_SRUN_ARGS
from hpctrain.base.files import read_end
from hpctrain.base.process import own_program
from hpctrain.errors import ClusterError
from hpctrain.scheduler.base import RequestEnd
from hpctrain.scheduler.slurm.command import IGNORE_STORM, STORM, run, storm_held
from hpctrain.scheduler.slurm.environment import (
    KEPT,
    OF_DEVICES,
    PREFIXES,
    clean,
    own_end,
    own_job_id,
)
from hpctrain.scheduler.slurm.parse import parse_config, parse_jobs, read_nodes
from hpctrain.scheduler.slurm.script import asked_options, is_exclusive, more_options
from hpctrain.settings.sbatch_options import name_of
from hpctrain.site.preset import site_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.run.layout import RunDir
    from hpctrain.settings.spec import Spec

log = logging.getLogger("hpctrain.entry")

PERMITS = "permit_job_expansion"
NOT_HERE = 4
"""The exit code of the process where no node is ever added to this job."""
LAST_BYTES = 4096
LOOK_S = 0.2
_GRANTED = re.compile(r"job allocation (\d+)")
_OF_THE_JOB = frozenset(
    """
    SLURM_JOB_ID SLURM_JOBID SLURM_RESTART_COUNT SLURM_CLUSTER_NAME SLURM_JOB_NAME
    SLURM_JOB_START_TIME SLURM_JOB_END_TIME SLURM_JOB_PARTITION SLURM_JOB_ACCOUNT SLURM_JOB_QOS
    SLURM_JOB_USER SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST
    """.split()  # noqa: SIM905 - as sbatch_options.py has its lists
)
"""What of the first node's variables holds on the new node too; srun sets the others anew."""
_OF_A_SCRIPT = frozenset(
    """
    --array --begin --chdir --deadline --dependency --error --export --export-file --hold --input
    --job-name --kill-on-invalid-dep --nodelist --nodes --no-kill --no-requeue --open-mode --output
    --parsable --requeue --signal --switches --test-only --time --time-min --wait --wait-all-nodes
    --wrap
    """.split()  # noqa: SIM905
)
"""Options of a batch script that one more node is asked for without."""


class AddedNode:
    """Implements `scheduler.base.NodeRequest`."""

    def __init__(self, run: RunDir, environ: Mapping[str, str], name: str) -> None:
        """Ask for it.

        Args:
            run: The run.
            environ: With which its agent is to start, as this node's was.
            name: Of this request, for the file with what is printed.
        """
        self._log = run.jobs / f"{name}.out"
        module = "hpctrain.entry.slurm_grow"
        with self._log.open("ab") as out, storm_held():
            self._child = subprocess.Popen(
                own_program(module, str(run.root), unbuffered=True),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def ended(self) -> RequestEnd | None:
        """See `NodeRequest`."""
        code = self._child.poll()
        if code is None:
            return None
        return RequestEnd(self._last_line(), is_final=code == NOT_HERE)

    def take_back(self, timeout_s: float) -> None:
        """See `NodeRequest`."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGINT)
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("SLURM is still asked for a node; see %s", self._log)

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = read_end(self._log, LAST_BYTES).split("\n")
            if said := [line.strip() for line in lines if line.strip()]:
                return said[-1].partition("hpctrain: error: ")[2] or said[-1]
        return f"it is not known why; {self._log} is empty"


def grow(spec: Spec, run_dir: str, environ: Mapping[str, str], parent: int) -> int:
    """Ask for a node, merge it into our job, start the agent there; the exit code of that.

    Args:
        spec: The run.
        run_dir: Of the run.
        environ: With which the agent is to start.
        parent: The agent that asks: without it nobody needs the node.

    Raises:
        ClusterError: no node was added.
    """
    job_id = own_job_id(environ)
    if why := why_not():
        log.error("%s", why)
        return NOT_HERE
    if spec.settings.environment.stage != "no":
        log.error("the run's environment is staged to the disks of the first nodes alone")
        return NOT_HERE
    take_back_all(job_id)
    left_s = _seconds_left(environ)
    node = _merged(_granted(salloc_words(spec, job_id, left_s), parent), job_id)
    for number in STORM | {signal.SIGINT}:  # from here on the agent on the new node is told
        signal.signal(number, signal.SIG_IGN)
    return subprocess.call(srun_words(spec, run_dir, environ, job_id, node), env=_of_srun(environ))


def why_not() -> str:
    """Why no node can be added to a job here, "" where one can.

    Raises:
        ClusterUnreachable: slurmctld gave no answer.
    """
    if shutil.which("salloc") is None:
        return "there is no salloc on this node, by which SLURM adds nodes to a job"
    config = parse_config(run(["scontrol", "show", "config"]))
    if PERMITS in config.get("SchedulerParameters", "").split(","):
        return ""
    return f"the site's SchedulerParameters have no {PERMITS}"


def request_name(job_id: str) -> str:
    """What the jobs are called by which a job asks for nodes.

    Args:
        job_id: Its own.
    """
    return f"hpctrain-node-for-{job_id}"


def take_back_all(job_id: str) -> None:
    """Cancel what a job has asked for, where nobody does who has asked: a node that died.

    Once our job is over SLURM would give such a request a node all the same, for nobody.

    Args:
        job_id: Our job.

    Raises:
        ClusterError: SLURM refused, or gave no answer.
    """
    run(["scancel", f"--name={request_name(job_id)}"])


def salloc_words(spec: Spec, job_id: str, left_s: float | None) -> list[str]:
    """The command that waits for one node of the job's own kind.

    Args:
        spec: The run.
        job_id: Our job.
        left_s: So long it has still to run; None for unknown.
    """
    settings, site = spec.settings.slurm, site_of(spec)
    asked = [f"--{option}={value}" for option, value in asked_options(settings, site) if value]
    asked += ["--exclusive"] if is_exclusive(settings, site) else []
    asked += [*more_options(settings, site, asked), *settings.extra]
    minutes = [] if left_s is None else [f"--time={max(1, int(left_s / 60))}"]
    return [
        "salloc",
        "--no-shell",
        "--nodes=1",
        f"--dependency=expand:{job_id}",
        f"--job-name={request_name(job_id)}",
        *minutes,
        *(option for option in asked if name_of(option) not in _OF_A_SCRIPT),
    ]


def srun_words(
    spec: Spec, run_dir: str, environ: Mapping[str, str], job_id: str, node: str
) -> list[str]:
    """The command that starts the agent, as sbatch/body.sh starts those of the first nodes."""
    more = [word for word in environ.get(HPCTRAIN_SRUN_ARGS, "").split("\n") if word]
    srun = ["srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1"]
    srun += ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill"]
    srun += ["--wait=0", "--unbuffered", f"--nodelist={node}", *more]
    task = [spec.python, "-P", "-u", "-m", "hpctrain.entry.slurm_task", run_dir]
    return [*IGNORE_STORM, *srun, *IGNORE_STORM, *task]


def _granted(words: Sequence[str], parent: int) -> str:
    """Wait in the queue; the id of the job that has the node."""
    salloc = subprocess.Popen(
        words,
        env=clean(os.environ).env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        while salloc.poll() is None:
            if os.getppid() != parent:
                raise ClusterError("the agent that asked for a node has gone")
            clock.sleep(LOOK_S)  # nothing tells that the parent has gone, and salloc may wait long
    finally:
        if salloc.poll() is None:
            salloc.send_signal(signal.SIGINT)  # takes back what is still in the queue
        said = salloc.communicate()[0]
    match = _GRANTED.search(said)
    if salloc.returncode != 0 or match is None:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        lines = [line for line in lines if "error:" in line] or lines
        raise ClusterError(f"SLURM gave no node: {lines[0] if lines else 'salloc says nothing'}")
    return match[1]


def _merged(giver: str, job_id: str) -> str:
    """Give the node of one job to ours; its name."""
    try:
        record = parse_jobs(run(["scontrol", "show", "job", giver]))[0]
        (node,) = read_nodes(record["NodeList"])
        run(["scontrol", "update", f"JobId={giver}", "NumNodes=0"])
    except (ClusterError, LookupError, ValueError) as error:
        with contextlib.suppress(ClusterError):
            run(["scancel", giver])
        raise ClusterError(f"SLURM did not merge job {giver} into ours: {error}") from None
    run(["scontrol", "update", f"JobId={job_id}", "NumNodes=ALL"])
    log.info("%s was added to job %s", node, job_id)
    return node


def _of_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Its environment: the batch script's, without what the first node's own step has set."""
    kept = {name: environ[name] for name in _OF_THE_JOB | KEPT if name in environ}
    of_node = (*PREFIXES, "PMI_", "PMI2_", "PMIX_")
    others = {name: value for name, value in environ.items() if not name.startswith(of_node)}
    return {name: value for name, value in others.items() if name not in OF_DEVICES} | kept


def _seconds_left(environ: Mapping[str, str]) -> float | None:
    end = own_end(environ)
    return None if end is None else end - clock.now()
