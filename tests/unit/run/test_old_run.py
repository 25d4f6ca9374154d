"""A run directory of version 0.1 is shown, and every field of its ledger read, as 0.1 did.

tests/data/run-0.1/README.md says how it came about, and what each file there is.
"""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.cli.main import main
from hpctrain.run.events import parse
from tests.support.ledger_runs import fields_of, says_something
from tests.support.old_run import OLD, copy_of_old_run

if TYPE_CHECKING:
    from pathlib import Path

SHOWN = OLD / "shown"
LATER = 1795364100.0
"""A few minutes after its last event."""
COMMANDS = {
    "status.txt": "status gpt",
    "status.json": "status gpt --json",
    "events.txt": "events gpt",
    "checkpoints.txt": "checkpoints list gpt",
    "resume.txt": "resume gpt --dry-run",
    "report.txt": "report gpt --text",
    "every-kind.txt": "events every-kind",
}


@pytest.fixture
def old(tmp_path, monkeypatch, hands) -> Path:
    copy_of_old_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    hands.set_wall(LATER)
    monkeypatch.setattr(
        os, "statvfs", lambda _path: SimpleNamespace(f_bavail=2**20, f_frsize=2**12)
    )
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_shown_of_it_is_what_0_1_showed(old, name, capsys):
    assert main(COMMANDS[name].split()) == 0

    shown = capsys.readouterr().out.replace(str(old), "@HERE@")
    shown = shown.replace("  hpctrain doctor gpt\n", "")  # 0.1 had no doctor
    if name == "status.json":
        shown = without_new_keys(shown)
    assert shown == (SHOWN / name).read_text()


def without_new_keys(text: str) -> str:
    """What 0.1 did not have, and scripts that read it do not miss."""
    state = json.loads(text)
    assert state.pop("not_known") is None
    assert state.pop("image") is None
    state["next"].remove("hpctrain doctor gpt")
    for key in ("after", "chain", "evaluations"):
        assert state.pop(key) == []
    for attempt in state["attempts"]:
        assert attempt.pop("awaited") is None
        assert attempt.pop("restart_pause_s") is None
        assert attempt.pop("hang") is None
        assert attempt.pop("straggler") is None
        assert attempt.pop("read_from") == ("disk" if attempt["first_step"] else None)
    assert not state.pop("mishaps")["guarded"]["left_out"]
    for spent in (state["goodput"], state["last_24h"]):
        assert spent["classes"].pop("no_progress")["seconds"] == 0
    return json.dumps(state, indent=2) + "\n"


@pytest.mark.parametrize("name", ["gpt", "every-kind"])
def test_every_field_of_its_ledger_is_read(old, name):
    for line in (old / "runs" / name / "events.jsonl").read_bytes().splitlines():
        written = json.loads(line)
        event = parse(line)
        assert (event.t, event.kind, event.attempt) == (
            written.pop("t"), written.pop("kind"), written.pop("attempt"),
        )  # fmt: skip
        assert as_words(fields_of(event)) == {
            name: value for name, value in as_words(written).items() if says_something(value)
        }


def as_words(fields: dict[str, Any]) -> dict[str, Any]:
    """With what has always been read as text, and NaN, which differs from itself."""
    facts = fields.get("facts") or {}
    words = {
        name: str(value) if type(value) in {int, float} else value for name, value in facts.items()
    }
    loss = fields.get("loss")
    changes = {"facts": words, "loss": None if loss is None else str(loss)}
    return {name: changes.get(name, value) for name, value in fields.items()}
