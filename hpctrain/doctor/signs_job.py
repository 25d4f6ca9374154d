"""Signatures of a job: its launch, its nodes' meeting, its training, its scheduler. Pure.

The first one that fits a line counts, so the finer ones come first.
tests/unit/doctor/test_corpus.py holds each against real logs.
"""

from __future__ import annotations

from hpctrain.doctor.faults import Certainty, FaultKind
from hpctrain.doctor.sign import LogSign, Role

_K, _R, _LIKELY, _POSSIBLE = FaultKind, Role, Certainty.LIKELY, Certainty.POSSIBLE

MEETING: tuple[LogSign, ...] = (
    LogSign(
        "port-taken",
        _K.PORT_IN_USE,
        _R.CAUSE,
        "already in use",
        r"(?:(?:bind to|listen on|port[:=]?) ?\S{0,255}?[:\]](?P<port>\d{2,5}).{0,300})?"
        r"(?:EADDRINUSE|(?i:address) already in use)(?:.*\bport: (?P<port2>\d+))?",
    ),
    LogSign(
        "port-taken-accelerate",
        _K.PORT_IN_USE,
        _R.CAUSE,
        "another process",
        r"Tried to launch distributed communication on port `?(?P<port>\d+)`?, but another process",
    ),
    LogSign(
        "environment-missing",
        _K.LAUNCH,
        _R.CAUSE,
        "environment variable",
        r"environment variable (?P<variable>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) "
        r"expected",
    ),
    LogSign(
        "environment-key",
        _K.LAUNCH,
        _R.CAUSE,
        "KeyError: '",
        r"^KeyError: '(?P<variable>(?:LOCAL_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
    ),
    LogSign(
        "group-missing",
        _K.LAUNCH,
        _R.CAUSE,
        "initialized",
        r"[Dd]efault process group (?:has not been|is not) initialized",
        _LIKELY,
    ),
    LogSign(
        "nccl-invalid-usage",
        _K.LAUNCH,
        _R.CAUSE,
        "nvalid",
        r"\bncclInvalid(?:Usage|Argument)\b|\bNCCL error.*, invalid (?:usage|argument)\b",
        _POSSIBLE,
    ),
    LogSign(
        "local-rank-argument",
        _K.LAUNCH,
        _R.CAUSE,
        "unrecognized arguments",
        r"error: unrecognized arguments: --local[-_]rank",
    ),
    LogSign(
        "lightning-tasks",
        _K.LAUNCH,
        _R.CAUSE,
        "SLURM",
        r"You set `(?:--ntasks|devices|num_nodes)[^`]*`.* in (?:your )?(?:SLURM|Lightning)|"
        r"does not match the number of (?:nodes|tasks) .*SLURM",
    ),
    LogSign(
        "not-by-slurm",
        _K.LAUNCH,
        _R.HINT,
        "is",
        r"multi-node training without SLURM handling the processes|"
        r"The `srun` command is available on your system but is not used",
        _POSSIBLE,
    ),
    LogSign(
        "no-interface",
        _K.INTERFACE,
        _R.CAUSE,
        "interface",
        r"\bBootstrap : no socket interface found|no socket interface found|"
        r"[Uu]nable to find (?:address for|interface)|No interface found in the same subnet",
    ),
    LogSign(
        "gloo-address",
        _K.INTERFACE,
        _R.CAUSE,
        "gloo",
        r"gloo/transport/tcp/device\.cc:\d+\].*(?:rv != -1|Unable to (?:resolve|find)|"
        r"[Nn]o such (?:device|address))",
    ),
    LogSign(
        "gloo-loopback",
        _K.INTERFACE,
        _R.CAUSE,
        "gloo",
        r"gloo/transport/tcp/pair\.cc:\d+\] connect \[?127\.\d+\.\d+\.\d+\]?:\d+: Connection ref",
        _LIKELY,
    ),
    LogSign(
        "connect-container-bridge",
        _K.INTERFACE,
        _R.CAUSE,
        "onnect to 172.17.",
        r"[Cc]onnect to 172\.17\.\d+\.\d+(?:<\d+>)? (?:failed|returned)",
        _LIKELY,
    ),
    LogSign(
        "nccl-no-route",
        _K.INTERFACE,
        _R.CAUSE,
        "No route to host",
        r"onnect to (?P<peer>\S+) (?:failed|returned).*No route to host",
        _LIKELY,
    ),
    LogSign(
        "nccl-refused",
        _K.INTERFACE,
        _R.CAUSE,
        "NCCL WARN",
        r"NCCL WARN (?:\S+ : |socketStartConnect: )?(?:Call to connect|[Cc]onnect to "
        r"(?P<peer>\S+)) (?:failed|timeout|returned) ?: "
        r"(?:Connection (?:refused|timed out)|Software caused)",
        _POSSIBLE,
    ),
    LogSign(
        "store-timeout",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "client socket has timed out",
        r"The client socket has timed out after (?P<waited>\d+ ?m?s) while trying to connect to "
        r"\(?(?P<peer>[^\s()]{1,255}?(?:, \d{1,5})?)\)?[.\s]{0,9}$",
        _LIKELY,
    ),
    LogSign(
        "store-connect",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "connect() timed out",
        r"connect\(\) timed out(?:\. Original timeout was (?P<waited>\d+ ms))?",
        _LIKELY,
    ),
    LogSign(
        "store-refused",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "RuntimeError: Connection refused",
        r"^RuntimeError: Connection refused$",
        _LIKELY,
    ),
    LogSign(
        "store-unreachable",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "client socket has failed to connect",
        r"The client socket has failed to connect to (?:any network address of )?(?P<peer>\S+)",
        _LIKELY,
    ),
    LogSign(
        "rendezvous-failed",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "Rendezvous",
        r"\bRendezvous(?:Connection|Timeout|Closed)Error\b",
        _LIKELY,
    ),
    LogSign(
        "store-workers",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "clients joined",
        r"Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+/\d+) clients joined",
    ),
    LogSign(
        "name-unknown",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "n",
        r"host not found: |Name or service not known|Temporary failure in name resolution",
        _LIKELY,
    ),
    LogSign(
        "store-based-barrier",
        _K.RENDEZVOUS,
        _R.CAUSE,
        "store based barrier",
        r"Timed out initializing process group in store based barrier",
        _LIKELY,
    ),
    LogSign(
        "versions-nccl",
        _K.VERSIONS,
        _R.CAUSE,
        "ersion",
        r"[Mm]ismatched NCCL version|NCCL version mismatch|"
        r"Net(?:work)? plugin .{0,40}version mismatch",
    ),
    LogSign(
        "versions-cuda",
        _K.VERSIONS,
        _R.CAUSE,
        "CUDA version",
        r"detected CUDA version .{0,40}mismatches|\bCUDA version \S+ does not match",
    ),
    LogSign(
        "versions-cudnn",
        _K.VERSIONS,
        _R.CAUSE,
        "version incompatibility",
        r"\bcuDNN version incompatibility",
    ),
    LogSign(
        "versions-import",
        _K.VERSIONS,
        _R.CAUSE,
        "cannot import name",
        r"cannot import name '(?P<symbol>\w+)' from '[\w.]+' \(\S*/(?:site|dist)-packages/",
        _LIKELY,
    ),
    LogSign(
        "versions-bytes",
        _K.VERSIONS,
        _R.CAUSE,
        "Message truncated",
        r"Message truncated : received (?P<got>\d+) bytes instead of (?P<wanted>\d+)",
        _LIKELY,
    ),
    LogSign(
        "versions-address",
        _K.VERSIONS,
        _R.CAUSE,
        "neither AF_INET",
        r"connecting to address .*with family \d+ is neither AF_INET",
        _LIKELY,
    ),
    LogSign(
        "undefined-symbol",
        _K.VERSIONS,
        _R.CAUSE,
        "undefined symbol",
        r"\.so[.\d]*: undefined symbol: (?P<symbol>\w+)",
    ),
    LogSign(
        "library-missing",
        _K.VERSIONS,
        _R.CAUSE,
        "cannot open shared object",
        r"(?P<library>lib\S+\.so[.\d]*): cannot open shared object file",
    ),
    LogSign(
        "glibc-missing",
        _K.VERSIONS,
        _R.CAUSE,
        "not found",
        r"version `(?P<symbol>(?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found",
    ),
)

