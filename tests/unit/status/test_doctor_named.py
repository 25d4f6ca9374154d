"""A run that failed names the doctor among what one would type next."""

from __future__ import annotations

from hpctrain.observe.status.reader import StatusReader
from hpctrain.observe.status.text import next_commands
from tests.support.ledger_runs import Story


def test_a_failed_run_names_the_doctor_first(tmp_path):
    tale = Story(tmp_path / "lm-3").submitted().started(1).restored(1).steps(1, 1, 8)
    tale.add("failure", 1, rank=1, node="n2", kind_of="exception", summary="ValueError: no")
    tale.ended(1, "user_error", "stop")

    status = StatusReader(tmp_path).look(tale.run)

    assert next_commands(status)[0] == f"hpctrain doctor {tale.run.root}"
