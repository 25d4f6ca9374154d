"""Signatures of machines: GPUs, memory, disks. Pure.

The first one that fits a line counts, so the finer ones come first.
tests/unit/doctor/test_corpus.py holds each against real logs.
"""

from __future__ import annotations

from hpctrain.doctor.faults import Certainty, FaultKind
from hpctrain.doctor.sign import LogSign, Role

_K, _R, _LIKELY, _POSSIBLE = FaultKind, Role, Certainty.LIKELY, Certainty.POSSIBLE

ACCELERATORS: tuple[LogSign, ...] = (
    # c10/cuda/CUDACachingAllocator.cpp in its wordings since 1.0, and NCCL's and cuBLAS's own.
    LogSign(
        "cuda-oom",
        _K.GPU_OOM,
        _R.CAUSE,
        "ut of memory",
        r"(?:\b(?:CUDA|HIP|XPU|NPU)(?: error:| driver error:)? out of memory\b|"
        r"\bcuda runtime error \(2\) : out of memory|RESOURCE_EXHAUSTED: Out of memory)"
        r"(?:.*?Tried to allocate (?P<asked>[\d.]+ [KMGT]iB))?",
    ),
    LogSign(
        "cuda-oom-nccl", _K.GPU_OOM, _R.CAUSE, "out of memory", r"Cuda failure.{0,6}out of memory"
    ),
    LogSign(
        "cuda-oom-blas",
        _K.GPU_OOM,
        _R.CAUSE,
        "_STATUS_ALLOC_FAILED",
        r"\bCU(?:DNN|BLAS|SPARSE)_STATUS_ALLOC_FAILED\b",
        _LIKELY,
    ),
    LogSign(
        "cuda-no-memory-class",
        _K.GPU_OOM,
        _R.CAUSE,
        "OutOfMemoryError",
        r"(?<![\w.])(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b",
    ),
    LogSign(
        "kernel-assert-line",
        _K.GPU_ASSERT,
        _R.CAUSE,
        "ssertion `",
        r"\.cuh?:\d+:.{0,400}\bblock: \[.{0,100}Assertion `(?P<check>[^`']+)['`]",
    ),
    LogSign(
        "device-assert", _K.GPU_ASSERT, _R.CAUSE, "device-side assert", r"device-side assert trig"
    ),
    LogSign(
        "xid-of-program",
        _K.GPU_ERROR,
        _R.CAUSE,
        "Xid",
        r"\bNVRM: Xid \((?:PCI:)?(?P<gpu>[\da-fA-F:.]+)\): (?P<xid>13|31|43|45)\b",
        _LIKELY,
        is_late=True,
    ),
    LogSign(
        "xid",
        _K.GPU_ERROR,
        _R.CAUSE,
        "Xid",
        r"\bXid \((?:PCI:)?(?P<gpu>[\da-fA-F:.]+)\): (?P<xid>\d{1,3})\b",
        is_late=True,
    ),
    LogSign(
        "gpu-off-the-bus",
        _K.GPU_ERROR,
        _R.CAUSE,
        "allen off the bus",
        r"[Ff]allen off the bus",
        is_late=True,
    ),
    LogSign(
        "gpu-handle-lost",
        _K.GPU_ERROR,
        _R.CAUSE,
        "device handle for GPU",
        r"Unable to determine the device handle for GPU\s?(?P<gpu>[\da-fA-F:.]*)",
    ),
    LogSign("ecc", _K.GPU_ERROR, _R.CAUSE, "ECC", r"\b[Uu]ncorrectable ECC\b|ECC_UNCORRECTABLE"),
    LogSign("nvlink", _K.GPU_ERROR, _R.CAUSE, "NVLink error", r"[Uu]ncorrectable NVLink error"),
    LogSign(
        "wrong-ordinal",
        _K.GPU_SETUP,
        _R.CAUSE,
        "invalid device ordinal",
        r"\binvalid device ordinal\b",
    ),
    LogSign(
        "fewer-gpus",
        _K.GPU_SETUP,
        _R.CAUSE,
        "machine only has",
        r"\bmachine only has: (?P<there>\[.*?\])",
    ),
    LogSign(
        "fewer-slots",
        _K.GPU_SETUP,
        _R.CAUSE,
        "No slot '",
        r"No slot '(?P<slot>\d+)' specified on host '(?P<node>[^']+)'",
    ),
    LogSign(
        "gpu-busy",
        _K.GPU_SETUP,
        _R.CAUSE,
        "busy or unavailable",
        r"CUDA-capable devices?(?:\(s\))? (?:is/)?are busy or unavailable",
    ),
    LogSign(
        "gpu-not-initialized",
        _K.GPU_SETUP,
        _R.CAUSE,
        "rror",
        r"^(?!.*Warning).*(?:no CUDA-capable device is detected|CUDA driver initialization failed|"
        r"[Ss]ystem not yet initialized|forward compatibility was attempted on non supported|"
        r"unsupported display driver / cuda driver combination|: Invalid device id$)",
    ),
    LogSign(
        "no-peer-access",
        _K.GPU_SETUP,
        _R.CAUSE,
        "peer access",
        r"peer access is not supported between these",
    ),
    LogSign(
        "no-kernel-image",
        _K.GPU_SETUP,
        _R.CAUSE,
        "no kernel image",
        r"no kernel image is available for execution",
    ),
    LogSign(
        "driver-too-old",
        _K.GPU_SETUP,
        _R.CAUSE,
        "river",
        r"The NVIDIA driver on your system is too old|couldn't communicate with the NVIDIA driver|"
        r"CUDA driver version is insufficient for CUDA runtime|"
        r"[Dd]river/library version mismatch|provided PTX was compiled with an unsupported tool",
    ),
    LogSign(
        "torch-without-gpu",
        _K.GPU_SETUP,
        _R.CAUSE,
        "CUDA",
        r"Torch not compiled with CUDA enabled|Attempting to deserialize object on (?:a )?CUDA dev",
    ),
    LogSign(
        "no-gpu",
        _K.GPU_SETUP,
        _R.CAUSE,
        "GPU",
        r"^(?:\w+: )?No CUDA GPUs are available|^RuntimeError: No CUDA GPUs are available|"
        r"Found no NVIDIA driver on your system|no GPUs found",
    ),
    LogSign(
        "duplicate-gpu",
        _K.LAUNCH,
        _R.CAUSE,
        "Duplicate GPU detected",
        r"Duplicate GPU detected : rank (?P<first>\d+) and rank (?P<second>\d+) both on CUDA "
        r"device (?P<device>\w+)",
    ),
    LogSign(
        "illegal-access",
        _K.GPU_ERROR,
        _R.CAUSE,
        "illegal",
        r"an illegal (?:memory access|instruction) was encountered|CUDA_ERROR_ILLEGAL_ADDRESS",
        _LIKELY,
    ),
    LogSign(
        "amd-fault",
        _K.GPU_ERROR,
        _R.CAUSE,
        "by GPU node",
        r"(?:Memory access fault|HW Exception) by GPU node-(?P<gpu>\d+)",
        _LIKELY,
    ),
    LogSign(
        "launch-failure",
        _K.GPU_ERROR,
        _R.CAUSE,
        "rror",
        r"(?:CUDA error: |cuda runtime error \(\d+\) : |THCudaCheck FAIL .*error=\d+ : )"
        r"(?:unspecified launch failure|misaligned address|unknown error|"
        r"the launch timed out|invalid program counter|hardware stack error)",
        _LIKELY,
    ),
    LogSign(
        "cublas-failed",
        _K.GPU_ERROR,
        _R.CAUSE,
        "_STATUS_",
        r"\bCU(?:DNN|BLAS|SPARSE)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)\b",
        _POSSIBLE,
    ),
    LogSign(
        "cuda-runtime-error",
        _K.GPU_ERROR,
        _R.CAUSE,
        "runtime error",
        r"\bcuda runtime error \(\d+\) : (?P<error>.+?) at ",
        _POSSIBLE,
    ),
)

