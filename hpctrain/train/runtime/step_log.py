"""Step marks in the ledger: which steps were done, from which samples, and what they took.

Rank 0 only. One line covers all steps since the last, and the older a run is the further apart the
lines come, so that the ledger of a month stays small. tests/unit/runtime/test_step_log.py holds the
promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpctrain.core.base import clock
from hpctrain.ledger.run import events as ledger
from hpctrain.ledger.run.event_types import StepsDone

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpctrain.ledger.run.fence import Attempt
    from hpctrain.ledger.run.layout import RunDir

STRETCH = 200
"""A mark for each so-manieth of the run's age: what is older is looked at in less detail."""
LONGEST_S = 60.0
KEPT = 4096
"""Step times in memory at a time; of more, every second one is forgotten."""
EXACT = 1e15
"""Sums below it are written digit by digit."""
SUMMED = ("tokens", "flops", "skipped")


def mark_every_s(run_age_s: float, log_every_s: float) -> float:
    """Seconds between step marks in a run of this age; 0 is every step's, at any age."""
    if log_every_s <= 0:
        return 0.0
    return min(max(run_age_s / STRETCH, log_every_s), max(LONGEST_S, log_every_s))


def run_age_s(run: RunDir, now: float) -> float:
    """Seconds since the first fact of the run that can be read; 0 without one."""
    try:
        first = ledger.first_fact(run)
    except OSError:
        return 0.0
    return max(0.0, now - first.t) if first is not None else 0.0


class StepTimes:
    """Quantiles of step times, in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._count = 0
        self._every = 1

    def add(self, seconds: float) -> None:
        """One step took so long."""
        if self._count % self._every == 0:
            self._kept.append(seconds)
        self._count += 1
        if len(self._kept) >= KEPT:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def quantile(self, share: float) -> float | None:
        """The time that this share of the steps stays within; None without steps."""
        if not self._kept:
            return None
        ordered = sorted(self._kept)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class StepLog:
    """Gathers steps, and writes a mark of them when told to."""

    def __init__(
        self,
        run: RunDir,
        attempt: Attempt,
        every_s: Callable[[], float],
        *,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """Start with an empty mark; `every_s` returns the seconds between marks now."""
        self._run = run
        self._attempt = attempt
        self._every_s = every_s
        self._clock = clock
        self._first: int | None = None
        self._last = 0
        self._samples: tuple[int | None, int | None] = (None, None)
        self._loss: float | None = None
        self._grad_norm: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._first = None
        self._since = self._clock()
        self._times = StepTimes()
        self._sums: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no step was done since the last mark."""
        return self._first is None

    def begin(self) -> None:
        """The first step begins: what went before (the restore) is no step's time."""
        self._begin()

    def add(
        self,
        step: int,
        samples: tuple[int | None, int | None],
        seconds: float | None,
        values: Mapping[str, float],
        *,
        steps: int = 1,
    ) -> None:
        """Record that step `step` is done (that many updates are applied).

        `samples` are those consumed before the steps of this mark, and those consumed now.
        `seconds` leave out saves; None if unknown. `values` come from `run.log`. `steps` were done
        since the last call.
        """
        if self._first is None:
            self._first = step - steps + 1
            self._samples = samples
        self._last = step
        self._samples = (self._samples[0], samples[1])
        if seconds is not None:
            self._times.add(seconds / steps)
        self.tell(values)

    def tell(self, values: Mapping[str, float]) -> None:
        """What the program said of the last step, also after it was counted."""
        self._loss = values.get("loss", self._loss)
        self._grad_norm = values.get("grad_norm", self._grad_norm)
        for name in SUMMED:
            if name in values:
                self._sums[name] = self._sums.get(name, 0.0) + values[name]

    def is_due(self) -> bool:
        """Whether a mark should be written."""
        return self._first is not None and self._clock() - self._since >= self._every_s()

    def flush(self, **more: Any) -> None:
        """Write what was gathered, with more fields of `StepsDone`."""
        if self._first is not None:
            more |= {name: _plain(value) for name, value in self._sums.items() if value}
            mark = StepsDone(
                first=self._first,
                last=self._last,
                sample_first=self._samples[0],
                sample_last=self._samples[1],
                loss=self._loss,
                grad_norm=_rounded(self._grad_norm),
                seconds=round(self._clock() - self._since, 3),
                p50_s=_rounded(self._times.quantile(0.5)),
                p95_s=_rounded(self._times.quantile(0.95)),
                **more,
            )
            ledger.record(self._run, mark, attempt=self._attempt.number)
        self._begin()


def _rounded(value: float | None) -> float | None:
    """Six digits say enough of a measurement."""
    return None if value is None else float(f"{value:.6g}")


def _plain(value: float) -> float:
    """A whole number without a point, where that is shorter."""
    return int(value) if value.is_integer() and value < EXACT else float(f"{value:.6g}")
