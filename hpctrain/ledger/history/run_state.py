"""Where a run stands, and what ended its attempts. Pure.

A cause is finer than `EndReason`, which only has to tell what follows: the scheduler's reason comes
first, what the failed rank said second, the scheduler's state of the job third. Where none of them
tells, the cause is `crashed` or `unknown`, never a guess. tests/unit/history/test_attempts.py and
test_causes.py hold the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hpctrain.core.base.records import EndReason, JobState, Next
from hpctrain.ledger.run import event_types as facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.core.base.records import JobInfo
    from hpctrain.ledger.history.run_records import AttemptRecord, Failure
    from hpctrain.ledger.run.event_fields import LedgerFact


EXIT_FOR_GOOD = 93
"""Exit code of a run that a budget or a lack of progress stopped."""


class RunState(StrEnum):
    """Where a run stands: a closed set."""

    CREATED = "created"
    """Its directory is there; nothing was submitted."""
    SUBMITTING = "submitting"
    """The scheduler was asked, and no answer is on record."""
    PENDING = "pending"
    RUNNING = "running"
    REQUEUED = "requeued"
    """Waiting to be started again."""
    SUSPENDED = "suspended"
    """Its job keeps its nodes and stands still, until the scheduler lets it continue."""
    COMPLETING = "completing"
    """Cancelled; the scheduler still ends its processes, which may still write."""
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """Ended for good: saved and left as asked, or by a budget, or for want of progress."""
    CANCELLED = "cancelled"
    LOST = "lost"
    """No end is on record, and no job is there that could write one."""


OVER = frozenset({RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.CANCELLED})
_WAITING = frozenset({JobState.PENDING, JobState.REQUEUED})
_FAILURES = frozenset(
    {JobState.FAILED, JobState.NODE_FAILED, JobState.OUT_OF_MEMORY, JobState.TIMED_OUT}
)


@dataclass(frozen=True)
class LedgerState:
    """Where the run stands by the ledger alone.

    Attributes:
        phase: The state as last written down; the scheduler may know better.
        token: Of the newest submission; `job_id` is its job, as soon as it is known.
        attempt: The newest one; `reason` is why it ended.
        cancel: "cancel" or "save" once it was asked for, else "".
        exit_code: Of a run that was stopped for good; `detail` says why, in a line.
        t: When the phase began.
    """

    phase: RunState = RunState.CREATED
    token: str | None = None
    job_id: str | None = None
    attempt: int | None = None
    reason: EndReason | None = None
    cancel: str = ""
    exit_code: int | None = None
    detail: str = ""
    t: float = 0.0


def after(now: LedgerState, t: float, attempt: int | None, fact: LedgerFact) -> LedgerState:
    """Where the run stands after one more event, of a kind in `STATE_CHANGES`."""
    if (attempt or now.attempt or 0) < (now.attempt or 0):
        return now
    changes = STATE_CHANGES[type(fact)](now, fact)
    if type(fact) is facts.AttemptStarted:
        changes["attempt"] = attempt
    moment = t if changes.get("phase", now.phase) is not now.phase else now.t
    return replace(now, t=moment, **changes)


def run_state(now: LedgerState, job: JobInfo | None, *, asked: bool = True) -> RunState:
    """Where the run stands: an end in the ledger is final; without one the scheduler's word counts.

    `job` is the run's newest job, None if the scheduler knows of none. Unless `asked`, the
    scheduler gave no answer, and the ledger alone must do.
    """
    if now.phase in OVER:
        return now.phase
    if job is not None and job.alive:
        return _alive(job, now)
    if now.cancel == "cancel" or (job is not None and job.state == JobState.CANCELLED):
        return RunState.CANCELLED
    if not asked or now.phase in {RunState.CREATED, RunState.SUBMITTING}:
        return now.phase
    if job is not None and job.state in _FAILURES:
        return RunState.FAILED
    return RunState.LOST


def _alive(job: JobInfo, now: LedgerState) -> RunState:
    began = job.restarts > 0 or now.phase in {RunState.RUNNING, RunState.REQUEUED}
    if job.state in _WAITING:
        return RunState.REQUEUED if began else RunState.PENDING
    if job.state == JobState.SUSPENDED:
        return RunState.SUSPENDED
    if job.state == JobState.COMPLETING and now.phase is RunState.REQUEUED:
        return RunState.REQUEUED
    if job.state == JobState.COMPLETING and now.cancel == "cancel":
        return RunState.COMPLETING
    return RunState.RUNNING


# What each kind of event changes.


def _intent(now: LedgerState, fact: facts.SubmitIntent) -> dict[str, Any]:
    fresh = LedgerState(RunState.SUBMITTING, token=fact.token, attempt=now.attempt)
    return {name: value for name, value in vars(fresh).items() if name != "t"}


def _submitted(now: LedgerState, fact: facts.Submitted | facts.SubmitAdopted) -> dict[str, Any]:
    changes = {"job_id": fact.job_id, "token": fact.token}
    # A job may start, or be held back, before sbatch's answer is written down.
    is_heard = now.phase is RunState.RUNNING or now.job_id == fact.job_id
    return changes if is_heard else changes | {"phase": RunState.PENDING}


def _refused(_: LedgerState, fact: facts.SubmitFailed) -> dict[str, Any]:
    return {"phase": RunState.FAILED, "detail": f"the job was not accepted: {fact.why}"}


def _held_back(now: LedgerState, fact: facts.HeldBack) -> dict[str, Any]:
    if now.job_id not in {None, fact.job_id}:
        return {}  # an older submission's job
    return {"phase": RunState.FAILED, "job_id": fact.job_id, "detail": fact.why}


def _started(now: LedgerState, fact: facts.AttemptStarted) -> dict[str, Any]:
    job_id = fact.job_id or now.job_id
    return {
        "phase": RunState.RUNNING,
        "job_id": job_id,
        "reason": None,
        "cancel": now.cancel if now.job_id in {None, job_id} else "",
        "exit_code": None,
        "detail": "",
    }


_BY_REASON = {
    EndReason.COMPLETED: RunState.DONE,
    EndReason.STOPPED: RunState.STOPPED,
    EndReason.CANCELLED: RunState.CANCELLED,
}


def _ended(now: LedgerState, fact: facts.AttemptEnded) -> dict[str, Any]:
    if now.phase is RunState.DONE or now.exit_code is not None:
        return {"reason": fact.reason}
    phase = RunState.REQUEUED
    if fact.next is Next.RESTART:
        phase = RunState.RUNNING
    elif fact.next is Next.STOP:
        phase = _BY_REASON.get(fact.reason, RunState.FAILED)
    return {"phase": phase, "reason": fact.reason, "detail": fact.detail}


def _requeued(now: LedgerState, _: facts.Requeued) -> dict[str, Any]:
    return {} if now.phase in OVER else {"phase": RunState.REQUEUED, "detail": ""}


def _not_requeued(_: LedgerState, fact: facts.RequeueFailed) -> dict[str, Any]:
    return {"detail": f"could not be requeued: {fact.why}"}


def _done(_: LedgerState, __: facts.TrainingDone) -> dict[str, Any]:
    return {"phase": RunState.DONE, "detail": ""}


def _stopped(_: LedgerState, fact: facts.RunStopped) -> dict[str, Any]:
    phase = RunState.STOPPED if fact.exit_code == EXIT_FOR_GOOD else RunState.FAILED
    return {"phase": phase, "exit_code": fact.exit_code, "detail": fact.detail}


def _cancel(_: LedgerState, fact: facts.CancelRequested) -> dict[str, Any]:
    return {"cancel": "save" if fact.save else "cancel"}


STATE_CHANGES: dict[type[LedgerFact], Callable[[LedgerState, Any], dict[str, Any]]] = {
    facts.SubmitIntent: _intent,
    facts.Submitted: _submitted,
    facts.SubmitAdopted: _submitted,
    facts.SubmitFailed: _refused,
    facts.HeldBack: _held_back,
    facts.AttemptStarted: _started,
    facts.AttemptEnded: _ended,
    facts.Requeued: _requeued,
    facts.RequeueFailed: _not_requeued,
    facts.TrainingDone: _done,
    facts.RunStopped: _stopped,
    facts.CancelRequested: _cancel,
}
"""What moves a run from one state to another, and how."""


# ---- causes


class EndCause(StrEnum):
    """What ended an attempt: a closed set."""

    COMPLETED = "completed"
    HUNG_END = "hung_end"
    """Completed, but for ranks or processes that did not end, and were ended."""
    PREEMPTED = "preempted"
    WALLTIME = "walltime"
    """The job's time limit."""
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """`hpctrain cancel --save`."""
    NODE_FAIL = "node_fail"
    GPU_ERROR = "gpu_error"
    GPU_OOM = "gpu_oom"
    HOST_OOM = "host_oom"
    HANG = "hang"
    DESYNC = "desync"
    NCCL_ERROR = "nccl_error"
    """Communication failed: NCCL's own error, a connection, or a collective that timed out."""
    DATA_WORKER = "data_worker"
    """A worker process of a DataLoader died."""
    NAN = "nan"
    STORAGE_FULL = "storage_full"
    STORAGE_ERROR = "storage_error"
    """The file system refused: a stale handle, a server that is away, an expired ticket."""
    USER_ERROR = "user_error"
    """The program raised before its first step, or was started in a wrong way."""
    CRASHED = "crashed"
    """A process died, and nothing says why."""
    REQUEUED = "requeued"
    """From outside, for a reason that nobody tells."""
    UNFIT_NODE = "unfit_node"
    """Preflight found a bad node before the ranks began."""
    FENCED = "fenced"
    """A newer attempt took the run over."""
    UNKNOWN = "unknown"


