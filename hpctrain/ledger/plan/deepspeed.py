"""DeepSpeed's configuration: from our settings, with the user's own file merged under them.

`check_user_config` looks at the user's file at submit, and refuses what DeepSpeed would not read,
or what hpctrain cannot hold to, with the key and the setting that it meets; nothing in the file is
left out in silence.

Pure. tests/unit/plan/test_ds_config.py holds the promises, compares the tables to what the
installed DeepSpeed reads, and has its own parser take what comes out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpctrain.core.settings.external import REMOVED_KEYS, SECTIONS, TOP_KEYS, ZERO
from hpctrain.core.settings.layers import did_you_mean
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hpctrain.core.settings.schema import EngineSettings, TrainSettings

REFUSED: dict[str, str] = {
    "bfloat16": 'it is the old name of "bf16"; write that',
    "compile": "set engine.compile",
    "data_efficiency": "hpctrain orders the samples",
    "data_parallel_size": "all ranks of a zero engine are data-parallel",
    "expert_parallel": "set engine.kind fsdp2 and engine.ep",
    "hybrid_engine": "hpctrain's engines train only",
    "managed_gradient_accumulation": "hpctrain says when gradients travel",
    "optimizer": "the program makes the optimizer and gives it to hpctrain",
    "pipeline": "set engine.kind fsdp2 and engine.pp",
    "scheduler": "the program sets the learning rate",
    "sequence_parallel_size": "all ranks of a zero engine are data-parallel",
    "tensor_parallel": "set engine.kind fsdp2 and engine.tp",
    "torch_autocast": "set engine.precision",
    "weight_quantization": "it is for inference",
    f"{ZERO}.cpu_offload": "set engine.offload",
    f"{ZERO}.cpu_offload_param": "set engine.offload",
    f"{ZERO}.cpu_offload_use_pin_memory": 'write "pin_memory" in "offload_optimizer"',
    f"{ZERO}.elastic_checkpoint": "hpctrain's checkpoints load at any number of ranks as it is",
    f"{ZERO}.offload_optimizer.super_offload": "a checkpoint could not reach its state",
    f"{ZERO}.round_robin_gradients": "DeepSpeed 0.19.8 tells wrongly which rank holds what then, "
    "and a checkpoint would be wrong",
    f"{ZERO}.zenflow": "a checkpoint could not reach its state",
    "bf16.bf16_master_weights_and_grads": "checkpoints hold fp32 weights",
    "bf16.bf16_optimizer_states": "checkpoints hold fp32 weights",
    "fp16.fp16_master_weights_and_grads": "checkpoints hold fp32 weights",
} | dict.fromkeys(REMOVED_KEYS, "DeepSpeed has no such feature any more")
"""What hpctrain does not take, with what to know or do; `false` and "auto" are let pass."""

NO_EFFECT: dict[str, str] = {
    "activation_checkpointing": "set engine.activation_checkpointing",
    "aio": "hpctrain keeps no state in files",
    "autotuning": "it belongs to DeepSpeed's own launcher",
    "checkpoint": "hpctrain writes the checkpoints: see [checkpoint]",
    "dataloader_drop_last": "hpctrain cuts the samples",
    "datastates_ckpt": "hpctrain writes the checkpoints: see [checkpoint]",
}
"""Keys that are reported and otherwise let pass."""

MUST_BE: dict[str, tuple[object, str]] = {
    "gradient_allreduce_op": ("mean", "it undoes the mean itself"),
    "zero_allow_untested_optimizer": (True, "the program makes the optimizer"),
    "zero_force_ds_cpu_optimizer": (False, "the program makes the optimizer"),
    f"{ZERO}.compute_grad_norm": (True, "a step's gradient norm is what it logs"),
    f"{ZERO}.offload_optimizer.ratio": (1.0, "a checkpoint could not reach state in two places"),
}
"""Values that hpctrain's engine rests on, and why."""


AUTO = "auto"
"""What a file written for Hugging Face's trainer says where others are to fill in."""

BUCKET_ELEMENTS = 50_000_000
"""Gradients or parameters that travel at a time: 100 MB of bf16, which keeps a fast network busy.
DeepSpeed's own 5e8 takes one gigabyte of the GPU, or two where buckets overlap."""

NEVER = 1_000_000_000
"""Steps between DeepSpeed's own log lines: the ledger has them."""


SPREADS_PARAMETERS = 3
"""The stage at which each rank holds but a part of the weights."""


_SHOWN = 60
BATCH, MICRO, PASSES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def stage_of(kind: str) -> int:
    """ZeRO's stage of an engine kind "zero0" to "zero3"."""
    return int(kind.removeprefix("zero"))


