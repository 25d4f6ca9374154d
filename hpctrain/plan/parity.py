"""The comparison of an engine with one process: two records of the same steps, and a result. Pure.

Losses alone say little: a parameter that is never updated changes them in the sixth digit. So the
first step's gradients are compared by name as well. tests/engines/test_parity.py breaks engines and
sees them found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpctrain.settings.check_engine import bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.settings.schema import EngineSettings

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""By precision: how far a loss may be from one process's, relative to it."""

GRADIENT_FACTOR = 10.0
"""Gradients and their norms may be so many times as far off: rounding shows in them first."""


@dataclass(frozen=True)
class StepRecord:
    """One step: its loss over the global batch, and the gradient's norm before clipping."""

    loss: float
    norm: float


@dataclass(frozen=True)
class GradientSums:
    """One parameter's gradient of the first step, as sums of squares over all its elements.

    Attributes:
        found: Of the engine's.
        wanted: Of one process's.
        apart: Of the difference; below zero where parts were counted twice.
    """

    found: float = 0.0
    wanted: float = 0.0
    apart: float = 0.0

    def __add__(self, other: GradientSums) -> GradientSums:
        return GradientSums(
            self.found + other.found, self.wanted + other.wanted, self.apart + other.apart
        )

    @property
    def relative(self) -> float:
        """Size of the difference as a part of one process's gradient."""
        if self.wanted == 0.0:
            return 0.0 if self.found == 0.0 else math.inf
        return math.sqrt(abs(self.apart) / self.wanted)


@dataclass(frozen=True)
class ParityStep:
    """A step as both did it; `off` where it left the tolerance."""

    step: int
    one: StepRecord
    engine: StepRecord
    off: bool

    @property
    def difference(self) -> float:
        """Of the losses, relative to one process's."""
        return relative(self.engine.loss, self.one.loss)


@dataclass(frozen=True)
class ParityResult:
    """What came out.

    Attributes:
        rows: The steps.
        tolerance: Of a loss; see `TOLERANCE`.
        without_gradient: Parameters that have a gradient in one process and none in the engine.
        different: Those whose gradient is another, with the relative difference, largest first.
    """

    rows: list[ParityStep]
    tolerance: float
    without_gradient: list[str]
    different: list[tuple[str, float]]

    @property
    def largest(self) -> float:
        """The largest relative difference of a loss; not a number where a loss was none."""
        differences = [row.difference for row in self.rows]
        return math.nan if any(map(math.isnan, differences)) else max(differences)

    @property
    def first_off(self) -> int | None:
        """The first step whose loss or norm left the tolerance."""
        return next((row.step for row in self.rows if row.off), None)

    @property
    def holds(self) -> bool:
        """Whether the engine trains as one process does."""
        return self.first_off is None and not self.without_gradient and not self.different

    def as_dict(self) -> dict[str, Any]:
        """For programs; what is not a finite number is null."""
        return {
            "holds": self.holds,
            "tolerance": self.tolerance,
            "gradient_tolerance": GRADIENT_FACTOR * self.tolerance,
            "largest_difference": _finite(self.largest),
            "first_step_off": self.first_off,
            "without_gradient": self.without_gradient,
            "different_gradients": {name: _finite(apart) for name, apart in self.different},
            "steps": [
                {
                    "step": row.step,
                    "loss_one": _finite(row.one.loss),
                    "loss_engine": _finite(row.engine.loss),
                    "difference": _finite(row.difference),
                    "norm_one": _finite(row.one.norm),
                    "norm_engine": _finite(row.engine.norm),
                }
                for row in self.rows
            ],
        }


def compare(
    one: Sequence[StepRecord],
    engine: Sequence[StepRecord],
    gradients: Mapping[str, GradientSums],
    tolerance: float,
) -> ParityResult:
    """Hold an engine's steps against those of one process.

    Args:
        one: The steps of one process.
        engine: As many of the engine's.
        gradients: Of every parameter that has one in one process.
        tolerance: Of a loss, relative.
    """
    loose = GRADIENT_FACTOR * tolerance
    rows = []
    for number, (mine, theirs) in enumerate(zip(one, engine, strict=True), start=1):
        # Not "greater than": what is not a number is off.
        loss_fits = relative(theirs.loss, mine.loss) <= tolerance
        norm_fits = relative(theirs.norm, mine.norm) <= loose or _both_overflow(mine, theirs)
        rows.append(ParityStep(number, mine, theirs, off=not (loss_fits and norm_fits)))
    without = [name for name, sums in gradients.items() if sums.found == 0.0 < sums.wanted]
    different = [
        (name, sums.relative)
        for name, sums in gradients.items()
        if name not in without and not sums.relative <= loose
    ]
    return ParityResult(rows, tolerance, without, sorted(different, key=lambda pair: -pair[1]))


def relative(value: float, wanted: float) -> float:
    """How far a value is off, as a part of the wanted one."""
    if value == wanted:
        return 0.0
    return abs(value - wanted) / max(abs(wanted), math.ulp(0.0))


def summary(result: ParityResult) -> str:
    """The result in one line."""
    if result.holds:
        return f"parity holds: {_largest(result)}, within {result.tolerance:g}"
    lines = []
    if result.without_gradient:
        lines.append(f"without a gradient: {_some(result.without_gradient)}")
    if result.different:
        names = [f"{name} ({apart:.1e})" for name, apart in result.different]
        lines.append(f"another gradient: {_some(names)}")
    if result.first_off is not None:
        lines.append(f"out of tolerance from step {result.first_off} on")
    lines.append(f"{_largest(result)}, tolerance {result.tolerance:g}")
    return f"parity does not hold: {'; '.join(lines)}"


def least_ranks(engine: EngineSettings) -> int:
    """The fewest ranks that the mesh can be made of, and at least two.

    Raises:
        UsageError: see `bounds`.
    """
    return max(2, math.prod(axis.start for axis in bounds(engine).values()))


def _both_overflow(one: StepRecord, engine: StepRecord) -> bool:
    """With fp16 both left the step out: the scale was still too high."""
    return not math.isfinite(one.norm) and not math.isfinite(engine.norm)


def _largest(result: ParityResult) -> str:
    return f"largest difference of a loss {result.largest:.1e}"


def _some(names: Sequence[str]) -> str:
    shown = 5
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
