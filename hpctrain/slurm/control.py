"""A job's view of its own scheduler: why am I being stopped, and run me again."""

from __future__ import annotations

import time

from hpctrain.errors import ClusterError, ClusterUnreachable
from hpctrain.records import EndReason, JobFacts
from hpctrain.slurm.command import QUERY_TIMEOUT_S, run, run_until
from hpctrain.slurm.jobs import job_facts
from hpctrain.slurm.parse import SACCT_COMMAND, parse_records, parse_sacct

ALREADY_REQUEUED = "pending execution"
"""scontrol's rc 1 where SLURM requeues the job by itself (submitit#1617)."""
PREVIOUS_END = {
    "NODE_FAIL": EndReason.NODE_FAILED,
    "PREEMPTED": EndReason.PREEMPTED,
    "REQUEUED": EndReason.REQUEUED,
    "TIMEOUT": EndReason.TIMED_OUT,
}
"""How sacct names the ends after which a job was run again."""


class SlurmControl:
    """Implements `records.JobControl` with scontrol.

    Attributes:
        job_id: Our own job; ``A_t`` in an array, since ``A`` alone would requeue all its tasks.
        restarts: The restart count with which this process was started. With it, a process that a
            node failure left behind cannot requeue the job away from its own successor.
        timeout_s: How long slurmctld may be silent before we give up.
    """

    def __init__(
        self, job_id: str, *, restarts: int | None = None, timeout_s: float = QUERY_TIMEOUT_S
    ) -> None:
        self.job_id = job_id
        self.restarts = restarts
        self.timeout_s = timeout_s

    def facts(self) -> JobFacts:
        """Ask slurmctld about our own job."""
        return self._facts(time.monotonic() + self.timeout_s)

    def requeue(self) -> None:
        """Ask for this job to be run again, patiently while slurmctld is down."""
        deadline = time.monotonic() + self.timeout_s
        if self._succeeded(deadline):
            return
        try:
            run_until(["scontrol", "requeue", self.job_id], deadline=deadline)
        except ClusterUnreachable:
            raise
        except ClusterError as error:
            if ALREADY_REQUEUED not in str(error).lower():
                raise

    def previous_end(self) -> EndReason:
        """Why the incarnation before this one ended, as far as accounting tells; else UNKNOWN.

        After a node failure no code of the job has run, so only SLURM can say what it was.
        """
        try:
            rows = parse_sacct(run([*SACCT_COMMAND, "--jobs", self.job_id]))
        except (
            ClusterError
        ):  # no accounting here: the reason stays unknown, nothing else depends on it
            return EndReason.UNKNOWN
        before = rows[-2] if len(rows) > 1 else None
        return PREVIOUS_END.get(before.state, EndReason.UNKNOWN) if before else EndReason.UNKNOWN

    def _succeeded(self, deadline: float) -> bool:
        """Whether the job has been started again, or is about to be, without us."""
        if self.restarts is None:
            return False
        now = self._facts(deadline).restarts
        return now is not None and now > self.restarts

    def _facts(self, deadline: float) -> JobFacts:
        text = run_until(["scontrol", "show", "job", self.job_id], deadline=deadline)
        records = parse_records(text)
        if not records:
            raise ClusterError(
                f"scontrol show job {self.job_id} printed no job: {text.strip()[:80]!r}"
            )
        return job_facts(records[0])
