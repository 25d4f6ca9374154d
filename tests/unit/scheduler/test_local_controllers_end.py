"""A program that submits local jobs and lives on, as a notebook does."""

from __future__ import annotations

import time
from pathlib import Path

import hpctrain
from hpctrain.scheduler.local import client


def test_an_ended_controller_leaves_no_zombie_and_no_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    job = hpctrain.submit(cluster="local", name="lm")
    while not (record := client.read(job.job_id)).controller_pid:
        time.sleep(0.01)

    hpctrain.cancel("lm")

    deadline = time.monotonic() + 120
    while Path(f"/proc/{record.controller_pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