WITHOUT_A_STEP = "in a row without one new committed step"
"""How a run's stop for attempts without progress is recorded. It is no attempt's cause: each of
them has one of its own, and this is why no other follows."""
UNFIT = "preflight: "
"""How the agent's word on an end begins where a node was not fit."""

_CAUSE_BY_REASON = {
    EndReason.COMPLETED: EndCause.COMPLETED,
    EndReason.PREEMPTED: EndCause.PREEMPTED,
    EndReason.TIMED_OUT: EndCause.WALLTIME,
    EndReason.CANCELLED: EndCause.CANCELLED,
    EndReason.STOPPED: EndCause.STOPPED,
    EndReason.NODE_FAILED: EndCause.NODE_FAIL,
    EndReason.STORAGE_FAILED: EndCause.STORAGE_ERROR,
    EndReason.REQUEUED: EndCause.REQUEUED,
    EndReason.FENCED: EndCause.FENCED,
}

_BY_STATE = {
    JobState.CANCELLED: EndCause.CANCELLED,
    JobState.NODE_FAILED: EndCause.NODE_FAIL,
    JobState.OUT_OF_MEMORY: EndCause.HOST_OOM,
    JobState.PREEMPTED: EndCause.PREEMPTED,
    JobState.REQUEUED: EndCause.REQUEUED,
    JobState.TIMED_OUT: EndCause.WALLTIME,
}
"""What the scheduler says of that start of the job."""
_CAUSES = frozenset({JobState.NODE_FAILED, JobState.OUT_OF_MEMORY})
"""What can make a rank crash; the other states follow from it, as a requeue does."""

