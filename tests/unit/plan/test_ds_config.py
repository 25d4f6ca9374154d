"""DeepSpeed's configuration: what we make it of, what we refuse, and that DeepSpeed reads it so.

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
from hpctrain.core.settings.schema import EngineSettings, Settings, TrainSettings
from hpctrain.errors import NotFound, UsageError
from hpctrain.launch.checks import take_ds_config
from hpctrain.ledger.plan.deepspeed import (
    MUST_BE,
    NO_EFFECT,
    REFUSED,
    check_user_config,
    engine_config,
    read_user_config,
    resolve_ds_config,
)

CASES = [
    {"kind": f"zero{stage}", "offload": offload, "precision": precision, "selective": selective}
    for stage, precision, offload, selective in itertools.product(
        range(4), ("fp32", "bf16", "fp16"), ("no", "cpu"), (False, True)
    )
    if offload == "no" or stage > 0
]


def made(kind, offload, precision, *, selective, **more):
    engine = EngineSettings(
        kind=kind,
        offload=offload,
        activation_checkpointing="selective" if selective else "no",
        clip_norm=0.0,
        **more,
    )
    return engine_config(engine, precision=precision, data_ranks=1)


def check(user, *, train=None, **engine):
    settings = EngineSettings(**{"kind": "zero2", **engine})
    return check_user_config(user, settings, train=train, where="ds.json")


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


def test_what_is_refused_or_without_effect_is_a_key_of_deepspeeds():
    for path in [*REFUSED, *MUST_BE, *NO_EFFECT]:
        section, _, key = path.rpartition(".")
        assert key in (SECTIONS[section] if section else TOP_KEYS | REMOVED_KEYS), path


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


def test_batch_sizes_are_formal_and_fit_the_ranks():
    config = engine_config(EngineSettings(kind="zero1"), precision="fp32", data_ranks=6)
    sizes = [config[f"train_{name}"] for name in ("batch_size", "micro_batch_size_per_gpu")]
    assert [*sizes, config["gradient_accumulation_steps"]] == [6, 1, 1]


def test_a_users_values_win_over_our_defaults_and_lose_to_what_must_hold():
    user = {
        "wall_clock_breakdown": True,
        "gradient_clipping": "auto",
        "train_batch_size": 96,
        "bf16": {"enabled": "auto"},
        ZERO: {
            "stage": "auto",
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": "auto",
            "round_robin_gradients": True,
            "offload_optimizer": {"device": "auto", "pin_memory": False},
        },
    }
    text = json.dumps(user)

    config = made("zero2", "cpu", "bf16", selective=False, ds_config=text)

    assert config["wall_clock_breakdown"] is True
    assert config["gradient_clipping"] == 0.0
    assert config["train_batch_size"] == 1
    assert config["bf16"] == {"enabled": True}
    zero = config[ZERO]
    assert zero["stage"] == 2
    assert zero["reduce_bucket_size"] == 1000
    assert zero["allgather_bucket_size"] == 50_000_000
    assert zero["round_robin_gradients"] is False
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_a_path_that_was_never_read_is_refused_by_the_engine():
    with pytest.raises(UsageError, match=r"engine\.ds_config is 'ds\.json', not the text"):
        made("zero2", "no", "fp32", selective=False, ds_config="ds.json")


# ---- reading


def test_the_spec_gets_the_files_text_compact():
    files = {"conf/ds.json": '{\n  "bf16": {"enabled": true},\n  "steps_per_print": 1e3\n}'}
    wanted = '{"bf16":{"enabled":true},"steps_per_print":1000.0}'
    assert resolve_ds_config("conf/ds.json", files.__getitem__) == wanted
    assert resolve_ds_config(wanted, files.__getitem__) == wanted
    assert resolve_ds_config("", files.__getitem__) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "a": 1,\n}', r"ds\.json:3: not valid JSON: "),
        ("[1]", r"ds\.json: must be one JSON object, \{\.\.\.\}, not \[1\]"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "enabled stands there twice"),
        ('{"gradient_clipping": NaN}', "NaN is not a number in JSON"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
    ids=["a comma too many", "a list", "a key twice", "not a number", "too deep"],
)
def test_a_file_that_is_not_one_json_object_is_refused_with_its_place(text, message):
    with pytest.raises(UsageError, match=message):
        read_user_config(text, "ds.json")


# ---- at submit


def taken(tmp_path, value, **engine):
    settings = Settings(engine=EngineSettings(kind="zero2", ds_config=value, **engine))
    settings, notes = take_ds_config(settings, tmp_path, is_recipe=True)
    return notes, settings.engine


def test_a_path_in_the_settings_becomes_the_files_text(tmp_path):
    (tmp_path / "ds.json").write_text('{"steps_per_print": 10,\n "checkpoint": {}}')

    notes, engine = taken(tmp_path, "ds.json")

    assert engine.ds_config == '{"steps_per_print":10,"checkpoint":{}}'
    assert [note.partition(" has no effect")[0] for note in notes] == ["ds.json: checkpoint"]
    (tmp_path / "ds.json").unlink()
    again, _ = taken(tmp_path, engine.ds_config)
    assert [note.partition(" has no effect")[0] for note in again] == [
        "engine.ds_config: checkpoint"
    ]
    assert taken(tmp_path, "") == ([], EngineSettings(kind="zero2"))


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, NotFound, r"ds\.json \(engine\.ds_config\) is not there; check the path"),
        (b"\xff{}", UsageError, r"ds\.json \(engine\.ds_config\) cannot be read: not UTF-8"),
        (b"{]", UsageError, r"ds\.json:1: not valid JSON"),
        (b'{"train_batch_size": 7}', UsageError, r"ds\.json: train_batch_size is 7, and train\."),
    ],
    ids=["missing", "no text", "no JSON", "contradicts"],
)
def test_a_file_that_cannot_be_taken_is_refused_by_its_name(tmp_path, content, error, message):
    if content is not None:
        (tmp_path / "ds.json").write_bytes(content)

    with pytest.raises(error, match=message):
        taken(tmp_path, "ds.json")


# ---- checking

REFUSALS = {
    "a top-level key misspelt": (
        {"zero_optimisation": {"stage": 2}},
        {},
        "zero_optimisation is not a key that DeepSpeed knows; did you mean zero_optimization?",
    ),
    "a ZeRO key misspelt": (
        {ZERO: {"overlap_com": True}},
        {},
        "did you mean zero_optimization.overlap_comm?",
    ),
    "an offload key misspelt": (
        {ZERO: {"offload_param": {"pin_memry": True}}},
        {},
        "did you mean zero_optimization.offload_param.pin_memory?",
    ),
    "a key like no other": ({"qqqq": 1}, {}, "qqqq is not a key that DeepSpeed knows; take it out"),
    "the old form": ({ZERO: True}, {}, "zero_optimization is true; it takes an object"),
    "no section": ({"bf16": None}, {}, "bf16 is null; it takes an object"),
    "another stage": (
        {ZERO: {"stage": 3}},
        {},
        'zero_optimization.stage is 3, and engine.kind is "zero2"',
    ),
    "a stage that is none": ({ZERO: {"stage": True}}, {"kind": "zero1"}, "stage is true, and"),
    "another precision": (
        {"bf16": {"enabled": True}},
        {"precision": "fp32"},
        'bf16.enabled is true, and engine.precision is "fp32"',
    ),
    "the precision switched off": (
        {"fp16": {"enabled": False}},
        {"precision": "fp16"},
        'fp16.enabled is false, and engine.precision is "fp16"',
    ),
    "both precisions": (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        {"precision": "bf16"},
        "fp16.enabled is true, and",
    ),
    "another clipping": (
        {"gradient_clipping": 0.5},
        {},
        "gradient_clipping is 0.5, and engine.clip_norm is 1",
    ),
    "an optimizer": (
        {"optimizer": {"type": "AdamW"}},
        {},
        "hpctrain does not take optimizer: the program makes the optimizer",
    ),
    "a scheduler": ({"scheduler": {"type": "WarmupLR"}}, {}, "hpctrain does not take scheduler"),
    "round robin": (
        {ZERO: {"round_robin_gradients": True}},
        {},
        "hpctrain does not take zero_optimization.round_robin_gradients",
    ),
    "summed gradients": (
        {"gradient_allreduce_op": "sum"},
        {},
        'gradient_allreduce_op is "sum"; hpctrain needs "mean"',
    ),
    "state in two places": (
        {ZERO: {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"kind": "zero3", "offload": "cpu"},
        "zero_optimization.offload_optimizer.ratio is 0.5; hpctrain needs 1.0",
    ),
    "a removed feature": ({"amp": {"enabled": True}}, {}, "hpctrain does not take amp: DeepSpeed"),
    "offload that is not set": (
        {ZERO: {"offload_optimizer": {"device": "cpu"}}},
        {},
        'offload_optimizer.device is "cpu", and engine.offload is "no"',
    ),
    "offload switched off": (
        {ZERO: {"offload_optimizer": {"device": "none"}}},
        {"offload": "cpu"},
        'offload_optimizer.device is "none", and engine.offload is "cpu"',
    ),
    "offload of what every rank holds": (
        {ZERO: {"offload_param": {"device": "cpu"}}},
        {"offload": "cpu"},
        'offload_param.device is "cpu", and engine.offload is "cpu" and engine.kind is "zero2"',
    ),
    "a disk for the optimizer that is not set": (
        {ZERO: {"offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}},
        {"kind": "zero3", "offload": "cpu"},
        'offload_optimizer.device is "nvme", and engine.offload is "cpu"',
    ),
    "gradients added in fp32 at stage 1": (
        {"data_types": {"grad_accum_dtype": "fp32"}},
        {"kind": "zero1", "precision": "bf16"},
        'dtype is "fp32", and engine.precision is "bf16" and engine.kind is "zero1"; zero2',
    ),
    "gradients added in another type": (
        {"data_types": {"grad_accum_dtype": "fp16"}},
        {"precision": "bf16"},
        'data_types.grad_accum_dtype is "fp16", and engine.precision is "bf16"',
    ),
    "no gradient norm": (
        {ZERO: {"compute_grad_norm": False}},
        {},
        "zero_optimization.compute_grad_norm is false; hpctrain needs true, since a step's grad",
    ),
}


@pytest.mark.parametrize(("user", "engine", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_deepspeed_would_not_read_or_read_otherwise_is_refused(user, engine, message):
    with pytest.raises(UsageError) as refusal:
        check(user, **engine)

    said = str(refusal.value)
    assert said.startswith("ds.json: ")
    assert message in said


@pytest.mark.parametrize("size", [64, 0, True, "32"])
def test_the_batch_of_the_recipe_must_be_the_settings(size):
    with pytest.raises(UsageError, match=r"train_batch_size is .*train\.global_batch is 32"):
        check({"train_batch_size": size}, train=TrainSettings(global_batch=32))


def test_a_file_that_agrees_passes_and_what_has_no_effect_is_told():
    user = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "torch_autocast": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn"},
        ZERO: {
            "stage": 3,
            "stage3_prefetch_bucket_size": "auto",
            "round_robin_gradients": False,
            "leaf_module": {"classes": ["Block"]},
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
    }
    engine = {"kind": "zero3", "precision": "bf16", "offload": "cpu"}

    notes = check(user, train=TrainSettings(global_batch=32, micro_batch=4), **engine)

    cuts = "has no effect; train.micro_batch says how much a pass takes"
    assert notes == [
        "ds.json: checkpoint has no effect; hpctrain writes the checkpoints: see [checkpoint]",
        f"ds.json: train_micro_batch_size_per_gpu {cuts}",
        f"ds.json: gradient_accumulation_steps {cuts}",
    ]


def test_a_file_that_leaves_everything_to_us_passes():
    user = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": "auto",
        ZERO: {"stage": "auto", "offload_optimizer": "auto"},
    }
    assert check(user, train=TrainSettings()) == []


def test_a_program_of_the_users_is_told_that_its_own_batches_count():
    assert check({"train_batch_size": 96}) == [
        "ds.json: train_batch_size has no effect; the program cuts batches"
    ]


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
