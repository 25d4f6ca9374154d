"""When is the last moment at which a save still fits before the job's end?

Pure: times in, answer out.
"""

from __future__ import annotations

from dataclasses import dataclass

GUESS_BYTES_PER_S = 100e6
"""Before the first save: a slow disk's rate, so that the first guess errs on the safe side."""
SAFETY = 1.5


@dataclass
class JobClock:
    """The job's end against what a save costs.

    Attributes:
        end_time: When the scheduler ends the job, seconds since the epoch; None where nobody knows.
        margin_s: Kept free after the save, for leaving and requeueing.
        state_bytes: Size of a checkpoint on this rank; a first guess of the save's time comes from
        it.
        save_s: Longest save measured in this attempt.
        step_s: Time of a step.
    """

    end_time: float | None
    margin_s: float
    state_bytes: int = 0
    save_s: float | None = None
    step_s: float = 0.0

    def expected_save_s(self) -> float:
        """What a save is likely to take."""
        if self.save_s is not None:
            return self.save_s
        return 1.0 + self.state_bytes / GUESS_BYTES_PER_S

    def lead_s(self) -> float:
        """Seconds before the end at which to stop: one more step, one save, the margin."""
        return self.margin_s + SAFETY * self.expected_save_s() + 2 * self.step_s

    def is_due(self, now: float) -> bool:
        """Whether the step that is about to begin may be the last one that fits."""
        return self.end_time is not None and now >= self.end_time - self.lead_s()

    def saved(self, seconds: float) -> None:
        """Learn from a save."""
        self.save_s = max(self.save_s or 0.0, seconds)

    def stepped(self, seconds: float) -> None:
        """Learn from a step."""
        self.step_s += 0.3 * (seconds - self.step_s) if self.step_s else seconds
