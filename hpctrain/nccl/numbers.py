"""Rules for numbers and switches, as each reader parses them.

NCCL reads a number with C's strtoll in base 0 and keeps what it got: `true` is 0, `010` is 8,
`1abc` is 1, all without a word. torch reads decimal numbers and its own words for yes and no, and
stops the program at others. libfabric reads numbers as NCCL does, and switches by words.
tests/unit/nccl/test_nccl_rules.py holds the promises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.nccl import names
from hpctrain.nccl.rule import Context, Problem, Rule, cut, error, listed, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = re.compile(r"-?[1-9][0-9]*|0|0x[0-9a-fA-F]+", re.ASCII)
_C_PREFIX = re.compile(
    r"[ \t\n\v\f\r]*(?P<sign>[+-]?)"
    r"(?:(?P<hex>0[xX][0-9a-fA-F]+)|(?P<octal>0[0-7]*)|(?P<decimal>[1-9][0-9]*))?",
    re.ASCII,
)
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}
_MOST = 2**63 - 1
_MOST_OF_TORCH = 2**31 - 1
_ENOUGH_DIGITS = 64  # the largest number has fewer; Python refuses to read thousands
_TRUE = frozenset({"true", "yes", "on", "t", "y", "enable", "enabled"})
_FALSE = frozenset({"false", "no", "off", "f", "n", "disable", "disabled"})
_WORDY = frozenset({"NCCL_PARAM_DUMP_ALL", "NCCL_SET_THREAD_NAME", "NCCL_WARN_ENABLE_DEBUG_INFO"})
_FI_WORDS = frozenset({"true", "yes", "on", "false", "no", "off"})


@dataclass(frozen=True)
class Range:
    """The numbers that a variable takes."""

    least: int | None = None
    most: int | None = None
    among: tuple[int, ...] = ()
    note: str = ""
    """What happens to a number outside, and what it may have been meant for."""

    def holds(self, number: int) -> bool:
        """Whether the number is among them."""
        if self.among:
            return number in self.among
        above = self.least is None or number >= self.least
        return above and (self.most is None or number <= self.most)

    def __str__(self) -> str:
        if self.among:
            return listed([str(number) for number in self.among])
        if self.most is None:
            return "any whole number" if self.least is None else f"{self.least} or more"
        return f"{self.least} to {self.most}"


_SWITCH = Range(among=(0, 1))
_THREE = Range(among=(0, 1, 2))
_COUNT = Range(least=1)
_BYTES = Range(least=1024, note="it is counted in bytes")

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            "NCCL_ALLOC_P2P_NET_LL_BUFFERS",
            "NCCL_CHECK_POINTERS",
            "NCCL_COLLNET_ENABLE",
            "NCCL_COMM_BLOCKING",
            "NCCL_DMABUF_ENABLE",
            "NCCL_GDRCOPY_ENABLE",
            "NCCL_IB_ADAPTIVE_ROUTING",
            "NCCL_IB_DISABLE",
            "NCCL_IB_ECE_ENABLE",
            "NCCL_IB_MERGE_NICS",
            "NCCL_IB_OOO_RQ",
            "NCCL_IB_RETURN_ASYNC_EVENTS",
            "NCCL_IB_SPLIT_DATA_ON_QPS",
            "NCCL_IGNORE_COLLNET_MISMATCH",
            "NCCL_IGNORE_CPU_AFFINITY",
            "NCCL_IGNORE_NET_MISMATCH",
            "NCCL_IPC_USE_ABSTRACT_SOCKET",
            "NCCL_LAUNCH_RACE_FATAL",
            "NCCL_MEM_SYNC_DOMAIN",
            "NCCL_MULTI_RANK_GPU_ENABLE",
            "NCCL_NET_DISABLE_INTRA",
            "NCCL_NET_FORCE_FLUSH",
            "NCCL_NET_GDR_C2C",
            "NCCL_NET_GDR_READ",
            "NCCL_OOB_NET_ENABLE",
            "NCCL_P2P_DIRECT_DISABLE",
            "NCCL_P2P_DISABLE",
            "NCCL_PXN_DISABLE",
            "NCCL_RAS_ENABLE",
            "NCCL_SET_THREAD_NAME",
            "NCCL_SHM_DISABLE",
        ),
        _SWITCH,
    ),
    **dict.fromkeys(
        (
            "NCCL_CROSS_NIC",
            "NCCL_IB_PCI_RELAXED_ORDERING",
            "NCCL_MNNVL_ENABLE",
            "NCCL_NVLS_ENABLE",
            "NCCL_P2P_PXN_LEVEL",
        ),
        _THREE,
    ),
    **dict.fromkeys(
        (
            "NCCL_MAX_NCHANNELS",
            "NCCL_MIN_NCHANNELS",
            "NCCL_RAS_TIMEOUT_FACTOR",
            "NCCL_SOCKET_RETRY_CNT",
            "NCCL_SOCKET_RETRY_SLEEP_MSEC",
            "NCCL_UID_STAGGER_RATE",
            "NCCL_UID_STAGGER_THRESHOLD",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_NVLS_CHUNKSIZE"), _BYTES),
    "NCCL_CGA_CLUSTER_SIZE": Range(0, 8),
    "NCCL_IB_FIFO_TC": Range(0, 255, note="the header's field has 8 bits"),
    "NCCL_IB_GID_INDEX": Range(least=-1),
    "NCCL_IB_QPS_PER_CONNECTION": Range(1, 128),
    "NCCL_IB_RETRY_CNT": Range(0, 7, note="the header's field has 3 bits"),
    "NCCL_IB_ROCE_VERSION_NUM": Range(among=(1, 2)),
    "NCCL_IB_SL": Range(0, 15, note="the header's field has 4 bits"),
    "NCCL_IB_TC": Range(0, 255, note="the header's field has 8 bits"),
    "NCCL_IB_TIMEOUT": Range(
        1,
        31,
        note="it is an exponent, not seconds: each try waits 4.096 us times 2 to that power (22: "
        "17 s), and 0 or 32 and more wait for ever",
    ),
    "NCCL_MAX_CTAS": Range(1, 64),
    "NCCL_MIN_CTAS": Range(1, 64),
    "NCCL_NSOCKS_PERTHREAD": Range(1, 64),
    "NCCL_CUMEM_ENABLE": Range(among=(-2, 0, 1), note="-2 leaves it to NCCL"),
    "NCCL_CUMEM_HOST_ENABLE": Range(among=(-1, 0, 1), note="-1 leaves it to NCCL"),
    "NCCL_NTHREADS": Range(
        among=tuple(range(64, 513, 32)), note="a multiple of 32; NCCL takes its most for others"
    ),
    "NCCL_SOCKET_NTHREADS": Range(1, 16),
    "NCCL_SOCKET_POLL_TIMEOUT_MSEC": Range(least=0),
    "TORCH_FR_BUFFER_SIZE": Range(least=0),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Range(among=(0, 1, 2, 3)),
    "TORCH_NCCL_COORD_CHECK_MILSEC": Range(least=1),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Range(
        least=1, note="after so many seconds the monitor kills a rank whose watchdog is stuck"
    ),
    "TORCH_NCCL_RANKS_PER_ROOT": Range(least=1),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Range(least=0),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": Range(least=0),
    "NCCL_LAUNCH_ORDER_IMPLICIT": _SWITCH,
}
"""Numbers as the guide of NCCL 2.30 and torch's sources have them; others take any number."""

