"""Runs whose checkpoints are evaluated, on a cluster whose jobs are files."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.cluster.scheduler.base import SCHEDULERS, Cluster, Scheduler
from hpctrain.core.base.records import JobInfo, JobState
from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.launch import launch
from hpctrain.launch.prepare import make_run, prepare
from hpctrain.ledger.history.run_history import RunHistory
from tests.support.checkpoints import next_attempt, save
from tests.support.ledger_runs import write_event
from tests.support.submit_requests import request_of


class FakeCluster(Cluster):
    """Jobs are files; nothing runs."""

    name = "fake"
    on_this_machine = True
    folder = Path("/nowhere")

    def missing(self, environ):
        del environ
        return ""

    def here(self, environ=None):
        del environ
        return ""

    def render(self, spec, run, token):
        return f"#!/bin/sh\n# {spec.name} {run.root} {token}\n"

    def submit(self, request):
        if (refused := self.folder / "refused").exists():
            raise ClusterError(refused.read_text())
        if (silent := self.folder / "silent").exists():
            raise ClusterUnreachable(silent.read_text())
        job_id = str(len(self.jobs()) + 1)
        job = {"token": request.token, "run": request.run_dir.name, "alive": True}
        (self.folder / f"{job_id}.json").write_text(json.dumps(job))
        return job_id

    def jobs(self):
        return {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}

    def find_job(self, token):
        found = [job_id for job_id, job in self.jobs().items() if job["token"] == token]
        return self.job(found[0]) if found else None

    def job(self, job_id):
        job = self.jobs().get(job_id)
        if job is None:
            return None
        state = JobState.RUNNING if job["alive"] else JobState.OVER
        return JobInfo(job_id, state, alive=job["alive"])


def use_fake_cluster(tmp_path, monkeypatch):
    """Have it; gives what tells the names of the runs that had a job, in the jobs' order."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    monkeypatch.setattr(FakeCluster, "folder", folder)
    monkeypatch.setitem(SCHEDULERS, "fake", Scheduler(f"{__name__}:FakeCluster", "", "the fake"))
    monkeypatch.setattr(launch, "ADOPT_WAIT_S", 0.0)

    def names():
        submitted = FakeCluster().jobs()
        return [submitted[job_id]["run"] for job_id in sorted(submitted, key=int)]

    names.folder = folder
    return names


def made(folder, *sets, saved=7):
    work = folder / "work"
    work.mkdir()
    (work / "evaluate.py").write_text("print('well')\n")
    request = request_of(
        cwd=work,
        environ={"PATH": ""},
        runs=folder / "runs",
        name="gpt",
        cluster="fake",
        sets=["evaluate.script=evaluate.py --all", *sets],
        nodes="4",
    )
    run = make_run(prepare(request), None)
    write_event(run, "submitted", token="t-1", job_id="900", cluster="fake", by="submit")
    write_event(run, "attempt_started", attempt=1, job_id="900")
    commit(run, *range(10, 10 * saved + 1, 10))
    return run


def commit(run, *steps):
    save(run, next_attempt(run), *steps)
    for step in steps:
        write_event(run, "saved", attempt=1, step=step)


def finish(run, step, metrics=None, *, reason="completed", **more):
    """The evaluation's job comes to its end."""
    child = run.evaluation(step)
    write_event(child, "attempt_started", attempt=1, job_id=job_of(child))
    if metrics is not None:
        child.results.write_text(json.dumps(metrics))
    write_event(child, "attempt_ended", attempt=1, reason=reason, next="stop", by="agent", **more)


def job_of(child):
    return RunHistory.read(child).state.job_id