MEMORY: tuple[LogSign, ...] = (
    LogSign(
        "slurm-oom",
        _K.HOST_OOM,
        _R.CAUSE,
        "oom",
        r"\bDetected \d+ oom[-_ ]kill event",
        is_late=True,
    ),
    LogSign(
        "slurm-oom-task",
        _K.HOST_OOM,
        _R.CAUSE,
        "Out Of Memory",
        r"\bsrun: error: (?P<node>\S+): tasks? \S+: Out Of Memory",
        is_late=True,
    ),
    LogSign(
        "slurm-memory-limit",
        _K.HOST_OOM,
        _R.CAUSE,
        "memory limit",
        r"\b[Ee]xceeded (?:job|step) memory limit|exceeded memory limit .{0,40}being killed",
        is_late=True,
    ),
    LogSign(
        "kernel-oom",
        _K.HOST_OOM,
        _R.CAUSE,
        "illed process",
        r"\b(?:Memory cgroup o|O)ut of memory: Killed process \d+|oom-kill:constraint=",
        is_late=True,
    ),
    LogSign(
        "ray-oom",
        _K.HOST_OOM,
        _R.CAUSE,
        "emory",
        r"killed due to (?:the node running low on memory|memory pressure \(OOM\))",
    ),
    LogSign(
        "cpu-allocator",
        _K.HOST_OOM,
        _R.CAUSE,
        "DefaultCPUAllocator",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?"
        r"(?:allocate (?P<asked>\d+) bytes|$)",
    ),
    LogSign(
        "python-memory-error",
        _K.HOST_OOM,
        _R.CAUSE,
        "MemoryError",
        r"^(?:numpy\.\S*\.?_?Array)?MemoryError\b|_ArrayMemoryError: Unable to allocate|"
        r"\bArrowMemoryError\b",
    ),
    LogSign("bad-alloc", _K.HOST_OOM, _R.CAUSE, "std::bad_alloc", r"\bstd::bad_alloc\b", _LIKELY),
    LogSign(
        "shm-bus-error",
        _K.SHARED_MEMORY,
        _R.CAUSE,
        "shared memory",
        r"(?:worker.{0,60}killed by signal: Bus error|bus error encountered in worker).*"
        r"shared memory",
    ),
    LogSign(
        "shm-full",
        _K.SHARED_MEMORY,
        _R.CAUSE,
        "</torch_",
        r"unable to (?:write to|resize|open|mmap|allocate) .{0,60}</torch_",
    ),
    LogSign(
        "worker-descriptors",
        _K.SHARED_MEMORY,
        _R.CAUSE,
        "RuntimeError",
        r"received \d+ items of ancdata|Communication with the workers is no longer possible",
    ),
    LogSign(
        "cannot-allocate",
        _K.HOST_OOM,
        _R.CAUSE,
        "annot allocate memory",
        r"\[Errno 12\]|^(?!.*(?:NCCL|UCX|ibv_)).*Cannot allocate memory",
        _LIKELY,
    ),
    LogSign(
        "worker-killed",
        _K.DATA_WORKER,
        _R.CAUSE,
        "killed by signal",
        r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<signal>\w[\w ]*)",
        _LIKELY,
    ),
    LogSign(
        "worker-exited",
        _K.DATA_WORKER,
        _R.CAUSE,
        "exited unexpectedly",
        r"DataLoader worker (?:\(pid(?:\(s\))? (?P<pid>[\d, ]+)\) )?exited unexpectedly",
        _LIKELY,
    ),
    LogSign(
        "worker-of-batchgenerators",
        _K.DATA_WORKER,
        _R.CAUSE,
        "background workers",
        r"background workers are no longer alive",
        _LIKELY,
    ),
    LogSign(
        "worker-silent",
        _K.DATA_WORKER,
        _R.CAUSE,
        "DataLoader timed out",
        r"DataLoader timed out after (?P<waited>\d+ seconds)",
        _LIKELY,
    ),
    LogSign(
        "pin-memory-thread",
        _K.DATA_WORKER,
        _R.CAUSE,
        "Pin memory thread",
        r"Pin memory thread exited unexpectedly",
        _LIKELY,
    ),
)

