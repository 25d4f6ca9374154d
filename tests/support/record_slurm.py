"""Records what SLURM's commands print, as hpctrain asks them, for tests of what reads it.

    tests/support/slurm_system.sh run 24.11 python -m tests.support.record_slurm

writes tests/data/slurm-answers/<version>/: jobs in every state that matters, then the cluster.
Paths, the host's name and the kernel's are replaced, so that two recordings differ by SLURM alone.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.slurm.parse import SACCT_COMMAND
from tests.support import signal_watch
from tests.support.slurm_cluster import SlurmCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA = Path(__file__).parents[1] / "data" / "slurm-answers"
ODD_NAME = "a b'c\"d$(rm) JobState=DONE\\e;f #g"
CLUSTER_QUESTIONS = {
    "show_config": ["scontrol", "show", "config"],
    "show_partitions": ["scontrol", "show", "partition"],
    "show_nodes": ["scontrol", "show", "node"],
    "node_states": ["sinfo", "--noheader", "--Node", "--nodes=n1,n2", "--format=%T"],
    "queue": ["squeue", "--noheader", "--format=%i|%T|%o"],
    "associations": ["sacctmgr", "--noheader", "--parsable2", "show", "association",
                     "format=Account"],
}  # fmt: skip


class Recorder:
    """Asks a cluster and writes down what it says."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.folder = DATA / "{}.{:02}".format(*cluster.version)
        self.folder.mkdir(parents=True, exist_ok=True)

    def record(self, name: str, argv: Sequence[str]) -> None:
        """Write what the command prints into NAME.txt."""
        done = subprocess.run(
            argv,
            env=self.cluster.env | {"SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            check=True,
        )
        (self.folder / f"{name}.txt").write_text(self._neutral(done.stdout))

    def job(self, name: str, job_id: str) -> None:
        self.record(f"show_job_{name}", ["scontrol", "show", "job", job_id])

    def account(self, name: str, job_id: str) -> None:
        self.record(f"sacct_{name}", [*SACCT_COMMAND, "--jobs", job_id])

    def _neutral(self, text: str) -> str:
        text = text.replace(str(self.cluster.at.folder), "/cluster")
        for path, name in (
            (tempfile.gettempdir(), "/cluster/tmp"),
            (sys.executable, "python"),
            (str(Path(__file__).parents[2]), "/checkout"),
        ):
            text = text.replace(path, name)
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", text)
        text = re.sub(r"\bOS=.*", "OS=Linux", text)
        moments = r"\b(BootTime|BOOT_TIME|SlurmdStartTime|LastBusyTime)(\s*=\s*)\S+"
        text = re.sub(moments, r"\g<1>\g<2>100", text)
        return "".join(line.rstrip() + "\n" for line in text.splitlines())


def stubborn(cluster: SlurmCluster, name: str, *options: str) -> str:
    """A running job that stays until SIGKILL, so that its end can be looked at."""
    watch = shlex.join([sys.executable, signal_watch.__file__, str(cluster.at.work), name])
    job_id = cluster.sbatch(
        *("--requeue", "--time=60", f"--job-name={name}", "--output=/dev/null", *options),
        f"--wrap=srun {watch}",
    )
    cluster.wait_for(lambda: list(cluster.at.work.glob(f"{name}.*")), f"{name} to run")
    return job_id


def running(cluster: SlurmCluster, job_id: str) -> None:
    """Wait by squeue: one line of `scontrol show job -o` cannot hold the odd name."""
    argv = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%T")
    cluster.wait_for(lambda: cluster.run(*argv).stdout.strip() == "RUNNING", job_id)


def record_all(cluster: SlurmCluster) -> None:
    """Every state in turn; about two minutes, of which a time limit takes one."""
    to = Recorder(cluster)
    limited = stubborn(cluster, "limited", "--nodelist=n4", "--partition=work")
    cluster.end_in(limited, 32)

    odd = cluster.sbatch(
        *("--nodelist=n1", f"--job-name={ODD_NAME}", "--comment=hello Restarts=9"),
        *("--output=/dev/null", "--time=60", "--wrap=exec sleep 600"),
    )
    running(cluster, odd)
    to.job("running", odd)
    pending = cluster.sbatch("--begin=now+1hour", "--nodes=2-3", "--wrap=true")
    to.job("pending", pending)
    array = cluster.sbatch("--array=0-1", "--nodelist=n2", "--output=/dev/null", "--wrap=sleep 600")
    cluster.wait_job(f"{array}_1", "RUNNING")
    to.job("array", array)
    het = cluster.sbatch("-n1", ":", "-n1", "--output=/dev/null", "--wrap=sleep 600")
    cluster.wait_job(het, "RUNNING")
    to.job("het", het)
    whole_nodes = ("PartitionName=urgent", "OverSubscribe=EXCLUSIVE")
    cluster.run("scontrol", "update", *whole_nodes, check=True)
    for name, argv in CLUSTER_QUESTIONS.items():
        to.record(name, argv)
    for job_id in (odd, pending, array, het):
        cluster.end_job(job_id)

    requeued, cancelled = (stubborn(cluster, name, "--nodelist=n2") for name in ("again", "gone"))
    cluster.run("scontrol", "requeue", requeued, check=True)
    cluster.cancel(cancelled)
    cluster.wait_job(requeued, "COMPLETING")
    cluster.wait_job(cancelled, "COMPLETING")
    to.job("requeued", requeued)
    to.job("cancelled", cancelled)
    cluster.wait_job(cancelled, "CANCELLED")
    to.account("cancelled", cancelled)

    graced = stubborn(cluster, "graced", "--nodelist=n1", "--partition=grace")
    urgent = cluster.submit_urgent(["n1"])
    cluster.wait_job(graced, lambda record: record.get("PreemptTime") not in {None, "None"})
    to.job("preempted_with_grace", graced)
    failed = stubborn(cluster, "failed", "--nodelist=n2,n3", "--nodes=2")
    cluster.kill_node("n3")
    cluster.wait_job(failed, lambda record: record["Restarts"] == "1")
    to.job("node_failed", failed)
    cluster.revive_node("n3")
    cluster.wait_job(limited, "COMPLETING")
    to.job("time_limit", limited)

    cluster.wait_job(requeued, "RUNNING")
    to.account("requeued", requeued)
    for job_id in (urgent, graced, failed, requeued):
        cluster.end_job(job_id)
    done = cluster.sbatch("--output=/dev/null", "--wrap=true")
    cluster.wait_job(done, "COMPLETED")
    to.job("completed", done)
    defaults = "JobDefaults=DefCpuPerGPU=6,DefMemPerGPU=100"
    cluster.run("scontrol", "update", "PartitionName=grace", defaults)
    to.record("show_partitions_gpu_defaults", CLUSTER_QUESTIONS["show_partitions"])


def main() -> int:
    """Record the SLURM of this machine, or of the system that this runs in."""
    os.umask(0o022)
    with SlurmCluster() as cluster:
        record_all(cluster)
    return 0


if __name__ == "__main__":
    sys.exit(main())