_SAID = {cause.value: cause for cause in (EndCause.HANG, EndCause.DESYNC)}
"""Only what detected them may say so: they look like many other things from outside."""

_LOSS = r"\b(?:loss|grad\w*|norm)\b"
_NOT_FINITE = r"(?:\b(?i:nan|inf)\b|\bnon-finite\b|\bnot finite\b)"

_PATTERNS = (
    # Our own word for it, whatever errno's text is behind it.
    (EndCause.STORAGE_ERROR, "FileSystemFault", r"\bFileSystemFault\b"),
    # torch/cuda/memory.py, c10/cuda/CUDACachingAllocator.cpp: "CUDA out of memory. Tried to..."
    (EndCause.GPU_OOM, "OutOfMemoryError", r"\bOutOfMemoryError\b"),
    (EndCause.GPU_OOM, " out of memory", r"\b(?:CUDA|HIP|XPU)(?: error:)? out of memory\b"),
    (EndCause.GPU_OOM, "_ALLOC_FAILED", r"\bCU(?:DNN|BLAS)_STATUS_ALLOC_FAILED\b"),
    # c10/core/impl/alloc_cpu.cpp, CPython and the C++ library.
    (EndCause.HOST_OOM, "CPUAllocator", r"\bDefaultCPUAllocator: (?:can't|not enough)\b"),
    (EndCause.HOST_OOM, "MemoryError", r"^MemoryError\b"),
    (EndCause.HOST_OOM, "bad_alloc", r"\bstd::bad_alloc\b"),
    (EndCause.HOST_OOM, "allocate memory", r"\bCannot allocate memory\b"),
    # errno's texts, and how Python prints their numbers.
    (EndCause.STORAGE_FULL, "No space left", r"\bNo space left on device\b"),
    (EndCause.STORAGE_FULL, "quota", r"\b[Qq]uota exceeded\b"),
    (EndCause.STORAGE_FULL, "ENOSPC", r"\bENOSPC\b"),
    (EndCause.STORAGE_FULL, "EDQUOT", r"\bEDQUOT\b"),
    (EndCause.STORAGE_FULL, "[Errno ", r"\[Errno (?:28|122)\]"),
    # What NFS, Lustre and a bad disk say; a time-out or a closed connection may be the network's.
    (EndCause.STORAGE_ERROR, "Stale file handle", r"\bStale file handle\b"),
    (EndCause.STORAGE_ERROR, "I/O error", r"\bRemote I/O error\b"),
    (EndCause.STORAGE_ERROR, "/output error", r"\bInput/output error\b"),
    (EndCause.STORAGE_ERROR, "endpoint shutdown", r"\bafter transport endpoint shutdown\b"),
    (EndCause.STORAGE_ERROR, "[Errno ", r"\[Errno (?:5|108|116|121)\]"),
    # NVIDIA's driver in the kernel's log: "NVRM: Xid (PCI:0000:3b:00): 79, ..."
    (EndCause.GPU_ERROR, "Xid", r"\bXid\b.{0,40}?\b\d{1,3}\b"),
    (EndCause.GPU_ERROR, "ECC", r"\b[Uu]ncorrectable ECC\b"),
    # c10/cuda/CUDAException.h, cuBLAS, cuDNN; NCCL repeats it as "unhandled cuda error".
    (EndCause.GPU_ERROR, "CUDA", r"\bCUDA (?:driver )?error\b"),
    (EndCause.GPU_ERROR, "HIP", r"\bHIP error\b"),
    (EndCause.GPU_ERROR, "unhandled cuda", r"\bunhandled cuda error\b"),
    (EndCause.GPU_ERROR, "AcceleratorError", r"\bAcceleratorError\b"),
    (EndCause.GPU_ERROR, "_STATUS_", r"\bCU(?:DNN|BLAS)_STATUS_(?:EXECUTION|INTERNAL)\w*"),
    # nccl.h, ProcessGroupNCCL.cpp, torch.distributed's classes of errors, gloo.
    (EndCause.NCCL_ERROR, "NCCL", r"\bNCCL (?:[Ee]rror|communicator|operation)\b"),
    (EndCause.NCCL_ERROR, "nccl", r"\bnccl(?:System|Remote|Internal)Error\b"),
    (EndCause.NCCL_ERROR, "Dist", r"\bDist(?:Backend|Network|Store)Error\b"),
    (EndCause.NCCL_ERROR, "Watchdog", r"\bWatchdog caught collective operation timeout\b"),
    (EndCause.NCCL_ERROR, "gloo/", r"\bgloo/\S+\.(?:cc|h):\d+\]"),
    (EndCause.NCCL_ERROR, "connectFullMesh", r"\bconnectFullMesh failed\b"),
    (EndCause.NCCL_ERROR, "Timed out", r"\bTimed out waiting \d+ ?ms for \w+ operation\b"),
    # torch/utils/data/_utils/signal_handling.py, dataloader.py.
    (EndCause.DATA_WORKER, "DataLoader worker", r"\bworker\b.{0,80}\b(?:killed by|exited unexp)"),
    (EndCause.DATA_WORKER, "memory thread", r"\bPin memory thread exited unexpectedly\b"),
    # What a program that watches its numbers raises.
    (EndCause.NAN, "FloatingPointError", r"^FloatingPointError\b"),
    (EndCause.NAN, "loss", rf"{_LOSS}.{{0,40}}{_NOT_FINITE}|{_NOT_FINITE}.{{0,40}}{_LOSS}"),
    (EndCause.NAN, "grad", rf"{_LOSS}.{{0,40}}{_NOT_FINITE}|{_NOT_FINITE}.{{0,40}}{_LOSS}"),
    # torch.autograd.set_detect_anomaly
    (EndCause.NAN, "returned nan", r"\breturned nan values in its \d+th output\b"),
)
"""What stands in a failure's line: the first that fits. The word in the middle is looked for before
the pattern, which takes far longer."""
NOT_THE_USERS = frozenset({EndCause.GPU_ERROR, EndCause.NCCL_ERROR, EndCause.DATA_WORKER})
"""Of machines and connections: they need not come at the next start."""
_LONGEST = 500
"""So much of a line is read: what is wrong stands at its beginning."""

