"""Signatures of ranks among each other: who waits, which connection broke, who died. Pure.

The first one that fits a line counts, so the finer ones come first.
tests/unit/doctor/test_corpus.py holds each against real logs.
"""

from __future__ import annotations

from hpctrain.doctor.faults import Certainty, FaultKind
from hpctrain.doctor.sign import LogSign, Role

FATAL = "fatal-python-error"
"""faulthandler's, of a crash in native code. An abort is none: whoever aborts has said why."""
_K, _R, _LIKELY, _POSSIBLE = FaultKind, Role, Certainty.LIKELY, Certainty.POSSIBLE

WAITS: tuple[LogSign, ...] = (
    LogSign(
        "nccl-watchdog",
        _K.HANG,
        _R.WAIT,
        "collective operation timeout",
        r"\[Rank (?P<rank>\d{1,6})\] .{0,200}?Watchdog caught collective operation timeout: "
        r"WorkNCCL\((?:SeqNum=(?P<number>\d{1,19}), )?OpType=(?P<operation>\w++)"
        r"(?:, NumelIn=(?P<input>\d++))?.{0,200}?Timeout\(ms\)=(?P<limit>\d{1,15})\) "
        r"ran for (?P<ran>\d+)",
        _LIKELY,
    ),
    LogSign(
        "nccl-work-status",
        _K.HANG,
        _R.WAIT,
        "last completed",
        r"Rank (?P<rank>\d{1,6})\].{0,400}?(?:at (?:NCCL )?work:?|sequence id:|NCCL work:) "
        r"?(?P<number>\d{1,19}+).{0,400}?last enqueued(?: NCCL)? work: (?P<enqueued>\d+), last "
        r"completed(?: NCCL)? work: "
        r"(?P<completed>\d+)",
        _LIKELY,
    ),
    LogSign(
        "nccl-timed-out",
        _K.HANG,
        _R.WAIT,
        "timed out in blocking wait",
        r"timed out in blocking wait",
        _LIKELY,
    ),
    LogSign(
        "nccl-monitor",
        _K.HANG,
        _R.WAIT,
        "watchdog",
        r"watchdog (?:got stuck|hang)|Heartbeat monitor timed out",
        _LIKELY,
    ),
    LogSign(
        "gloo-wait",
        _K.HANG,
        _R.WAIT,
        "Timed out waiting",
        r"Timed out waiting (?P<limit>\d{1,15}) ?ms for (?P<operation>\w+) operation",
        _LIKELY,
    ),
    LogSign(
        "store-get-wait",
        _K.HANG,
        _R.WAIT,
        "imeout",
        r"wait timeout after (?P<limit>\d{1,15}) ?ms, keys?: (?P<key>\S+)|"
        r"\[(?P<rank>\d{1,6})\] is setting up NCCL communicator.*(?:Socket Timeout|timeout)",
        _LIKELY,
    ),
    LogSign(
        "store-get-failed",
        _K.HANG,
        _R.WAIT,
        "is setting up NCCL communicator",
        r"\[(?P<rank>\d{1,6})\] is setting up NCCL communicator .* got error"
        r"(?!.*(?:onnection|Broken|recv|refused))",
        _POSSIBLE,
    ),
)

