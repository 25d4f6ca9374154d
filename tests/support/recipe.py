"""The shipped recipe on real gloo ranks, with a stop at a chosen step: what the engine tests share."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.ledger import events as ledger
from hpctrain.rundir.fence import take_attempt
from hpctrain.rundir.layout import RunDir
from hpctrain.settings.schema import Settings
from hpctrain.settings.spec import Entry, Spec
from tests.support.gloo import launch

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "train.steps": 12,
    "train.global_batch": 24,
    "train.seq_len": 16,
    "train.layers": 2,
    "train.dim": 16,
    "train.heads": 2,
    "train.data_limit_mb": 0.2,
    "train.dropout": 0.1,
    "train.audit": True,
    "run.log_every_s": 0.0,
    "checkpoint.interval_steps": 100,
}


def make_run(root: Path, **changes: Any) -> RunDir:
    """A run directory of the tiny recipe; changes are given as section__key=value."""
    settings = Settings()
    named = {key.replace("__", "."): value for key, value in changes.items()}
    for name, value in {**TINY, **named}.items():
        section, key = name.split(".")
        setattr(getattr(settings, section), key, value)
    root.mkdir(parents=True)
    run = RunDir(root)
    Spec(root.name, "id", time.time(), "local", "", Entry("recipe"), settings).dump(run.spec)
    return run


def train(run: RunDir, world_size: int, *, stop_at: int | None = None, victim: int = 0) -> list[Any]:
    """One attempt; with `stop_at` rank `victim` alone gets SIGTERM at that step."""
    attempt = take_attempt(run, job_id="test", restarts=0)
    run.attempt(attempt.number).mkdir(parents=True)
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(attempt))
    os.environ["HPCTRAIN_ATTEMPT_DIR"] = str(run.attempt(attempt.number))
    ledger.append(run, "attempt_started", attempt=attempt.number, world_size=world_size)
    try:
        return launch(_rank, world_size, stop_at=stop_at, victim=victim)
    finally:
        for name in ("HPCTRAIN_RUN_DIR", "HPCTRAIN_ATTEMPT", "HPCTRAIN_ATTEMPT_DIR"):
            del os.environ[name]


def _rank(stop_at: int | None, victim: int) -> None:
    from hpctrain.recipes.lm import train as recipe

    real = recipe.lr_at

    def lr_at(step: int, **rest: Any) -> float:
        if step == stop_at and int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(step, **rest)

    recipe.lr_at = lr_at
    recipe.main()


def full_state(run: RunDir, step: int) -> dict[str, Any]:
    """Every tensor of a committed checkpoint, whole, by its name; without the ranks' generators."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    path = run.checkpoints / f"step-{step:010d}"
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    walk("", state)
    return {name: value for name, value in flat.items() if not name.startswith("rng.")}


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both states hold the same names, and every tensor the same bits."""
    import torch

    assert one
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def consumed(run: RunDir) -> list[int]:
    """The sample indices that made up the final weights, from the ranks' own records.

    Each attempt wrote one line for each step; of a step that was redone only the last attempt's counts.
    """
    steps: dict[int, tuple[int, list[int]]] = {}
    for folder in sorted((run.root / "attempts").iterdir()):
        for path in sorted(folder.glob("samples-*.txt")):
            for line in path.read_text().splitlines():
                step, *indices = map(int, line.split())
                attempt = int(folder.name)
                if step not in steps or steps[step][0] < attempt:
                    steps[step] = (attempt, [])
                steps[step][1].extend(indices)
    return [index for step in sorted(steps) for index in steps[step][1]]