TRAINING: tuple[LogSign, ...] = (
    LogSign(
        "collectives-differ",
        _K.DESYNC,
        _R.CAUSE,
        "Detected mismatch between collectives",
        r"Detected mismatch between collectives on ranks\. Rank (?P<first>\d+) is running "
        r"(?:inconsistent )?collective: CollectiveFingerPrint\("
        r"(?:SequenceNumber=(?P<number>\d{1,19}),? ?)?OpType=(?P<operation>\w+)(?:.*?but Rank "
        r"(?P<second>\d+) is running collective: "
        r"(?:CollectiveFingerPrint\()?(?:SequenceNumber=\d+,? ?)?(?:OpType=)?(?P<other>\w+))?",
    ),
    LogSign(
        "monitored-barrier",
        _K.HANG,
        _R.CAUSE,
        "monitoredBarrier",
        r"Ranks? (?P<missing>[\d, ]+) failed to pass monitoredBarrier in \d+ ms",
        _LIKELY,
    ),
    LogSign(
        "ddp-model-differs",
        _K.DESYNC,
        _R.CAUSE,
        "DDP expects same model",
        r"DDP expects same model across all ranks, but Rank (?P<first>\d+) has",
    ),
    LogSign(
        "ddp-unused",
        _K.DESYNC,
        _R.CAUSE,
        "finished reduction in the prior iteration",
        r"Expected to have finished reduction in the prior iteration",
    ),
    LogSign(
        "nccl-mismatched",
        _K.DESYNC,
        _R.CAUSE,
        "ismatch",
        r"NCCL WARN (?:Mismatched collective detected|NET/IB : .*collective mismatch error)",
        _LIKELY,
    ),
    LogSign(
        "gloo-size",
        _K.DESYNC,
        _R.CAUSE,
        "op.preamble.length",
        r"op\.preamble\.length <= op\.nbytes|op\.nbytes == .{0,20}op\.preamble",
        _LIKELY,
    ),
    LogSign(
        "zero-world-size",
        _K.CHECKPOINT,
        _R.CAUSE,
        "DP world size",
        r"checkpoint being loaded used a DP world size of (?P<was>\d+) but the current world size "
        r"is (?P<now>\d+)",
    ),
    LogSign(
        "dcp-missing-key",
        _K.CHECKPOINT,
        _R.CAUSE,
        "Missing key in checkpoint state_dict",
        r"Missing key in checkpoint state_dict: (?P<key>\S+)",
    ),
    LogSign(
        "dcp-size",
        _K.CHECKPOINT,
        _R.CAUSE,
        "Size mismatch between saved",
        r"Size mismatch between saved (?P<was>\[[^]]*\]|torch\.Size\([^)]*\)) and current: "
        r"(?P<now>\[[^]]*\]|torch\.Size\([^)]*\)) for (?P<key>\S+)",
    ),
    LogSign(
        "state-dict",
        _K.CHECKPOINT,
        _R.CAUSE,
        "loading state_dict",
        r"Error\(s\) in loading state_dict for (?P<model>\w+)",
    ),
    LogSign(
        "state-dict-size",
        _K.CHECKPOINT,
        _R.CAUSE,
        "size mismatch for",
        r"size mismatch for (?P<key>\S+): copying a param with shape (?P<was>torch\.Size\([^)]*\)) "
        r"from checkpoint, the shape in current model is (?P<now>torch\.Size\([^)]*\))",
        _POSSIBLE,
    ),
    LogSign(
        "dcp-exception",
        _K.CHECKPOINT,
        _R.CAUSE,
        "CheckpointException",
        r"\bCheckpointException\b.*ranks",
        _POSSIBLE,
    ),
    LogSign(
        "checkpoint-torn",
        _K.CHECKPOINT,
        _R.CAUSE,
        "failed",
        r"PytorchStreamReader failed (?:reading|finding|locating)",
    ),
    LogSign(
        "checkpoint-torn-pickle",
        _K.CHECKPOINT,
        _R.CAUSE,
        "UnpicklingError",
        r"\bUnpicklingError: (?:pickle data was truncated|invalid load key|"
        r"Weights only load failed|unpickling stack underflow)",
        _LIKELY,
    ),
    LogSign(
        "checkpoint-file-missing",
        _K.CHECKPOINT,
        _R.CAUSE,
        "No such file",
        r"FileNotFoundError: .*(?:checkpoint|ckpt|global_step|iter_\d)\S{0,255}?\."
        r"(?:pkl|pt|pth|bin|safetensors|json|distcp)\b",
        _LIKELY,
    ),
    LogSign(
        "megatron-not-loaded",
        _K.CHECKPOINT,
        _R.CAUSE,
        "Unable to load",
        r"Unable to load [\w ]{1,60} from checkpoint .{0,400}--no-load-",
    ),
    LogSign(
        "checkpoint-empty",
        _K.CHECKPOINT,
        _R.CAUSE,
        "rror: ",
        r"EOFError: Ran out of input|Invalid magic number; corrupt file|"
        r"Can't find a valid checkpoint at",
        _LIKELY,
    ),
    LogSign(
        "optimizer-groups",
        _K.CHECKPOINT,
        _R.CAUSE,
        "param",
        r"loaded state dict (?:contains a parameter group|has a different number of parameter)|"
        r"is not specified in param_groups\[\d+\] when resuming",
    ),
    LogSign(
        "safetensors-torn",
        _K.CHECKPOINT,
        _R.CAUSE,
        "SafetensorError",
        r"SafetensorError: Error while deserializing header: (?:\w*Incomplete|\w*HeaderTooLarge|"
        r"InvalidHeader|incomplete)",
    ),
    LogSign(
        "scale-at-minimum",
        _K.FP16_OVERFLOW,
        _R.CAUSE,
        "loss scale already at minimum",
        r"Current loss scale already at minimum",
    ),
    LogSign(
        "scale-at-minimum-fairseq",
        _K.FP16_OVERFLOW,
        _R.CAUSE,
        "Minimum loss scale reached",
        r"Minimum loss scale reached",
    ),
    LogSign(
        "lightning-nan",
        _K.NAN,
        _R.CAUSE,
        "is nan or inf",
        r"The loss returned in `training_step` is (?:nan|inf)",
    ),
    LogSign(
        "nan-stopped",
        _K.NAN,
        _R.CAUSE,
        "topping training",
        r"\b[Ll]oss is (?:nan|inf|\S{1,40}?nan\S{0,40}),? ?[Ss]topping training",
    ),
    LogSign(
        "nan-raised",
        _K.NAN,
        _R.CAUSE,
        "oss",
        r"^\w*(?:Error|Exception): .*\b[Ll]oss\b.{0,40}"
        r"\b(?:[Nn]a[Nn]|[Ii]nf|non-finite|not finite)\b",
        _LIKELY,
    ),
    LogSign(
        "nan-values",
        _K.NAN,
        _R.CAUSE,
        "nan",
        r"\bfound invalid values:.*\bnan\b|^tensor\(\[+ *nan\b",
        _LIKELY,
    ),
    LogSign(
        "norm-nan",
        _K.NAN,
        _R.HINT,
        "norm",
        r"\bgrad[_ ]norm['\"]?: ?nan\b",
        _POSSIBLE,
    ),
    LogSign(
        "anomaly-nan",
        _K.NAN,
        _R.CAUSE,
        "returned nan values",
        r"Function '(?P<function>\w+)' returned nan values in its \d+th output",
    ),
    LogSign(
        "megatron-unexpected-result",
        _K.NAN,
        _R.CAUSE,
        "Unexpected result",
        r"Unexpected result (?:nan|-?inf|tensor\((?:nan|inf))",
    ),
    LogSign(
        "megatron-nan",
        _K.NAN,
        _R.CAUSE,
        "found NaN in",
        r"found NaN in (?:local )?(?:forward loss|grad norm|\S+ grad)",
    ),
    LogSign(
        "nonfinite-norm",
        _K.NAN,
        _R.CAUSE,
        "non-finite",
        r"total norm of order \S+ for gradients .{0,40}is non-finite",
    ),
    LogSign(
        "probability-nan",
        _K.NAN,
        _R.CAUSE,
        "probability tensor contains",
        r"probability tensor contains either `inf`, `nan` or element < 0",
    ),
)

