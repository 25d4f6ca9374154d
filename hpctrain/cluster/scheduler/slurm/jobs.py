"""SLURM's answers as the records that the rest of hpctrain knows. Pure.

Its words for why a job waits are in reasons.toml beside this file.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.scheduler.slurm.parse import (
    NOTHING,
    AccountRow,
    names_of,
    parse_count,
    parse_state,
    parse_time,
)
from hpctrain.core.base.records import JobFacts, JobInfo, JobStart, JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FINISHED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States in which no process of the job is left. Every other one, also one that is not invented
yet, counts as alive: a second writer is worse than a wait."""
STATES = {
    "BOOT_FAIL": JobState.NODE_FAILED,
    "DEADLINE": JobState.TIMED_OUT,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.REQUEUED,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
}
_SAME = frozenset(JobState)
_WAITING = frozenset({JobState.PENDING, JobState.REQUEUED})
_HELD = frozenset({"REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""States that wait for a person, by their names alone."""


@dataclass(frozen=True)
class WaitReason:
    """What one of SLURM's words for a reason means.

    Attributes:
        means: Behind "the job waits in the queue".
        helps: What one can do, or what happens by itself; JOBID stands for the job's id.
        starts: The start that SLURM expects means something.
        held: Nothing starts the job before `scontrol release`.
    """

    means: str
    helps: str = ""
    starts: bool = False
    held: bool = False


@functools.cache
def wait_reasons() -> tuple[dict[str, WaitReason], dict[str, WaitReason]]:
    """SLURM's words for reasons, and the beginnings of texts that stand in their place."""
    table = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text())
    words, texts = (
        {name: WaitReason(**row) for name, row in table[part].items()}
        for part in ("reasons", "texts")
    )
    return words, texts


def wait_reason(reason: str) -> WaitReason | None:
    """Return what a reason means; None for one that no version had whose source was read.

    It is as SLURM prints it, e.g. "ReqNodeNotAvail, UnavailableNodes:n[1-3]".
    """
    words, texts = wait_reasons()
    name = reason.strip().strip("()").replace(" ", "_")
    word = name.replace(":", ",").partition(",")[0]
    by_text = (row for beginning, row in texts.items() if name.startswith(beginning))
    return words.get(word) or next(by_text, None)


def job_state(word: str) -> JobState:
    """SLURM's word for a state as ours; its many words for a job that still runs are one here."""
    if word in _SAME:
        return JobState(word)
    return STATES.get(word, JobState.RUNNING if is_alive(word) else JobState.OVER)


def is_alive(state: str) -> bool:
    """Whether a job in this state may still write."""
    return state not in FINISHED


def job_id_of(record: Mapping[str, str]) -> str:
    """The id under which only this job is meant: `A_t` in an array, since `A` is all of it."""
    if "ArrayJobId" in record and "ArrayTaskId" in record:
        return f"{record['ArrayJobId']}_{record['ArrayTaskId']}"
    return record["JobId"]


def job_info(record: Mapping[str, str]) -> JobInfo:
    """The login node's view of one `scontrol show job` record."""
    state = parse_state(record.get("JobState", ""))
    info = JobInfo(
        job_id=job_id_of(record),
        state=job_state(state),
        said=state,
        alive=is_alive(state),
        reason=_or_none(record.get("Reason", "")),
        nodes=_or_none(record.get("NodeList", "")) or "",
        restarts=parse_count(record.get("Restarts", "")) or 0,
        start_time=parse_time(record.get("StartTime", "")),
        end_time=parse_time(record.get("EndTime", "")),
        script=_or_none(record.get("Command", "")) or "",
    )
    if info.state == JobState.SUSPENDED:
        return replace(info, suspended_at=parse_time(record.get("SuspendTime", "")))
    return _explained(info, record.get("Priority", ""))


def _is_held(info: JobInfo, priority: str) -> bool:
    """Whether it waits for a release: then its priority is 0, whatever else is in its way."""
    about = wait_reason(info.reason or "")
    return priority == "0" or info.said in _HELD or (about is not None and about.held)


def _explained(info: JobInfo, priority: str) -> JobInfo:
    """The same with its reason in words, and without a start that nobody may count on."""
    if info.state not in _WAITING:
        return info
    about, held = wait_reason(info.reason or ""), _is_held(info, priority)
    words = [] if about is None else [about.means, about.helps]
    if held and not (about is not None and about.held):
        words = ["it is held", "`scontrol release JOBID` lets it go"]
    means_nothing = held or (about is not None and not about.starts)
    return replace(
        info,
        held=held,
        explained="; ".join(filter(None, words)).replace("JOBID", info.job_id),
        start_time=None if means_nothing else info.start_time,
    )


def queued_job(row: Sequence[str]) -> JobInfo:
    """The login node's view of one row of squeue in BULK_FORMAT."""
    names = ("JobId", "JobState", "NodeList", "StartTime", "EndTime", "Priority", "Reason")
    return job_info(dict(zip((*names, "Command"), row, strict=True)))


def job_facts(record: Mapping[str, str]) -> JobFacts:
    """The job's own view of one `scontrol show job` record."""
    info = job_info(record)
    return JobFacts(
        state=info.state,
        restarts=parse_count(record.get("Restarts", "")),
        reason=info.reason,
        # Told from the moment in which it is put back, while its processes still end.
        held=_is_held(info, record.get("Priority", "")),
        preempt_time=parse_time(record.get("PreemptTime", "")),
        # SLURM notes both there, the suspension and its end.
        resumed_at=None if info.suspended_at else parse_time(record.get("SuspendTime", "")),
        end_time=parse_time(record.get("EndTime", "")),
    )


def _or_none(value: str) -> str | None:
    return None if value in NOTHING else value


def accounted_job(rows: Sequence[AccountRow]) -> JobInfo | None:
    """The newest incarnation of a job that only accounting knows; None without rows.

    It does not count as alive: sacct keeps saying RUNNING of a job that slurmctld has lost.
    """
    if not rows:
        return None
    newest = rows[-1]
    return JobInfo(
        job_id=newest.job_id,
        state=job_state(newest.state),
        said=newest.state,
        alive=False,
        nodes=newest.nodes,
        restarts=len(rows) - 1,
        start_time=newest.start,
        end_time=newest.end,
    )


def job_starts(rows: Sequence[AccountRow]) -> list[JobStart]:
    """Every start of every job in accounting, counted from 0 in each job."""
    counted: dict[str, int] = {}
    starts = []
    for row in rows:
        index = counted.get(row.job_id, 0)
        counted[row.job_id] = index + 1
        state, nodes = job_state(row.state), ",".join(names_of(row.nodes))
        starts.append(JobStart(row.job_id, index, state, row.start, row.end, nodes))
    return starts
