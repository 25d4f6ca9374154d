"""The variables that NCCL, its plugins, libfabric and torch read, and the rule for their names.

`check_name` warns of misspelt and dead names, of NVIDIA's debugging class, and of what no preset
sets. A name that is missing in these tables is not wrong for certain: it is warned of, with the
nearest one that is known.

Read from source: NVIDIA/nccl 2.30.7 (5067397), ROCm/rccl 2.21.5 (0cbce2a) and a few later names,
aws/aws-ofi-nccl (2daf7d3), Mellanox/nccl-rdma-sharp-plugins, ofiwg/libfabric (af8ddbe), torch 2.13.
tests/unit/nccl/test_nccl_rules.py holds the promises.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hpctrain.nccl.rule import ERROR, Context, Problem, error, reason, warning

if TYPE_CHECKING:
    from collections.abc import Iterator


def names(prefix: str, text: str) -> frozenset[str]:
    """Names of one prefix, written without it."""
    return frozenset(prefix + word for word in text.split())


NCCL = names(
    "NCCL_",
    """
    ALGO ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_MODE
    CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID
    COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONF_FILE CONNECT_ROUND_MAX_PEERS
    CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS
    DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DEV_API_JIT DISABLE_MEM_MANAGER DMABUF_ENABLE
    ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK ENV_PLUGIN GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE
    GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE
    GIN_ERROR_QUERY_SEC GIN_GDAKI_MAX_DEST_RD_ATOMIC GIN_GDAKI_MAX_QP_RD_ATOMIC
    GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS GIN_PLUGIN
    GIN_PLUGIN_REF_COUNT GIN_PROXY_QUEUE_SIZE GIN_TYPE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK
    GRAPH_FILE GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING
    GROUP_CUDA_STREAM HOSTID IBVERBS_LIB IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE
    IB_AR_THRESHOLD IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC
    IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT
    IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY
    IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED
    IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER
    IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY
    IB_RESILIENCY_PORT_RECOVERY IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
    IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM
    IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING
    IB_SUBNET_PREFIX_LEN IB_TC IB_TIMEOUT IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH
    IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET
    L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL
    LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER
    LSA_TEAM_SIZE MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS
    MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MLOPART_RDMA_ENABLE MNNVL_CLIQUE_ID
    MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID
    MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY
    NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE NET_GDR_C2C NET_GDR_LEVEL NET_GDR_MLOPART
    NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD
    NET_PLUGIN NET_PLUGIN_REF_COUNT NET_SHARED_BUFFERS NET_SHARED_COMMS NO_CACHE NSOCKS_PERTHREAD
    NTHREADS NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE
    NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE
    OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_EPOCH_ENABLE P2P_LEVEL P2P_LL_THRESHOLD
    P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PER_CHANNEL_NET_BW
    P2P_PXN_LEVEL P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PARAM_DUMP_ALL
    PAT_ENABLE PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PROTO PROXY_APPEND_BATCH_SIZE PROXY_CPUSET
    PROXY_DUMP_SIGNAL PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR
    REPORT_CONNECT_PROGRESS RMA_DISABLE RMA_PLUGIN RMA_PLUGIN_REF_COUNT RMA_PROXY_DUMP_SIGNAL
    RMA_PROXY_QUEUE_SIZE RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME
    SHADOW_MEMPOOL_MAX_SIZE SHM_DISABLE SHM_LOCALITY SINGLE_PROC_MEM_REG_ENABLE SOCKET_FAMILY
    SOCKET_IFNAME SOCKET_INLINE SOCKET_MAGIC SOCKET_MIN_TASKSIZE SOCKET_NTHREADS
    SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
    SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_KERNEL SYM_NOWIN_ENABLE
    SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS TOPO_DUMP_FILE
    TOPO_DUMP_FILE_RANK TOPO_FILE TOPO_SPLIT_MLOPART TUNER_PLUGIN UID_STAGGER_RATE
    UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WARN_ENABLE_DEBUG_INFO WIN_ENABLE WIN_STRIDE
    WORK_ARGS_BYTES WORK_FIFO_BYTES
    """,
)
"""Read by NCCL itself."""

NCCL_DEBUGGING = names(
    "NCCL_",
    """
    ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_MODE CHECK_POINTERS COMM_BLOCKING
    CUMEM_ENABLE CUMEM_HOST_ENABLE DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER
    GRAPH_STREAM_ORDERING IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DISABLE IB_ECE_ENABLE IB_MERGE_NICS
    IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_SPLIT_DATA_ON_QPS
    IGNORE_COLLNET_MISMATCH IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET LAUNCH_MODE
    LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LOCAL_REGISTER MAX_CTAS
    MAX_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID
    NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_MERGE_POLICY NET_SHARED_BUFFERS NET_SHARED_COMMS
    NTHREADS NVB_DISABLE NVLS_ENABLE P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD
    P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR
    RUNTIME_CONNECT SET_STACK_SIZE SHM_DISABLE SYM_GIN_KERNELS_ENABLE WIN_ENABLE
    """,
)
"""The guide's section Debugging: not to be kept in scripts, says NVIDIA, or only after a
measurement; newer versions may work otherwise."""

NCCL_OTHERS = names(
    "NCCL_",
    """
    AGG_CHANNEL_SIZE CREATE_THREAD_CONTEXT DIR HOME IBEXT_DISABLE IB_IS_GLOBAL INCLUDE_DIR LIBRARY
    LIB_DIR NCHANNELS_PER_PEER PLUGIN_P2P PROXY_PROFILE RINGS RINGS_REMAP ROOT SHM_MEMCPY_MODE
    SHM_USE_CUDA_MEMCPY TUNER_CONFIG_FILE TUNER_CONFIG_PATH VERSION WORK_FIFO_DEPTH
    """,
)
"""Read by RCCL, plugins, or builds and images, under names without a prefix of their own."""

NCCL_FAMILIES = (
    "NCCL_CHECKPOINT_",
    "NCCL_EP_",
    "NCCL_FASTRAK_",
    "NCCL_GIB_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_INSPECTOR_",
    "NCCL_PROFILE_",
    "NCCL_PROFILER_",
    "NCCL_RESHARD_",
    "NCCL_SHARP_",
    "NCCL_SHIMNET_",
    "NCCL_SPCX_",
    "NCCL_TESTS_",
    "NCCL_UCX_",
)
"""Beginnings of names that plugins and tools read; what follows is not judged."""

RCCL = names(
    "RCCL_",
    """
    ALL_TO_ALL_PIVOT_ENABLE CLIQUE_ALLREDUCE_BYTE_LIMIT CLIQUE_ALLREDUCE_NCHANNELS
    CLIQUE_IGNORE_TOPO DUMP_ROME_MODEL_FILE ENABLE_CLIQUE ENABLE_INTRANET ENABLE_SIGNALHANDLER
    CHANNEL_TUNING_ENABLE FORCE_ENABLE_GDRDMA GFX9_CHEAP_FENCE_OFF IB_ABORT_ON_ERROR
    IB_QPS_PER_P2P INTRANET_THRESHOLD KERNEL_COLL_TRACE_ENABLE
    LL128_FORCE_ENABLE MODEL_MATCHING_DISABLE MODEL_REVERSAL_DISABLE MSCCLPP_ENABLE
    MSCCLPP_READ_ALLRED MSCCLPP_THRESHOLD P2P_BATCH_ENABLE
    MSCCL_ENABLE MSCCL_ENABLE_SINGLE_PROCESS MSCCL_FORCE_ENABLE
    MSCCL_FORCE_FULLOPS MSCCL_WORK_FIFO_DEPTH NET_CONTIGUOUS_MEM P2P_NET_DISABLE P2P_NET_THRESHOLD
    PIVOT_ALLTOALL_ENABLE ROCR_PATH STACK_SIZE_OVERRIDE TREES USE_AMD_SMI_LIB USE_ROCM_SMI_LIB
    """,
)
"""Read by RCCL only."""

OFI_NCCL = names(
    "OFI_NCCL_",
    """
    ABORT_ON_ERROR CM_NUM_RX_BUFFERS CQ_READ_COUNT CQ_SIZE CUDA_FLUSH_ENABLE DISABLE_CLOSE_MESSAGE
    DISABLE_DMABUF DISABLE_GDR_REQUIRED_CHECK DISABLE_NATIVE_RDMA_CHECK EAGER_MAX_SIZE
    EARLY_COMPLETION ENDPOINT_PER_COMM ERRORCHECK_MUTEX EXCLUDE_TCP_IF FORCE_NUM_RAILS
    GDAKI_EFA_HW_COUNTER GDR_FLUSH_DISABLE GIN_CQ_PROCESS_MAX_ITER MIN_STRIPE_SIZE MR_CACHE_DISABLE
    MR_KEY_SIZE NET_LATENCY NIC_DUP_CONNS NVTX_TRACE_DIMENSION PLATFORM PROGRESS_MODEL PROTOCOL
    RDMA_MAX_POSTED_BOUNCE_BUFFERS RDMA_MAX_POSTED_CONTROL_BUFFERS RDMA_MAX_POSTED_EAGER_BUFFERS
    RDMA_MIN_POSTED_BOUNCE_BUFFERS RDMA_MIN_POSTED_CONTROL_BUFFERS RDMA_MIN_POSTED_EAGER_BUFFERS
    RR_CTRL_MSG SCHED_MAX_SMALL_RR_SIZE SKIP_NICS_WITHOUT_ACCEL_AT_SAME_PCI_LEVEL
    TUNER_NET_COMP_OVERHEAD TUNER_NET_LATENCY TUNER_NUM_CHANNELS TUNER_TYPE USE_IPV6_TCP
    USE_LOW_LATENCY_TC
    """,
)
"""Read by the plugin that lets NCCL use libfabric."""

TORCH = names(
    "TORCH_",
    """
    FR_BUFFER_SIZE FR_CPP_STACK FR_DUMP_DYNAMIC_FILE_NAME FR_DUMP_TEMP_FILE NCCL_ABORT_IN_DESTROY_PG
    NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS NCCL_BCAST_UNIQUEID NCCL_BLOCKING_WAIT
    NCCL_COORD_CHECK_MILSEC NCCL_CUDA_EVENT_CACHE NCCL_DEBUG_INFO_PIPE_FILE
    NCCL_DEBUG_INFO_TEMP_FILE NCCL_DESYNC_DEBUG NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING
    NCCL_ENABLE_TIMING NCCL_EXTRA_DUMP_ON_EXEC NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY
    NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NCCL_NAN_CHECK NCCL_NONBLOCKING_TIMEOUT
    NCCL_PROPAGATE_ERROR NCCL_RANKS_PER_ROOT NCCL_RETHROW_CUDA_ERRORS
    NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING NCCL_TRACE_BUFFER_SIZE NCCL_TRACE_CPP_STACK
    NCCL_USE_COMM_NONBLOCKING NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK NCCL_WAIT_TIMEOUT_DUMP_MILSEC
    """,
)
"""Read by torch's process group for NCCL and by its flight recorder."""

