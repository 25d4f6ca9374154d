"""Training loops of other libraries, as parts of a run: `huggingface` and `lightning`.

Each tells the run its steps, losses and checkpoints, and saves and leaves when all ranks agree to
stop. A module, and its library with it, is imported when it is first used. docs/frameworks.md shows
how; tests/engines/test_frameworks.py holds the promises.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.frameworks import huggingface, lightning

__all__ = ["huggingface", "lightning"]


def __getattr__(name: str) -> Any:
    """Import a framework's module when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'hpctrain.frameworks' has no attribute {name!r}")
    return import_module(f"hpctrain.frameworks.{name}")


def __dir__() -> list[str]:
    """The modules, imported or not."""
    return __all__
