"""The files of `hpctrain plan -o DIR`: one plan in the words of those who carry it out.

Each is held against its real reader by tests/unit/strategy/test_writing.py. Pure: texts by name.
templates.toml has those that are long.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.facts import BERT, GPT2, MOE, ModelFacts
from hpctrain.advise.strategy.screen import TEXTS, as_plain, heading
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.ledger.plan.deepspeed import engine_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.advise.strategy.choice import Row, StrategyPlan
    from hpctrain.advise.strategy.memory import Spread

_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def lightning_trainer(plan: StrategyPlan, row: Row, *, precision: str) -> str:
    """A Python file with `trainer(**more)`; `shard` and `recompute` where the model has to help."""
    layout, cluster, batch = row.way.layout, plan.asked.cluster, row.batch
    assert batch is not None  # noqa: S101 - a chosen row has one
    how = f"Batches of {batch.micro} samples: `trainer(max_steps=1000).fit(module, data)`."
    mixed = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(precision, "32-true")
    strategy, more = '"auto"' if layout.kind == "single" else '"ddp"', ""
    imports: list[str] = []
    if layout.kind == "fsdp2":
        strategy, imports, more = _parallel_model(row, precision)
        mixed = "32-true"  # what FSDP2 computes in is its own policy's
        how += "\nLightning leaves the sharding to the module: see `shard`."
        if layout.tp > 1:
            how += " Cut its matrices along\n`self.device_mesh['tensor_parallel']` before."
    elif layout.kind.startswith("zero"):
        imports = ["from lightning.pytorch.strategies import DeepSpeedStrategy"]
        strategy = 'DeepSpeedStrategy(config="ds_config.json")'
    if layout.recompute:
        imports += [f"from {_WRAPPER} import (\n    apply_activation_checkpointing,\n)"]
        more += TEXTS["recompute"]
    first = ["import torch"] if "torch." in more else []
    text = TEXTS["lightning"].format(
        title=row.way.title,
        how=how,
        imports="\n".join([*first, *sorted(["from lightning.pytorch import Trainer", *imports])]),
        strategy=strategy,
        devices=1 if layout.kind == "single" else cluster.gpus,
        nodes=1 if layout.kind == "single" else cluster.nodes,
        precision=mixed,
        passes=batch.passes,
    )
    return text + more


def _parallel_model(row: Row, precision: str) -> tuple[str, list[str], str]:
    """For FSDP2: the strategy, what it imports, and the function that shards."""
    layout = row.way.layout
    low = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(precision)
    shard = TEXTS["shard"].format(
        mesh=_mesh_line(row),
        policy=f"param_dtype={low}, reduce_dtype=torch.float32" if low else "",
        reshard=layout.reshard,
        away=",\n                    offload_policy=CPUOffloadPolicy()" if layout.offload else "",
    )
    names = (*["CPUOffloadPolicy"] * layout.offload, "MixedPrecisionPolicy", "fully_shard")
    imports = [
        "from lightning.pytorch.strategies import ModelParallelStrategy",
        f"from torch.distributed.fsdp import {', '.join(names)}",
    ]
    if layout.copies > 1:
        imports += ["from torch.distributed.device_mesh import init_device_mesh"]
    sizes = f"data_parallel_size={row.way.data_ranks}, tensor_parallel_size={layout.tp}"
    return f"ModelParallelStrategy({sizes})", imports, shard


def _mesh_line(row: Row) -> str:
    """Lightning's mesh has one axis for data; copies of a sharded model need two."""
    layout = row.way.layout
    if layout.copies == 1:
        return 'mesh = mesh["data_parallel"]'
    sizes = f"({layout.copies}, {layout.shards})"
    return f'mesh = init_device_mesh(mesh.device_type, {sizes}, mesh_dim_names=("copy", "shard"))'