STORAGE: tuple[LogSign, ...] = (
    LogSign(
        "disk-full",
        _K.STORAGE_FULL,
        _R.CAUSE,
        "No space left on device",
        r"^(?!.*Warning:).*No space left on device(?:.*?'(?P<path>/[^']+)')?",
    ),
    LogSign(
        "quota-full",
        _K.STORAGE_FULL,
        _R.CAUSE,
        "uota exceeded",
        r"\b[Qq]uota exceeded(?:.*?'(?P<path>/[^']+)')?",
    ),
    LogSign(
        "torch-zip-short",
        _K.STORAGE_FULL,
        _R.CAUSE,
        "unexpected pos",
        r"inline_container\.cc.*unexpected pos \d+ vs \d+",
        _LIKELY,
    ),
    LogSign(
        "torch-zip-failed",
        _K.STORAGE_FULL,
        _R.CAUSE,
        "file write failed",
        r"PytorchStreamWriter failed writing .*file write failed",
        _LIKELY,
    ),
    LogSign(
        "stale-handle",
        _K.STORAGE_ERROR,
        _R.CAUSE,
        "file handle",
        r"Stale (?:NFS )?file handle(?:.*?'(?P<path>/[^']+)')?",
    ),
    LogSign(
        "input-output",
        _K.STORAGE_ERROR,
        _R.CAUSE,
        "nput/output error",
        r"\b(?:\[Errno 5\]|Input/output error)(?:.*?'(?P<path>/[^']+)')?",
    ),
    LogSign(
        "file-server",
        _K.STORAGE_ERROR,
        _R.CAUSE,
        "Errno",
        r"\[Errno (?:108|121|107)\].*(?:'(?P<path>/[^']+)')?",
    ),
    LogSign(
        "lock-refused",
        _K.STORAGE_ERROR,
        _R.CAUSE,
        "ock",
        r"\(unable to lock file, errno = \d+|\blmdb\.LockError\b",
        _LIKELY,
    ),
    LogSign(
        "read-only",
        _K.STORAGE_ERROR,
        _R.CAUSE,
        "Read-only file system",
        r"\[Errno 30\] Read-only file system(?:.*?'(?P<path>/[^']+)')?",
    ),
)
