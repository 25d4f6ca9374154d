"""A file system that refuses one rank at a restore costs an attempt, and no checkpoint."""

from __future__ import annotations

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.layout import RunDir
from tests.support import patience
from tests.support.ledger_runs import all_fields
from tests.support.recipe import TINY
from tests.support.scenario import cli

FAULTS = "kill:report.gather,step=8,attempt=1,rank=1;fail:read.table,rank=1,attempt=2,error=ESTALE"


def test_the_attempt_is_requeued_and_goes_on_from_the_same_checkpoint(tmp_path):
    env = {
        "HPCTRAIN_LOCAL_DIR": str(tmp_path / "local"),
        "HPCTRAIN_FAULTS": FAULTS,
    }
    sets = TINY | {
        "checkpoint.interval_steps": 4,
        "checkpoint.mode": "sync",
        "checkpoint.patience_s": 0.2,
        "preflight.enabled": "no",
    }
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={_toml(value)}")]
    where = ["--cluster", "local", "--nodes", "1", "--ranks-per-node", "2", "--no-snapshot"]

    done = cli(None, tmp_path, "submit", "--name", "lm", *where, *words, env=env)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "runs" / "lm")
    patience.until(
        lambda: _ends(run)[-1:] in (["completed"], ["user_error"]),
        lambda: [(e.kind, all_fields(e)) for e in ledger.read(run)],
    )

    events = ledger.read(run)
    assert _ends(run) == ["crashed", "storage_failed", "completed"]
    assert [all_fields(e)["step"] for e in events if e.kind == "restored"] == [0, 4]
    assert not [e for e in events if e.kind == "checkpoint_set_aside"]
    status = cli(None, tmp_path, "status", "lm", env=env).stdout
    assert "storage_error" in status


def _ends(run):
    return [all_fields(e)["reason"] for e in ledger.read(run) if e.kind == "attempt_ended"]


def _toml(value):
    return str(value).lower() if isinstance(value, bool) else value