def megatron_args(plan: StrategyPlan, row: Row, *, precision: str) -> str:
    """Arguments of Megatron-LM's pretrain_gpt.py, one a line; `#` begins a remark."""
    layout, batch = row.way.layout, row.batch
    assert batch is not None  # noqa: S101 - a chosen row has one
    lines = [
        f"# {row.way.title}: written by hpctrain plan for Megatron-LM's pretrain_gpt.py:",
        "#   torchrun ... pretrain_gpt.py $(grep -v '^#' megatron.args)",
        "# Data, tokenizer and learning rate are yours. A Qwen2 wants --add-qkv-bias too, a Qwen3",
        "# --qk-layernorm; see your config.json for --rotary-base and --norm-epsilon.",
        *_megatron_model(plan.asked.model),
        f"--seq-length {plan.asked.seq}",
        f"--max-position-embeddings {plan.asked.seq}",
        f"--micro-batch-size {batch.micro}",
        f"--global-batch-size {plan.asked.global_batch}",
    ]
    if precision != "fp32":
        lines += [f"--{precision}"]
    if plan.asked.steps:
        lines += [f"--train-iters {plan.asked.steps}"]
    if layout.recompute:
        lines += ["--recompute-granularity full", "--recompute-method uniform"]
        lines += ["--recompute-num-layers 1"]
    lines += [f"--tensor-model-parallel-size {layout.tp}"]
    if layout.tp > 1:
        lines += ["--sequence-parallel"]
    if layout.pp > 1:
        lines += [f"--pipeline-model-parallel-size {layout.pp}"]
    if layout.ep > 1:
        lines += [f"--expert-model-parallel-size {layout.ep}"]
    return "\n".join([*lines, *_megatron_sharding(row)]) + "\n"


def _megatron_model(model: ModelFacts) -> list[str]:
    lines = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads}",
        f"--kv-channels {model.head_dim}",
        f"--ffn-hidden-size {model.inner}",
    ]
    if model.kv_heads != model.heads:
        lines += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    if model.family == GPT2:
        lines += ["--position-embedding-type learned_absolute", "--normalization LayerNorm"]
    else:
        lines += ["--position-embedding-type rope", "--normalization RMSNorm"]
        lines += ["--swiglu", "--disable-bias-linear"]
    if not model.tied:
        lines += ["--untie-embeddings-and-output-weights"]
    if model.family == MOE:
        lines += [f"--num-experts {model.experts}", f"--moe-router-topk {model.routed}"]
    return lines


