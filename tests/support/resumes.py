"""Training that is stopped and goes on in one process: fresh objects, real saves and restores."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.checkpoint.tensors.save import SavePlace
from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.core.world import World, on_rank_0
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.train.runtime.run import Run
from hpctrain.train.runtime.stops import RankSignals
from tests.support.resumed import end_threads, forget_imports
from tests.support.value_trees import facts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpctrain.ledger.run.fence import Attempt

ALONE = World(0, 0, 1, torch.device("cpu"))


@dataclass
class Training:
    """What trains: its parts, and one step of it."""

    model: torch.nn.Module
    optimizer: Any
    step: Callable[[int], Any]
    tracked: dict[str, Any] = field(default_factory=dict)


def stopped_and_whole(
    make: Callable[[Run], Training],
    folder: Path,
    *,
    steps: int = 6,
    stops: tuple[int, ...] = (3,),
    world: World = ALONE,
    kind: str = "ddp",
) -> tuple[Any, Any]:
    """All facts at the end of a training that was stopped, and of one that was not.

    Collective where there are several ranks.
    """
    whole = start(make, None, steps, world=world, kind=kind)
    for stop in (*stops, steps):
        resumed = start(make, folder, stop, world=world, kind=kind)
    return resumed, whole


def start(
    make: Callable[[Run], Training],
    folder: Path | None,
    total: int,
    *,
    world: World = ALONE,
    kind: str = "ddp",
) -> dict[str, Any]:
    """One start, up to `total` steps: all that it ended with."""
    forget_imports()
    settings = replaced(Settings(), {"checkpoint.mode": "sync", "engine.kind": kind})
    place = None
    if folder is not None:
        attempt = on_rank_0(world, lambda: _next_attempt(RunDir(folder)))
        place = SavePlace(RunDir(folder), attempt, settings.checkpoint)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - the one that programs draw from
    run = Run(world, settings, place=place, signals=RankSignals(), spec=None)
    made = make(run)
    own = {} if _has_engine(run) else {"model": made.model, "optimizer": made.optimizer}
    run.track(**own, **made.tracked)
    try:
        for step in run.steps(total=total):
            made.step(step)
    finally:
        end_threads(run)
    return facts_of(made)


def _has_engine(run: Run) -> bool:
    """Whether the program has called `parallelize`."""
    return run._program.engine is not None


def _next_attempt(run_dir: RunDir) -> Attempt:
    run_dir.root.mkdir(parents=True, exist_ok=True)
    attempt = take_attempt(run_dir, job_id="1", restarts=0)
    run_dir.attempt(attempt.number).mkdir(parents=True)
    return attempt


def facts_of(made: Training) -> dict[str, Any]:
    """Everything that influences the next step, in words that are compared with ==."""
    tracked = {
        name: facts(thing.state_dict() if hasattr(thing, "state_dict") else thing)
        for name, thing in made.tracked.items()
    }
    state = made.optimizer.state_dict()
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - the same
    generators = (torch.get_rng_state(), random.getstate(), of_numpy)
    return {
        "model": facts(dict(made.model.state_dict())),
        "optimizer": facts({"state": _filled(state["state"]), "groups": state["param_groups"]}),
        "tracked": tracked,
        "generators": facts(generators),
    }


def _filled(state: dict[Any, Any]) -> dict[Any, Any]:
    """Of an optimizer's state what holds something, in order of the keys.

    Asking for a parameter's state makes an empty one, and no optimizer goes by the order.
    """
    return {
        owner: dict(sorted(values.items())) if isinstance(values, dict) else values
        for owner, values in sorted(state.items(), key=str)
        if values or not isinstance(values, dict)
    }


def differences(resumed: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The parts that differ: as resumed, and as undisturbed."""
    return {name: (resumed[name], whole[name]) for name in whole if resumed[name] != whole[name]}