LINKS: tuple[LogSign, ...] = (
    LogSign(
        "store-socket-timeout",
        _K.HANG,
        _R.LINK,
        "Socket Timeout",
        r"^(?:[\w.]+\.)?(?:RuntimeError|DistStoreError): Socket Timeout",
        _POSSIBLE,
    ),
    LogSign(
        "ib-completion",
        _K.TRANSPORT,
        _R.LINK,
        "Got completion",
        r"NET/IBP? ?: ?Got completion from peer (?P<peer>\S+) with (?:status|error)[= ]?"
        r"(?P<status>\d+).*?(?:vendor err (?P<vendor>\d+)|$)(?:.*?hca (?P<card>\w+))?",
        _LIKELY,
    ),
    LogSign(
        "ofi-completion",
        _K.TRANSPORT,
        _R.LINK,
        "NET/OFI",
        r"NET/OFI Request .*completed with error",
        _LIKELY,
    ),
    LogSign(
        "ib-async",
        _K.TRANSPORT,
        _R.CAUSE,
        "async",
        r"NET/IB : (?:(?P<card>\w+):\d+ )?Got async event : (?P<event>.+)",
        _LIKELY,
    ),
    LogSign(
        "ibv-call",
        _K.TRANSPORT,
        _R.CAUSE,
        "ibv_",
        r"(?:NCCL WARN|UCX +ERROR) (?:Call to )?(?P<call>ibv_\w+)(?:\(.*?\))? "
        r"failed(?: with error)? ?(?P<error>.*)",
        _LIKELY,
    ),
    LogSign(
        "nccl-peer-closed",
        _K.TRANSPORT,
        _R.LINK,
        "losed by",
        r"(?:Connection closed by (?:remote )?peer ?(?P<peer>\S*)|"
        r"\[Service thread\] Connection closed by localRank \d+)",
        _POSSIBLE,
    ),
    LogSign(
        "nccl-call-failed",
        _K.TRANSPORT,
        _R.LINK,
        "NCCL WARN",
        r"NCCL WARN (?:Net : )?Call to (?P<call>\w+) (?:from (?P<peer>\S+) )?failed : "
        r"(?P<error>.*)",
        _POSSIBLE,
    ),
    LogSign(
        "nccl-system-error",
        _K.TRANSPORT,
        _R.LINK,
        "system error",
        r"unhandled system error",
        _POSSIBLE,
    ),
    LogSign(
        "nccl-cuda-error",
        _K.GPU_ERROR,
        _R.CAUSE,
        "unhandled cuda error",
        r"NCCL error.*unhandled cuda error",
        _POSSIBLE,
    ),
    LogSign(
        "nccl-error-class",
        _K.TRANSPORT,
        _R.LINK,
        "nccl",
        r"\bnccl(?:Remote|System|Internal|Unhandled\w*)Error\b",
        _POSSIBLE,
    ),
    LogSign(
        "peer-reset",
        _K.TRANSPORT,
        _R.LINK,
        "onnection reset by peer",
        r"[Cc]onnection reset by peer",
        _POSSIBLE,
    ),
    LogSign("broken-pipe", _K.TRANSPORT, _R.LINK, "Broken pipe", r"\bBroken pipe\b", _POSSIBLE),
    LogSign(
        "nccl-operations-failed",
        _K.TRANSPORT,
        _R.LINK,
        "NCCL operations",
        r"Some NCCL operations have failed or timed out",
        _POSSIBLE,
    ),
    LogSign(
        "barrier-of-others",
        _K.TRANSPORT,
        _R.LINK,
        "monitoredBarrier",
        r"reached monitoredBarrier, but received errors while waiting",
        _POSSIBLE,
    ),
    LogSign(
        "full-mesh",
        _K.TRANSPORT,
        _R.LINK,
        "connectFullMesh failed",
        r"connectFullMesh failed",
        _POSSIBLE,
    ),
    LogSign(
        "communicator-aborted",
        _K.TRANSPORT,
        _R.LINK,
        "communicator was aborted",
        r"NCCL communicator was aborted",
        _POSSIBLE,
    ),
    LogSign(
        "store-gone",
        _K.TRANSPORT,
        _R.LINK,
        "TCPStore",
        r"(?:recvValue|recvBytes|sendBytes) failed|Failed to (?:recv|check).*TCPStore|"
        r"Broken TCPStore",
        _POSSIBLE,
    ),
)

