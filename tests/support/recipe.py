"""What the engine tests share: the shipped recipe on real gloo ranks, stopped at a chosen step."""

from __future__ import annotations

import email
import json
import os
import signal
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.core.settings.schema import Settings, replaced
from hpctrain.core.settings.spec import Entry, Spec
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_records import StepMark
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.train.data.order import SampleOrder
from tests.support.gloo import launch
from tests.support.ledger_runs import write_event

TINY = {
    "train.steps": 12,
    "train.global_batch": 24,
    "train.seq_len": 16,
    "train.layers": 2,
    "train.dim": 16,
    "train.heads": 2,
    "train.data": str(Path(email.__file__).parent),  # little text: it is made once for each run
    "train.data_limit_mb": 0.2,
    "train.dropout": 0.1,
    "train.audit": True,
    "run.log_every_s": 0.0,
    "checkpoint.interval_steps": 100,
}


def make_run(root: Path, **changes: Any) -> RunDir:
    """A run directory of the tiny recipe; changes are given as section__key=value."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    settings = replaced(Settings(), {**TINY, **named})
    root.mkdir(parents=True)
    run = RunDir(root)
    Spec(root.name, "id", time.time(), "local", "", Entry("recipe"), settings).dump(run.spec)
    return run


def train(
    run: RunDir,
    world_size: int,
    *,
    stop_at: int | None = None,
    kill_at: int | None = None,
    victim: int = 0,
    signum: int = signal.SIGTERM,
    tree: int = 0,
) -> list[Any]:
    """One attempt of the recipe.

    Args:
        run: The run.
        world_size: Ranks.
        stop_at: Rank `victim` alone gets `signum` at that step.
        kill_at: Rank `victim` is killed (SIGKILL) at its so-manieth flush or rename of a file.
        victim: Which rank.
        tree: Nodes of a control plane by which the ranks agree; 0 has them agree through gloo.
    """
    attempt = take_attempt(run, job_id="test", restarts=0)
    run.attempt(attempt.number).mkdir(parents=True)
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(attempt))
    os.environ["HPCTRAIN_ATTEMPT_DIR"] = str(run.attempt(attempt.number))
    write_event(
        run,
        "attempt_started",
        attempt=attempt.number,
        job_id=attempt.job_id,
        restarts=0,
        world_size=world_size,
    )
    try:
        return launch(
            _rank,
            world_size,
            may_fail=kill_at is not None,
            tree=tree,
            stop_at=stop_at,
            kill_at=kill_at,
            victim=victim,
            signum=signum,
        )
    finally:
        for name in ("HPCTRAIN_RUN_DIR", "HPCTRAIN_ATTEMPT", "HPCTRAIN_ATTEMPT_DIR"):
            del os.environ[name]


def _rank(stop_at: int | None, kill_at: int | None, victim: int, signum: int) -> None:
    from hpctrain.recipes.lm import train as recipe

    if kill_at is not None and int(os.environ["RANK"]) == victim:
        _die_at(kill_at)
    real = recipe.lr_at

    def lr_at(step: int, **rest: Any) -> float:
        if step == stop_at and int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signum)
        return real(step, **rest)

    recipe.lr_at = lr_at
    recipe.main()


def _die_at(call: int) -> None:
    """Kill this process in the middle of a save: before its `call`-th flush or rename."""
    seen = 0

    def dying(real: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += "checkpoints" in _path(args[0])
            if seen > call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return act

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, dying(getattr(os, name)))


def _path(target: Any) -> str:
    return str(Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target)


def full_state(run: RunDir, step: int) -> dict[str, Any]:
    """Every tensor of a committed checkpoint, whole, by its name; none of a rank's or a file's own.

    Read by torch's own reader of safetensors, not by ours.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = HuggingFaceStorageReader(str(run.checkpoints / f"step-{step:010d}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own storage classes
        _load_state_dict(
            state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    return {
        name: value for name, value in state.items() if not name.startswith(("rng.", "digests@"))
    }


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Both states hold the same names, and every tensor the same bits."""
    import torch

    assert one
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def consumed(run: RunDir) -> list[int]:
    """The sample indices that made up the final weights, from the ranks' own records."""
    return [index for _, indices in sorted(consumed_by_step(run).items()) for index in indices]


def consumed_by_step(run: RunDir) -> dict[int, list[int]]:
    """The same by step: what all ranks consumed in it.

    Each attempt wrote one line for each step; of a step that was redone only the last attempt's
    counts.
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
    return {step: indices for step, (_, indices) in steps.items()}


def samples_of_step(run: RunDir, step: int) -> list[int]:
    """What the sample order says that a step consumes, whoever does it."""
    from hpctrain.core.settings.spec import load_spec
    from hpctrain.recipes.lm import corpus
    from hpctrain.train.data.tokens import TokenFile

    train = load_spec(run.spec).settings.train
    sequences = TokenFile(run.data / "tokens.bin").len_sequences(train.seq_len)
    size, _ = corpus.split(sequences, global_batch=train.global_batch)
    batch = train.global_batch
    return SampleOrder(size, train.seed).indices((step - 1) * batch, step * batch)


def losses(run: RunDir) -> dict[int, float]:
    """The loss of each step in the final weights' history; the run's `log_every_s` must be 0."""
    found: dict[int, float] = {}
    for mark in RunHistory.read(run).training:
        if isinstance(mark, StepMark):
            assert mark.fact.first == mark.fact.last
            found[mark.fact.last] = mark.fact.loss
    return found
