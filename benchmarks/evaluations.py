"""What evaluations cost the training beside which they run: steps per second, and goodput.

    python -m benchmarks.evaluations

The same training in turn with a job for each of its checkpoints and without any, on the local
cluster. Steps sleep for most of their time and checkpoints are small, so that what the jobs take of
this machine's cores, which on a cluster are other nodes', weighs little: what is left is what
hpctrain itself does beside the training. The ratios hold on any machine with a core to spare.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import hpctrain
from hpctrain.core.base.env import HPCTRAIN_LOCAL_DIR
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import CheckpointSaved
from hpctrain.ledger.run.layout import RunDir

ROUNDS = 3
STEPS = 120
EVERY = 10
TRAINING = {
    "train.steps": STEPS,
    "train.step_delay_s": 0.2,
    "train.layers": 1,
    "train.dim": 32,
    "train.heads": 1,
    "train.seq_len": 32,
    "train.global_batch": 4,
    "train.data_limit_mb": 0.2,
    "train.val_batches": 1,
    "checkpoint.interval_steps": EVERY,
    "checkpoint.keep_last": 2,
}
EVALUATION = 'sleep 1; echo "{\\"loss\\": 1.5}" >"$HPCTRAIN_RESULTS"\n'


def main() -> None:
    """Print both, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ[HPCTRAIN_LOCAL_DIR] = str(Path(folder) / "local")
        Path("evaluate.sh").write_text(EVALUATION)
        evaluated = {"evaluate.script": "bash evaluate.sh", "evaluate.every": 1}
        alone, beside = [], []
        for turn in range(ROUNDS):
            alone.append(_trained(f"alone-{turn}", {}))
            beside.append(_trained(f"beside-{turn}", evaluated))
    for name, rows in (("alone", alone), (f"with {STEPS // EVERY} evaluations", beside)):
        steps_s = ", ".join(f"{step_s:.3f}" for step_s, _ in rows)
        useful = ", ".join(f"{100 * goodput:.1f} %" for _, goodput in rows)
        print(f"{name}: {steps_s} s for each step; goodput after the start {useful}")
    ratio = statistics.median(a / b for (a, _), (b, _) in zip(alone, beside, strict=True))
    print(f"steps per second beside evaluations: {ratio:.3f} of those alone (median)")


def _trained(name: str, more: dict[str, object]) -> tuple[float, float]:
    """Seconds for each step between the first save and the last, and the goodput after the start.

    The start imports torch, which takes as long as the machine is busy.
    """
    run = hpctrain.submit(name=name, cluster="local", settings=TRAINING | more)
    while not _is_over(now := hpctrain.status(name)):
        time.sleep(1)
    if now.state != "done":
        raise RuntimeError(f"{run.dir} is {now.state}: {now.why or now.failure}")
    events = ledger.read(RunDir(run.dir))
    saved = [event.t for event in events if isinstance(event.fact, CheckpointSaved)]
    goodput = now.facts["goodput"]
    seconds = {name: part["seconds"] for name, part in goodput["classes"].items()}
    begun_s = goodput["allocated_s"] - seconds["startup"]
    return (saved[-1] - saved[0]) / (STEPS - EVERY), seconds["step"] / begun_s


def _is_over(now: hpctrain.Status) -> bool:
    """Whether the run's evaluations are too: else they would run beside the next training."""
    judged = (row["state"] == "evaluated" for row in now.facts["evaluations"])
    return now.over and (now.state != "done" or all(judged))


if __name__ == "__main__":
    main()
