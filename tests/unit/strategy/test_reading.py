from __future__ import annotations

import json

import pytest

from hpctrain.advise.strategy.measure import read_model
from hpctrain.errors import NotFound, UsageError
from tests.support.plan_cases import MODELS

CONFIG = json.dumps(MODELS["llama-7B"])


def test_a_file_and_its_folder_are_the_same_model(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG)

    by_file, by_folder = (read_model(str(p)) for p in (tmp_path / "config.json", tmp_path))

    assert by_file == by_folder
    facts, values = by_file
    assert facts.params == 6_738_415_616
    assert values == MODELS["llama-7B"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be one JSON object"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "the layout of model_type 'None' is not known"),
        (b" " * (5 << 20), "too large for a config.json"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(UsageError) as caught:
        read_model(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gone.json", "no/such/folder", "own_model:build"])
def test_what_is_not_there_is_not_found(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(NotFound, match=r"there is no such file; MODEL is a config.json"):
        read_model(name)


def test_a_folder_without_a_config_is_not_found(tmp_path):
    with pytest.raises(NotFound, match=r"no config.json lies there"):
        read_model(str(tmp_path))
