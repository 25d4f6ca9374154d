"""What `status` pays to read a month: a ratio to parsing every line of the ledger.

    python -m benchmarks.ledger_read

Two ledgers: one attempt with 50 MB of step marks, more than a run of 30 days writes, and 1,000
attempts. Process CPU time, the best of several; the ratio holds on any machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.goodput import goodput
from hpctrain.ledger.history.progress import progress, saving, speed
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.run.layout import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 5
MARKS = 150_000
ATTEMPTS = 1_000
MARKS_EACH = 60
SAVE_EVERY = 36
"""Marks from save to save: half an hour."""


def main() -> None:
    """Print what each ledger costs."""
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in (("one attempt", one_attempt()), ("1,000 attempts", many_attempts())):
            run = RunDir(Path(folder))
            run.events.write_text("".join(lines))
            whole, status = _best(parse_all, run), _best(_answer, run)
            size = run.events.stat().st_size / 1e6
            print(
                f"{name}: {size:.0f} MB; every line parsed {whole:.3f} s, answered {status:.3f} s, "
                f"ratio {status / whole:.2f}"
            )


def _best(call: Callable[[RunDir], None], run: RunDir) -> float:
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        call(run)
        taken.append(time.process_time() - started)
    return min(taken)


def parse_all(run: RunDir) -> None:
    """One pass over a ledger."""
    with run.events.open("rb") as file:
        for line in file:
            json.loads(line)


def _answer(run: RunDir) -> None:
    """What `status` derives from a ledger."""
    history = RunHistory.read(run, marks="few")
    attempts(history)
    progress(history)
    saving(history)
    speed(history)
    goodput(history, now=history.last_t or 0.0)


def _line(t: float, kind: str, attempt: int | None, **fields: object) -> str:
    return json.dumps({"t": round(t, 3), "kind": kind, "attempt": attempt} | fields) + "\n"


def one_attempt() -> Iterator[str]:
    """The lines of one long attempt's ledger."""
    yield _line(0, "submitted", None, job_id="17")
    yield _line(5, "attempt_started", 1, job_id="17", restarts=0, nodes=["a", "b"], by="start")
    yield from _trained(1, 10.0, 0, MARKS)


def many_attempts() -> Iterator[str]:
    """The lines of a ledger of many attempts that were preempted."""
    yield _line(0, "submitted", None, job_id="17")
    for number in range(1, ATTEMPTS + 1):
        t, step = number * 3600.0, (number - 1) * MARKS_EACH * 10
        where = {"job_id": "17", "restarts": number - 1, "nodes": ["a", "b"], "by": "start"}
        yield _line(t, "attempt_started", number, **where, batch_started=t - 5)
        yield from _trained(number, t + 10, step, MARKS_EACH)
        yield _line(t + 3400, "stop_requested", number, cause="sigterm", rank=0)
        yield _line(t + 3410, "stopped", number, step=step + MARKS_EACH * 10)
        end = {"reason": "preempted", "next": "requeue", "by": "agent", "facts": {}}
        yield _line(t + 3420, "attempt_ended", number, **end)
        yield _line(t + 3421, "requeued", number, by="agent")


def _trained(attempt: int, t: float, step: int, marks: int) -> Iterator[str]:
    yield _line(t, "restored", attempt, step=step, seconds=3.0, checkpoint=None, skipped=[])
    yield _line(t + 5, "phase", attempt, name="first_step")
    for number in range(1, marks + 1):
        t, step = t + 50, step + 10
        saves = number % SAVE_EVERY == 0
        yield _line(
            t,
            "steps",
            attempt,
            first=step - 9,
            last=step,
            sample_first=(step - 10) * 512,
            sample_last=step * 512,
            loss=2.123456,
            seconds=50.001,
            p50_s=4.98765,
            p95_s=5.12345,
            tokens=20971520,
            flops=1.23456e18,
            grad_norm=0.987654,
            data_s=number * 0.123,
            save_s=number * 0.456,
            slow_rank=7,
            slow_by=0.0412,
            **({"at_save": True} if saves else {}),
        )
        if saves:
            yield _line(t + 3, "saved", attempt, step=step, bytes=4096, seconds=3.0, stall_s=0.4)


if __name__ == "__main__":
    main()