FI_CXI = names(
    "FI_CXI_",
    """
    ATS ATS_MLOCK_MODE CNTR_SPIN_BEFORE_YIELD CNTR_TRIG_CMDQ CNTR_WB COLL_FABRIC_MGR_URL COLL_JOB_ID
    COLL_JOB_STEP_ID COLL_MCAST_TOKEN COLL_RETRY_USEC COLL_TIMEOUT_USEC COLL_USE_DMA_PUT
    CQ_FILL_PERCENT CQ_POLICY CTRL_RX_EQ_MAX_SIZE DEFAULT_CQ_SIZE DEFAULT_RX_SIZE DEFAULT_TX_SIZE
    DEFAULT_VNI DEVICE_NAME DISABLE_ALT_READ_CMDQ DISABLE_CQ_HUGETLB DISABLE_CUDA_SYNC_MEMOPS
    DISABLE_EQ_HUGETLB DISABLE_HMEM_DEV_REGISTER DISABLE_HOST_REGISTER DISABLE_NON_INJECT_AMO_IDC
    DISABLE_NON_INJECT_MSG_IDC DISABLE_NON_INJECT_RMA_IDC ENABLE_TRIG_OP_LIMIT ENABLE_WRITEDATA
    EQ_ACK_BATCH_SIZE FC_RETRY_USEC_DELAY FORCE_DEV_REG_COPY FORCE_ODP FORCE_ZE_HMEM_SUPPORT HRP
    HWCOLL_ADDRS_PER_JOB HWCOLL_MIN_NODES HYBRID_POSTED_RECV_PREEMPTIVE HYBRID_PREEMPTIVE
    HYBRID_RECV_PREEMPTIVE HYBRID_UNEXPECTED_MSG_PREEMPTIVE IOTLB LLRING_MODE
    MR_CACHE_EVENTS_DISABLE_LE_POLL_NSECS MR_CACHE_EVENTS_DISABLE_POLL_NSECS MR_MATCH_EVENTS
    MR_TARGET_ORDERING MSG_LOSSLESS ODP OFLOW_BUF_COUNT OFLOW_BUF_MAX_CACHED OFLOW_BUF_MIN_POSTED
    OFLOW_BUF_SIZE OPTIMIZED_MRS PROV_KEY_CACHE RDZV_ALIGNED_SW_RGET RDZV_EAGER_SIZE RDZV_GET_MIN
    RDZV_PROTO RDZV_THRESHOLD REQ_BUF_MAX_CACHED REQ_BUF_MAX_COUNT REQ_BUF_MIN_POSTED REQ_BUF_SIZE
    RGET_TC RNR_APPEND_RETRY_TIMEOUT_US RNR_MAX_TIMEOUT_US RX_MATCH_MODE SAFE_DEVMEM_COPY_THRESHOLD
    SW_RX_TX_INIT_MAX TELEMETRY TELEMETRY_RGID TRUNC_OK UNRELIABLE ZBCOLL_RADIX
    """,
)
"""Read by libfabric's provider for Slingshot."""

