"""A plan in the words of Lightning, Megatron-LM and Kubernetes.

Each text is held against its real reader by tests/unit/strategy/test_exports.py. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.advise.strategy.facts import BERT, GPT2, MOE

if TYPE_CHECKING:
    from hpctrain.advise.strategy.choice import StrategyPlan
    from hpctrain.advise.strategy.facts import ModelFacts
    from hpctrain.advise.strategy.rows import Row

_LIGHTNING = '''"""A Trainer of Lightning for {title}. Written by hpctrain plan.

{how}
"""

{imports}


def trainer(**more):
    """With this plan's strategy; what is given beside it (max_steps, callbacks) is added."""
    return Trainer(
        strategy={strategy},
        accelerator="gpu",
        devices={devices},
        num_nodes={nodes},
        precision="{precision}",
        accumulate_grad_batches={passes},
        **more,
    )
'''
_SHARD = '''

def shard(model, blocks, mesh):
    """Called by `configure_model(self)`: shard(self.model, self.model.layers, self.device_mesh)."""
    {mesh}
    policy = MixedPrecisionPolicy({policy})
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard}{away})
'''
_RECOMPUTE = '''

def recompute(model, blocks):
    """Blocks compute their forward pass again in the backward pass; call it before anything else.

    DDP and DeepSpeed want it in `configure_model` too, before Lightning wraps the model.
    """
    chosen = {id(block) for block in blocks}
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)
'''
_JOBSET = """# {title}: written by hpctrain plan.
# Set image; add volumes for data and checkpoints.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: train
spec:
  network:
    enableDNSHostnames: true
  failurePolicy:
    maxRestarts: 10 # the program has to go on from its newest checkpoint
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          parallelism: {nodes}
          completions: {nodes}
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              containers:
                - name: ranks
                  image: IMAGE
                  command: [torchrun]
                  args:
                    - --nnodes={nodes}
                    - --nproc-per-node={gpus}
                    - --rdzv-backend=c10d
                    - --rdzv-id=train
                    - --rdzv-endpoint=train-node-0-0.train:29500
                    - {program}
                  ports:
                    - containerPort: 29500
                      protocol: TCP
                  resources:
                    limits:
                      {resource}: {gpus}
                  volumeMounts:
                    - name: shm
                      mountPath: /dev/shm
              volumes:
                - name: shm # NCCL and DataLoader workers need more than a pod's 64 MB
                  emptyDir:
                    medium: Memory
"""
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
        more += _RECOMPUTE
    first = ["import torch"] if "torch." in more else []
    text = _LIGHTNING.format(
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
    shard = _SHARD.format(
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


def megatron_misfit(row: Row, plan: StrategyPlan) -> str:
    """Why Megatron-LM's pretrain_gpt.py cannot train so; empty where it can."""
    layout = row.way.layout
    if plan.asked.model.family == BERT:
        return "pretrain_gpt.py trains decoders alone"
    if layout.offload:
        return "pretrain_gpt.py keeps no weights on the host"
    if layout.lora:
        return "pretrain_gpt.py trains no adapters"
    return ""


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
    return _JOBSET.format(
        title=row.way.title, nodes=nodes, gpus=gpus, resource=resource, program=program
    )
