"""What a plan writes for Lightning, Megatron-LM and Kubernetes is read by the real readers."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from hpctrain.advise.strategy import choice
from hpctrain.advise.strategy.writing import files_of, jobset_yaml, lightning_trainer, megatron_args
from tests.support.plan_cases import for_key

OPTIONS = Path(__file__).parents[2] / "data" / "megatron-options.txt"
KEYS = ["ddp", "fsdp2", "fsdp2-no-reshard", "hsdp", "fsdp2+recompute", "tp2", "zero2", "zero3"]
KEYS += ["fsdp2+recompute+offload", "lora-ddp"]


def planned(key, **more):
    asked = for_key(key, **more)
    rows = choice.rows_of(asked)
    row = choice.choose(rows, key)
    return choice.StrategyPlan(asked, rows, row), row


@pytest.fixture
def gpus(monkeypatch):
    """Lightning finds eight GPUs here; none is asked for anything."""
    from lightning.fabric.accelerators import cuda
    from lightning.pytorch.accelerators import CUDAAccelerator

    monkeypatch.setattr(cuda, "num_cuda_devices", lambda: 8)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    # Else DeepSpeed takes the GPUs that are played here for this process's, for good.
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def read(plan, row, precision="bf16"):
    names = {}
    exec(lightning_trainer(plan, row, precision=precision), names)  # noqa: S102 - our own text
    return SimpleNamespace(**names)


@pytest.mark.filterwarnings("ignore:The `srun` command")
@pytest.mark.parametrize("key", KEYS)
def test_lightning_makes_the_trainer(key, gpus, tmp_path, monkeypatch):
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
    )

    plan, row = planned(key, global_batch=64)
    for name, text in files_of(plan, row, time="1:00", partition="", precision="bf16").items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)  # where DeepSpeed's file lies
    found = read(plan, row).trainer(max_steps=3, logger=False, default_root_dir=tmp_path)

    assert (found.num_devices, found.num_nodes, found.max_steps) == (8, 2, 3)
    assert found.accumulate_grad_batches == row.batch.passes
    kinds = {
        "ddp": DDPStrategy,
        "lora-ddp": DDPStrategy,
        "zero2": DeepSpeedStrategy,
        "zero3": DeepSpeedStrategy,
    }
    assert type(found.strategy) is kinds.get(key, ModelParallelStrategy)
    if key.startswith("zero"):
        assert found.strategy.config["zero_optimization"]["stage"] == int(key[4])
    elif not key.endswith("ddp"):
        assert found.strategy._data_parallel_size == row.way.data_ranks
        assert found.strategy._tensor_parallel_size == row.way.layout.tp
    shards = type(found.strategy) is ModelParallelStrategy
    assert found.precision == ("32-true" if shards else "bf16-mixed")


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("precision", "low"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)]
)
def test_its_module_is_sharded_and_recomputed_as_the_plan_says(precision, low, alone):
    plan, row = planned("fsdp2+recompute")
    names = read(plan, row, precision)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))

    names.recompute(model, list(model))
    names.shard(model, list(model), mesh)

    assert isinstance(model, FSDPModule)
    assert [type(block).__name__ for block in model] == ["FSDPCheckpointWrapper"] * 2
    policy = model._get_fsdp_state()._mp_policy
    assert policy.param_dtype == low
    model(torch.ones(2, 4)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_what_rests_on_the_host_says_so_to_fsdp2():
    from torch.distributed.fsdp import CPUOffloadPolicy

    given = []
    for key in ("fsdp2+recompute+offload", "fsdp2"):
        names = vars(read(*planned(key)))
        scope = names["shard"].__globals__
        scope["fully_shard"] = lambda _part, **options: given.append(options)
        names["shard"]("all", [], {"data_parallel": "mesh"})

    away, kept = given
    assert isinstance(away["offload_policy"], CPUOffloadPolicy)
    assert "offload_policy" not in kept


def test_copies_of_a_sharded_model_have_a_mesh_of_their_own(monkeypatch):
    plan, row = planned("hsdp")
    names = vars(read(plan, row))
    made, sharded = [], []
    names["shard"].__globals__["init_device_mesh"] = lambda *words, **more: made.append(
        (words, more)
    )
    names["shard"].__globals__["fully_shard"] = lambda part, **_: sharded.append(part)

    names["shard"]("all", ["one"], SimpleNamespace(device_type="cuda"))

    assert made == [(("cuda", (2, 8)), {"mesh_dim_names": ("copy", "shard")})]
    assert sharded == ["one", "all"]


def megatron_parser():
    """Megatron-LM's own parser, as its source built it; tests/data says of which commit."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    types = {"int": int, "float": float}
    for line in OPTIONS.read_text().splitlines():
        name, _, takes = line.partition(" ")
        if name == "#":
            continue
        if takes == "flag":
            parser.add_argument(name, action="store_true")
        elif "|" in takes:
            parser.add_argument(name, choices=takes.split("|"))
        else:
            kind, _, many = takes.partition(" ")
            parser.add_argument(name, type=types.get(kind, str), nargs=many or None)
    return parser