def adds_in_fp32(engine: EngineSettings) -> bool:
    """Whether gradients of 16 bits are added up in fp32 over the passes of a step.

    From stage 2 on, where each rank keeps its part of them alone. Left to itself DeepSpeed adds in
    16 bits. At stage 1 in bf16 it has another optimizer for it, whose state we do not know.
    """
    return stage_of(engine.kind) > 1


def engine_config(engine: EngineSettings, *, precision: str, data_ranks: int) -> dict[str, Any]:
    """The configuration that a DeepSpeed engine is made with.

    Batch sizes in it are formal: hpctrain weights the losses and says when gradients travel.

    `engine` is of a zero kind, with the text of a file as `ds_config`, or nothing. `precision` is
    "fp32", "bf16" or "fp16", which "auto" has become on this device. `data_ranks` read different
    samples.

    Raises:
        UsageError: `engine.ds_config` is not the text of a JSON object.
    """
    config = _defaults(engine, precision)
    if engine.ds_config:
        if not is_text(engine.ds_config):
            raise UsageError(
                f"engine.ds_config is {engine.ds_config!r}, not the text of a ds_config.json; "
                "`hpctrain submit` puts the text in its place"
            )
        _merge(config, without_auto(read_user_config(engine.ds_config, "engine.ds_config")))
    _merge(config, _musts(engine, precision, data_ranks))
    return config


def read_user_config(text: str, where: str) -> dict[str, Any]:
    """A user's ds_config.json.

    Messages call the file `where`.

    Raises:
        UsageError: it is not one JSON object, or has a key twice in one place.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for key, value in pairs:
            if key in parsed:
                raise UsageError(f"{where}: {key} stands there twice; keep one")
            parsed[key] = value
        return parsed

    def no_number(word: str) -> Any:
        raise UsageError(f"{where}: {word} is not a number in JSON; write one")

    try:
        config = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply to be a DeepSpeed configuration") from None
    if not isinstance(config, dict):
        raise UsageError(f"{where}: must be one JSON object, {{...}}, not {shown(config)}")
    return config


def is_text(value: str) -> bool:
    """Whether a value of `engine.ds_config` is the configuration itself, not the path of a file."""
    return value.lstrip().startswith("{")


def resolve_ds_config(value: str, read: Callable[[str], str]) -> str:
    """What a run's spec holds as `engine.ds_config`: JSON text, whole without the file.

    `value` is a path, the text itself (it begins with "{"), or nothing. `read` gives the text at a
    path.

    Raises:
        UsageError: it is not one JSON object.
    """
    if not value:
        return ""
    text, where = (value, "engine.ds_config") if is_text(value) else (read(value), value)
    return json.dumps(read_user_config(text, where), separators=(",", ":"))


def without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the values that are left to hpctrain."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            kept[key] = without_auto(value)
        elif value != AUTO:
            kept[key] = value
    return kept


def shown(value: Any) -> str:
    """A JSON value as its owner wrote it, cut short."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _defaults(engine: EngineSettings, precision: str) -> dict[str, Any]:
    """What a user's file may say otherwise."""
    stage = stage_of(engine.kind)
    return {
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        # As hpctrain's own scale: it starts at 2^16, halves at the first overflow, and doubles
        # after 2000 good steps. DeepSpeed's default waits for a second overflow.
        "fp16": {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
        if precision == "fp16"
        else {},
        "bf16": {},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if adds_in_fp32(engine) else {}),
        ZERO: {
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            # A second bucket is worth its memory where every layer's parameters travel too.
            "overlap_comm": stage == SPREADS_PARAMETERS,
            **_offload_section(engine, stage),
        },
    }


def _offload_section(engine: EngineSettings, stage: int) -> dict[str, Any]:
    """Weights go to host memory at most: theirs are 2 bytes of an element's 18."""
    if engine.offload == "no":
        return {}
    blocks: dict[str, Any] = {"offload_optimizer": {"device": engine.offload, "pin_memory": True}}
    if stage == SPREADS_PARAMETERS:
        blocks["offload_param"] = {"device": "cpu", "pin_memory": True}
    return blocks


def _musts(engine: EngineSettings, precision: str, data_ranks: int) -> dict[str, Any]:
    """What hpctrain's engine rests on."""
    stage = stage_of(engine.kind)
    zero: dict[str, Any] = {
        "stage": stage,
        # With them 0.19.8 tells wrongly which rank holds what.
        "round_robin_gradients": False,
    }
    if stage == SPREADS_PARAMETERS and engine.activation_checkpointing == "selective":
        # It adds a bias in place to what was saved for the backward pass: wrong gradients, and
        # nothing says so.
        zero["memory_efficient_linear"] = False
    return {
        "train_batch_size": data_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": engine.clip_norm,  # DeepSpeed clips at 1.0 where nothing is said
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        # Else it wants to compile an Adam of its own, or refuses the program's.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        ZERO: zero,
    }