OUTSIDE: tuple[LogSign, ...] = (
    LogSign(
        "slurm-time-limit", _K.WALLTIME, _R.CAUSE, "DUE TO TIME LIMIT", r"CANCELLED AT .*TIME LIMIT"
    ),
    LogSign("lsf-time-limit", _K.WALLTIME, _R.CAUSE, "TERM_RUNLIMIT", r"\bTERM_RUNLIMIT\b"),
    LogSign(
        "pbs-time-limit",
        _K.WALLTIME,
        _R.CAUSE,
        "walltime",
        r"PBS: job killed: walltime \d+ exceeded limit \d+",
    ),
    LogSign(
        "slurm-preempted", _K.PREEMPTED, _R.CAUSE, "PREEMPTION", r"CANCELLED AT .*DUE TO PREEMPTION"
    ),
    LogSign(
        "slurm-requeued", _K.REQUEUED, _R.CAUSE, "REQUEUE", r"CANCELLED AT .*DUE TO JOB REQUEUE"
    ),
    LogSign(
        "slurm-node-fail", _K.NODE_FAIL, _R.CAUSE, "NODE FAIL", r"CANCELLED AT .*DUE TO NODE FAIL"
    ),
    LogSign(
        "srun-node-fail",
        _K.NODE_FAIL,
        _R.CAUSE,
        "ode failure",
        r"srun: error: Node failure on (?P<node>\S+)",
    ),
    LogSign(
        "slurm-cancelled",
        _K.CANCELLED,
        _R.DEATH,
        "CANCELLED AT",
        r"slurmstepd\S*: error: \*\*\* (?:JOB|STEP) \S+ ON (?P<node>\S+) CANCELLED AT "
        r"(?P<at>\S+) \*\*\*",
        _LIKELY,
        is_late=True,
    ),
)