DEATHS: tuple[LogSign, ...] = (
    LogSign(
        "killed-sigkill",
        _K.HOST_OOM,
        _R.DEATH,
        "xitcode",
        r"\(?exitcode\s{0,9}:?\s{0,9}-9\b\)?(?: \(pid: (?P<pid>\d+)\))?"
        r"(?: local_rank: (?P<local>\d+))?",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "killed-return-code",
        _K.HOST_OOM,
        _R.DEATH,
        "return code",
        r"exits with return code = -9\b",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "segfault-return-code",
        _K.NATIVE,
        _R.DEATH,
        "return code",
        r"exits with return code = -11\b",
        _LIKELY,
        is_late=True,
    ),
    LogSign(
        "killed-by-9",
        _K.HOST_OOM,
        _R.DEATH,
        "SIGKILL",
        r"Signal 9 \(SIGKILL\) received by PID (?P<pid>\d+)|died with <Signals\.SIGKILL: 9>|"
        r"terminated with signal SIGKILL",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "killed-signal-9",
        _K.HOST_OOM,
        _R.DEATH,
        "signal 9",
        r"(?:exited on|interrupted by) signal 9\b",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "killed-code-137",
        _K.HOST_OOM,
        _R.DEATH,
        "137",
        r"\b(?:exit|return) ?code:? 137\b",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "segfault-code-139",
        _K.NATIVE,
        _R.DEATH,
        "139",
        r"\b(?:exit|return) ?code:? 139\b",
        _LIKELY,
        is_late=True,
    ),
    LogSign(
        "heap-damaged",
        _K.NATIVE,
        _R.DEATH,
        "r",
        r"\bdouble free or corruption \(|\bfree\(\): (?:invalid|double free)|"
        r"\bmalloc(?:_consolidate)?\(\): |\bmunmap_chunk\(\): |stack smashing detected",
        _LIKELY,
    ),
    LogSign(
        "crashed-core-dumped",
        _K.NATIVE,
        _R.DEATH,
        "core dumped",
        r"\b(?:Illegal instruction|Floating point exception) *\(core dumped\)",
        _LIKELY,
    ),
    LogSign(
        "aborted",
        _K.NATIVE,
        _R.DEATH,
        "Aborted",
        r"\bAborted +\(core dumped\)",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "killed-by-shell",
        _K.HOST_OOM,
        _R.DEATH,
        "Killed",
        r"^\s*(?:\S+: line \d+: +\d+ )?Killed\s*(?:$|\s{2,}\S)|"
        r"^srun: error: \S+: tasks? \S+: Killed",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        FATAL,
        _K.NATIVE,
        _R.DEATH,
        "Fatal Python error",
        r"^Fatal Python error: (?:Segmentation fault|Bus error|Floating.point exception|Illegal "
        r"instruction)",
        _LIKELY,
    ),
    LogSign(
        "segfault",
        _K.NATIVE,
        _R.DEATH,
        "egmentation fault",
        r"\bSegmentation fault\b",
        _LIKELY,
    ),
    LogSign(
        "killed-sigsegv",
        _K.NATIVE,
        _R.DEATH,
        "xitcode",
        r"\bexitcode\s{0,9}:?\s{0,9}-11\b",
        _LIKELY,
        is_late=True,
    ),
    LogSign(
        "received-sigsegv",
        _K.NATIVE,
        _R.DEATH,
        "SIGSEGV",
        r"Signal 11 \(SIGSEGV\) received by PID \d+|died with <Signals\.SIGSEGV|"
        r"terminated with signal SIGSEGV|signal 11: SIGSEGV|\*\*\* SIGSEGV ",
        _LIKELY,
        is_late=True,
    ),
    LogSign(
        "killed-sigbus",
        _K.SHARED_MEMORY,
        _R.DEATH,
        "xitcode",
        r"\bexitcode\s{0,9}:?\s{0,9}-7\b",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "received-sigbus",
        _K.SHARED_MEMORY,
        _R.DEATH,
        "SIGBUS",
        r"Signal 7 \(SIGBUS\) received by PID \d+",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "bus-error",
        _K.SHARED_MEMORY,
        _R.DEATH,
        "Bus error",
        r"Caught signal 7 \(Bus error|^(?:\S+: line \d+: +\d+ |srun: error: .*: )?Bus error\b",
        _POSSIBLE,
    ),
    LogSign(
        "bus-error-return-code",
        _K.SHARED_MEMORY,
        _R.DEATH,
        "return code",
        r"exits with return code = -7\b",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "ray-worker-died",
        _K.HOST_OOM,
        _R.DEATH,
        "Worker exit type",
        r"Worker exit type: SYSTEM_ERROR",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "killed-sigabrt",
        _K.NATIVE,
        _R.DEATH,
        "SIGABRT",
        r"Signal 6 \(SIGABRT\) received by PID \d+",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "aborted-code",
        _K.NATIVE,
        _R.DEATH,
        "xitcode",
        r"\bexitcode\s{0,9}:?\s{0,9}-6\b",
        _POSSIBLE,
        is_late=True,
    ),
    LogSign(
        "received-sigterm",
        _K.KILLED,
        _R.DEATH,
        "15",
        r"Received (?:SIGTERM|15|Signals\.SIGTERM) death signal|"
        r"(?:Bypassing|Received) SIGTERM: 15|Process \d+ got signal: 15",
        _POSSIBLE,
    ),
    LogSign(
        "received-sighup",
        _K.CANCELLED,
        _R.CAUSE,
        "signal",
        r"Received (?:1|Signals\.SIGHUP) death signal|Process \d+ got signal: 1$",
        _LIKELY,
    ),
    LogSign(
        "interrupted",
        _K.CANCELLED,
        _R.DEATH,
        "KeyboardInterrupt",
        r"^KeyboardInterrupt\b",
        _LIKELY,
    ),
)
