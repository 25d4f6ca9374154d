"""What ended an attempt: the right word where something tells it, and never a guess."""

from __future__ import annotations

import pytest

from hpctrain.cluster.scheduler.slurm.jobs import job_state
from hpctrain.core.base.records import EndReason
from hpctrain.ledger.history.attempts import attempts
from hpctrain.ledger.history.run_history import RunHistory
from hpctrain.ledger.history.run_records import AttemptRecord, Failure
from hpctrain.ledger.history.run_state import EndCause, cause_of, cause_of_failure
from tests.support.ledger_runs import Story


def failed(summary: str, kind: str = "exception") -> Failure:
    return Failure(1, 3, "n2", kind, summary)


def ended(reason: EndReason | None, summary: str | None = None, **fields: object) -> AttemptRecord:
    failure = None if summary is None else failed(summary)
    return AttemptRecord(1, 0.0, 0.0, reason=reason, ended=1.0, failure=failure, **fields)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (EndReason.COMPLETED, EndCause.COMPLETED),
        (EndReason.PREEMPTED, EndCause.PREEMPTED),
        (EndReason.TIMED_OUT, EndCause.WALLTIME),
        (EndReason.CANCELLED, EndCause.CANCELLED),
        (EndReason.STOPPED, EndCause.STOPPED),
        (EndReason.NODE_FAILED, EndCause.NODE_FAIL),
        (EndReason.REQUEUED, EndCause.REQUEUED),
        (EndReason.FENCED, EndCause.FENCED),
        (EndReason.CRASHED, EndCause.CRASHED),
        (EndReason.USER_ERROR, EndCause.USER_ERROR),
        (EndReason.UNKNOWN, EndCause.UNKNOWN),
        (None, EndCause.UNKNOWN),
    ],
)
def test_the_reason_alone_gives_its_own_cause(reason, cause):
    assert cause_of(ended(reason)) is cause


def test_every_reason_has_a_cause():
    assert all(isinstance(cause_of(ended(reason)), EndCause) for reason in EndReason)


@pytest.mark.parametrize(
    ("summary", "cause"),
    [
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total",
            EndCause.GPU_OOM,
        ),
        ("torch.OutOfMemoryError: HIP out of memory.", EndCause.GPU_OOM),
        ("RuntimeError: CUDA error: out of memory", EndCause.GPU_OOM),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", EndCause.GPU_OOM),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate",
            EndCause.HOST_OOM,
        ),
        ("MemoryError: Unable to allocate 8.00 GiB for an array", EndCause.HOST_OOM),
        ("OSError: [Errno 12] Cannot allocate memory", EndCause.HOST_OOM),
        ("OSError: [Errno 28] No space left on device: '/scratch/x'", EndCause.STORAGE_FULL),
        ("CheckpointError: shard 3: [Errno 122] Disk quota exceeded", EndCause.STORAGE_FULL),
        ("CheckpointError: write failed (ENOSPC)", EndCause.STORAGE_FULL),
        (
            "hpctrain.errors.FileSystemFault: x: [Errno 12] Cannot allocate memory",
            EndCause.STORAGE_ERROR,
        ),
        ("OSError: [Errno 116] Stale file handle: '/data/x'", EndCause.STORAGE_ERROR),
        ("OSError: [Errno 5] Input/output error", EndCause.STORAGE_ERROR),
        (
            "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'",
            EndCause.STORAGE_ERROR,
        ),
        ("RuntimeError: CUDA error: an illegal memory access", EndCause.GPU_ERROR),
        ("AcceleratorError: CUDA error: uncorrectable ECC error", EndCause.GPU_ERROR),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", EndCause.GPU_ERROR),
        (
            "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2005, unhandled cuda error",
            EndCause.GPU_ERROR,
        ),
        ("DistBackendError: NCCL error in: x.cpp:1, ncclSystemError: socket", EndCause.NCCL_ERROR),
        ("DistNetworkError: The client socket has timed out after 600000ms", EndCause.NCCL_ERROR),
        (
            "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
            EndCause.NCCL_ERROR,
        ),
        (
            "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
            EndCause.NCCL_ERROR,
        ),
        (
            "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(Seq",
            EndCause.NCCL_ERROR,
        ),
        ("FloatingPointError: loss at step 12", EndCause.NAN),
        ("ValueError: loss is nan at step 12", EndCause.NAN),
        ("RuntimeError: non-finite gradient norm", EndCause.NAN),
        ("RuntimeError: grad_norm is not finite: inf", EndCause.NAN),
        (
            "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
            EndCause.NAN,
        ),
        # What must not match.
        ("ValueError: unknown loss 'nanmean'; choose one of mse, mae", None),
        ("KeyError: 'loss'", None),
        ("RuntimeError: nancy has no data", None),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'out_of_memory.txt'", None),
        ("AssertionError: CUDA is not available", None),
        ("ValueError: NCCL_SOCKET_IFNAME is not set", None),
        ("ImportError: libnccl.so.2: cannot open shared object file", None),
        ("OSError: [Errno 281] no", None),
        ("TypeError: MemoryErrorHandler() takes no arguments", None),
        ("RuntimeError: Expected all tensors to be on the same device, cuda:0 and cpu", None),
        ("killed by SIGKILL (out of memory, or killed from outside)", None),
        ("killed by SIGSEGV", None),
        ("exit code 1", None),
        ("", None),
    ],
)
def test_what_a_failed_rank_said(summary, cause):
    assert cause_of_failure(failed(summary)) is cause
    assert cause_of(ended(EndReason.CRASHED, summary)) is (cause or EndCause.CRASHED)
    assert cause_of(ended(EndReason.USER_ERROR, summary)) is (cause or EndCause.USER_ERROR)
    assert cause_of(ended(EndReason.UNKNOWN, summary)) is (cause or EndCause.CRASHED)