def _merge(config: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        section = config.get(key)
        if isinstance(section, dict) and isinstance(value, dict):
            _merge(section, value)
        else:
            config[key] = value


def check_user_config(
    user: Mapping[str, Any],
    engine: EngineSettings,
    *,
    train: TrainSettings | None,
    where: str,
) -> list[str]:
    """Refuse what DeepSpeed would not read or would read otherwise than the run's settings.

    `engine` is of a zero kind; `train` is None where a program of the user's runs. Messages call
    the file `where`.

    Returns:
        What has no effect, for the user to read.

    Raises:
        UsageError: with the first thing that is wrong.
    """
    _known(user, where)
    refuse_unsupported(user, where)
    takes = _takes(engine, train)
    for path, value in _walk(user):
        values, why = takes.get(path, ([value], ""))
        if value != AUTO and not _is_one_of(value, values):
            raise UsageError(
                f"{where}: {path} is {shown(value)}, and {why}; "
                'make them agree, or write "auto" in the file'
            )
    # A program cuts its batches itself, and the recipe by [train].
    cuts = "train.micro_batch says how much a pass takes" if train else "the program cuts batches"
    no_effect = NO_EFFECT | dict.fromkeys(
        (MICRO, PASSES) if train else (BATCH, MICRO, PASSES), cuts
    )
    return [
        f"{where}: {key} has no effect; {instead}"
        for key, instead in no_effect.items()
        if _is_set(user.get(key, AUTO))
    ]


def _known(user: Mapping[str, Any], where: str) -> None:
    """Every key is one that DeepSpeed reads."""
    for path, value in _walk(user):
        section, _, key = path.rpartition(".")
        keys = SECTIONS.get(section) if section else TOP_KEYS | REMOVED_KEYS
        if keys is not None and key not in keys:
            table = f"{section}." if section else ""
            hint = did_you_mean(key, keys, "take it out", table=table)
            raise UsageError(f"{where}: {path} is not a key that DeepSpeed knows; {hint}")
        if path in SECTIONS and not isinstance(value, dict) and value != AUTO:
            raise UsageError(f"{where}: {path} is {shown(value)}; it takes an object, {{...}}")


def refuse_unsupported(user: Mapping[str, Any], where: str) -> None:
    """Refuse what hpctrain's engine cannot train or save right with, whatever the run's settings.

    Messages call the file `where`.

    Raises:
        UsageError: with the first such key.
    """
    for path, value in _walk(user):
        if path in REFUSED and _is_set(value):
            raise UsageError(f"{where}: hpctrain does not take {path}: {REFUSED[path]}")
        wanted, why = MUST_BE.get(path, (AUTO, ""))
        if path in MUST_BE and value not in (AUTO, wanted):
            raise UsageError(
                f"{where}: {path} is {shown(value)}; hpctrain needs {shown(wanted)}, since {why}: "
                "take the key out"
            )


def _takes(engine: EngineSettings, train: TrainSettings | None) -> dict[str, tuple[list[Any], str]]:
    """What both the file and our settings say: by its key what it may be, and why.

    The optimizer's state lies where `engine.offload` says; parameters there, nearer, or not away.
    """
    kind, offload = f'engine.kind is "{engine.kind}"', f'engine.offload is "{engine.offload}"'
    precision = f'engine.precision is "{engine.precision}"'
    away = engine.offload != "no"
    spread = stage_of(engine.kind) == SPREADS_PARAMETERS
    values: dict[str, tuple[list[Any], str]] = {
        "bf16.enabled": ([engine.precision == "bf16"], precision),
        "fp16.enabled": ([engine.precision == "fp16"], precision),
        f"{ZERO}.stage": ([stage_of(engine.kind)], kind),
        "gradient_clipping": ([engine.clip_norm], f"engine.clip_norm is {engine.clip_norm:g}"),
        f"{ZERO}.offload_optimizer.device": ([engine.offload if away else "none"], offload),
        f"{ZERO}.offload_param.device": (
            ["none", *(["cpu"] if away and spread else [])],
            f"{offload} and {kind}",
        ),
        "data_types.grad_accum_dtype": (
            [engine.precision, *(["fp32"] if adds_in_fp32(engine) else [])],
            f"{precision} and {kind}; zero2 and zero3 add gradients in fp32",
        ),
    }
    if train is not None:
        values[BATCH] = ([train.global_batch], f"train.global_batch is {train.global_batch}")
    return values


def _is_one_of(value: Any, values: list[Any]) -> bool:
    """As JSON means it, where true is no number."""
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in values)


def _is_set(value: Any) -> bool:
    """Whether a key asks for something: not left open, and not switched off."""
    if isinstance(value, dict):
        return value.get("enabled", True) is not False
    return value not in (AUTO, False, None)


def _walk(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        path = f"{above}{key}"
        yield path, value
        if isinstance(value, dict):
            yield from _walk(value, f"{path}.")
