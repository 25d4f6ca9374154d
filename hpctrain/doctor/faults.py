"""What a training job can die of: a closed set, each with its code, its name and what to do. Pure.

`docs/doctor.md` has a row for each code: tests/unit/doctor/test_faults.py holds that;
test_of_run.py holds that every member has its entry, and every cause of the ledger its fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hpctrain.history.causes import EndCause


class FaultKind(StrEnum):
    """What ended a job, finer than the ledger's `EndCause`: a closed set."""

    GPU_OOM = "gpu_oom"
    GPU_ERROR = "gpu_error"
    GPU_ASSERT = "gpu_assert"
    GPU_SETUP = "gpu_setup"
    HOST_OOM = "host_oom"
    SHARED_MEMORY = "shared_memory"
    DATA_WORKER = "data_worker"
    STORAGE_FULL = "storage_full"
    STORAGE_ERROR = "storage_error"
    HANG = "hang"
    DESYNC = "desync"
    TRANSPORT = "transport"
    INTERFACE = "interface"
    PORT_IN_USE = "port_in_use"
    RENDEZVOUS = "rendezvous"
    LAUNCH = "launch"
    VERSIONS = "versions"
    CHECKPOINT = "checkpoint"
    FP16_OVERFLOW = "fp16_overflow"
    NAN = "nan"
    LOSS_SPIKE = "loss_spike"
    CODE = "code"
    NATIVE = "native"
    KILLED = "killed"
    WALLTIME = "walltime"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    NODE_FAIL = "node_fail"
    STOPPED = "stopped"
    NO_PROGRESS = "no_progress"
    UNFIT_NODE = "unfit_node"
    FENCED = "fenced"
    REQUEUED = "requeued"
    HUNG_END = "hung_end"
    COMPLETED = "completed"
    RUNNING = "running"
    UNKNOWN = "unknown"


class Certainty(StrEnum):
    """How sure a diagnosis is."""

    CERTAIN = "certain"
    """What failed said so itself, and nothing before it explains it."""
    LIKELY = "likely"
    POSSIBLE = "possible"
    NOT_KNOWN = "not known"

    @property
    def rank(self) -> int:
        """0 for the surest."""
        return list(Certainty).index(self)


@dataclass(frozen=True)
class Knowledge:
    """What is known of a kind of fault.

    Attributes:
        code: Its code, as in docs/doctor.md.
        title: What happened, in a few words.
        do: What to do about it, in the order in which to try it.
    """

    code: str
    title: str
    do: tuple[str, ...]


