"""Step marks in the ledger: which steps were done, and which samples went into them. Rank 0 only.

One line covers all steps since the last, so a long run's ledger stays small.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from hpctrain.ledger import events as ledger

if TYPE_CHECKING:
    from hpctrain.rundir.fence import Attempt
    from hpctrain.rundir.layout import RunDir


def note(run: RunDir, kind: str, attempt: Attempt, **fields: Any) -> None:
    """Write a fact into the ledger; a disk that is full costs the fact, never the training."""
    try:
        ledger.append(run, kind, attempt=attempt.number, **fields)
    except OSError as error:
        print(f"hpctrain: the ledger misses {kind}: {error}", file=sys.stderr, flush=True)


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
        """Write what has been gathered; before a save, lest the ledger be behind a checkpoint."""
        now = time.monotonic()
        if self._first is not None:
            note(
                self._run,
                "steps",
                self._attempt,
                first=self._first,
                last=self._last,
                sample_first=self._samples[0],
                sample_last=self._samples[1],
                loss=self.loss,
                seconds=round(now - self._since, 3),
            )
        self._first, self._since = None, now
