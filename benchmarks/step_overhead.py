"""Stop agreement and bookkeeping per step, against the same loop without: 8 ranks, 20 ms steps.

A step is a sleep of 20 ms, so that 8 ranks on few cores do not measure each other. Both loops end
each step in the same barrier-free way; what is added is `run.steps` (agreement, clock, marks) and
`run.log`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

RANKS = 8
STEPS = 500
STEP_S = 0.02


def bare() -> float:
    """Seconds per step without hpctrain."""
    from hpctrain.world import join_world

    join_world()
    started = time.perf_counter()
    for _ in range(STEPS):
        time.sleep(STEP_S)
    return (time.perf_counter() - started) / STEPS


def ours() -> tuple[float, float]:
    """Seconds per step in `run.steps`, and this process's CPU seconds per step."""
    import hpctrain

    run = hpctrain.init()
    run.settings.checkpoint.interval_s = 1e9
    first = None
    for step in run.steps(total=STEPS + 20):
        if step == 20:
            first, cpu = time.perf_counter(), time.process_time()
        time.sleep(STEP_S)
        run.log(loss=1.0 / (step + 1))
        if step == STEPS + 19:
            break
    assert first is not None
    return (time.perf_counter() - first) / STEPS, (time.process_time() - cpu) / STEPS


def main() -> None:
    """Alternate the two loops and print the ratio of their medians over the ranks."""
    from tests.support.gloo import launch
    from tests.support.recipe import make_run

    ratios = []
    for turn in range(3):
        with tempfile.TemporaryDirectory() as name:
            plain = statistics.median(launch(bare, RANKS))
            run = make_run(Path(name) / "run", run__log_every_s=5.0, checkpoint__interval_steps=0)
            measured = _with_run(run)
            with_us = statistics.median(seconds for seconds, _ in measured)
            cpu = statistics.median(cpu for _, cpu in measured)
        ratios.append(with_us / plain)
        print(
            f"turn {turn}: bare {plain * 1e3:.3f} ms, with hpctrain {with_us * 1e3:.3f} ms, "
            f"ratio {with_us / plain:.4f}, CPU {cpu * 1e6:.0f} us a step and rank"
        )
    print(f"median ratio {statistics.median(ratios):.4f} (goal: at most 1.01)")


def _with_run(run) -> list[tuple[float, float]]:  # noqa: ANN001
    import json
    import os
    from dataclasses import asdict

    from hpctrain.rundir.fence import take_attempt
    from tests.support.gloo import launch

    attempt = take_attempt(run, job_id="bench", restarts=0)
    os.environ["HPCTRAIN_RUN_DIR"] = str(run.root)
    os.environ["HPCTRAIN_ATTEMPT"] = json.dumps(asdict(attempt))
    try:
        return launch(ours, RANKS)
    finally:
        del os.environ["HPCTRAIN_RUN_DIR"], os.environ["HPCTRAIN_ATTEMPT"]


if __name__ == "__main__":
    main()
