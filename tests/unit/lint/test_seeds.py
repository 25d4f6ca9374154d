"""What documents on distributed training advise and should not: each snippet with its finding.

The snippets are those of the project's seeds, completed to programs where they were pieces. The
W-numbers are those of the study that corrects them.
"""

from __future__ import annotations

import pytest

from hpctrain.advise.lint.check import check_text

HEAD = "import os\nimport torch\nimport torch.distributed as dist\n"
SNIPPETS = [
    (
        "W1: the result of an all_reduce in place",
        (
            "should_skip = batch['size'] < 4\n"
            "all_skip = dist.all_reduce(should_skip, op=dist.ReduceOp.MAX)\n"
            "if all_skip:\n    pass\n"
        ),
        {"HT104"},
    ),
    (
        "W3: the old scaler",
        "from torch.cuda.amp import GradScaler\nscaler = GradScaler()\n",
        {"HT401"},
    ),
    (
        "W4: autocast without a device",
        "with torch.autocast(dtype=torch.bfloat16):\n    loss = model(batch)\n",
        {"HT207"},
    ),
    (
        "W5: no zero_grad",
        "for batch in loader:\n    model(batch).backward()\n    optimizer.step()\n",
        {"HT204"},
    ),
    (
        "W6, W7: FSDP1, its wrapper thrown away",
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, CPUOffload\n"
            "for layer in model.layers:\n"
            "    FSDP(layer, cpu_offload=CPUOffload(offload_params=True))\n"
        ),
        {"HT404", "HT514"},
    ),
    (
        "W8: a bare wrap policy, sums in bf16",
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision\n"
            "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n"
            "mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)\n"
            "model = FSDP(model, mixed_precision=mp, auto_wrap_policy=transformer_auto_wrap_policy)"
        ),
        {"HT214", "HT404", "HT607"},
    ),
    (
        "W9: load_state_dict of checkpoints",
        (
            "from torch.distributed.checkpoint import load_state_dict, FileSystemReader\n"
            "load_state_dict(state_dict=state, storage_reader=FileSystemReader('checkpoint_dir'))\n"
        ),
        {"HT403"},
    ),
    (
        "W10: an option that is none",
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
            "model = FSDP(model, use_orig_params=True, state_dict_type='FULL_STATE_DICT')\n"
        ),
        {"HT404", "HT606"},
    ),
    (
        "W11, W12: the global rank as a device, a bare process group",
        (
            "dist.init_process_group('nccl')\nrank = dist.get_rank()\n"
            "model = torch.nn.parallel.DistributedDataParallel(model.to(rank), device_ids=[rank])\n"
        ),
        {"HT506", "HT507", "HT508"},
    ),
    ("W13: a knob that is none", "os.environ['NCCL_TIMEOUT'] = '1800'\n", {"HT503"}),
    (
        "W14, W15, W16: interface, transport, algorithm",
        (
            "os.environ['NCCL_ALGO'] = 'Ring'\nos.environ['NCCL_SOCKET_IFNAME'] = 'eth0'\n"
            "os.environ['NCCL_IB_DISABLE'] = '0'\n"
        ),
        {"HT501", "HT502", "HT504"},
    ),
    (
        "W21: checkpoint without use_reentrant",
        "from torch.utils.checkpoint import checkpoint\ny = checkpoint(block, x)\n",
        {"HT406"},
    ),
    (
        "W36: a dataset filtered by loading it",
        "rank = dist.get_rank()\nfiltered_dataset = [x for x in dataset if valid(x)]\n",
        {"HT307"},
    ),
    (
        "W42: a profiler that is never stepped",
        (
            "schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)\n"
            "with torch.profiler.profile(schedule=schedule) as prof:\n    train()\n"
        ),
        {"HT518"},
    ),
]


@pytest.mark.parametrize(("name", "text", "codes"), SNIPPETS, ids=[name for name, *_ in SNIPPETS])
def test_a_snippet_has_its_findings_and_no_others(name, text, codes):
    assert {one.rule.code for one in check_text(HEAD + text, "program.py")} == codes


def test_typos_at_the_top_of_a_configuration_are_errors():
    """W39: DeepSpeed takes any key there."""
    text = '{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}'

    assert {one.rule.code for one in check_text(text, "ds_config.json")} == {"HT701"}
