"""Programs with Megatron-LM's launch and files, as docs/frameworks.md has them started."""

from __future__ import annotations

from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir
from tests.support import local_runs

RANKS, STEPS = 2, 100
SEALED = ["--set", "checkpoint.sealed=ckpt/iter_*", "--set", "checkpoint.seal_settle_s=0.2"]
GOES_ON = ["--resume-args", "--ckpt-step {step}"]
OWN = ["--load", "ckpt", "--save", "ckpt", "--save-interval", "20"]


def train(folder, *words):
    """Two ranks to their end; what rank 0 printed in each attempt."""
    script = str(local_runs.SCRIPTS / "megatron_like.py")
    run = local_runs.start(folder, "r", 1, RANKS, *SEALED, *GOES_ON, "--", script, *OWN, *words)
    assert local_runs.await_end(run, 2)["reason"] == "completed"
    logs = [run / "attempts" / f"{number:04d}" / "rank-00000.log" for number in (1, 2)]
    return RunHistory.read(RunDir(run)), [log.read_text() for log in logs]


def test_a_stop_is_heard_by_its_own_handler_and_loses_no_step(tmp_path):
    history, (first, second) = train(tmp_path, "--preempted-at", "7")

    assert "exiting program after receiving SIGTERM." in first
    saved = history.saves[0].step
    assert 7 <= saved < STEPS
    assert f"--ckpt-step {saved}\n" in second
    assert f"begins at {saved}\n" in second
    assert f"ends with {float(STEPS)}\n" in second
    assert {save.kind for save in history.saves} == {"sealed"}


def test_a_save_that_a_dead_node_tore_is_passed_over_though_the_tracker_names_it(tmp_path):
    history, (first, second) = train(tmp_path, "--torn-at", "33")

    assert "begins at 0\n" in first
    assert "begins at 20\n" in second
    assert f"ends with {float(STEPS)}\n" in second
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == f"{STEPS}"
    was_sealed_before = 33 in [save.step for save in history.saves]
    assert was_sealed_before == (tmp_path / "ckpt" / "iter_0000033.torn-2").exists()
