"""The login side of the embedded cluster."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from hpctrain.base.process import own_program
from hpctrain.base.records import JobInfo, JobStart
from hpctrain.errors import ClusterError
from hpctrain.run.values import is_job_id
from hpctrain.scheduler.local import jobs
from hpctrain.settings.check import node_range, time_s
from hpctrain.settings.spec import load_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpctrain.base.records import JobRequest


class LocalCluster:
    """Implements `records.Cluster`."""

    name = "local"

    def here(self) -> str:
        """No name: its jobs are known by their files alone."""
        return ""

    def submit(self, request: JobRequest) -> str:
        """Start the job's controller, detached from this terminal."""
        spec = load_spec(request.run_dir / "spec.json")
        low, high = node_range(spec.settings.slurm.nodes)
        record = jobs.create(
            jobs.LocalJobRecord(
                job_id="",
                token=request.token,
                run_dir=str(request.run_dir),
                min_nodes=low,
                max_nodes=high,
                time_s=time_s(spec.settings.slurm.time),
                signal_lead_s=spec.settings.slurm.signal_lead_s,
            )
        )
        output = (request.run_dir / "jobs" / f"{request.token}.out").open("ab")
        with output:
            subprocess.Popen(
                own_program("hpctrain.entry.local_controller", record.job_id, python=spec.python),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return record.job_id

    def find_job(self, token: str) -> JobInfo | None:
        """The job of this submission."""
        for record in reversed(jobs.all_jobs()):
            if record.token == token:
                return _info(record)
        return None

    def job(self, job_id: str) -> JobInfo | None:
        """What is known of a job."""
        record = _read(job_id)
        return None if record is None else _info(record)

    def starts(self, job_ids: Sequence[str]) -> list[JobStart]:
        """Every start of these jobs, as their controllers wrote them down."""
        records = (_read(job_id) for job_id in job_ids)
        return [one for record in records if record is not None for one in _starts(record)]

    def survey(self, job_ids: Sequence[str]) -> LocalCluster:
        """Itself: it reads files, and asks nobody."""
        del job_ids
        return self

    def cancel(self, job_id: str) -> None:
        """Ask the controller to end the job."""
        if not is_job_id(job_id):
            raise ClusterError(f"the run's ledger names the job {job_id!r}, which is no job's id")
        jobs.request(job_id, "cancel")


def _read(job_id: str) -> jobs.LocalJobRecord | None:
    """The job's record; none for what is no id, which might be a path to anywhere."""
    return jobs.read(job_id) if is_job_id(job_id) else None


def _starts(record: jobs.LocalJobRecord) -> list[JobStart]:
    """A start whose controller died has no end: the ledger knows when it was last heard of."""
    return [
        JobStart(
            record.job_id,
            index,
            record.state if position == len(record.starts) - 1 else "REQUEUED",
            start,
            end,
            ",".join(f"local{node}" for node in range(nodes)),
        )
        for position, (index, start, end, nodes) in enumerate(record.starts)
        if end is not None or jobs.is_controlled(record)
    ]


def _info(record: jobs.LocalJobRecord) -> JobInfo:
    alive = record.state not in jobs.OVER and jobs.is_controlled(record)
    lost = record.state not in jobs.OVER and not alive
    return JobInfo(
        job_id=record.job_id,
        state="NODE_FAIL" if lost else record.state,
        alive=alive,
        reason=record.reason,
        nodes=",".join(record.nodes),
        restarts=record.restarts,
        start_time=record.start_time,
        end_time=record.end_time,
        script=f"{record.run_dir}/jobs/{record.token}.sh" if record.run_dir else "",
    )
