"""The loop of a program that counts its own steps: a framework's trainer, or a plain script's.

Such a program says after each update how many are applied (`Run.at`). From that its steps are
counted, timed and told, as those of hpctrain's own loop are; nothing is saved for it, and nothing
here is collective. tests/engines/test_told_steps.py holds the promises.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from hpctrain.core.base import clock
from hpctrain.core.device import is_accelerator, memory_stats
from hpctrain.errors import UsageError
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.plan import interval
from hpctrain.train.runtime.telemetry import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hpctrain.ledger.run.layout import RunDir
    from hpctrain.train.runtime.save_policy import JobClock
    from hpctrain.train.runtime.telemetry import Telemetry


class OwnLoop:
    """Counts updates by the program's reports; `step` is None before the first."""

    def __init__(
        self,
        telemetry: Telemetry,
        clock: JobClock,
        *,
        begin: Callable[[int], None],
        counted: Callable[[], None],
        consumed: Callable[[], int | None],
    ) -> None:
        """Count nothing before the first `at`.

        `begin` gets the updates applied at the first `at`, and again if the program goes back.
        `counted` is called after each step. `consumed` returns how many samples all ranks have
        consumed, if the data tells. `clock` learns what a step takes.
        """
        self.step: int | None = None
        self._told_at = 0.0
        self._telemetry = telemetry
        self._clock = clock
        self._begin = begin
        self._counted = counted
        self._consumed = consumed

    def at(self, step: int, values: dict[str, float]) -> None:
        """`step` updates are applied; see `Run.at`."""
        before, self.step = self.step, step
        self._told_at = clock.monotonic()
        if before is None or step < before:
            # Values are a step's: the update before them was done ere anybody was told of it.
            before = max(0, step - 1) if values else step
            self._telemetry.flush()
            self._begin(before)
            self._telemetry.step_began(self._consumed)
            self._telemetry.log(values)
            if before < step:
                self._telemetry.step_done(step, self._consumed, timed=False)
                self._clock.has_stepped = True
                self._counted()
                self._telemetry.step_began(self._consumed)
            return
        self._telemetry.log(values)
        if step == before:
            self._telemetry.log_late()
        else:
            steps = step - before
            seconds = self._telemetry.step_done(step, self._consumed, steps=steps)
            self._clock.stepped(seconds / steps)
            self._counted()
            self._telemetry.step_began(self._consumed)

    def since_s(self, step: int) -> float | None:
        """Seconds since the program last told of this step; None where it is at another one.

        What it has saved of the step since then took no longer. Asked again, it is counted anew.
        """
        before, self._told_at = self._told_at, clock.monotonic()
        return self._told_at - before if step == self.step else None


def earlier_save_s(run: RunDir, world_size: int) -> float | None:
    """What the longest of the newest saves of earlier attempts took; None before the first."""
    return interval.longest_save_s(RunHistory.read(run, marks="few"), world_size)


def memory_in_use(device: torch.device) -> int:
    """Bytes that this rank holds between two steps; what it saves is not more."""
    if is_accelerator(device):
        return memory_stats(device)["allocated_bytes.all.current"]
    return int(memory(device)["mem_peak_bytes"])


def step_number(step: object, name: str = "") -> int:
    """Check a number of updates; `name` is the argument of `Run.at`, "" for its step.

    Raises:
        UsageError: it is none.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        what = f"{name} is how many updates there are in all"
        what = what if name else "the step is how many updates are applied"
        given = f"{name}={step!r}" if name else repr(step)
        raise UsageError(f"run.at({given}): {what}, a whole number from 0 on")
    return number
