"""A third scheduler, written from `scheduler/base.py`: a job is one process, which is its one node.

A job has a folder with its record and, once it was cancelled, a file that says so. This module is
the command line with that scheduler, and its job:

    python -m tests.support.third_scheduler submit --cluster third -- train.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hpctrain.cluster.scheduler.base import SCHEDULERS, Cluster, JobControl, Scheduler
from hpctrain.core.base.process import free_port
from hpctrain.core.base.records import EndReason, JobContext, JobFacts, JobInfo, JobState
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.node.agent import signals

TOP = Path(__file__).parents[2]
ROOT = Path(os.environ.get("THIRD_DIR", "/nowhere"))
SCHEDULERS["third"] = Scheduler(f"{__name__}:ThirdCluster", f"{__name__}:ThirdControl", "the third")


class ThirdCluster(Cluster):
    """The login node's side."""

    name = "third"
    on_this_machine = True

    def missing(self, environ):
        return "" if environ.get("THIRD_DIR") else "THIRD_DIR is not set"

    def here(self, environ=None):
        del environ
        return "third-here"

    def render(self, spec, run, token):
        return f"#!/bin/sh\n# {spec.name} is {token} in {run.root}\n"

    def submit(self, request):
        folder = ROOT / str(len(list(ROOT.iterdir())) + 1)
        folder.mkdir()
        words = ["job", str(request.run_dir), folder.name, request.token]
        with (folder / "output").open("wb") as output:
            job = subprocess.Popen(
                [sys.executable, "-m", "tests.support.third_scheduler", *words],
                cwd=TOP,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        record = {"token": request.token, "pid": job.pid, "script": str(request.script_path)}
        (folder / "record").write_text(json.dumps(record))
        return folder.name

    def find_job(self, token):
        jobs = [folder.name for folder in ROOT.iterdir() if _record(folder.name)["token"] == token]
        return self.job(jobs[0]) if jobs else None

    def job(self, job_id):
        if not (ROOT / job_id / "record").exists():
            return None
        record, cancelled = _record(job_id), (ROOT / job_id / "cancelled").exists()
        alive = Path(f"/proc/{record['pid']}/cmdline").exists() and _cmdline(record["pid"]) != ""
        running = JobState.COMPLETING if cancelled else JobState.RUNNING
        over = JobState.CANCELLED if cancelled else JobState.OVER
        state = running if alive else over
        return JobInfo(job_id, state, alive=alive, script=record["script"], said="in the third way")

    def starts(self, job_ids):
        del job_ids
        return []

    def bulk_query(self, job_ids):
        del job_ids
        return self

    def cancel(self, job_id):
        if not (ROOT / job_id / "record").exists():
            raise ClusterError(f"there is no job {job_id}")
        (ROOT / job_id / "cancelled").touch()
        os.kill(_record(job_id)["pid"], 15)


class ThirdControl(JobControl):
    """Inside the job. What ends here is not run again."""

    def __init__(self, job_id, *, restarts):
        self.job_id, self.restarts = job_id, restarts

    def facts(self):
        job = ThirdCluster().job(self.job_id)
        if job is None:
            raise ClusterUnreachable(f"nothing is known of {self.job_id}")
        return JobFacts(job.state, self.restarts)

    def previous_end(self):
        return EndReason.UNKNOWN

    def previous_stop(self):
        return None

    def exclude(self, nodes):
        pass

    def requeue(self):
        raise ClusterError("no job is run again here")

    def forbid_requeue(self):
        pass


def job(run_dir, job_id, token):
    """One job: its agent, and then what a batch script's last act would be."""
    signals.install()
    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.node.agent.batch_side import JobStartFacts, finish
    from hpctrain.node.agent.main import run_agent

    run, control, nodes = RunDir(Path(run_dir)), ThirdControl(job_id, restarts=0), ["here"]
    port = free_port(job_id, 0)
    context = JobContext(job_id, 0, 0, nodes, "127.0.0.1", port, token, on_this_machine=True)
    code = run_agent(run, context, control)
    cancelled = (ROOT / job_id / "cancelled").exists()
    return finish(run, JobStartFacts(job_id, 0, token, nodes, code, cancelled), control)


def _record(job_id):
    return json.loads((ROOT / job_id / "record").read_text())


def _cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


if __name__ == "__main__":
    if sys.argv[1] == "job":
        sys.exit(job(*sys.argv[2:]))
    from hpctrain.cli.main import main

    sys.exit(main(sys.argv[1:]))
