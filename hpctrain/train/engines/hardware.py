"""What some hardware alone can do: products in 8 bits, and products that overlap their exchange.

Both are refused, in one line on every rank, where the device lacks them: computed in another way
they would be slower than without. No GPU has run this. tests/engines/test_hardware.py holds what is
refused, and trains in torchao's emulation of 8 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hpctrain.core.device import nvidia_capability
from hpctrain.errors import UsageError
from hpctrain.train.engines import torch_private
from hpctrain.train.engines.blocks import every_block

if TYPE_CHECKING:
    from hpctrain.core.settings.schema import EngineSettings

FLOAT8 = (8, 9)
"""NVIDIA's compute capability from which on there are such units (Ada, Hopper)."""
SYMMETRIC = (9, 0)
"""From which on torch exchanges through symmetric memory while it multiplies."""
MULTIPLE = 16
"""Rows and columns that a product in 8 bits has to be a multiple of."""


def use_hardware(model: nn.Module, settings: EngineSettings, device: torch.device) -> None:
    """Have a model use what the settings name, in place. Before it is compiled and sharded.

    Raises:
        UsageError: the device or the environment lacks it.
    """
    if settings.float8:
        _require("float8", "8-bit matrix products", FLOAT8, device)
        _convert(model, emulate=device.type == "cpu")
    if settings.async_tp:
        _require("async_tp", "symmetric memory", SYMMETRIC, device)
        torch_private.overlap_exchanges()


def _require(key: str, what: str, least: tuple[int, int], device: torch.device) -> None:
    if nvidia_capability(device) < least:
        raise UsageError(
            f"engine.{key} needs {what}, which NVIDIA's GPUs have from compute capability "
            f"{least[0]}.{least[1]} on; this rank has {_said(device)}: set engine.{key} = false"
        )


def _said(device: torch.device) -> str:
    major, minor = nvidia_capability(device)
    return f"{device.type} of {major}.{minor}" if major else device.type


def _convert(model: nn.Module, *, emulate: bool) -> None:
    """Convert matrices of blocks; embedding, head and odd sizes stay as they are.

    Scales are made anew from each tensor, so checkpoints hold the same masters as without.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise UsageError(
            f"engine.float8 needs torchao, which cannot be imported here ({error}): "
            "pip install 'hpctrain[float8]'"
        ) from error

    def fits(module: nn.Module, _: str) -> bool:
        return type(module) is nn.Linear and not any(n % MULTIPLE for n in module.weight.shape)

    for block in every_block(model):
        convert_to_float8_training(
            block, module_filter_fn=fits, config=Float8LinearConfig(emulate=emulate)
        )
    if not any(isinstance(module, Float8Linear) for module in model.modules()):
        raise UsageError(
            f"engine.float8: {type(model).__name__} has no nn.Linear in its blocks whose rows and "
            f"columns are multiples of {MULTIPLE}; set engine.float8 = false"
        )