KNOWLEDGE: dict[FaultKind, Knowledge] = {
    FaultKind.GPU_OOM: Knowledge(
        "HT801",
        "a GPU ran out of memory",
        (
            (
                "recompute activations (activation checkpointing), then halve the micro-batch and "
                "double the accumulation steps"
            ),
            (
                "shard more (FSDP2 or ZeRO-3), with smaller units where one gathered unit is the "
                "largest block; offload only after that"
            ),
        ),
    ),
    FaultKind.GPU_ERROR: Knowledge(
        "HT802",
        "a GPU, or what it computed, failed",
        (
            "look at that node: `nvidia-smi -q`, and `dmesg | grep -i xid`; tell the site's admins",
            (
                "start again without it (`#SBATCH --exclude=NODE`, or "
                "`hpctrain resume RUN --set slurm.exclude=NODE`)"
            ),
            (
                "does it come again on other nodes: run once with "
                "CUDA_LAUNCH_BLOCKING=1, and suspect "
                "a kernel of the program"
            ),
        ),
    ),
    FaultKind.GPU_ASSERT: Knowledge(
        "HT803",
        "a check inside a GPU kernel failed: an index or a label is out of range",
        (
            "run that batch with CUDA_LAUNCH_BLOCKING=1, or on the CPU, which names the line",
            (
                "compare token ids with the embedding's rows, labels with the classes, "
                "positions with "
                "the longest sequence"
            ),
        ),
    ),
    FaultKind.GPU_SETUP: Knowledge(
        "HT804",
        "the GPU cannot be used as asked: driver, architecture or number of devices",
        (
            (
                "compare `nvidia-smi` with `python -c 'import torch; print(torch.version.cuda, "
                "torch.cuda.device_count())'` on that node"
            ),
            "NCCL_P2P_DISABLE=1 where GPUs have no access to each other's memory",
            "start as many ranks on a node as it shows GPUs (--nproc-per-node, --gpus-per-node)",
        ),
    ),
    FaultKind.HOST_OOM: Knowledge(
        "HT805",
        "a node's memory was not enough",
        (
            "ask for more (`#SBATCH --mem`), or have fewer DataLoader workers and less prefetching",
            (
                "load weights on the meta device or by one rank, not whole by every "
                "rank; offloading "
                "optimizer states takes 12 bytes a parameter of the node"
            ),
            "does it grow all along: something keeps tensors or lists alive",
        ),
    ),
    FaultKind.SHARED_MEMORY: Knowledge(
        "HT806",
        "shared memory or the limit of files was too small for what DataLoader workers pass on",
        (
            (
                "give /dev/shm more room (a container's `--shm-size=16g`, `--ipc=host`), "
                "or have fewer workers "
                "and less prefetching"
            ),
            (
                "or `torch.multiprocessing.set_sharing_strategy('file_system')`; `ulimit -n` where "
                "files were too many"
            ),
        ),
    ),
    FaultKind.DATA_WORKER: Knowledge(
        "HT807",
        "a worker process of a DataLoader died",
        (
            "run once with num_workers=0: the error then has its own traceback",
            "killed by signal 9 or `Killed`: look for the node's memory (`dmesg | grep -i oom`)",
        ),
    ),
    FaultKind.STORAGE_FULL: Knowledge(
        "HT808",
        "a disk or a quota is full",
        (
            (
                "free room, or write elsewhere: `df -h PATH`, `df -i PATH`, `lfs quota -h PATH` or "
                "`quota -s`; /tmp, /dev/shm and ~/.cache count too"
            ),
            "keep fewer checkpoints (`hpctrain checkpoints prune RUN`)",
        ),
    ),
    FaultKind.STORAGE_ERROR: Knowledge(
        "HT809",
        "the file system failed: a stale handle, a server that is away, a bad disk",
        (
            "look whether the path can be read from the other nodes; tell the site's admins",
            "do not delete or replace files that a running job has open",
        ),
    ),
    FaultKind.HANG: Knowledge(
        "HT810",
        "ranks waited in a collective until its time was up",
        (
            (
                "find the late rank before anything else; a longer time-out only waits longer "
                "(NCCL_TIMEOUT is no setting of torch: it is init_process_group(timeout=...))"
            ),
            (
                "run with TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE=2000, or under "
                "hpctrain, which names the rank and its line (`hpctrain stacks RUN`)"
            ),
            (
                "slow work on one rank (tokenising, saving, evaluating) belongs before "
                "the group, on "
                "all ranks, or under a longer time-out of its own"
            ),
        ),
    ),
    FaultKind.DESYNC: Knowledge(
        "HT811",
        "ranks called different collectives",
        (
            (
                "`hpctrain lint train.py` names collectives, saves and `continue` under a test of "
                "the rank or of the data"
            ),
            "give every rank the same number of batches, and the same parameters in use",
            "run once with TORCH_DISTRIBUTED_DEBUG=DETAIL: it stops at the first difference",
        ),
    ),
    FaultKind.TRANSPORT: Knowledge(
        "HT812",
        "communication between ranks failed",
        (
            (
                "look at the link of the nodes that are named (`ibstat`, `ibv_devinfo`, "
                "`hpctrain preflight`), and start again without them"
            ),
            "NCCL_DEBUG=INFO says which network was taken: NET/IB, NET/OFI or NET/Socket",
        ),
    ),
    FaultKind.INTERFACE: Knowledge(
        "HT813",
        "ranks tried to meet over a network interface that does not join the nodes",
        (
            (
                "name the one that does, by its beginning: NCCL_SOCKET_IFNAME=hsn (or ib, bond; "
                "`^docker,lo` leaves some out), and GLOO_SOCKET_IFNAME in full"
            ),
            "`ip -brief address` on two nodes shows which one both have in the same network",
        ),
    ),
    FaultKind.PORT_IN_USE: Knowledge(
        "HT814",
        "the port for the ranks' meeting is taken",
        (
            (
                "use another one (`--master-port 0`, `--rdzv-endpoint host:0`, "
                "`accelerate launch --main_process_port 0`, or one derived from the job's id)"
            ),
            "ranks of an earlier job may still live: `ss -ltnp | grep PORT`",
        ),
    ),
    FaultKind.RENDEZVOUS: Knowledge(
        "HT815",
        "ranks did not find each other at the start",
        (
            (
                "MASTER_ADDR or --rdzv-endpoint must be a name of the first node that all others "
                "reach, never localhost, and the port open between nodes"
            ),
            "every node must start, with the same number of nodes, the same id and the same port",
        ),
    ),
    FaultKind.LAUNCH: Knowledge(
        "HT816",
        "the job was launched in a wrong way",
        (
            (
                "start ranks with a launcher (`torchrun`, `srun` with hpctrain, "
                "`accelerate launch`) "
                "that sets RANK, WORLD_SIZE and LOCAL_RANK"
            ),
            "one rank for each GPU, and each takes its own: `torch.cuda.set_device(LOCAL_RANK)`",
        ),
    ),
    FaultKind.VERSIONS: Knowledge(
        "HT817",
        "nodes or libraries have versions that do not go together",
        (
            (
                "use one environment for all nodes (one container, or `environment.stage`), and "
                "compare torch, NCCL, CUDA and Python between them"
            ),
        ),
    ),
    FaultKind.CHECKPOINT: Knowledge(
        "HT818",
        "a checkpoint does not fit this job, or is damaged",
        (
            (
                "ZeRO checkpoints need the same number of ranks: `hpctrain checkpoints import` "
                "takes them to any number (`hpctrain help exchange`); or convert with "
                '`ds_to_universal.py` and load with `"checkpoint": {"load_universal": true}`; '
                "torch DCP reshards when model and state have the same names"
            ),
            "a damaged one: go back to the one before (`hpctrain checkpoints verify RUN`)",
        ),
    ),
    FaultKind.FP16_OVERFLOW: Knowledge(
        "HT819",
        "float16 overflowed at every loss scale",
        (
            "train in bf16, whose range is that of float32; else lower the learning rate or clip",
            (
                "a higher initial scale does not help: a scale that halves again and "
                "again means that "
                "gradients themselves are not finite"
            ),
        ),
    ),
    FaultKind.NAN: Knowledge(
        "HT820",
        "loss or gradients ceased to be numbers",
        (
            "go back to a checkpoint from before that step, and look at that step's samples",
            "lower the learning rate, warm up longer, clip gradients; bf16 instead of fp16",
            "`[guard]` in hpctrain names rank, parameter and samples, and leaves the step out",
        ),
    ),
    FaultKind.LOSS_SPIKE: Knowledge(
        "HT821",
        "the loss rose and stayed high",
        (
            (
                "go back to a checkpoint from before the spike and leave its samples out "
                '(`guard.spike = "rewind"`)'
            ),
            "lower the learning rate, or clip gradients tighter",
        ),
    ),
    FaultKind.CODE: Knowledge(
        "HT822",
        "the program raised an error",
        ("mend the line that is named; the other ranks' errors follow from it",),
    ),
    FaultKind.NATIVE: Knowledge(
        "HT823",
        "a process crashed in native code",
        (
            "read the log behind 'Fatal Python error'; without it, run with PYTHONFAULTHANDLER=1",
            "look for libraries that were built for another torch, CUDA or C++ ABI",
        ),
    ),
    FaultKind.KILLED: Knowledge(
        "HT824",
        "a process was killed from outside, and nothing says by whom",
        (
            (
                "`sacct -j JOB --format=JobID,State,ExitCode,MaxRSS,ReqMem` and `dmesg | "
                "grep -i oom` "
                "on that node tell"
            ),
        ),
    ),
    FaultKind.WALLTIME: Knowledge(
        "HT825",
        "the job's time limit came; no crash",
        (
            (
                "ask for a signal ahead and save at it (`#SBATCH --signal=USR2@300`, or hpctrain, "
                "which does so and comes back), or for more time"
            ),
        ),
    ),
    FaultKind.PREEMPTED: Knowledge(
        "HT826",
        "the scheduler took the nodes for another job; no crash",
        ("save at SIGTERM and let the job be requeued (`#SBATCH --requeue`, or hpctrain)",),
    ),
    FaultKind.CANCELLED: Knowledge(
        "HT827",
        "the job was cancelled by someone; no crash",
        ("`sacct -j JOB --format=JobID,State%30` names who (CANCELLED by UID)",),
    ),
    FaultKind.NODE_FAIL: Knowledge(
        "HT828",
        "a node was lost",
        ("start again without it; `hpctrain submit --nodes N+1` goes on with a spare",),
    ),
    FaultKind.STOPPED: Knowledge(
        "HT829",
        "the run was asked to save and stop (`hpctrain cancel --save`)",
        ("go on with `hpctrain resume RUN`",),
    ),
    FaultKind.NO_PROGRESS: Knowledge(
        "HT830",
        "the run was stopped: one attempt after another ended before a new save",
        (
            (
                "save more often than an attempt lasts (`checkpoint.interval_s`), or ask for "
                "longer attempts; then `hpctrain resume RUN`"
            ),
        ),
    ),
    FaultKind.UNFIT_NODE: Knowledge(
        "HT831",
        "the preflight found a node unfit before the ranks began",
        ("look at that node with `hpctrain preflight`; leave it out with slurm.exclude",),
    ),
    FaultKind.FENCED: Knowledge(
        "HT832",
        "a newer attempt took the run over",
        ("nothing: the newer one goes on; `hpctrain status RUN` shows it",),
    ),
    FaultKind.REQUEUED: Knowledge(
        "HT833",
        "the job was requeued; nothing says who asked for it",
        ("nothing: the next attempt goes on; `sacct -j JOB --duplicates` shows its starts",),
    ),
    FaultKind.HUNG_END: Knowledge(
        "HT834",
        "the program was done, but ranks or processes of it did not end",
        ("call `destroy_process_group()` and end threads and workers at the program's end",),
    ),
    FaultKind.COMPLETED: Knowledge(
        "HT835",
        "it came to its end; nothing is wrong",
        ("nothing",),
    ),
    FaultKind.RUNNING: Knowledge(
        "HT836",
        "it runs, and nothing is known to be wrong",
        ("`hpctrain stacks RUN` shows where each rank is",),
    ),
    FaultKind.UNKNOWN: Knowledge(
        "HT837",
        "nothing in what was read says why",
        (
            "give the logs of all ranks and nodes, stderr too (`hpctrain doctor --log FOLDER`)",
            "`sacct -j JOB --format=JobID,State,ExitCode,MaxRSS,NodeList` tells what SLURM saw",
        ),
    ),
}