def test_a_failure_beside_a_preemption_is_no_cause():
    view = ended(EndReason.PREEMPTED, "CUDA error: an illegal memory access")
    assert cause_of(view, state="OUT_OF_MEMORY") is EndCause.PREEMPTED


@pytest.mark.parametrize(
    ("reason", "state", "cause"),
    [
        (EndReason.CRASHED, "OUT_OF_MEMORY", EndCause.HOST_OOM),
        (EndReason.CRASHED, "COMPLETED", EndCause.CRASHED),
        (EndReason.CRASHED, "FAILED", EndCause.CRASHED),
        (EndReason.CRASHED, "REQUEUED", EndCause.CRASHED),
        (EndReason.CRASHED, "PREEMPTED", EndCause.CRASHED),
        (EndReason.USER_ERROR, "CANCELLED", EndCause.USER_ERROR),
        (EndReason.UNKNOWN, "NODE_FAIL", EndCause.NODE_FAIL),
        (EndReason.UNKNOWN, "BOOT_FAIL", EndCause.NODE_FAIL),
        (EndReason.UNKNOWN, "PREEMPTED", EndCause.PREEMPTED),
        (EndReason.UNKNOWN, "TIMEOUT", EndCause.WALLTIME),
        (EndReason.UNKNOWN, "CANCELLED", EndCause.CANCELLED),
        (EndReason.UNKNOWN, "REQUEUED", EndCause.REQUEUED),
        (EndReason.UNKNOWN, "FAILED", EndCause.CRASHED),
        (EndReason.UNKNOWN, "METEOR", EndCause.UNKNOWN),
        (None, "NODE_FAIL", EndCause.NODE_FAIL),
    ],
)
def test_accounting_tells_what_the_ledger_does_not_know(reason, state, cause):
    assert cause_of(ended(reason), state=job_state(state)) is cause


def test_a_rank_killed_in_a_job_without_memory_left_died_of_that():
    view = ended(EndReason.CRASHED, "killed by SIGKILL (out of memory, or killed from outside)")
    assert cause_of(view, state="OUT_OF_MEMORY") is EndCause.HOST_OOM


def test_a_node_that_preflight_found_bad_is_unfit_and_did_not_fail():
    assert cause_of(ended(EndReason.NODE_FAILED, detail="preflight: n3: gpu 2 is gone")) is (
        EndCause.UNFIT_NODE
    )


@pytest.mark.parametrize("word", ["hang", "desync"])
def test_only_what_detected_a_hang_says_so(word):
    said = ended(EndReason.CRASHED)
    assert cause_of(ended(EndReason.CRASHED, f"the ranks are in a {word}")) is EndCause.CRASHED
    assert cause_of(ended(EndReason.CRASHED, stop_cause=word)).value == word
    assert cause_of_failure(failed("silent for 300 s", kind=word)) is EndCause(word)
    assert cause_of(said) is EndCause.CRASHED


def test_a_long_line_is_read_at_its_beginning_only():
    assert cause_of_failure(failed("x" * 10_000 + " CUDA error: y")) is None
    assert cause_of_failure(failed("CUDA error: y" + "x" * 10_000)) is EndCause.GPU_ERROR


def test_an_attempt_that_gave_way_without_another_word_was_fenced(tmp_path):
    story = Story(tmp_path / "lm").submitted().started(1).restored(1).steps(1, 1, 5)
    story.started(2, restarts=1).restored(2, 0).add("fenced", 1, job_id="17")

    def causes():
        return [one.cause for one in attempts(RunHistory.read(story.run))]

    assert causes() == [EndCause.FENCED, None]
    story.ended(1, "unknown", "leave", by="successor")
    assert causes() == [EndCause.FENCED, None]
    story.ended(1, "node_failed", "leave", by="successor")
    assert causes() == [EndCause.NODE_FAIL, None], "the scheduler knows why it was taken over"
    story.add("fenced", 2, job_id="17")
    assert causes() == [EndCause.NODE_FAIL, EndCause.FENCED]