FI_EFA = names(
    "FI_EFA_",
    """
    CQ_SIZE EFA_CQ_READ_SIZE ENABLE_SHM_TRANSFER FORK_SAFE IFACE IMPLICIT_AV_SIZE
    INTERNAL_RX_REFILL_THRESHOLD INTER_MAX_GDRCOPY_MESSAGE_SIZE INTER_MAX_MEDIUM_MESSAGE_SIZE
    INTER_MIN_READ_MESSAGE_SIZE INTER_MIN_READ_WRITE_SIZE INTER_READ_SEGMENT_SIZE MAX_MEMCPY_SIZE
    MAX_TIMEOUT MR_CACHE_ENABLE MR_MAX_CACHED_COUNT MR_MAX_CACHED_SIZE READCOPY_POOL_SIZE
    RECVWIN_SIZE RUNT_SIZE RX_COPY_OOO RX_COPY_UNEXP RX_SIZE SET_CUDA_SYNC_MEMOPS SHM_AV_SIZE
    SHM_CQ_READ_SIZE TIMEOUT_INTERVAL TRACK_MR TX_MIN_CREDITS TX_QUEUE_SIZE TX_SIZE
    USE_DATA_PATH_DIRECT USE_DEVICE_RDMA USE_HUGE_PAGE USE_SM2 USE_UNSOLICITED_WRITE_RECV
    USE_ZCPY_RX
    """,
)
"""Read by libfabric's provider for EFA."""