def megatron(key, precision="bf16", **more):
    plan, row = planned(key, **more)
    text = megatron_args(plan, row, precision=precision)
    words = [word for line in text.splitlines() if line[0] != "#" for word in line.split(" ")]
    return megatron_parser().parse_args(words), plan, row


@pytest.mark.parametrize("key", [*KEYS[:8], "zero1", "tp4+recompute", "pp2"])
def test_megatron_takes_its_arguments(key):
    args, plan, row = megatron(key, steps=1000, global_batch=64)

    model = plan.asked.model
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (32, 4096, 11_008)
    assert (args.num_attention_heads, args.kv_channels) == (model.heads, 128)
    assert (args.micro_batch_size, args.global_batch_size) == (row.batch.micro, 64)
    assert (args.seq_length, args.max_position_embeddings, args.train_iters) == (2048, 2048, 1000)
    assert args.tensor_model_parallel_size == row.way.layout.tp
    stages = row.way.layout.pp if row.way.layout.pp > 1 else None
    assert args.pipeline_model_parallel_size == stages
    assert args.sequence_parallel is (row.way.layout.tp > 1)
    assert (args.recompute_granularity == "full") is row.way.layout.recompute
    assert args.bf16
    assert not args.fp16
    assert args.swiglu
    assert args.untie_embeddings_and_output_weights
    assert not args.group_query_attention
    strategy = {
        "ddp": (False, None), "zero1": (False, None), "pp2": (False, None),
        "zero2": (True, "optim_grads"), "fsdp2-no-reshard": (True, "optim_grads"),
    }  # fmt: skip
    assert (args.use_megatron_fsdp, args.data_parallel_sharding_strategy) == strategy.get(
        key, (True, "optim_grads_params")
    )
    assert args.use_distributed_optimizer is (key != "ddp")
    assert args.num_distributed_optimizer_instances == (2 if key == "hsdp" else None)


def test_megatron_is_told_what_kind_of_model_it_is():
    grouped, *_ = megatron("ddp", "fp16", model="llama-156M")
    assert (grouped.group_query_attention, grouped.num_query_groups) == (True, 4)
    assert (grouped.fp16, grouped.bf16) == (True, False)
    gpt2, *_ = megatron("ddp", "fp32", model="gpt2-124M")
    assert (gpt2.position_embedding_type, gpt2.normalization) == ("learned_absolute", "LayerNorm")
    given = (gpt2.swiglu, gpt2.untie_embeddings_and_output_weights, gpt2.bf16, gpt2.fp16)
    assert given == (False,) * 4
    experts, *_ = megatron("fsdp2", model="mixtral-270M")
    assert (experts.num_experts, experts.moe_router_topk) == (8, 2)
    assert experts.expert_model_parallel_size is None
    shared, *_ = megatron("ep4")
    assert (shared.num_experts, shared.expert_model_parallel_size) == (8, 4)


def test_a_model_that_pretrain_gpt_does_not_train_gets_no_arguments_for_it():
    plan, row = planned("ddp", model="bert-335M")
    names = files_of(plan, row, time="1:00", partition="", precision="bf16")
    assert "megatron.args" not in names
    assert {"lightning_trainer.py", "jobset.yaml"} <= set(names)


def test_kubernetes_takes_the_jobset_whole():
    from kubeflow_trainer_api import models

    plan, row = planned("fsdp2")
    given = yaml.safe_load(jobset_yaml(plan, row, program="train.py"))

    read_back = models.JobsetV1alpha2JobSet.from_dict(given).to_dict()

    assert read_back == given  # a field that the schema does not have is left out of it
    job = given["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert (job["parallelism"], job["completions"]) == (2, 2)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_torchrun_takes_the_line_of_a_pod():
    from torch.distributed.run import parse_args

    plan, row = planned("fsdp2")
    job = yaml.safe_load(jobset_yaml(plan, row, program="train.py"))
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    given = parse_args(pod["containers"][0]["args"])
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("2", "8", "c10d")
    assert given.rdzv_endpoint == "train-node-0-0.train:29500"
    assert given.training_script == "train.py"


@pytest.mark.parametrize("key", KEYS)
def test_the_python_file_is_clean(key, tmp_path):
    plan, row = planned(key)
    path = tmp_path / "lightning_trainer.py"
    path.write_text(lightning_trainer(plan, row, precision="bf16"))
    rules = ["--isolated", "--line-length=100", "--select=E,F,I", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *rules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
