"""The files of `hpctrain plan -o DIR`: one plan in the words of those who carry it out.

Each is held against its real reader by tests/unit/strategy/test_writing.py. Pure: texts by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpctrain.advise.strategy.activations import FP32
from hpctrain.advise.strategy.exports import (
    jobset_yaml,
    lightning_trainer,
    megatron_args,
    megatron_misfit,
)
from hpctrain.advise.strategy.screen import as_plain, heading
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.ledger.plan.deepspeed import engine_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpctrain.advise.strategy.choice import StrategyPlan
    from hpctrain.advise.strategy.memory import Spread
    from hpctrain.advise.strategy.rows import Row

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
    if layout.selective:
        gone["megatron.args"] = "Megatron-LM's selective recomputation keeps other results"
    if why := megatron_misfit(row, plan):
        gone["megatron.args"] = why
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
