"""torch.compile: each block of a model on its own, and what its backends ask of the machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

INSTEAD = "or set engine.compile = aot_eager or no"


def compile_blocks(
    blocks: Iterable[nn.Module],
    backend: str,
    device: torch.device,
    *,
    inside_hooks: bool = False,
) -> None:
    """Have blocks compiled when they are first called. In place; not collective.

    Args:
        blocks: Of a model; those of one class share what is compiled.
        backend: One of torch's.
        device: On which they run.
        inside_hooks: Leave a block's own hooks out of what is compiled.

    Raises:
        UsageError: this machine lacks what the backend builds with.
    """
    if backend == "inductor" and device.type == "cpu":
        _need_compiler()
    for block in blocks:
        if inside_hooks:
            block.forward = torch.compile(block.forward, backend=backend)
        else:
            block.compile(backend=backend)


def _need_compiler() -> None:
    """Torch would say so in the first step, at the end of a long stack trace, on every rank."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise UsageError(
            f"engine.compile inductor builds its kernels with {compiler} (CXX, or else g++), which "
            f"is not on this node's PATH; load a compiler module in slurm.setup, {INSTEAD}"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise UsageError(
            f"engine.compile inductor builds its kernels with Python's headers, and {header} is "
            f"not there; use a Python that was installed with them, {INSTEAD}"
        )
