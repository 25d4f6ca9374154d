"""A small program that is stopped and resumed in this process, beside an undisturbed run of it.

    def program(run, total):
        ...
        for step in run.steps(total):
            ...
        return result

    assert undisturbed(tmp_path, program, 9) == resumed(tmp_path, program, 4, 9)

A run that is done at step 4 and is started again with more steps resumes from step 4, as after a
stop, without a signal to wait for.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import hpctrain
from hpctrain.core.base.env import HPCTRAIN_RUN_DIR
from hpctrain.core.settings.schema import Settings, replaced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Program = Callable[[Any, int], Any]


MANY = 100_000
"""Objects in the collector's sight: torch and the tests make a million."""


def start(folder: Path, program: Program, total: int, **changes: Any) -> Any:
    """Start the run in a folder, or resume it; returns the program's result.

    Args:
        folder: The run's.
        program: Called with the run and the number of steps.
        total: Number of steps.
        changes: Settings, with `__` for the dot.
    """
    forget_imports()
    folder.mkdir(parents=True, exist_ok=True)
    values = {"checkpoint.mode": "sync"}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, {HPCTRAIN_RUN_DIR: str(folder)}):
        run = hpctrain.init(replaced(Settings(), values))
        try:
            return program(run, total)
        finally:
            end_threads(run)


def forget_imports() -> None:
    """Take what is alive now out of the garbage collector's sight, where it is not yet.

    At the first step after a restore `runtime/unsaved.py` looks through all objects of the process
    and may have it swept: half a second for what torch and the tests have imported, at each of a
    thousand small runs.
    """
    # ranks that were forked in between have ended it; gc.get_freeze_count() counts for 0.1 s
    if len(gc.get_objects(generation=2)) > MANY:
        gc.collect()
        gc.freeze()


def end_threads(run: Any) -> None:
    """End the threads that end with a rank's process.

    Hundreds of runs share this process, and each would go on looking for requests.
    """
    if (requests := run._stops._requests) is not None:
        requests.on_stop, requests.stop = None, 1
        requests._warned.set()
    run._record.close()


def undisturbed(folder: Path, program: Program, total: int) -> Any:
    """Run a program without a stop."""
    return start(folder / "undisturbed", program, total)


def resumed(folder: Path, program: Program, *stops: int) -> Any:
    """Run a program up to each of the steps in turn; returns the last start's result."""
    result = None
    for total in stops:
        result = start(folder / "resumed", program, total)
    return result


def values(*modules: torch.nn.Module) -> dict[str, list[Any]]:
    """All weights and buffers as lists, which compare bit by bit."""
    return {
        f"{number}.{name}": tensor.tolist()
        for number, module in enumerate(modules)
        for name, tensor in module.state_dict().items()
    }
