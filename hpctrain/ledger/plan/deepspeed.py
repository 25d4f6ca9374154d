"""DeepSpeed's configuration, from our settings.

Pure. tests/unit/plan/test_ds_config.py has DeepSpeed's own parser take what comes out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.core.settings.external import ZERO

if TYPE_CHECKING:
    from hpctrain.core.settings.schema import EngineSettings

BUCKET_ELEMENTS = 50_000_000
"""Gradients or parameters that travel at a time: 100 MB of bf16, which keeps a fast network busy.
DeepSpeed's own 5e8 takes one gigabyte of the GPU, or two where buckets overlap."""

NEVER = 1_000_000_000
"""Steps between DeepSpeed's own log lines: the ledger has them."""

SPREADS_PARAMETERS = 3
"""The stage at which each rank holds but a part of the weights."""


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

    `engine` is of a zero kind. `precision` is "fp32", "bf16" or "fp16", which "auto" has become on
    this device. `data_ranks` read different samples.
    """
    # As hpctrain's own scale: it starts at 2^16, halves at the first overflow, and doubles after
    # 2000 good steps. DeepSpeed's default waits for a second overflow.
    scale = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return {
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        "fp16": {**(scale if precision == "fp16" else {}), "enabled": precision == "fp16"},
        "bf16": {"enabled": precision == "bf16"},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if adds_in_fp32(engine) else {}),
        ZERO: _zero_section(engine),
        "train_batch_size": data_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": engine.clip_norm,  # DeepSpeed clips at 1.0 where nothing is said
        # Else it wants to compile an Adam of its own, or refuses the program's.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _zero_section(engine: EngineSettings) -> dict[str, Any]:
    stage = stage_of(engine.kind)
    zero: dict[str, Any] = {
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        # A second bucket is worth its memory where every layer's parameters travel too.
        "overlap_comm": stage == SPREADS_PARAMETERS,
        "stage": stage,
        # With them 0.19.8 tells wrongly which rank holds what.
        "round_robin_gradients": False,
    }
    if engine.offload != "no":
        zero["offload_optimizer"] = {"device": engine.offload, "pin_memory": True}
        if stage == SPREADS_PARAMETERS:  # host memory at most: 2 bytes of an element's 18
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == SPREADS_PARAMETERS and engine.activation_checkpointing == "selective":
        # It adds a bias in place to what was saved for the backward pass: wrong gradients, and
        # nothing says so.
        zero["memory_efficient_linear"] = False
    return zero
