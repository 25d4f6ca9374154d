"""What a run's guards look at, and what becomes of what they find: the ledger hears, or all stop.

Every rank calls everything here alike; rank 0 writes. tests/engines/test_guarded_runs.py holds the
promises.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from hpctrain.errors import GuardStopped, UsageError
from hpctrain.guards.nonfinite import Ruling
from hpctrain.run.event_types import BatchSkipped, StepNotFinite, StepSpiked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpctrain.engines.engine import Engine
    from hpctrain.engines.step_guard import BadStep
    from hpctrain.guards.spikes import Spike
    from hpctrain.run.event_types import LedgerFact
    from hpctrain.runtime.program import Program
    from hpctrain.settings.schema import GuardSettings

log = logging.getLogger("hpctrain.runtime")

STATE = "guard"
"""Under which a checkpoint holds what the guards remember."""


class Guarding:
    """One rank's side of the run's guards; see `GuardListener`."""

    def __init__(
        self,
        settings: GuardSettings,
        program: Program,
        *,
        tell: Callable[[LedgerFact], None],
        log_skipped: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        """Nothing is guarded so far.

        Args:
            settings: The run's.
            program: What trains.
            tell: Writes a fact into the ledger, on rank 0.
            log_skipped: Counts the step in hand among those whose update was left out.
            stop: Leaves word that no other start would go better, before all ranks raise.
        """
        self._settings = settings
        self._program = program
        self._tell = tell
        self._log_skipped = log_skipped
        self._stop = stop
        self._consumed: int | None = None
        self._is_on = settings.nonfinite != "off" or settings.spike != "off"

    def guard(self, engine: Engine) -> None:
        """Have an engine's steps guarded as the settings say.

        Raises:
            UsageError: the engine cannot do what they ask for.
        """
        if self._settings.spike == "skip" and engine.decides_alone:
            raise UsageError(
                f"guard.spike skip: DeepSpeed ({engine.kind}) updates before anybody "
                "is asked; set guard.spike = tell, or engine.kind fsdp2"
            )
        if self._is_on:
            from hpctrain.engines.step_guard import StepGuard

            engine.guard = StepGuard(engine, self._settings, self)
            self._program.tracked[STATE] = engine.guard

    def step_begins(self) -> None:
        """The program is about to read the step's samples."""
        if self._is_on:
            self._consumed = self._program.consumed()

    # ---- what a step's guard finds

    def samples_of(self, microbatch: int) -> Sequence[int]:
        """See `GuardListener`; none where the program's data does not tell them."""
        taken = getattr(self._program.data, "taken", None)
        pieces = getattr(taken, "pieces", ())
        return pieces[microbatch].indices if microbatch < len(pieces) else []

    def not_finite(self, bad: BadStep) -> None:
        """See `GuardListener`.

        Raises:
            GuardStopped: on every rank.
        """
        self._tell(
            StepNotFinite(
                step=bad.step,
                loss=bad.loss,
                grad_norm=bad.norm,
                rank=bad.rank,
                ranks=bad.ranks,
                node=bad.node,
                parameter=bad.parameter,
                samples=bad.samples,
                in_weights=bad.in_weights,
                transient=bad.transient,
                left_out=bad.is_left_out,
            )
        )
        if bad.is_left_out:
            self._skipped(bad.step, "nonfinite")
        said = in_words(bad)
        log.warning("%s", said)
        if bad.ruling is Ruling.STOP:
            self._stop()
            raise GuardStopped(f"guard.nonfinite: {said}; nothing more is trained")

    def spiked(self, step: int, spike: Spike, *, is_left_out: bool) -> None:
        """See `GuardListener`."""
        self._tell(
            StepSpiked(
                step=step,
                what=spike.what,
                value=spike.value,
                usual=spike.usual,
                deviations=round(spike.deviations, 1),
                left_out=is_left_out,
            )
        )
        if is_left_out:
            self._skipped(step, "spike")

    def _skipped(self, step: int, why: str) -> None:
        last = self._program.consumed()
        self._log_skipped()
        self._tell(BatchSkipped(step=step, first=self._consumed, last=last, why=why))


def in_words(bad: BadStep) -> str:
    """What happened, in one line."""
    loss = "" if bad.loss is None or math.isfinite(bad.loss) else f"loss {bad.loss}, "
    what = f"step {bad.step} is not finite ({loss}gradient norm {bad.norm})"
    if bad.in_weights:
        return f"{what}: the weights themselves are not, first {bad.parameter}"
    whose = f"rank {bad.rank} on {bad.node} had it first" if bad.rank is not None else ""
    where = f"at {bad.parameter}" if bad.parameter else ""
    samples = f"samples {', '.join(map(str, bad.samples[:8]))}" if bad.samples else ""
    dots = ", ..." if len(bad.samples) > 8 else ""  # noqa: PLR2004
    named = ", ".join(filter(None, [whose, where, samples + dots])) or "nobody knows whose it is"
    again = {
        None: "",
        True: "; computed again it is finite: a fault of the machine",
        False: "; computed again it is the same",
    }[bad.transient]
    return f"{what}: {named}{again}{'; its update is left out' if bad.is_left_out else ''}"
