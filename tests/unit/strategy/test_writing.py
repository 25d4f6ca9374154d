"""What a plan writes is read by `hpctrain submit`."""

from __future__ import annotations

import json

import pytest

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.screen import hpctrain_toml
from hpctrain.cli.main import main
from tests.support.plan_cases import for_key

KEYS = ["ddp", "fsdp2", "fsdp2-no-reshard", "hsdp", "fsdp2+recompute", "tp2", "tp4+recompute"]
KEYS += ["zero1", "zero2+recompute", "zero3", "fsdp2+recompute+offload", "zero3+recompute+offload"]
KEYS += ["lora-ddp", "lora-fsdp2+recompute", "pp2", "pp2+recompute", "ep8", "fsdp2+selective"]


def written(key, folder, **more):
    asked = for_key(key, **more)
    rows = choice.rows_of(asked)
    row = choice.choose(rows, key)
    plan = choice.StrategyPlan(asked, rows, row)
    text = hpctrain_toml(plan, row, time="12:00:00", partition="gpu", precision="bf16")
    (folder / "hpctrain.toml").write_text(text)
    return row, text


@pytest.mark.parametrize("key", KEYS)
def test_submit_takes_the_settings_as_they_are(key, tmp_path, monkeypatch, capsys):
    row, text = written(key, tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)

    command = ["submit", "--dry-run", "--cluster", "slurm", "--json", "--site", "none"]
    assert main([*command, "--", "train.py"]) == 0

    settings = json.loads(capsys.readouterr().out)["spec"]["settings"]
    engine, slurm = settings["engine"], settings["slurm"]
    assert (slurm["nodes"], slurm["gpus_per_node"], slurm["partition"]) == ("2", 8, "gpu")
    assert engine["kind"] == row.way.layout.kind
    assert engine["tp"] == str(row.way.layout.tp)
    assert engine["dp_replicate"] == str(row.way.layout.copies)
    assert (engine["pp"], engine["ep"]) == (str(row.way.layout.pp), str(row.way.layout.ep))
    assert engine["pp_schedule"] == "1f1b"
    assert engine["offload"] == ("cpu" if row.way.layout.offload else "no")
    assert engine["reshard_after_forward"] is row.way.layout.reshard
    layout = row.way.layout
    again = "full" if layout.recompute else "selective" if layout.selective else "no"
    assert engine["activation_checkpointing"] == again
    assert engine["reduce_each_pass"] is layout.each_pass
    is_adapted = "# Adapters of rank 16 are your program's" in text
    assert is_adapted is (layout.lora > 0)


def test_a_reduction_in_each_pass_is_written(tmp_path):
    row, text = written("fsdp2", tmp_path, gb=30, micro=1, global_batch=64)

    assert row.way.layout.each_pass
    assert "reduce_each_pass = true" in text
