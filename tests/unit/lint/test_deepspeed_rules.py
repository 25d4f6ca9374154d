"""The keys are those of DeepSpeed's own source; what is DeepSpeed's is told from other JSON."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from hpctrain.advise.lint import deepspeed_config
from hpctrain.advise.lint.check import check_text
from hpctrain.advise.lint.deepspeed_config import is_deepspeed
from hpctrain.core.settings.external import REMOVED_ZERO_KEYS


def test_what_earlier_versions_read_of_zero_is_what_deepspeed_refuses():
    """The other tables are compared in tests/unit/plan/test_ds_config.py."""
    source = Path(importlib.util.find_spec("deepspeed").origin).parent
    tree = ast.parse((source / "runtime" / "config.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_REMOVED_ZERO_CONFIG_KEYS"
    ]

    assert {key.value for key in table.keys} == REMOVED_ZERO_KEYS


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        ({"zero_optimization": {}, "train_batch_size": 8}, True),
        ({"zero_optimisation": {}, "bf16": {}}, True),
        ({"fp16": {}, "optimizer": {}}, False),
        ({"zero_optimization": {}}, False),
        ({"name": "a", "version": 1}, False),
        ([], False),
        (None, False),
    ],
)
def test_whose_configuration_it_is(value, is_one):
    assert is_deepspeed(value) is is_one


def test_a_tokenizers_vocabulary_is_not_compared_word_by_word(monkeypatch):
    compared = []
    monkeypatch.setattr(deepspeed_config, "nearest_key", lambda key, *_: compared.append(key) or "")

    assert not is_deepspeed({f"token{number}": number for number in range(20_000)})
    assert len(compared) < 10


def test_a_finding_names_the_line_of_its_key():
    text = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 3}\n}\n'

    (found,) = check_text(text, "ds_config.json")

    assert (found.line, found.column) == (3, 3)
    assert 'did you mean "zero_optimization"?' in found.message


def test_a_key_of_zero_that_is_meant_is_named():
    text = '{"train_batch_size": 8, "zero_optimization": {"overlap_com": true, "zzz": 1}}'

    near, other = check_text(text, "ds_config.json")

    assert near.message.endswith('did you mean "overlap_comm"?')
    assert other.message == 'unknown key "zzz" in zero_optimization'


def test_a_setting_that_submit_refuses_has_its_line():
    (finding,) = check_text('[slurm]\nnodes = "4"\nnodez = "4"\n', "hpctrain.toml")

    assert (finding.rule.code, finding.line, finding.evidence) == ("HT708", 3, 'nodez = "4"')
    assert "hpctrain.toml" not in finding.message


def test_what_is_no_toml_is_told():
    (finding,) = check_text("[slurm\n", "hpctrain.toml")

    assert finding.rule.code == "HT001"
    assert finding.message.startswith("no TOML: ")