FI_CORE = names(
    "FI_",
    """
    ADDR_FORMAT AV_REMOVE_CLEANUP FORK_UNSAFE HMEM HMEM_CUDA_ENABLE_ASYNC_COPY HMEM_CUDA_USE_DMABUF
    HMEM_CUDA_USE_GDRCOPY HMEM_DISABLE_P2P HMEM_NEURON_USE_DMABUF HMEM_ROCR_USE_DMABUF
    HMEM_SYNAPSEAI_USE_DMABUF HMEM_ZE_COPY_ENGINE HMEM_ZE_USE_DMABUF HOOK LOG_INTERVAL LOG_LEVEL
    LOG_LOCATION LOG_LOCATION_MODE LOG_PROV LOG_SUBSYS MR_CACHE_MAX_COUNT MR_CACHE_MAX_SIZE
    MR_CACHE_MONITOR MR_CUDA_CACHE_MONITOR_ENABLED MR_ROCR_CACHE_MONITOR_ENABLED
    MR_ZE_CACHE_MONITOR_ENABLED OFFLOAD_COLL_PROVIDER PERF_CNTR PREFER_SYSCONFIG PROVIDER
    PROVIDER_PATH ROCR_D2H_THRESHOLD UNIVERSE_SIZE
    """,
)
"""Read by libfabric itself; other FI_* names belong to other providers."""


