"""hpctrain keeps a PyTorch training program training on a SLURM cluster until it is done.

`import hpctrain` is cheap: the training side, with torch, is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.runtime.run import Run, init

__all__ = ["Run", "__version__", "init"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the training side when it is first asked for."""
    if name in {"init", "Run"}:
        return getattr(import_module("hpctrain.runtime.run"), name)
    raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
