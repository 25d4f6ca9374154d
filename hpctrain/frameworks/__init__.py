"""Training loops of other libraries, as parts of a run: `huggingface` and `lightning`.

Each tells the run its steps, losses and checkpoints, and saves and leaves when all ranks agree to
stop. A module, and its library with it, is imported when it is first used. docs/frameworks.md shows
how; tests/engines/test_frameworks.py holds the promises.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from hpctrain.errors import CheckpointError, Fenced, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from hpctrain.train.runtime.run import Run

log = logging.getLogger("hpctrain.frameworks")

__all__ = ["huggingface", "lightning"]


def __getattr__(name: str) -> Any:
    """Import a framework's module when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'hpctrain.frameworks' has no attribute {name!r}")
    return import_module(f"hpctrain.frameworks.{name}")


def __dir__() -> list[str]:
    """The modules, imported or not."""
    return __all__


def need(library: str, *, since: str, below: str) -> None:
    """Refuse a library that is not there, or of a version that was not tried.

    Raises:
        UsageError: in one line, with what to install.
    """
    wanted = f"{library}>={since},<{below}"
    try:
        installed = version(library)
    except PackageNotFoundError:
        raise UsageError(f"{library} is not installed: pip install '{wanted}'") from None
    if not _numbers(since) <= _numbers(installed) < _numbers(below):
        raise UsageError(
            f"{library} {installed} was not tried with this hpctrain: pip install '{wanted}'"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def meet(run: Run, framework: str, ranks: int, do: str) -> None:
    """Refuse a framework that has not met the other ranks: each would train alone, unseen.

    Raises:
        UsageError: in one line, with what to do.
    """
    if ranks != run.world.world_size:
        raise UsageError(
            f"{framework} trains on {ranks} ranks, the run has {run.world.world_size}: {do}"
        )


def seal(run: Run, step: int, path: Path) -> bool:
    """Take what the framework has saved under the run's care; return whether. Collective.

    A seal that fails costs itself: the file stands as the framework has written it.
    """
    try:
        run.sealed(step, path)
    except Fenced:
        raise
    except CheckpointError as error:
        if run.world.rank == 0:
            log.warning("step %d is not registered: %s; training continues", step, error)
        return False
    return True
