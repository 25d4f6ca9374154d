"""A local job's view of its controller, from inside the job: `JobControl` by files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.records import EndReason, JobFacts, JobState
from hpctrain.errors import ClusterUnreachable
from hpctrain.scheduler.local import client

if TYPE_CHECKING:
    from collections.abc import Sequence


class LocalControl:
    """Implements `JobControl`."""

    def __init__(self, job_id: str, *, restarts: int | None = None) -> None:
        """Speak of this job; its record counts the restarts."""
        del restarts
        self._job_id = job_id

    def facts(self) -> JobFacts:
        """What the controller has written of the job."""
        record = self._record()
        return JobFacts(
            state=JobState(record.state),
            restarts=record.restarts,
            reason=record.reason,
            preempt_time=record.preempt_time,
            end_time=record.end_time,
        )

    def previous_end(self) -> EndReason:
        """Why the previous start ended."""
        return EndReason(self._record().previous_end)

    def previous_stop(self) -> float | None:
        """When the previous start ended."""
        return self._record().previous_stop

    def exclude(self, nodes: Sequence[str]) -> None:
        """Without effect: all nodes are this machine."""

    def requeue(self) -> None:
        """Ask the controller to start the job again."""
        client.request(self._job_id, "requeue")

    def end(self) -> None:
        """Without effect: the controller ends it with its last agent."""

    def forbid_requeue(self) -> None:
        """Without effect: a job that ends by itself is not started again here."""

    def _record(self) -> client.LocalJobRecord:
        record = client.read(self._job_id)
        if record is None:
            raise ClusterUnreachable(f"the record of local job {self._job_id} is gone")
        return record