PREFIXES = ("NCCL_", "RCCL_", "OFI_NCCL_", "TORCH_NCCL_", "TORCH_FR_", "FI_", "GLOO_")
"""Of the variables that are judged: an empty value, quotes and blanks around it never help them."""

_SECRET = re.compile(r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)")
_BLANKS = frozenset({"NCCL_DEBUG_TIMESTAMP_FORMAT"})
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(|`")

_TORCH_READS = "torch reads the old name too for now, but the newer name wins over it"
DEAD: dict[str, tuple[str, str]] = {
    "NCCL_ASYNC_ERROR_HANDLING": (_TORCH_READS, "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_BLOCKING_WAIT": (_TORCH_READS, "TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_DESYNC_DEBUG": (_TORCH_READS, "TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": (_TORCH_READS, "TORCH_NCCL_ENABLE_TIMING"),
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": (
        _TORCH_READS,
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    ),
    "TORCH_NCCL_ASYNC_HANDLING": (
        "nothing reads this common misspelling",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    "NCCL_CHECKS_DISABLE": ("NCCL has not read it since 2.2", "NCCL_CHECK_MODE"),
    "NCCL_IB_CUDA_SUPPORT": ("NCCL has not read it since 2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_IB_GDR_LEVEL": ("NCCL has not read it since 2.4", "NCCL_NET_GDR_LEVEL"),
    "NCCL_LL_THRESHOLD": ("NCCL has not read it since 2.5", "NCCL_PROTO"),
    "NCCL_MAX_NRINGS": ("is the name of NCCL 2.4", "NCCL_MAX_NCHANNELS"),
    "NCCL_MIN_NRINGS": ("is the name of NCCL 2.4", "NCCL_MIN_NCHANNELS"),
    "NCCL_NET_MAX_REQUESTS": ("is fixed when NCCL is built", ""),
    "NCCL_SINGLE_RING_THRESHOLD": ("NCCL has not read it since 2.3", "NCCL_ALGO"),
    "NCCL_SOCKET_TIMEOUT": ("nothing reads it", "NCCL_SOCKET_RETRY_CNT"),
    "NCCL_TIMEOUT": (
        "nothing reads it: the time-out of collectives is an argument of init_process_group",
        "",
    ),
    "NCCL_TREE_THRESHOLD": ("NCCL has not read it since 2.5", "NCCL_ALGO"),
    "RDMAV_FORK_SAFE": ("AWS says not to use it; newer kernels need neither", "FI_EFA_FORK_SAFE"),
}
"""Names that do nothing, or no longer: what became of them, and the name to use ("" for none)."""

_GLOO = frozenset(
    {
        "GLOO_DEVICE_TRANSPORT",
        "GLOO_DISABLE_CONNECTION_RETRIES",
        "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER",
        "GLOO_LOG_LEVEL",
        "GLOO_SOCKET_IFNAME",
    }
)
_READERS: dict[str, tuple[str, frozenset[str]]] = {
    "NCCL_": ("NCCL 2.30", NCCL | NCCL_OTHERS),
    "RCCL_": ("RCCL 2.21", RCCL),
    "OFI_NCCL_": ("the plugin for libfabric", OFI_NCCL),
    "TORCH_NCCL_": ("torch", TORCH),
    "TORCH_FR_": ("torch", TORCH),
    "FI_CXI_": ("libfabric 2", FI_CXI),
    "FI_EFA_": ("libfabric 2", FI_EFA),
    "GLOO_": ("Gloo", _GLOO),
}
"""Prefix to who reads the variables of that prefix, and their names."""

_REPLACES = {
    "PATH": "programs",
    "LD_LIBRARY_PATH": "libraries",
    "PYTHONPATH": "packages",
    "LD_PRELOAD": "libraries",
}
_FABRIC_POLICY = frozenset({"NCCL_IB_FIFO_TC", "NCCL_IB_SL", "NCCL_IB_TC"})
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits in each collective",
    "TORCH_NCCL_DESYNC_DEBUG": "each collective is written to the store",
    "TORCH_NCCL_NAN_CHECK": "each collective's input is searched for NaN",
}


def check_name(name: str, value: str, context: Context) -> Iterator[Problem]:
    """What is to be said of the name, and of any value that this name may have."""
    del context
    if name in DEAD:
        yield from _dead(name, value)
    else:
        yield from _unknown(name, value)
    if _SECRET.fullmatch(name) and value:
        yield Problem(
            ERROR,
            f"{name} looks like a secret: presets can be read by everybody, and spec.json and the "
            "logs record the environment; let each user set it in the job's own shell",
        )
    if name in _REPLACES and "$" not in value:
        yield warning(
            name,
            value,
            f"takes the place of the {_REPLACES[name]} that modules and the virtual environment "
            "have put there; use [modules] instead",
        )
    if name.startswith("SLURM_"):
        yield warning(
            name,
            value,
            "reaches the ranks only, after srun has read its own; use slurm.extra or "
            "slurm.srun_args",
        )
    yield from _text(name, value)
    yield from _class(name, value)


def _text(name: str, value: str) -> Iterator[Problem]:
    """What a shell would have done to the value, and nobody does here."""
    expansion = _EXPANSION.search(value)
    if expansion:
        yield error(
            name,
            value,
            f"nobody expands {expansion.group()} here: ranks see this very text; write the value "
            "itself, or set the variable in slurm.setup",
        )
    if not name.startswith(PREFIXES):
        return
    if not value:
        yield error(
            name,
            value,
            "is empty, which is no value: most readers take it for not set, and NCCL no longer "
            "looks into /etc/nccl.conf; leave it out, or name the variable in env.unset",
        )
    elif value[0] in "\"'" and value[-1] == value[0]:
        yield error(
            name,
            value,
            "the quotes are part of the value, as a shell would not have it, and then it fits "
            f"nothing; write {value.strip(value[0])}",
        )
    elif value != value.strip() and name not in _BLANKS:
        yield error(
            name, value, f'the blank around it is part of the value; write "{value.strip()}"'
        )


def _class(name: str, value: str) -> Iterator[Problem]:
    if name in NCCL_DEBUGGING:
        yield reason(
            name,
            value,
            "is one of NVIDIA's debugging variables, not to be kept in scripts: a newer NCCL may "
            'choose better; leave it out, or say why it stays: { value = "...", why = "..." }',
        )
    elif name in _FABRIC_POLICY:
        yield reason(
            name,
            value,
            "is a policy of this one fabric's switches, wrong on any other; say why: "
            '{ value = "...", why = "..." }',
        )
    elif name in _SLOW and value.lower() not in {"0", "false", "f", "no", "n"}:
        yield reason(
            name,
            value,
            f"slows training: {_SLOW[name]}; leave it out, or say why it stays: "
            '{ value = "...", why = "..." }',
        )


def _dead(name: str, value: str) -> Iterator[Problem]:
    what, instead = DEAD[name]
    write = f"use {instead}" if instead else "leave it out"
    yield warning(name, value, f"{what}; {write}")


def _unknown(name: str, value: str) -> Iterator[Problem]:
    for prefix, (reader, variables) in _READERS.items():
        if not name.startswith(prefix):
            continue
        if name not in variables and not name.startswith(NCCL_FAMILIES):
            yield warning(name, value, f"{reader} has no variable of this name; {_hint(name)}")
        return
    yield from _nearly_known(name, value)


def _hint(name: str) -> str:
    """The name that was meant, if one is near: its last part is compared, the prefix is common."""
    if f"TORCH_{name}" in TORCH:
        return f"did you mean TORCH_{name}?"
    if name.startswith("NCCL_OFI_"):
        return f"did you mean OFI_NCCL_{name.removeprefix('NCCL_OFI_')}?"
    prefix = next(prefix for prefix in _READERS if name.startswith(prefix))
    ends = [known.removeprefix(prefix) for known in _READERS[prefix][1]]
    near = get_close_matches(name.removeprefix(prefix), ends, 1, 0.7)
    return f"did you mean {prefix}{near[0]}?" if near else "leave it out if nothing else reads it"


def _nearly_known(name: str, value: str) -> Iterator[Problem]:
    """A name that only just misses: nccl_debug, NCCLDEBUG, NNCL_DEBUG, FI_MR_CACHE_MONITR."""
    every = NCCL | TORCH | FI_CORE | _GLOO
    if name in every:
        return
    near = [name.upper()] if name.upper() in every else get_close_matches(name, every, 1, 0.9)
    if near:
        yield warning(name, value, f"nothing reads this name; did you mean {near[0]}?")
