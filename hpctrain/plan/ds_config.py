"""DeepSpeed's configuration: from our settings, with the user's own file merged under them. Pure.

What a user's file may say is `ds_check.py`'s, at submit; here what must hold overrules it. That
DeepSpeed takes what comes out is tested with its own parser in tests/unit/test_ds_config.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpctrain.errors import UsageError
from hpctrain.plan.ds_keys import ZERO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.settings.schema import EngineSettings

AUTO = "auto"
"""What a file written for Hugging Face's trainer says where others are to fill in."""

BUCKET_ELEMENTS = 50_000_000
"""Gradients or parameters that travel at a time: 100 MB of bf16, which keeps a fast network busy.
DeepSpeed's own 5e8 takes one gigabyte of the GPU, or two where buckets overlap."""

NEVER = 1_000_000_000
"""Steps between DeepSpeed's own log lines: the ledger has them."""


SPREADS_PARAMETERS = 3
"""The stage at which each rank holds but a part of the weights."""

SUB_GROUP_ELEMENTS = 100_000_000
"""Elements that come from a disk at a time: a rank has four such rows of fp32 in host memory, 1.6
GB. DeepSpeed's own 1e9 takes 16 GB of each rank."""

_SHOWN = 60


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

    Args:
        engine: The run's settings, of a zero kind; `ds_config` is the text of a file, or empty.
        precision: "fp32", "bf16" or "fp16", which "auto" has become on this device.
        data_ranks: Ranks that read different samples.

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

    Args:
        text: Of the file.
        where: How messages name it.

    Raises:
        UsageError: it is not one JSON object, or has a key twice in one place.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UsageError(f"{where}: {key} stands there twice; keep one")
            found[key] = value
        return found

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

    Args:
        value: As set: a path, the text itself (it begins with "{"), or nothing.
        read: The text at a path.

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
            **_offload(engine, stage),
        },
    }


def _offload(engine: EngineSettings, stage: int) -> dict[str, Any]:
    """Weights go to host memory at most: theirs are 2 bytes of an element's 18."""
    if engine.offload == "no":
        return {}
    blocks: dict[str, Any] = {"offload_optimizer": {"device": engine.offload, "pin_memory": True}}
    if stage == SPREADS_PARAMETERS:
        blocks["offload_param"] = {"device": "cpu", "pin_memory": True}
    if engine.offload == "nvme":
        blocks["sub_group_size"] = SUB_GROUP_ELEMENTS
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
    """Lay values over a configuration, section by section, in place."""
    for key, value in over.items():
        mine = config.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            _merge(mine, value)
        else:
            config[key] = value