OF_CAUSE: dict[EndCause, FaultKind] = {
    EndCause.COMPLETED: FaultKind.COMPLETED,
    EndCause.HUNG_END: FaultKind.HUNG_END,
    EndCause.PREEMPTED: FaultKind.PREEMPTED,
    EndCause.WALLTIME: FaultKind.WALLTIME,
    EndCause.CANCELLED: FaultKind.CANCELLED,
    EndCause.STOPPED: FaultKind.STOPPED,
    EndCause.NODE_FAIL: FaultKind.NODE_FAIL,
    EndCause.GPU_ERROR: FaultKind.GPU_ERROR,
    EndCause.GPU_OOM: FaultKind.GPU_OOM,
    EndCause.HOST_OOM: FaultKind.HOST_OOM,
    EndCause.HANG: FaultKind.HANG,
    EndCause.DESYNC: FaultKind.DESYNC,
    EndCause.NCCL_ERROR: FaultKind.TRANSPORT,
    EndCause.DATA_WORKER: FaultKind.DATA_WORKER,
    EndCause.NAN: FaultKind.NAN,
    EndCause.STORAGE_FULL: FaultKind.STORAGE_FULL,
    EndCause.STORAGE_ERROR: FaultKind.STORAGE_ERROR,
    EndCause.USER_ERROR: FaultKind.CODE,
    EndCause.CRASHED: FaultKind.KILLED,
    EndCause.REQUEUED: FaultKind.REQUEUED,
    EndCause.UNFIT_NODE: FaultKind.UNFIT_NODE,
    EndCause.FENCED: FaultKind.FENCED,
    EndCause.UNKNOWN: FaultKind.UNKNOWN,
}
"""Which fault each cause of the ledger is where nothing finer is known."""
