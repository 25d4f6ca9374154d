"""What hpctrain costs per step, against the same loop without: 8 ranks, 20 ms steps.

A step is a sleep of 20 ms, so that 8 ranks on few cores do not measure each other. Both loops end
each step in the same barrier-free way; what is added is `run.steps` (agreement, clock, marks,
heartbeat, what ranks tell of each other), `run.timed` and `run.log`, as often as in a run's first
minutes, when there is the most of it.

A ratio of wall times needs a machine with nothing else to do; the CPU time of the bookkeeping does
not, and is told beside it: the loop is run once more with steps of no length, by one rank alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.ledger.run.layout import RunDir

sys.path.insert(0, str(Path(__file__).parents[1]))

RANKS = 8
STEPS = 500
STEP_S = 0.02
GOAL = 1.005
ALONE_STEPS = 20_000
QUIET = {"run__log_every_s": 5.0, "checkpoint__interval_steps": 0}


def bare() -> float:
    """Seconds per step without hpctrain."""
    from hpctrain.train.joining_ranks import join_world

    join_world()
    started = time.perf_counter()
    for _ in range(STEPS):
        time.sleep(STEP_S)
    return (time.perf_counter() - started) / STEPS


def ours() -> tuple[float, float]:
    """Seconds per step in `run.steps`, and this process's CPU seconds per step."""
    import hpctrain
    from hpctrain.core.settings.schema import CheckpointSettings, Settings

    run = hpctrain.init(Settings(checkpoint=CheckpointSettings(interval_s=1e9)))
    first = None
    for step in run.steps(total=STEPS + 20):
        if step == 20:
            first, cpu = time.perf_counter(), time.process_time()
        with run.timed("data"):
            time.sleep(STEP_S)
        run.log(loss=1.0 / (step + 1), grad_norm=1.0, tokens=4096, flops=1e12)
        if step == STEPS + 19:
            break
    assert first is not None
    return (time.perf_counter() - first) / STEPS, (time.process_time() - cpu) / STEPS


def alone() -> float:
    """CPU seconds of one step of no length: `run.steps`, `run.timed` and `run.log` alone."""
    import hpctrain
    from hpctrain.core.settings.schema import CheckpointSettings, Settings

    run = hpctrain.init(Settings(checkpoint=CheckpointSettings(interval_s=1e9)))
    for step in run.steps(total=ALONE_STEPS + 20):
        if step == 20:
            cpu = time.process_time()
        with run.timed("data"):
            pass
        run.log(loss=1.0 / (step + 1), grad_norm=1.0, tokens=4096, flops=1e12)
        if step == ALONE_STEPS + 19:
            break
    return (time.process_time() - cpu) / ALONE_STEPS


LOOK_LAYERS, LOOK_STEPS = 200, 1000
"""Of the model that is looked at (12 parameters and 10 modules each), and steps that share it."""


def looks() -> dict[str, float]:
    """CPU seconds of each look for state that no checkpoint has, in a large model."""
    import torch
    from torch import nn

    from hpctrain.core.world import World
    from hpctrain.train.runtime.program import Program
    from hpctrain.train.runtime.unsaved import Unsaved

    program = Program(World(0, 0, 1, torch.device("cpu")))
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(LOOK_LAYERS)]
    program.model = nn.Sequential(*layers)
    program.optimizer = torch.optim.AdamW(program.model.parameters(), foreach=True)
    unsaved = Unsaved(program)
    acts: dict[str, Callable[[], object]] = {
        "before the first step": lambda: unsaved.begin(None, 0),
        "after it": unsaved.after_first_step,
        "at a save that looks": lambda: unsaved.recorded_at(LOOK_STEPS),
    }
    taken = {}
    for name, act in acts.items():
        began = time.process_time()
        act()
        taken[name] = time.process_time() - began
    return taken


def main() -> None:
    """Alternate the two loops and print the ratio of their medians over the ranks."""
    from tests.support.gloo import launch
    from tests.support.recipe import make_run

    ratios = []
    for turn in range(3):
        with tempfile.TemporaryDirectory() as name:
            plain = statistics.median(launch(bare, RANKS))
            measured = _with_run(make_run(Path(name) / "run", **QUIET), ours, RANKS)
            with_us = statistics.median(seconds for seconds, _ in measured)
            cpu = statistics.median(cpu for _, cpu in measured)
        ratios.append(with_us / plain)
        print(
            f"turn {turn}: bare {plain * 1e3:.3f} ms, with hpctrain {with_us * 1e3:.3f} ms, "
            f"ratio {with_us / plain:.4f}, CPU {cpu * 1e6:.0f} us a step and rank"
        )
    with tempfile.TemporaryDirectory() as name:
        [cpu] = _with_run(make_run(Path(name) / "run", **QUIET), alone, 1)
    [taken] = launch(looks, 1)
    each = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in taken.items())
    print(f"looks for unsaved state, {LOOK_LAYERS * 12:,} parameters, CPU: {each}")
    share, step_ms = cpu / STEP_S, STEP_S * 1e3
    print(f"bookkeeping alone: {cpu * 1e6:.1f} us of CPU a step, {share:.2%} of {step_ms:g} ms")
    print(f"median ratio {statistics.median(ratios):.4f} (goal: at most {GOAL})")


def _with_run(run: RunDir, loop: Callable[[], Any], ranks: int) -> list[Any]:
    import json
    import os
    from dataclasses import asdict

    from hpctrain.ledger.run.fence import take_attempt
    from tests.support.gloo import launch

    attempt = take_attempt(run, job_id="bench", restarts=0)
    run.attempt(attempt.number).mkdir(parents=True)
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(attempt))
    try:
        return launch(loop, ranks)
    finally:
        del os.environ["HPCTRAIN_RUN_DIR"], os.environ["HPCTRAIN_ATTEMPT"]


if __name__ == "__main__":
    main()
