"""Executors whose runs are made and never started; job ids count from 12, as submitit's do."""

from __future__ import annotations

import dataclasses

import pytest

import hpctrain.cli.api
from hpctrain.ledger.run.layout import RunDir
from hpctrain.submitit import AutoExecutor
from hpctrain.submitit.job import JobFiles, dump
from tests.support.ledger_runs import Story


class FakeCluster:
    """Stands in the place of `hpctrain.submit`, behind the checks of the real one."""

    def __init__(self, submit):
        self._submit = submit
        self.asked = []
        self.refuse_after = None

    def __call__(self, **flags):
        if self.refuse_after is not None and len(self.asked) >= self.refuse_after:
            raise hpctrain.UsageError("refused")
        made = self._submit(start=False, **flags)
        job_id = str(12 + len(self.asked))
        self.asked.append(flags)
        run = RunDir(made.dir)
        run.jobs.mkdir()
        run.script("token").write_text("#!/bin/bash\n")
        spec = run.spec.read_bytes()
        Story(run.root).submitted(job_id)
        run.spec.write_bytes(spec)
        return dataclasses.replace(made, job_id=job_id)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("HPCTRAIN_SITE", "none")
    monkeypatch.chdir(tmp_path)
    fake = FakeCluster(hpctrain.cli.api.submit)
    monkeypatch.setattr(hpctrain.cli.api, "submit", fake)
    return fake


@pytest.fixture
def executor(cluster, tmp_path):
    return AutoExecutor(tmp_path / "log", cluster="slurm")


def make_call(job, rank=0):
    """Make a job's call in this process, as a rank does."""
    files = JobFiles.of(RunDir(job.run))
    dump(("success", files.load(rank).result()), files.result(rank))
