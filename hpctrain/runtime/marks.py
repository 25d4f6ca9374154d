"""Step marks in the ledger: which steps were done, and which samples went into them. Rank 0 only.

One line covers all steps since the last, so a long run's ledger stays small.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpctrain.ledger import events as ledger

if TYPE_CHECKING:
    from hpctrain.rundir.fence import Attempt
    from hpctrain.rundir.layout import RunDir


class StepMarks:
    """Gathers steps and writes them out now and then."""

    def __init__(self, run: RunDir, attempt: Attempt, every_s: float) -> None:
        self._run = run
        self._attempt = attempt
        self._every_s = every_s
        self._first: int | None = None
        self._last = 0
        self._samples: tuple[int | None, int | None] = (None, None)
        self._since = time.monotonic()
        self.loss: float | None = None

    def add(self, step: int, samples: tuple[int | None, int | None]) -> None:
        """Step `step` is done (that many updates are applied); its samples are [first, last)."""
        if self._first is None:
            self._first = step
            self._samples = (samples[0], samples[1])
        self._last = step
        self._samples = (self._samples[0], samples[1])
        if time.monotonic() - self._since >= self._every_s:
            self.flush()

    def flush(self) -> None:
        """Write what has been gathered; before a save, so that the ledger is never behind a checkpoint."""
        now = time.monotonic()
        if self._first is not None:
            ledger.append(
                self._run,
                "steps",
                attempt=self._attempt.number,
                first=self._first,
                last=self._last,
                sample_first=self._samples[0],
                sample_last=self._samples[1],
                loss=self.loss,
                seconds=round(now - self._since, 3),
            )
        self._first, self._since = None, now
