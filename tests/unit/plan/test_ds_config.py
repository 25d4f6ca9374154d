"""DeepSpeed's configuration: what we make it of, and that DeepSpeed reads it so.

Run as a program this file asks the installed DeepSpeed, whose import would change this process.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.settings.external import REMOVED_KEYS, SECTIONS, TOP_KEYS, ZERO
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.ledger.plan.deepspeed import engine_config

CASES = [
    {"kind": f"zero{stage}", "offload": offload, "precision": precision, "selective": selective}
    for stage, precision, offload, selective in itertools.product(
        range(4), ("fp32", "bf16", "fp16"), ("no", "cpu"), (False, True)
    )
    if offload == "no" or stage > 0
]


def made(kind, offload, precision, *, selective):
    engine = EngineSettings(
        kind=kind,
        offload=offload,
        activation_checkpointing="selective" if selective else "no",
        clip_norm=0.0,
    )
    return engine_config(engine, precision=precision, data_ranks=1)


# ---- what DeepSpeed itself says


@pytest.fixture(scope="module")
def deepspeed():
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, __file__], env=environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_our_top_level_keys_are_those_that_the_installed_deepspeed_reads(deepspeed):
    assert sorted(TOP_KEYS | REMOVED_KEYS) == deepspeed["top"]
    assert sorted(REMOVED_KEYS) == deepspeed["removed"]


def test_our_sections_have_the_keys_of_the_installed_deepspeed(deepspeed):
    assert {name: sorted(keys) for name, keys in SECTIONS.items()} == deepspeed["sections"]


def test_deepspeed_understands_every_generated_config_as_it_is_meant(deepspeed):
    for case, seen in zip(CASES, deepspeed["understood"], strict=True):
        stage = int(case["kind"][-1])
        device = "none" if case["offload"] == "no" else case["offload"]
        assert seen == {
            "stage": stage,
            "bf16": case["precision"] == "bf16",
            "fp16": case["precision"] == "fp16",
            "clip": 0.0,
            "optimizer on": device,
            "parameters on": "cpu" if stage == 3 and device != "none" else "none",
            "at a time": 1_000_000_000,
            "gradients added in": "fp32" if stage > 1 else None,
            "memory_efficient_linear": not (stage == 3 and case["selective"]),
            "round_robin": False,
            "overlap": stage == 3,
            "bucket": 50_000_000,
            "own optimizer": False,
            "untested": True,
            "passes": 1,
        }, case


# ---- what we make


def test_the_scale_of_losses_is_hpctrains_own_in_fp16_alone():
    fp16, bf16 = (made("zero2", "no", kind, selective=False) for kind in ("fp16", "bf16"))

    assert fp16["fp16"] == {
        "enabled": True, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1,
    }  # fmt: skip
    assert bf16["fp16"] == {"enabled": False}


def test_batch_sizes_are_formal_and_fit_the_ranks():
    config = engine_config(EngineSettings(kind="zero1"), precision="fp32", data_ranks=6)
    sizes = [config[f"train_{name}"] for name in ("batch_size", "micro_batch_size_per_gpu")]
    assert [*sizes, config["gradient_accumulation_steps"]] == [6, 1, 1]


# ---- asked in a process of its own


def ask():
    """Print what the installed DeepSpeed reads, and how it understands our configurations."""
    import deepspeed
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.swap_tensor import aio_config
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    class Watched(dict):
        seen: set[str] = set()  # noqa: RUF012 - one for all copies

        def get(self, key, default=None):
            self.seen.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            self.seen.add(key)
            return super().__getitem__(key)

        def __contains__(self, key):
            self.seen.add(key)
            return super().__contains__(key)

        def keys(self):
            return self

        def __copy__(self):
            return type(self)(self)

    def fields(model):
        names = {name: field.alias for name, field in model.model_fields.items()}
        return sorted({*names, *filter(None, names.values())})

    def understood(case):
        told = config.DeepSpeedConfig(made(**case))
        zero = told.zero_config
        away = [zero.offload_optimizer, zero.offload_param]
        return {
            "stage": int(zero.stage),
            "bf16": told.bfloat16_config.enabled,
            "fp16": told.float16_config.enabled,
            "clip": told.gradient_clipping,
            "optimizer on": away[0].device if away[0] else "none",
            "parameters on": away[1].device if away[1] else "none",
            "at a time": zero.sub_group_size,
            "gradients added in": told.grad_accum_dtype,
            "memory_efficient_linear": zero.memory_efficient_linear,
            "round_robin": zero.round_robin_gradients,
            "overlap": zero.overlap_comm,
            "bucket": zero.reduce_bucket_size,
            "own optimizer": told.zero_force_ds_cpu_optimizer,
            "untested": told.zero_allow_untested_optimizer,
            "passes": told.gradient_accumulation_steps,
        }

    config.DeepSpeedConfig(Watched(train_batch_size=1))
    source = Path(deepspeed.__file__).read_text()
    aio = Watched()
    aio.seen = set()
    aio_config.get_aio_config({"aio": aio})
    return {
        "top": sorted(Watched.seen | read_by_initialize(source)),
        "removed": sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
        "sections": {
            ZERO: fields(DeepSpeedZeroConfig),
            f"{ZERO}.offload_optimizer": fields(offload_config.DeepSpeedZeroOffloadOptimizerConfig),
            f"{ZERO}.offload_param": fields(offload_config.DeepSpeedZeroOffloadParamConfig),
            "bf16": fields(precision_config.DeepSpeedBF16Config),
            "fp16": fields(precision_config.DeepSpeedFP16Config),
            "aio": sorted(aio.seen),
        },
        "understood": [understood(case) for case in CASES],
    }


def read_by_initialize(source):
    """The keys that `deepspeed.initialize` itself takes from its config, from its source."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            key, of = node.left, node.comparators[0]
        elif isinstance(node, ast.Subscript):
            key, of = node.slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            key, of = node.args[0], node.func.value
        else:
            continue
        named = isinstance(of, ast.Name) and of.id == "config"
        if named and isinstance(key, ast.Constant):
            found.add(key.value)
    return found


if __name__ == "__main__":
    print(json.dumps(ask()))
