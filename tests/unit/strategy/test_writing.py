"""What a plan writes is read by those for whom it is: each file by its real reader."""

from __future__ import annotations

import json
import subprocess

import pytest

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.writing import files_of, without_equivalent
from hpctrain.cli.main import main
from tests.support.plan_cases import for_key

KEYS = ["ddp", "fsdp2", "fsdp2-no-reshard", "hsdp", "fsdp2+recompute", "tp2", "tp4+recompute"]
KEYS += ["zero1", "zero2+recompute", "zero3", "fsdp2+recompute+offload", "zero3+recompute+offload"]
KEYS += ["lora-ddp", "lora-fsdp2+recompute"]
ALONE = ["pp2", "pp2+recompute", "ep8"]
"""Of which hpctrain and Megatron-LM know, and no others."""


def written(key, folder, **more):
    asked = for_key(key, **more)
    rows = choice.rows_of(asked)
    row = choice.choose(rows, key)
    plan = choice.StrategyPlan(asked, rows, row)
    texts = files_of(plan, row, time="12:00:00", partition="gpu", precision="bf16")
    for name, text in texts.items():
        (folder / name).write_text(text)
    return row, texts


@pytest.mark.parametrize("key", [*KEYS, *ALONE, "fsdp2+selective"])
def test_submit_takes_the_settings_as_they_are(key, tmp_path, monkeypatch, capsys):
    row, _ = written(key, tmp_path)
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


def test_a_reduction_in_each_pass_is_written_and_others_files_are_left_out(tmp_path):
    row, texts = written("fsdp2", tmp_path, gb=30, micro=1, global_batch=64)

    assert row.way.layout.each_pass
    assert "reduce_each_pass = true" in texts["hpctrain.toml"]
    assert not {"accelerate.yaml", "lightning_trainer.py"} & set(texts)
    _, texts = written("fsdp2+selective", tmp_path)
    assert not {"accelerate.yaml", "lightning_trainer.py", "megatron.args"} & set(texts)


@pytest.mark.parametrize("key", KEYS)
def test_accelerate_reads_its_file(key, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    row, _ = written(key, tmp_path)

    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))

    assert config.num_processes == 16
    assert config.num_machines == 2
    assert config.mixed_precision == "bf16"
    if key in {"ddp", "lora-ddp"}:
        assert config.distributed_type == "MULTI_GPU"
        return
    if key.startswith("zero"):
        assert config.distributed_type == "DEEPSPEED"
        assert config.deepspeed_config["deepspeed_config_file"] == "ds_config.json"
        return
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.fsdp_config["fsdp_reshard_after_forward"] is row.way.layout.reshard
    assert config.fsdp_config["fsdp_activation_checkpointing"] is row.way.layout.recompute
    assert config.fsdp_config["fsdp_offload_params"] is row.way.layout.offload


@pytest.mark.parametrize("key", ALONE)
def test_what_others_have_no_words_for_is_not_written_and_said(key, tmp_path):
    row, texts = written(key, tmp_path)
    plan = choice.StrategyPlan(for_key(key), [row], row)

    gone = without_equivalent(plan, row)

    assert set(gone) == {"accelerate.yaml", "lightning_trainer.py"}
    assert gone.keys().isdisjoint(texts)
    assert "megatron.args" in texts


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("fsdp2+recompute+offload", "pretrain_gpt.py keeps no weights on the host"),
        ("lora-ddp", "pretrain_gpt.py trains no adapters"),
    ],
)
def test_megatron_is_told_nothing_that_it_cannot_do(key, why, tmp_path):
    row, texts = written(key, tmp_path)

    assert without_equivalent(choice.StrategyPlan(for_key(key), [row], row), row) == {
        "megatron.args": why
    }
    assert "megatron.args" not in texts
    is_adapted = "# Adapters of rank 16 are your program's" in texts["hpctrain.toml"]
    assert is_adapted is (key == "lora-ddp")


@pytest.mark.parametrize("name", ["launch.sh", "train.sbatch"])
def test_shell_scripts_are_clean(name, tmp_path):
    written("fsdp2", tmp_path)

    done = subprocess.run(
        ["shellcheck", name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""


def test_torchrun_takes_its_line(tmp_path, monkeypatch):
    from torch.distributed.run import parse_args

    written("fsdp2", tmp_path)
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HEAD_NODE", "n01")

    done = subprocess.run(
        ["bash", "launch.sh", "mine.py", "--lr", "1"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    given = parse_args(done.stdout.split())

    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("2", "8", "c10d")
    assert given.rdzv_endpoint == "n01:29500"
    assert (given.training_script, given.training_script_args) == ("mine.py", ["--lr", "1"])


def test_the_plan_itself_is_there_for_programs(tmp_path):
    row, texts = written("fsdp2", tmp_path)

    plan = json.loads(texts["plan.json"])

    assert plan["chosen"] == "fsdp2"
    (same,) = [each for each in plan["rows"] if each["strategy"] == "fsdp2"]
    assert same["peak_bytes"] == row.peak.nbytes == sum(same["parts"].values())


@pytest.mark.parametrize("key", ["zero1", "zero2+recompute", "zero3", "zero3+recompute+offload"])
def test_deepspeed_reads_its_file(key, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    row, texts = written(key, tmp_path, global_batch=64)
    monkeypatch.setattr("deepspeed.comm.is_initialized", lambda: False)
    config = json.loads(texts["ds_config.json"])

    read = DeepSpeedConfig(config | {"train_batch_size": row.batch.micro * row.batch.passes})

    assert config["train_batch_size"] == 64 == row.batch.micro * row.batch.passes * 16
    assert read.zero_config.stage == int(key[4])
    assert read.bfloat16_config.enabled
    away = "cpu" if row.way.layout.offload else None
    for section in (read.zero_config.offload_optimizer, read.zero_config.offload_param):
        assert (section and section.device) == away
    assert read.gradient_accumulation_steps == row.batch.passes