TEXTS = names.names(
    "NCCL_",
    """
    ALGO CHECK_MODE COMM_ID CONF_FILE CTA_POLICY DEBUG DEBUG_FILE DEBUG_SUBSYS
    DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS ENV_PLUGIN GIN_PLUGIN GRAPH_DUMP_FILE GRAPH_FILE
    HOSTID IBVERBS_LIB IB_ADDR_FAMILY IB_ADDR_RANGE IB_HCA LAUNCH_MODE NET NETDEVS_POLICY
    NET_FORCE_MERGE NET_GDR_LEVEL NET_MERGE_LEVEL NET_MERGE_POLICY NET_PLUGIN NO_CACHE
    OOB_NET_IFNAME P2P_LEVEL PROFILER_PLUGIN PROTO PROXY_CPUSET RAS_ADDR RMA_PLUGIN SOCKET_FAMILY
    SOCKET_IFNAME SYM_KERNEL THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE TUNER_PLUGIN
    """,
)
"""The variables of NCCL's that are no numbers."""

TORCH_NUMBERS = frozenset(name for name in RANGES if name.startswith("TORCH_"))
TORCH_TEXTS = frozenset(
    {
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    }
)
FI_TEXTS = frozenset(
    {
        "FI_CXI_ATS_MLOCK_MODE",
        "FI_CXI_COLL_FABRIC_MGR_URL",
        "FI_CXI_COLL_JOB_ID",
        "FI_CXI_COLL_JOB_STEP_ID",
        "FI_CXI_COLL_MCAST_TOKEN",
        "FI_CXI_CQ_POLICY",
        "FI_CXI_DEVICE_NAME",
        "FI_CXI_LLRING_MODE",
        "FI_CXI_MR_TARGET_ORDERING",
        "FI_CXI_RDZV_PROTO",
        "FI_CXI_RGET_TC",
        "FI_CXI_RX_MATCH_MODE",
        "FI_CXI_TELEMETRY",
        "FI_EFA_IFACE",
    }
)
FI_SWITCHES = frozenset(
    {
        "FI_CXI_ATS",
        "FI_CXI_COLL_USE_DMA_PUT",
        "FI_CXI_DISABLE_ALT_READ_CMDQ",
        "FI_CXI_DISABLE_CUDA_SYNC_MEMOPS",
        "FI_CXI_DISABLE_HMEM_DEV_REGISTER",
        "FI_CXI_DISABLE_HOST_REGISTER",
        "FI_CXI_DISABLE_NON_INJECT_AMO_IDC",
        "FI_CXI_DISABLE_NON_INJECT_MSG_IDC",
        "FI_CXI_DISABLE_NON_INJECT_RMA_IDC",
        "FI_CXI_FORCE_DEV_REG_COPY",
        "FI_CXI_FORCE_ODP",
        "FI_CXI_MSG_LOSSLESS",
        "FI_CXI_ODP",
        "FI_CXI_OPTIMIZED_MRS",
        "FI_CXI_PROV_KEY_CACHE",
        "FI_EFA_FORK_SAFE",
        "FI_EFA_MR_CACHE_ENABLE",
        "FI_EFA_USE_DEVICE_RDMA",
        "FI_EFA_USE_HUGE_PAGE",
        "FI_EFA_USE_SM2",
        "FI_FORK_UNSAFE",
        "FI_HMEM_CUDA_USE_DMABUF",
        "FI_HMEM_CUDA_USE_GDRCOPY",
        "FI_HMEM_DISABLE_P2P",
        "FI_HMEM_ROCR_USE_DMABUF",
        "FI_MR_CUDA_CACHE_MONITOR_ENABLED",
        "FI_MR_ROCR_CACHE_MONITOR_ENABLED",
    }
)


