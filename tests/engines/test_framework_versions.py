"""Frameworks of versions that the tests' own environment has not, each in one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.progress import progress
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir
from tests.support import local_runs
from tests.support.scripts.titan_tiny import EVERY, SEQUENCES, STEPS, TOKENS

SUPPORT = Path(local_runs.__file__).parent
RANKS, PREEMPTED_AT, NEVER = (
    2,
    11,
    10**6,
)  # the hook of a preemption counts torchtitan's steps twice


def environment(folder: Path, *packages: str) -> str:
    """The python of an environment with these packages before the tests' own."""
    made = subprocess.run(
        [SUPPORT / "framework_environment.sh", folder / "environment", *packages],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return made.stdout.strip()


def train(folder: Path, preempted_at: int) -> RunHistory:
    """Two ranks of torchtitan to their end."""
    folder.mkdir()
    subprocess.run([sys.executable, local_runs.SCRIPTS / "titan_tiny.py"], cwd=folder, check=True)
    (folder / "train.py").write_text(local_runs.shown("torchtitan"))
    words = [str(local_runs.SCRIPTS / "titan_on_cpu.py"), str(preempted_at), "train.py"]
    where = ["--env", f"PYTHONPATH={local_runs.SCRIPTS}", "--"]
    config = ["--module", "titan_tiny", "--config", "tiny"]
    run = local_runs.start(folder, "r", 1, RANKS, *where, *words, *config)
    ended = local_runs.await_end(run, 1 if preempted_at == NEVER else 2)
    assert ended["reason"] == "completed"
    return RunHistory.read(RunDir(run))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / "outputs" / "checkpoint" / f"step-{STEPS}", folder / "final.pt")
    return torch.load(folder / "final.pt", weights_only=False)


@pytest.mark.soak
def test_torchtitan_loses_no_step_to_a_preemption(tmp_path, monkeypatch):
    python = environment(tmp_path, "torchtitan==0.3.0", "triton")
    monkeypatch.setattr(sys, "executable", python)
    history = train(tmp_path / "preempted", PREEMPTED_AT)

    first, second = attempts(history)
    assert (first.reason, first.stop_cause) == ("preempted", "sigterm")
    assert 0 < first.last_step < STEPS
    assert (second.first_step, second.last_step) == (first.last_step, STEPS)
    assert (first.steps_lost, second.steps_lost) == (0, 0)
    saved = sorted({first.last_step, EVERY, 2 * EVERY})
    assert [(save.kind, save.step) for save in history.saves] == [("sealed", at) for at in saved]
    assert progress(history).loss is not None
    marks = [mark.fact for attempt in history.attempts for mark in attempt.marks]
    assert sum(mark.tokens for mark in marks) == STEPS * SEQUENCES * TOKENS * RANKS
    train(tmp_path / "peace", NEVER)
    preempted, peace = weights(tmp_path / "preempted"), weights(tmp_path / "peace")
    assert preempted.keys() == peace.keys()
    assert all(torch.equal(preempted[name], peace[name]) for name in peace)
