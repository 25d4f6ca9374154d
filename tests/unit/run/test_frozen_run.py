"""The frozen run is shown, every field of its ledger read, and its checkpoints proved.

tests/data/frozen-run/README.md says how it came about, and what each file there is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.cli.main import main
from hpctrain.ledger.run.events import parse
from tests.support.frozen_run import copy_of_frozen_run
from tests.support.ledger_runs import fields_of, says_something

if TYPE_CHECKING:
    from pathlib import Path

RENAMED = {"buddies": "peers"}
COMMANDS = [
    "status gpt",
    "events gpt",
    "events every-kind",
    "status every-kind",
    "checkpoints verify gpt --deep",
    "report gpt --text",
    "doctor gpt",
]


@pytest.fixture
def frozen(tmp_path, monkeypatch) -> Path:
    copy_of_frozen_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCTRAIN_LOCAL_DIR", str(tmp_path / "local"))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_it(frozen, command, capsys):
    assert main(command.split()) == 0

    assert capsys.readouterr().out


def test_its_attempts_and_steps_are_what_they_were(frozen, capsys):
    assert main(["status", "gpt", "--json"]) == 0

    state = json.loads(capsys.readouterr().out)
    facts = [
        (one["reason"], one["first_step"], one["last_step"], one["steps_lost"])
        for one in state["attempts"]
    ]
    assert facts == [("crashed", 0, 24, 4), ("stopped", 20, 52, 0), ("stopped", 52, 67, 0)]
    assert (state["step"], state["checkpoint"]["step"]) == (67, 67)


@pytest.mark.parametrize("name", ["gpt", "every-kind"])
def test_every_field_of_its_ledger_is_read(frozen, name):
    for line in (frozen / "runs" / name / "events.jsonl").read_bytes().splitlines():
        written = json.loads(line)
        event = parse(line)
        assert (event.t, event.kind, event.attempt) == (
            written.pop("t"), written.pop("kind"), written.pop("attempt", None),
        )  # fmt: skip
        assert as_words(fields_of(event)) == {
            RENAMED.get(name, name): value
            for name, value in as_words(written).items()
            if says_something(value)
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