def c_number(text: str) -> tuple[int, str]:
    """The number that C's strtoll in base 0 takes from a text, and what it leaves unread.

    A number that does not fit into 64 bits is the nearest that does.
    """
    match = _C_PREFIX.match(text)
    digits = match and (match["hex"] or match["octal"] or match["decimal"])
    if not match or not digits:
        return 0, text
    base = 16 if match["hex"] else 8 if match["octal"] else 10
    read = int(digits.lstrip("0xX")[:_ENOUGH_DIGITS] or "0", base)
    signed = -read if match["sign"] == "-" else read
    return max(-_MOST - 1, min(signed, _MOST)), text[match.end() :]


def number(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A number that C reads in base 0: NCCL's and libfabric's."""
    del context
    reader = "libfabric" if name.startswith("FI_") else "NCCL"
    if name in _WORDY and value.upper() in {"T", "TRUE", "F", "FALSE"}:
        digit = "1" if value.upper().startswith("T") else "0"
        yield warning(
            name, value, f'NCCL knows words here since 2.30 and reads 0 before; write "{digit}"'
        )
    elif _PLAIN.fullmatch(value) is None:
        yield error(name, value, f"{reader} {_as_read(name, value)}")
    elif abs(c_number(value)[0]) >= _MOST:
        yield error(
            name,
            value,
            f"{reader} takes its default: the number does not fit into 64 bits; write "
            f"{RANGES.get(name, Range())}",
        )
    else:
        yield from _outside(name, value, c_number(value)[0])


def _as_read(name: str, value: str) -> str:
    """What becomes of a text that is no plain number, and what to write instead."""
    read, rest = c_number(value)
    word = value.strip().lower()
    if word in _TRUE | _FALSE:
        meant = "1" if word in _TRUE else "0"
        return f'knows no words here and reads {read}, without a message; write "{meant}"'
    unit = rest.strip().lower().removesuffix("b").removesuffix("i")
    if rest and read and unit in _UNITS:
        return (
            f'stops at the unit and reads {read}; write the whole number, "{read << _UNITS[unit]}"'
        )
    takes = RANGES.get(name, Range())
    if not rest and value.strip().lstrip("+-").startswith("0") and read:
        digits = value.strip().lstrip("+-0") or "0"
        return f'takes the leading 0 for octal and reads {read}; write "{digits}"'
    if not rest:
        return f'reads {read} from it; write "{read}"'
    return f"reads {read} and drops {cut(repr(rest))}, without a message; write {takes}"


def torch_number(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A number that torch reads: decimal; what follows is dropped, other texts stop the program."""
    del context
    begins = re.match(r"\s*([+-]?[0-9]+)", value, re.ASCII)
    read = int(begins[1][:_ENOUGH_DIGITS]) if begins else 0
    if begins is None:
        what = "torch stops the program: this is no number"
    elif abs(read) > _MOST_OF_TORCH:
        what = "torch stops the program: the number does not fit into 32 bits"
    elif begins.group() != value:
        what = f"torch reads {read} and drops the rest"
    else:
        yield from _outside(name, value, read, reader="torch")
        return
    yield error(name, value, f"{what}; write {RANGES[name]}")


def torch_switch(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A switch of torch's, which stops the program at words that it does not know."""
    del context
    if value.lower() not in {"y", "yes", "1", "t", "true", "n", "no", "0", "f", "false"}:
        meant = "0" if value.strip().lower() in _FALSE else "1"
        yield error(
            name,
            value,
            "torch stops the program: it takes 1, true, t, yes, y or 0, false, f, no, n; write "
            f'"{meant}"',
        )


def fi_switch(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A switch of libfabric's, which keeps its default at words that it does not know."""
    del context
    if value.lower() not in _FI_WORDS | {"0", "1"}:
        yield error(
            name,
            value,
            "libfabric keeps its default: it takes 1, true, yes, on or 0, false, no, off; write "
            '"1" or "0"',
        )


def _outside(name: str, value: str, read: int, *, reader: str = "NCCL") -> Iterator[Problem]:
    takes = RANGES.get(name)
    if takes is None or takes.holds(read):
        return
    note = f" ({takes.note})" if takes.note else ""
    yield error(name, value, f"{reader} has no meaning for {read}{note}; write {takes}")


def rule_for(name: str) -> Rule | None:
    """The rule of a variable that is a number or a switch, if it is one."""
    if name in names.NCCL:
        return None if name in TEXTS else number
    if name in names.TORCH - TORCH_TEXTS:
        return torch_number if name in TORCH_NUMBERS else torch_switch
    if name in FI_SWITCHES:
        return fi_switch
    if name in (names.FI_CXI | names.FI_EFA) - FI_TEXTS:
        return fi_number
    return None


def fi_number(name: str, value: str, context: Context) -> Iterator[Problem]:
    """A number or a switch of libfabric's whose kind is not listed here: both forms pass."""
    if value.lower() not in _FI_WORDS:
        yield from number(name, value, context)