def _megatron_sharding(row: Row) -> list[str]:
    layout = row.way.layout
    if layout.kind in {"single", "ddp"}:
        return []
    # A stage's weights stay whole for a step, and so do its gradients: the optimizer is sharded.
    if layout.kind == "zero1" or layout.pp > 1:
        return ["--use-distributed-optimizer"]
    # Megatron has no sharding that keeps gathered blocks: whole weights with sharded gradients and
    # optimizer come nearest.
    whole = layout.kind == "zero2" or not layout.reshard
    lines = ["--use-megatron-fsdp", "--use-distributed-optimizer"]
    lines += [f"--data-parallel-sharding-strategy optim_grads{'' if whole else '_params'}"]
    if layout.copies > 1:
        lines += [f"--num-distributed-optimizer-instances {layout.copies}"]
        lines += ["--outer-dp-sharding-strategy no_shard"]
    return [*lines, "--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]


def jobset_yaml(plan: StrategyPlan, row: Row, *, program: str) -> str:
    """A JobSet for Kubernetes: a pod for each node, torchrun in each, all anew when one fails."""
    single = row.way.layout.kind == "single"
    nodes = 1 if single else plan.asked.cluster.nodes
    gpus = 1 if single else plan.asked.cluster.gpus
    resource = "amd.com/gpu" if plan.asked.gpu.name.lower().startswith("mi") else "nvidia.com/gpu"
    return TEXTS["jobset"].format(
        title=row.way.title, nodes=nodes, gpus=gpus, resource=resource, program=program
    )


PROGRAM = "train.py"
"""What is started where no program was named."""


def files_of(
    plan: StrategyPlan, row: Row, *, time: str, partition: str, precision: str
) -> dict[str, str]:
    """Return the files, name to text, that write `row` of the plan down.

    `time` is the job's limit, as sbatch takes it. An empty `partition` is SLURM's default.
    `precision` is "bf16", "fp16" or "fp32".
    """
    texts = {
        "plan.json": json.dumps(as_plain(plan), indent=2) + "\n",
        "hpctrain.toml": hpctrain_toml(
            plan, row, time=time, partition=partition, precision=precision
        ),
        "launch.sh": launch(plan),
        "train.sbatch": batch_script(plan, time=time, partition=partition),
        "jobset.yaml": jobset_yaml(plan, row, program=PROGRAM),
    }
    gone = without_equivalent(plan, row)
    if "accelerate.yaml" not in gone:
        texts["accelerate.yaml"] = accelerate_yaml(plan, row, precision=precision)
    if "lightning_trainer.py" not in gone:
        texts["lightning_trainer.py"] = lightning_trainer(plan, row, precision=precision)
    if "megatron.args" not in gone:
        texts["megatron.args"] = megatron_args(plan, row, precision=precision)
    if row.way.layout.kind.startswith("zero"):
        texts["ds_config.json"] = ds_config(plan, row, precision=precision)
    return texts


def without_equivalent(plan: StrategyPlan, row: Row) -> dict[str, str]:
    """Files that others have no words for, and why."""
    layout, gone = row.way.layout, dict[str, str]()
    for axis, what in (("pp", "pipelines"), ("ep", "experts on several ranks")):
        if getattr(layout, axis) > 1:
            gone |= {
                "accelerate.yaml": f"accelerate knows no {what}",
                "lightning_trainer.py": f"Lightning's Trainer knows no {what}",
            }
    if layout.each_pass or layout.selective:
        what = "no selective recomputation" if layout.selective else "one reduction a step alone"
        gone |= {
            "accelerate.yaml": f"accelerate knows {what}",
            "lightning_trainer.py": f"Lightning's Trainer knows {what}",
        }
    misfits = (
        (layout.selective, "Megatron-LM's selective recomputation keeps other results"),
        (layout.lora, "pretrain_gpt.py trains no adapters"),
        (layout.offload, "pretrain_gpt.py keeps no weights on the host"),
        (plan.asked.model.family == BERT, "pretrain_gpt.py trains decoders alone"),
    )
    for applies, why in misfits:
        gone |= {"megatron.args": why} if applies else {}
    return gone


def ds_config(plan: StrategyPlan, row: Row, *, precision: str) -> str:
    """For DeepSpeed without hpctrain, whose engine writes its own: the same, with the batch."""
    assert row.batch is not None  # noqa: S101 - a chosen row has one
    engine = EngineSettings(
        kind=row.way.layout.kind,
        activation_checkpointing="full" if row.way.layout.recompute else "no",
        offload="cpu" if row.way.layout.offload else "no",
    )
    config = engine_config(engine, precision=precision, data_ranks=row.way.data_ranks)
    config |= {
        "train_batch_size": plan.asked.global_batch,
        "train_micro_batch_size_per_gpu": row.batch.micro,
        "gradient_accumulation_steps": row.batch.passes,
    }
    return json.dumps(config, indent=2) + "\n"


def hpctrain_toml(
    plan: StrategyPlan, row: Row, *, time: str, partition: str, precision: str
) -> str:
    """Settings that `hpctrain submit` reads from the working directory."""
    layout, cluster, batch = row.way.layout, plan.asked.cluster, row.batch
    assert batch is not None  # noqa: S101 - a chosen row has one
    slurm: dict[str, str | int] = {
        "nodes": str(cluster.nodes),
        "gpus_per_node": cluster.gpus,
        "time": time,
    }
    if partition:
        slurm["partition"] = partition
    lines = [
        f"# {row.way.title}: written by hpctrain plan.",
        f"# {heading(plan)}",
        f"# {batch.micro} samples x {batch.passes} passes x {row.way.data_ranks} ranks a step.",
        *(
            [f"# Adapters of rank {layout.lora} are your program's: peft's get_peft_model."]
            if layout.lora
            else []
        ),
        "",
        *_table("slurm", slurm),
        *_table("engine", _engine(layout, precision)),
    ]
    if plan.saving is not None:
        lines += _table("checkpoint", {"interval_s": round(plan.saving.interval_s, 1)})
    return "\n".join(lines).rstrip() + "\n"


def _engine(layout: Spread, precision: str) -> dict[str, str | float | bool]:
    """Return the settings of [engine]."""
    kind = "ddp" if layout.kind == "single" else layout.kind
    engine: dict[str, str | float | bool] = {"kind": kind, "precision": precision}
    if layout.recompute or layout.selective:
        engine["activation_checkpointing"] = "full" if layout.recompute else "selective"
    if layout.each_pass:
        engine["reduce_each_pass"] = True
    if layout.kind == "fsdp2":
        engine["reshard_after_forward"] = layout.reshard
    if layout.tp > 1:
        engine["tp"] = str(layout.tp)
    if layout.copies > 1:
        engine["dp_replicate"] = str(layout.copies)
    if layout.pp > 1:
        engine |= {"pp": str(layout.pp), "pp_schedule": "1f1b"}
    if layout.ep > 1:
        engine["ep"] = str(layout.ep)
    if layout.offload:
        engine["offload"] = "cpu"
    return engine


def _table(name: str, values: Mapping[str, str | float | bool]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]


def launch(plan: StrategyPlan) -> str:
    """One node's ranks by torchrun; under SLURM once on each node."""
    cluster = plan.asked.cluster
    return f"""#!/bin/bash
# Starts the ranks of one node. Written by hpctrain plan; usage: launch.sh [PROGRAM ARGS...]
set -euo pipefail
[ "$#" -gt 0 ] || set -- {PROGRAM}
exec torchrun \\
  --nnodes={cluster.nodes} \\
  --nproc-per-node={cluster.gpus} \\
  --rdzv-backend=c10d \\
  --rdzv-id="${{SLURM_JOB_ID:-0}}" \\
  --rdzv-endpoint="${{HEAD_NODE:-localhost}}:${{HEAD_PORT:-29500}}" \\
  "$@"
"""


def batch_script(plan: StrategyPlan, *, time: str, partition: str) -> str:
    """For sbatch, where hpctrain is not to start the job itself."""
    cluster = plan.asked.cluster
    where = f"#SBATCH --partition={partition}\n" if partition else ""
    return f"""#!/bin/bash
# Written by hpctrain plan; with hpctrain.toml `hpctrain submit` keeps a run going over jobs.
#SBATCH --nodes={cluster.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={cluster.gpus}
#SBATCH --time={time}
{where}#SBATCH --open-mode=append
set -euo pipefail
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HEAD_PORT=$((20000 + SLURM_JOB_ID % 10000))
export HEAD_NODE HEAD_PORT
srun --cpus-per-task="${{SLURM_CPUS_ON_NODE:-1}}" ./launch.sh "$@"
"""


def accelerate_yaml(plan: StrategyPlan, row: Row, *, precision: str) -> str:
    """For `accelerate launch --config_file`; its wizard asks for nothing then."""
    layout, cluster = row.way.layout, plan.asked.cluster
    assert row.batch is not None  # noqa: S101 - a chosen row has one
    ranks = cluster.ranks
    kind = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}.get(layout.kind, "DEEPSPEED")
    lines = [
        "# Written by hpctrain plan. On several nodes add --machine_rank and --main_process_ip.",
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        f"distributed_type: '{kind}'",
        f"mixed_precision: '{'no' if layout.low == FP32 else precision}'",
        f"num_machines: {cluster.nodes}",
        f"num_processes: {ranks if kind != 'NO' else 1}",
        "machine_rank: 0",
        "main_training_function: main",
        "rdzv_backend: c10d",
        "same_network: true",
        "use_cpu: false",
    ]
    if kind == "FSDP":
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(layout.reshard).lower()}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
            f"  fsdp_activation_checkpointing: {str(layout.recompute).lower()}",
            "  fsdp_cpu_ram_efficient_loading: true",
            f"  fsdp_offload_params: {str(layout.offload).lower()}",
        ]
    if kind == "DEEPSPEED":
        lines += [
            "deepspeed_config:",
            "  deepspeed_config_file: ds_config.json",
            f"  zero3_init_flag: {str(layout.kind == 'zero3').lower()}",
        ]
    if layout.tp > 1 or layout.copies > 1:
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {layout.copies}",
            f"  parallelism_config_dp_shard_size: {layout.shards}",
            f"  parallelism_config_tp_size: {layout.tp}",
        ]
    return "\n".join(lines) + "\n"
