"""`make demo`: a run is preempted, saves, requeues itself, and comes back on fewer nodes.

Everything happens on this machine: the embedded cluster plays SLURM, with processes as nodes. Each
command is shown before it runs, and works in the same way on a real cluster.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import (
    AttemptEnded,
    AttemptStarted,
    PhaseReached,
    Requeued,
    RunStopped,
    StepsDone,
    TrainingDone,
)
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.ledger.run.event_fields import LedgerFact

F = TypeVar("F", bound="LedgerFact")
TOP = Path(__file__).resolve().parents[1]
RUNS = Path(os.environ.get("HPCTRAIN_RUNS") or TOP / "runs").absolute()
SETTINGS = (
    "train.steps=240",
    "train.layers=2",
    "train.dim=64",
    "train.seq_len=64",
    "train.global_batch=24",
    "train.data_limit_mb=1",
    "train.lr=0.003",
    "run.log_every_s=0.5",
)
PREEMPT_AT = 30  # early: where a machine is busy, steps go on while the next command starts
PATIENCE_S = 150.0
POLL_S = 0.2
COLUMNS, ROWS = 72, 12
HPCTRAIN = [sys.executable, "-m", "hpctrain"]


def main() -> int:
    """Tell the story; returns the exit code of the last command that could fail."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["HPCTRAIN_RUNS"] = str(RUNS)
    os.environ.setdefault("COLUMNS", "100")
    run = RunDir(RUNS / _free_name())
    began = time.monotonic()
    try:
        _tell(run)
    except KeyboardInterrupt:
        _say("interrupted: ending the run")
        subprocess.run([*HPCTRAIN, "cancel", run.name], check=False)
        return 130
    _say(f"That took {time.monotonic() - began:.0f} s. Everything of the run lies in {run.root}")
    return 0


def _tell(run: RunDir) -> None:
    _say("A small language model on the Python library's source, on up to 4 nodes of this machine.")
    sets = [f"--set={text}" for text in SETTINGS]
    _hpctrain("submit", "--cluster=local", "--nodes=1-4", f"--name={run.name}", *sets)
    _wait(run, f"step {PREEMPT_AT}", lambda: _newest_step(run) >= PREEMPT_AT)

    _say("Somebody's urgent job takes two of the four nodes; there are 30 s to leave.")
    _hpctrain("local", "preempt", run.name, "--leave=2", "--grace=30")
    _wait(run, "its requeue", lambda: _facts(run, Requeued))
    _hpctrain("checkpoints", "list", run.name)

    _say("It saved, left, and asked to be run again. Now it comes back on the two nodes left.")
    _wait(run, "the step after it", lambda: _first_steps(run) > 1)
    _hpctrain("status", run.name)
    _wait(run, "its end", lambda: _facts(run, TrainingDone) and _ended(run))

    _say("Done. What became of each attempt:")
    _hpctrain("status", run.name)
    print("\n".join(_curve(_events(run, StepsDone))), flush=True)
    _say(_verdict(run))


def _free_name() -> str:
    number = 1
    while (RUNS / f"demo-{number}").exists():
        number += 1
    return f"demo-{number}"


def _say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def _hpctrain(*arguments: str) -> None:
    """Show a command and run it.

    Raises:
        SystemExit: it failed; it has said why.
    """
    print(f"\n$ hpctrain {shlex.join(arguments)}", flush=True)
    done = subprocess.run([*HPCTRAIN, *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def _wait(run: RunDir, what: str, reached: Callable[[], object]) -> None:
    """Follow the ledger until something is there.

    Raises:
        SystemExit: the run stopped for good, or it took too long.
    """
    print(f"\n  ... waiting for {what}", flush=True)
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        stopped = _facts(run, RunStopped)
        if stopped or time.monotonic() > deadline:
            why = stopped[0].detail if stopped else f"it took more than {PATIENCE_S:.0f} s"
            _hpctrain("status", run.name)
            sys.exit(f"demo: {what} did not come: {why}; see {run.root}")
        time.sleep(POLL_S)


def _events(run: RunDir, kind: type[F]) -> list[tuple[int, F]]:
    """Attempt and fact of each event of a kind."""
    return [(e.attempt or 0, e.fact) for e in ledger.read(run) if isinstance(e.fact, kind)]


def _facts(run: RunDir, kind: type[F]) -> list[F]:
    return [fact for _, fact in _events(run, kind)]


def _first_steps(run: RunDir) -> int:
    return sum(phase.name == "first_step" for phase in _facts(run, PhaseReached))


def _newest_step(run: RunDir) -> int:
    return max((mark.last or 0 for mark in _facts(run, StepsDone)), default=0)


def _ended(run: RunDir) -> bool:
    ends = _facts(run, AttemptEnded)
    return bool(ends) and ends[-1].next == "stop"


def _curve(marks: Sequence[tuple[int, StepsDone]]) -> list[str]:
    """The loss over the steps; the digit is the attempt in which a step was done."""
    points = [(m.last, m.loss, n) for n, m in marks if m.last and m.loss is not None]
    last = max(step for step, _, _ in points)
    low, high = min(loss for _, loss, _ in points), max(loss for _, loss, _ in points)
    grid = [[" "] * (COLUMNS + 1) for _ in range(ROWS + 1)]
    for step, loss, attempt in points:
        row = round((high - loss) / ((high - low) or 1.0) * ROWS)
        grid[row][round(step / last * COLUMNS)] = str(attempt % 10)
    labels = {0: f"{high:.2f}", ROWS: f"{low:.2f}"}
    lines = [f"{labels.get(n, ''):>6} |{''.join(row).rstrip()}" for n, row in enumerate(grid)]
    steps = f"step {last}"
    return ["", "  loss", *lines, f"{'':6} +{'-' * COLUMNS}", f"{'0':>8}{steps:>{COLUMNS}}"]


def _verdict(run: RunDir) -> str:
    """Whether each step was done once, and each sample used once, as the ledger has it."""
    step = sample = 0
    for mark in sorted(_facts(run, StepsDone), key=lambda mark: mark.first or 0):
        if (mark.first, mark.sample_first) != (step + 1, sample) or None in (
            mark.last,
            mark.sample_last,
        ):
            sys.exit(f"demo: step {mark.first} does not follow step {step}")
        step, sample = mark.last or 0, mark.sample_last or 0
    sizes = [start.world_size for start in _facts(run, AttemptStarted)]
    shape = ", then ".join(f"{size} ranks" for size in sizes)
    return (
        f"{shape}: {step} steps, none done twice; {sample} samples, none skipped, none seen twice."
    )


if __name__ == "__main__":
    sys.exit(main())
