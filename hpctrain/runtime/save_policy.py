"""When is the last moment at which a save still fits before the job's end?

Pure: times in, answer out.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.base.records import StopCause

GUESS_BYTES_PER_S = 200e6
"""Of one rank, before any save was measured: eight ranks of a node write 1.6 GB/s together."""
GUESS_SHARE = 1 / 8
"""A guess costs a job no more of its time: a wrong one must not keep it from training at all."""
SAFETY = 1.5
LEAVE_S = 3.0
"""Kept free before the kill: for the processes to leave and for the agent to requeue."""


@dataclass
class JobClock:
    """The job's end against what a save costs. Rank 0's is the one that counts.

    Attributes:
        end_time: When the scheduler ends the job, seconds since the epoch; None where nobody knows.
        margin_s: Kept free after the save, for leaving and requeueing.
        job_s: The job's time from here to its end; None where nobody knows.
        state_bytes: What this rank writes in a save; a first guess of its time comes from it.
        earlier_s: Longest of the newest saves of earlier attempts.
        save_s: Longest save measured in this attempt.
        step_s: Time of a step.
        has_stepped: Whether this attempt has done a step.
    """

    end_time: float | None
    margin_s: float
    job_s: float | None = None
    state_bytes: int = 0
    earlier_s: float | None = None
    save_s: float | None = None
    step_s: float = 0.0
    has_stepped: bool = False

    def expected_save_s(self) -> float:
        """What a save is likely to take: as measured here, else as before, else a guess."""
        if self.save_s is not None:
            return self.save_s
        if self.earlier_s is not None:
            return self.earlier_s
        guess = 1.0 + self.state_bytes / GUESS_BYTES_PER_S
        return guess if self.job_s is None else min(guess, max(0.0, GUESS_SHARE * self.job_s))

    def lead_s(self) -> float:
        """Seconds before the end at which to stop: one more step, one save, the margin."""
        return self.margin_s + SAFETY * self.expected_save_s() + 2 * self.step_s

    def is_late(self, now: float) -> bool:
        """Whether the step that is about to begin may be the last one that fits, or be none."""
        return self.end_time is not None and now >= self.end_time - self.lead_s()

    def is_due(self, now: float) -> bool:
        """Whether to stop before the next step.

        Not before the first: there is nothing to save so far, and a job that always left then would
        never come to do anything.
        """
        return self.has_stepped and self.is_late(now)

    def saved(self, seconds: float) -> None:
        """Learn from a save."""
        self.save_s = max(self.save_s or 0.0, seconds)

    def stepped(self, seconds: float) -> None:
        """Learn from a step."""
        self.has_stepped = True
        self.step_s += 0.3 * (seconds - self.step_s) if self.step_s else seconds

    def left_s(
        self,
        cause: StopCause,
        now: float,
        *,
        term_at: float | None = None,
        kill_wait_s: float | None = None,
        grace_end: float | None = None,
    ) -> float | None:
        """Seconds until the processes are killed; None where nobody says.

        Args:
            cause: What asked for the stop.
            now: Seconds since the epoch, as all times here.
            term_at: When SIGTERM came.
            kill_wait_s: Between SIGTERM and SIGKILL, where there is no grace time; a job that
                reaches its limit hears SIGTERM then.
            grace_end: When the grace time of a preemption ends; None where there is none.
        """
        if cause is StopCause.TERM and grace_end is None:
            end = None if kill_wait_s is None else (term_at or now) + kill_wait_s - LEAVE_S
        else:
            end = self.end_time if grace_end is None else grace_end
            # As the agent of the node does, which ends late ranks: at its limit a job hears
            # SIGTERM, and is killed KillWait later; at the end of a grace time it is killed.
            spare_s = -max(LEAVE_S, self.margin_s / 2)
            if grace_end is None and kill_wait_s is not None:
                spare_s = max(spare_s, kill_wait_s - LEAVE_S)
            end = None if end is None else end + spare_s
        return None if end is None else max(0.0, end - now)
