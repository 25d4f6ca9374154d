"""The numbers that forward passes use."""

from __future__ import annotations

import torch

from hpctrain.errors import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `engine.precision` means on a device.

    Raises:
        UsageError: there is none of that name.
    """
    if name == "auto":
        fits = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fits else torch.float32
    if name not in DTYPES:
        raise UsageError(
            f"engine.precision {name!r} is not known; use one of auto, {', '.join(DTYPES)}"
        )
    return DTYPES[name]
