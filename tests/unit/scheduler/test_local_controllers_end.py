"""A program that submits local jobs and lives on, as a notebook does."""

from __future__ import annotations

from pathlib import Path

import hpctrain
from hpctrain.cluster.scheduler import local as client
from tests.support import patience


def test_an_ended_controller_leaves_no_zombie_and_no_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    job = hpctrain.submit(cluster="local", name="lm")
    patience.until(lambda: client.read(job.job_id).controller_pid)
    record = client.read(job.job_id)

    hpctrain.cancel("lm")

    patience.until(lambda: not Path(f"/proc/{record.controller_pid}").exists())