_OF_PROGRAM = frozenset({EndReason.CRASHED, EndReason.USER_ERROR, EndReason.UNKNOWN})


def cause_of(attempt: AttemptRecord, *, state: JobState | None = None) -> EndCause:
    """What ended the attempt; `unknown` for one that has not ended.

    `state` is what accounting says of that start of the job; None where it says nothing, or where
    another attempt followed in the same allocation.
    """
    reason = attempt.reason or EndReason.UNKNOWN
    if reason is EndReason.UNKNOWN and attempt.gave_way is not None:
        return EndCause.FENCED
    if attempt.stop_cause in _SAID:
        return _SAID[attempt.stop_cause]
    if reason is EndReason.NODE_FAILED and attempt.detail.startswith(UNFIT):
        return EndCause.UNFIT_NODE
    if reason is EndReason.COMPLETED and attempt.awaited is not None and attempt.awaited.ended:
        return EndCause.HUNG_END
    if reason not in _OF_PROGRAM:
        return _CAUSE_BY_REASON.get(reason, EndCause.UNKNOWN)
    cause = cause_of_failure(attempt.failure) if attempt.failure is not None else None
    if cause is None and (reason is EndReason.UNKNOWN or state in _CAUSES):
        cause = None if state is None else _BY_STATE.get(state)
    return cause or _by_default(attempt, reason, state)


def _by_default(attempt: AttemptRecord, reason: EndReason, state: JobState | None) -> EndCause:
    """Where nothing says why: no more than that a process died, if that much is known."""
    if reason is EndReason.USER_ERROR:
        return EndCause.USER_ERROR
    died = reason is EndReason.CRASHED or attempt.failure is not None or state == JobState.FAILED
    return EndCause.CRASHED if died else EndCause.UNKNOWN


def cause_of_failure(failure: Failure) -> EndCause | None:
    """What a failure's own words tell; None where they tell nothing."""
    return _SAID.get(failure.kind) or cause_in(failure.summary)


def cause_in(summary: str) -> EndCause | None:
    """What a failure's one line tells; None where it tells nothing."""
    line = summary[:_LONGEST]
    fit = (cause for cause, word, known in _PATTERNS if word in line and re.search(known, line))
    return next(fit, None)
