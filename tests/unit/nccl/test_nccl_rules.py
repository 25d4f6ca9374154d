"""Values that work are accepted; values that do not are refused with what they would do and what
to write. Levels: an accepted value has no problem of level error; a good one not even a warning.
"""

from __future__ import annotations

import ctypes
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpctrain.cluster.nccl import names, rules, values
from hpctrain.cluster.nccl.rules import (
    DEBUG,
    ERROR,
    WARNING,
    Context,
    check_environment,
    check_variable,
)
from hpctrain.cluster.nccl.values import RANGES, TEXTS, c_number

ANYWHERE = Context()
SLINGSHOT = Context(kind="slingshot", required=("--network=disable_rdzv_get",))
OCI_HCAS = ",".join(f"mlx5_{n}" for n in (0, 1, *range(3, 11), *range(12, 18)))

# What stands in the sites' own documents and in NVIDIA's guide.
GOOD = [
    ("NCCL_SOCKET_IFNAME", "hsn0,hsn1,hsn2,hsn3"),
    ("NCCL_SOCKET_IFNAME", "hsn"),
    ("NCCL_SOCKET_IFNAME", "eth0"),
    ("NCCL_SOCKET_IFNAME", "enp0s12"),
    ("NCCL_SOCKET_IFNAME", "en"),
    ("NCCL_SOCKET_IFNAME", "^docker,lo,veth,eth"),
    ("NCCL_SOCKET_IFNAME", "=eth0,eth1"),
    ("NCCL_SOCKET_IFNAME", "^=docker0"),
    ("NCCL_SOCKET_FAMILY", "AF_INET6"),
    ("NCCL_IB_HCA", "ibp"),
    ("NCCL_IB_HCA", "mlx5"),
    ("NCCL_IB_HCA", f"={OCI_HCAS}"),
    ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
    ("NCCL_IB_HCA", "=mlx5_0::0:0,mlx5_1::0:1"),
    ("NCCL_IB_HCA", "^=mlx5_1,mlx5_4"),
    ("NCCL_IB_TIMEOUT", "22"),
    ("NCCL_IB_TC", "96"),
    ("NCCL_IB_SL", "0"),
    ("NCCL_IB_ADDR_FAMILY", "AF_INET6"),
    ("NCCL_IB_ADDR_RANGE", "fd02::/16"),
    ("NCCL_NET", "AWS Libfabric"),
    ("NCCL_NET", "OFI"),
    ("NCCL_NET_PLUGIN", "none"),
    ("NCCL_NET_GDR_LEVEL", "PHB"),
    ("NCCL_P2P_LEVEL", "NVL"),
    ("NCCL_PROTO", "^LL128"),
    ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"),
    ("NCCL_CROSS_NIC", "1"),
    ("NCCL_BUFFSIZE", "8388608"),
    ("NCCL_TOPO_FILE", "/opt/microsoft/ndv5-topo.xml"),
    ("FI_MR_CACHE_MONITOR", "kdreg2"),
    ("FI_CXI_RX_MATCH_MODE", "hybrid"),
    ("FI_CXI_DEFAULT_CQ_SIZE", "131072"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
]
MORE_GOOD = [
    ("NCCL_DEBUG", "info"),
    ("NCCL_DEBUG_SUBSYS", "^INIT,NET"),
    ("NCCL_DEBUG_FILE", "/scratch/logs/nccl.%h.%p"),
    ("NCCL_DEBUG_FILE", "/dev/stderr"),
    ("NCCL_IB_PKEY", "0x7fff"),
    ("NCCL_CUMEM_ENABLE", "0"),
    ("NCCL_CUMEM_ENABLE", "-2"),
    ("NCCL_CUMEM_HOST_ENABLE", "-1"),
    ("NCCL_NTHREADS", "384"),
    ("NCCL_CTA_POLICY", "EFFICIENCY|ZERO"),
    ("NCCL_CTA_POLICY", "2"),
    ("NCCL_NET_MERGE_LEVEL", "PORT"),
    ("NCCL_NET_MERGE_LEVEL", "PXB"),
    ("RCCL_MSCCLPP_READ_ALLRED", "1"),
    ("RCCL_P2P_BATCH_ENABLE", "1"),
    ("RCCL_CHANNEL_TUNING_ENABLE", "1"),
    ("RCCL_GFX9_CHEAP_FENCE_OFF", "1"),
    ("NCCL_NETDEVS_POLICY", "MAX:4"),
    ("NCCL_TUNER_PLUGIN", "libnccl-tuner-ofi.so"),
    ("NCCL_FASTRAK_IFNAME", "enp6s0,enp7s0,enp13s0"),
    ("NCCL_IB_GID_INDEX", "3"),
    ("RCCL_MSCCL_ENABLE", "0"),
    ("OFI_NCCL_PROTOCOL", "RDMA"),
    ("FI_PROVIDER", "tcp;ofi_rxm"),
    ("FI_EFA_USE_HUGE_PAGE", "0"),
    ("FI_VERBS_PREFER_XRC", "1"),
    ("FI_CXI_RDZV_PROTO", "default"),
    ("FI_CXI_OPTIMIZED_MRS", "false"),
    ("GLOO_SOCKET_IFNAME", "hsn0,hsn1"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TRUE"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "1800"),
    ("TORCH_FR_DUMP_TEMP_FILE", "/scratch/run/fr_"),
    ("HSA_FORCE_FINE_GRAIN_PCIE", "1"),
    ("MPICH_GPU_SUPPORT_ENABLED", "0"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("UCX_TLS", "tcp"),
    ("NCCL_IB_HCA", "mlx5_1"),  # an adapter mlx5_10 is rare, and nobody knows of one here
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
    ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2,>:8],backend:native"),
]

# The fifteen kinds of wrong value, most of them seen in public scripts.
BAD = [
    ("NCCL_IB_DISABLE", "true", 'knows no words here and reads 0, without a message; write "1"'),
    ("NCCL_CROSS_NIC", "010", 'takes the leading 0 for octal and reads 8; write "10"'),
    ("NCCL_IB_RETRY_CNT", "1abc", "reads 1 and drops 'abc', without a message; write 0 to 7"),
    ("NCCL_SOCKET_IFNAME", "=eth0,=eth1", 'a name with its own fits none; write e.g. "=eth0,eth1"'),
    ("NCCL_SOCKET_IFNAME", "=^eth0", r'\^ comes before =; write e.g. "\^=eth0"'),
    ("NCCL_SOCKET_IFNAME", "eth0, eth1", 'a blank becomes part of the name.*e.g. "eth0,eth1"'),
    ("NCCL_SOCKET_IFNAME", "e", "ignores a value of one character"),
    ("NCCL_SOCKET_FAMILY", "ipv4", 'ignores it without a message.*write "AF_INET"'),
    ("NCCL_IB_HCA", "hsn0", "a network interface, not an adapter, so NCCL finds no InfiniBand"),
    ("NCCL_IB_TIMEOUT", "120", r"no meaning for 120 \(it is an exponent, not seconds.*1 to 31"),
    ("NCCL_NET_GDR_LEVEL", "phb", "compares upper case letter by letter.*write LOC, PIX, PXB, PHB"),
    ("NCCL_NET", "'AWS Libfabric'", "the quotes are part of the value.*write AWS Libfabric"),
    ("NCCL_ALGO", "Rings", "stops at it since 2.24, and ignored it before; write Ring"),
    ("GLOO_SOCKET_IFNAME", "=ib0", 'looks for an interface whose name.* and stops.*e.g. "ib0"'),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4", "torch has no meaning for 4; write 0, 1, 2 or 3"),
]
MORE_BAD = [
    ("NCCL_IB_DISABLE", "off", 'reads 0, without a message; write "0"'),
    ("NCCL_IB_DISABLE", "2", "NCCL has no meaning for 2; write 0 or 1"),
    ("NCCL_BUFFSIZE", "8M", 'stops at the unit and reads 8; write the whole number, "8388608"'),
    ("NCCL_BUFFSIZE", "4", r"no meaning for 4 \(it is counted in bytes\); write 1024 or more"),
    ("NCCL_BUFFSIZE", "8e6", "reads 8 and drops 'e6', without a message"),
    ("NCCL_P2P_NET_CHUNKSIZE", "512KiB", 'write the whole number, "524288"'),
    ("NCCL_MIN_NCHANNELS", "+4", 'reads 4 from it; write "4"'),
    ("NCCL_MIN_NCHANNELS", "1_000", "reads 1 and drops '_000'"),
    ("NCCL_WORK_FIFO_BYTES", "9" * 20, "takes its default: the number does not fit into 64 bits"),
    ("NCCL_IB_TC", "256", r"the header's field has 8 bits\); write 0 to 255"),
    ("NCCL_IB_SL", "16", "write 0 to 15"),
    ("NCCL_IB_TIMEOUT", "0", "0 or 32 and more wait for ever"),
    ("NCCL_IB_QPS_PER_CONNECTION", "129", "write 1 to 128"),
    ("NCCL_NTHREADS", "500", "write 64, 96, 128, .* 480 or 512"),
    ("NCCL_CUMEM_ENABLE", "2", "-2 leaves it to NCCL.*; write -2, 0 or 1"),
    ("NCCL_CTA_POLICY", "fast", "leaves out words that it lacks.*; write .*EFFICIENCY"),
    ("NCCL_NET_MERGE_LEVEL", "foo", "write"),
    ("NCCL_P2P_LEVEL", "PORT", "is for NCCL_NET_MERGE_LEVEL"),
    ("NCCL_NVLS_ENABLE", "3", "write 0, 1 or 2"),
    ("NCCL_SOCKET_NTHREADS", "32", "write 1 to 16"),
    ("NCCL_SOCKET_IFNAME", "eth*", 'literally.*a beginning is enough, e.g. "eth"'),
    ("NCCL_SOCKET_IFNAME", "10.1.0.0/16", "has an address; NCCL compares names of interfaces"),
    ("NCCL_SOCKET_IFNAME", "eth0:1", 'drops what follows the colon of a name; write e.g. "eth0"'),
    ("NCCL_SOCKET_IFNAME", "verylongifname01", "has more than 15 characters"),
    ("NCCL_SOCKET_IFNAME", "^=", "names no interface"),
    ("NCCL_SOCKET_IFNAME", "^docker,^lo", 'with its own fits none; write .* "\\^=docker,lo"'),
    ("NCCL_SOCKET_IFNAME", ",".join(f"e{n}" for n in range(17)), "reads 16 names and drops the"),
    ("NCCL_SOCKET_IFNAME", "lo", "ranks of several nodes never meet"),
    ("NCCL_SOCKET_FAMILY", "af_inet6", 'write "AF_INET6", in upper case'),
    ("NCCL_IB_HCA", "=mlx5_0,=mlx5_1", "one = hold for the whole list"),
    ("NCCL_IB_HCA", "=mlx5_0:one", "reads .* as adapter:port:rail:plane, each a number"),
    ("NCCL_IB_HCA", "=" + ",".join(f"m_{n}" for n in range(33)), "reads 32 adapters and drops"),
    ("NCCL_IB_HCA", "enp0s12", "a network interface, not an adapter"),
    ("NCCL_IB_ADDR_FAMILY", "ipv6", 'write "AF_INET6"'),
    ("NCCL_IB_ADDR_RANGE", "10.0.0.1", "has no /, so NCCL ignores it and takes any address"),
    ("NCCL_IB_ADDR_RANGE", "10.0.0.0/64", "is no address and length, so NCCL ignores it"),
    ("NCCL_NET", "infiniband", 'no network calls itself so, and NCCL stops.*write "IB"'),
    ("NCCL_NET", "tcp", 'write "Socket"'),
    ("NCCL_NET", "slingshot", 'write "AWS Libfabric"'),
    ("NCCL_NET", " OFI", 'the blank around it is part of the value; write "OFI"'),
    ("NCCL_NET_PLUGIN", "IB", "looks for a library libnccl-net-IB.so; a network is chosen by"),
    (
        "NCCL_NET_GDR_LEVEL",
        "PCI",
        "ignores this without a message.*write LOC, PIX, PXB, PHB or SYS",
    ),
    ("NCCL_ALGO", "Ring,^Tree", "stops at it since 2.24.*after one \\^ to leave them out"),
    ("NCCL_ALGO", "Ring, Tree", "stops at it since 2.24.*without blanks"),
    ("NCCL_ALGO", "Ring,", "stops at it since 2.24"),
    ("NCCL_ALGO", "Collnet", "write .*CollNetDirect"),
    ("NCCL_ALGO", "alltoall:Ring", "more lists after ; begin with Broadcast"),
    ("NCCL_ALGO", "Ring;Tree", "more lists after ; begin with Broadcast"),
    ("NCCL_PROTO", "LL64", "NCCL stops at it .*; write LL, LL128 or Simple"),
    ("NCCL_DEBUG", "DEBUG", "ignores the value without a message; write VERSION, WARN"),
    ("NCCL_DEBUG_SUBSYS", "INIT,NETWORK", "does not know a subsystem here; write, between commas"),
    ("NCCL_DEBUG_FILE", "/scratch/nccl.log", r'overwrite each other.*write "/scratch/nccl.log.%h'),
    ("NCCL_DEBUG_FILE", "~/nccl.%h.%p", "nobody expands ~ here"),
    ("NCCL_TOPO_FILE", "$HOME/topo.xml", r"nobody expands \$HOME here: ranks see this very text"),
    ("NCCL_NETDEVS_POLICY", "MAX", "falls back to AUTO; write AUTO, ALL or MAX:2"),
    ("NCCL_CHECK_MODE", "on", "write DEFAULT, DEBUG_LOCAL or DEBUG_GLOBAL"),
    ("NCCL_COMM_ID", "10.0.0.1:5000", "every job here would meet at this one address"),
    ("NCCL_HOSTID", "node", "every node would count as the same host"),
    ("NCCL_CROSS_NIC", "", "is empty, which is no value.*name the variable in env.unset"),
    ("GLOO_SOCKET_IFNAME", "hsn", 'takes whole names, and a beginning.*write.*"hsn0"'),
    ("GLOO_SOCKET_IFNAME", "^docker", "Gloo cannot leave interfaces out"),
    ("GLOO_SOCKET_IFNAME", "eth0, eth1", 'blanks and empty ones too.*write e.g. "eth0,eth1"'),
    ("GLOO_SOCKET_IFNAME", "eth*", "literally and finds none"),
    ("GLOO_SOCKET_IFNAME", "lo", "ranks of several nodes never meet"),
    ("GLOO_SOCKET_IFNAME", "verylongifname01", "has more than 15 characters"),
    ("NCCL_IB_HCA", "=" + "m" * 64, "cuts names after 63 characters"),
    ("NCCL_TUNER_PLUGIN", "~/libtuner.so", "nobody expands ~ here"),
    ("FI_PROVIDER", "cxi,^tcp", 'before the whole list; write e.g. "\\^cxi,tcp"'),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "on", 'torch stops the program: it takes 1.*write "1"'),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "0", "write 1 or more"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "10min", "torch reads 10 and drops the rest"),
    ("TORCH_FR_BUFFER_SIZE", "9999999999", "torch stops the program: .* not fit into 32 bits"),
    ("NCCL_WORK_FIFO_BYTES", "9" * 5000, "does not fit into 64 bits"),
    ("TORCH_FR_BUFFER_SIZE", "many", "torch stops the program: this is no number"),
    ("TORCH_FR_DUMP_TEMP_FILE", "~/fr_", "nobody expands ~ here"),
    ("TORCH_DISTRIBUTED_DEBUG", "FULL", "torch stops at other words; write OFF, INFO or DETAIL"),
    (
        "FI_PROVIDER",
        "cxi, tcp",
        'a blank becomes part of the name; write it without, e.g. "cxi,tcp"',
    ),
    ("FI_MR_CACHE_MONITOR", "Memhooks", 'keeps its default, since case counts; write "memhooks"'),
    ("FI_CXI_RX_MATCH_MODE", "soft", "takes hardware; write hardware, software or hybrid"),
    ("FI_CXI_RDZV_PROTO", "altread", "keeps its default; write default or alt_read"),
    ("FI_CXI_DISABLE_HOST_REGISTER", "2", "keeps its default: it takes 1, true, yes, on"),
    ("FI_CXI_RDZV_THRESHOLD", "16k", 'libfabric stops at the unit.*"16384"'),
    ("OFI_NCCL_PROTOCOL", "TCP", "stops at other words; write SENDRECV or RDMA"),
    ("WANDB_API_KEY", "abc", "looks like a secret.*spec.json"),
    (
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segment:True",
        'torch stops at "expandable_segment", which is no option; write expandable_segments',
    ),
    ("PYTORCH_ALLOC_CONF", "expandable_segments=True", 'stops at "expandable_segments=True".*:'),
]
DOUBTFUL = [
    ("NCCL_SOKET_IFNAME", "eth0", "did you mean NCCL_SOCKET_IFNAME?"),
    ("NCCL_MIN_CHANNELS", "4", "did you mean NCCL_MIN_NCHANNELS?"),
    ("NCCL_TIMEOUT", "1800", "nothing reads it: the time-out of collectives is an argument of"),
    ("NCCL_SOCKET_TIMEOUT", "300", "nothing reads it; use NCCL_SOCKET_RETRY_CNT"),
    ("NCCL_NET_MAX_REQUESTS", "8", "is fixed when NCCL is built; leave it out"),
    ("NCCL_AVOID_RECORD_STREAMS", "1", "did you mean TORCH_NCCL_AVOID_RECORD_STREAMS?"),
    ("NCCL_OFI_PLATFORM", "AWS", "did you mean OFI_NCCL_PLATFORM?"),
    ("TORCH_NCCL_ASYNC_HANDLING", "1", "common misspelling; use TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("NCCL_ASYNC_ERROR_HANDLING", "3", "use TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("NCCLDEBUG", "INFO", "nothing reads this name; did you mean NCCL_DEBUG?"),
    ("FI_CXI_OVFLOW_BUF_SIZE", "8388608", "did you mean FI_CXI_OFLOW_BUF_SIZE?"),
    ("NCCL_NET_GDR_LEVEL", "3", "is the old numbering.*PHB for 3"),
    ("NCCL_NET_GDR_LEVEL", "NVB", "NCCL's own and not in its guide; write one of LOC"),
    ("NCCL_NET_GDR_LEVEL", "9", "SYS for more"),
    ("NCCL_NET_GDR_LEVEL", "NVL", "is for NCCL_P2P_LEVEL; write one of LOC"),
    ("NCCL_SOCKET_IFNAME", "eth0,,eth1", "has an empty entry"),
    ("NCCL_ALGO", "Tree", 'Ring is not taken by itself.*e.g. "Tree,Ring"'),
    ("NCCL_PROTO", "LL128", "data come out wrong"),
    ("NCCL_SET_THREAD_NAME", "true", 'knows words here since 2.30 and reads 0 before; write "1"'),
    ("NCCL_DEBUG_FILE", "/scratch/nccl.%p", "processes of two nodes can have the same number"),
    ("NCCL_TOPO_FILE", "topo.xml", "is looked for in the working directory of each rank"),
    ("NCCL_NET", "Omni", "needs a network of exactly this name and stops without one"),
    ("TORCH_FR_DUMP_TEMP_FILE", "/dev/shm/fr_", "lies on the node itself and is lost"),  # noqa: S108
    ("FI_PROVIDER", "gni", "hpctrain knows no provider of a name here"),
    ("PYTORCH_ALLOC_CONF", "zero_copy:1", 'hpctrain knows no option "zero_copy"'),
    ("LD_LIBRARY_PATH", "/opt/lib", "takes the place of the libraries that modules"),
    ("PATH", "/opt/bin", "takes the place of the programs that modules"),
    ("PYTHONPATH", "/opt/own", "takes the place of the packages that modules"),
    ("SLURM_MPI_TYPE", "pmix", "reaches the ranks only, after srun has read its own"),
]
REASON = [
    ("NCCL_P2P_DISABLE", "1", "is one of NVIDIA's debugging variables.*why = "),
    ("NCCL_NET_GDR_LEVEL", "PHB", "debugging variables"),
    ("NCCL_IB_TC", "41", "a policy of this one fabric's switches"),
    ("NCCL_IB_GID_INDEX", "3", "finds the index by itself since 2.21"),
    ("NCCL_DEBUG", "TRACE", "prints every call of every rank"),
    ("CUDA_LAUNCH_BLOCKING", "1", "slows training: the host waits for each kernel"),
]


def messages(name: str, value: str, level: str, context: Context = ANYWHERE) -> list[str]:
    return [
        problem.message
        for problem in check_variable(name, value, context)
        if problem.level == level
    ]


def test_there_are_34_good_values_and_15_kinds_of_bad_ones():
    assert (len(GOOD), len(BAD)) == (34, 15)


@pytest.mark.parametrize(("name", "value"), GOOD + MORE_GOOD)
def test_a_good_value_is_accepted_without_a_warning(name, value):
    assert {one.level for one in check_variable(name, value, ANYWHERE)} <= {DEBUG}


@pytest.mark.parametrize(("name", "value", "told"), BAD + MORE_BAD)
def test_a_wrong_value_is_an_error_that_says_what_it_does_and_what_to_write(name, value, told):
    found = messages(name, value, ERROR)

    assert any(re.search(told, message) for message in found), found
    assert all(message.isprintable() and message.startswith(name) for message in found)


@pytest.mark.parametrize(("name", "value", "told"), DOUBTFUL)
def test_a_doubtful_value_is_a_warning_and_still_accepted(name, value, told):
    found = messages(name, value, WARNING)

    assert any(re.search(told, message) for message in found), found
    assert not messages(name, value, ERROR)


@pytest.mark.parametrize(("name", "value", "told"), REASON)
def test_a_value_for_debugging_asks_for_its_reason(name, value, told):
    assert any(re.search(told, message) for message in messages(name, value, DEBUG))


def pairs(env: dict[str, str], context: Context = ANYWHERE) -> dict[str, list[tuple[str, str]]]:
    """Errors and warnings by name."""
    found = check_environment(env, context)
    kept = {
        name: [(one.level, one.message) for one in problems if one.level != DEBUG]
        for name, problems in found.items()
    }
    return {name: problems for name, problems in kept.items() if problems}


KIND = {kind: Context(kind=kind) for kind in ("ib", "roce", "efa", "slingshot", "tcp")}
ALONE = Context(kind="slingshot", multi_node=False)
TOGETHER = [
    # the environment, what is known, which variable it is about, level, message
    ({"FI_CXI_RDZV_PROTO": "alt_read"}, KIND["slingshot"], ERROR, '--network=disable_rdzv_get" to'),
    ({"FI_MR_CACHE_MONITOR": "memhooks"}, KIND["slingshot"], ERROR, "can deadlock together with"),
    ({"NCCL_NET": "OFI"}, ALONE, ERROR, "on one node the plugin does not start"),
    ({"NCCL_NET": "IB"}, KIND["efa"], ERROR, "a fabric of kind efa has no InfiniBand"),
    ({"NCCL_NET": "Socket"}, KIND["ib"], WARNING, "goes over TCP and past the ib fabric"),
    ({"NCCL_NET": "OFI", "NCCL_NET_PLUGIN": "none"}, ANYWHERE, ERROR, "=none turns off"),
    ({"NCCL_NET": "OFI", "NCCL_NET_PLUGIN": "ofi"}, ANYWHERE, WARNING, "which wins"),
    ({"FI_PROVIDER": "efa"}, KIND["slingshot"], ERROR, "leaves out cxi, the provider"),
    ({"FI_PROVIDER": "^efa,tcp"}, KIND["efa"], ERROR, "leaves out efa, the provider"),
    ({"NCCL_IB_DISABLE": "1"}, KIND["ib"], WARNING, "leaves the ib fabric out and goes over TCP"),
    ({"NCCL_IB_TIMEOUT": "22"}, KIND["slingshot"], WARNING, "does nothing on a fabric of kind"),
    ({"FI_CXI_RX_MATCH_MODE": "hybrid"}, KIND["ib"], WARNING, "only on slingshot"),
    ({"FI_EFA_USE_HUGE_PAGE": "0"}, KIND["roce"], WARNING, "only on efa"),
    ({"FI_EFA_USE_DEVICE_RDMA": "1"}, KIND["efa"], WARNING, "is the default since libfabric 1.18"),
    ({"RDMAV_HUGEPAGES_SAFE": "1"}, KIND["efa"], WARNING, "AWS says not to set"),
    ({"NCCL_IB_GID_INDEX": "3"}, KIND["ib"], WARNING, "ignores it on InfiniBand links"),
    (
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        KIND["tcp"],
        ERROR,
        "=8 is 128 sockets for each connection, and NCCL takes 64 at most; write 8",
    ),
    (
        {"NCCL_MIN_NCHANNELS": "32", "NCCL_MAX_NCHANNELS": "8"},
        ANYWHERE,
        ERROR,
        "is more than NCCL_MAX_NCHANNELS=8",
    ),
    ({"NCCL_IB_SPLIT_DATA_ON_QPS": "1"}, KIND["ib"], WARNING, "does nothing with one queue pair"),
    ({"NCCL_IB_TIMEOUT": "25"}, KIND["ib"], WARNING, "is tried for 962 s.*after 480 s"),
    ({"NCCL_IB_ADDR_RANGE": "fd02::/16"}, KIND["roce"], ERROR, 'ADDR_FAMILY = "AF_INET6" beside'),
    (
        {"NCCL_ALGO": "NVLS,NVLSTree", "NCCL_NVLS_ENABLE": "0"},
        ANYWHERE,
        ERROR,
        "turns off the only algorithms named",
    ),
    ({"NCCL_P2P_LEVEL": "NVL", "NCCL_P2P_DISABLE": "1"}, ANYWHERE, WARNING, "wins over it"),
    (
        {"NCCL_DEBUG_FILE": "/x/%h.%p"},
        ANYWHERE,
        WARNING,
        "writes nothing there without NCCL_DEBUG; write",
    ),
    (
        {"NCCL_DEBUG_SUBSYS": "NET", "NCCL_DEBUG": "WARN"},
        ANYWHERE,
        WARNING,
        'on NCCL_DEBUG=INFO and more only; write NCCL_DEBUG = "INFO"',
    ),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ANYWHERE, WARNING, 'writes no dump; write "3"'),
    (
        {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "=mlx5_0"},
        ANYWHERE,
        WARNING,
        "leaves out all adapters, those of NCCL_IB_HCA too",
    ),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, ANYWHERE, WARNING, "hangs for ever"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, ANYWHERE, WARNING, "lives on without its"),
    (
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
        ANYWHERE,
        WARNING,
        "there is nothing to dump",
    ),
    ({"NCCL_FASTRAK_IFNAME": "enp6s0"}, KIND["ib"], WARNING, "only on gpudirect-tcp; leave"),
    ({"NCCL_SOCKET_NTHREADS": "4"}, KIND["ib"], WARNING, "only on gpudirect-tcp and tcp"),
    (
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "100", "TORCH_FR_BUFFER_SIZE": "2000"},
        ANYWHERE,
        WARNING,
        'which has 2000 and wins where torch knows both; write "2000" in both',
    ),
    (
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"},
        ANYWHERE,
        WARNING,
        "there is nothing to dump with a buffer of 0",
    ),
]


@pytest.mark.parametrize(("env", "context", "level", "told"), TOGETHER)
def test_what_variables_mean_together_is_told_at_the_first_of_them(env, context, level, told):
    name = next(iter(env))

    found = pairs(env, context)

    assert list(found) == [name]
    assert any(one == level and re.search(told, message) for one, message in found[name]), found


@pytest.mark.parametrize(
    ("env", "context"),
    [
        ({"FI_CXI_RDZV_PROTO": "alt_read"}, SLINGSHOT),
        (
            {"FI_CXI_RDZV_PROTO": "alt-read"},
            Context(kind="slingshot", required=["--network", "job_vni,disable_rdzv_get"]),
        ),
        ({"NCCL_NET": "AWS Libfabric"}, SLINGSHOT),
        ({"NCCL_NET": "Socket"}, KIND["tcp"]),
        ({"FI_PROVIDER": "^tcp"}, SLINGSHOT),
        ({"FI_PROVIDER": "cxi,tcp"}, SLINGSHOT),
        ({"NCCL_IB_DISABLE": "1"}, KIND["tcp"]),
        ({"NCCL_IB_TIMEOUT": "22"}, KIND["roce"]),
        ({"NCCL_IB_TIMEOUT": "25", "NCCL_IB_RETRY_CNT": "3"}, KIND["ib"]),
        ({"NCCL_IB_TIMEOUT": "25", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800"}, KIND["ib"]),
        ({"NCCL_IB_ADDR_RANGE": "fd02::/16", "NCCL_IB_ADDR_FAMILY": "AF_INET6"}, KIND["roce"]),
        ({"NCCL_IB_ADDR_RANGE": "10.0.0.0/8"}, KIND["roce"]),
        ({"NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "8"}, KIND["tcp"]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_FR_BUFFER_SIZE": "0"}, ANYWHERE),
        ({"FI_EFA_USE_DEVICE_RDMA": "1"}, Context(kind="efa", old_plugin=True)),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "NET"}, ANYWHERE),
        ({"NCCL_P2P_LEVEL": "NVL", "NCCL_P2P_DISABLE": "0"}, ANYWHERE),
        ({"NCCL_IB_DISABLE": "0x0"}, KIND["ib"]),
    ],
)
def test_variables_that_go_together_are_left_in_peace(env, context):
    assert pairs(env, context) == {}


NODE = Context(netdevs=frozenset({"lo", "eth0", "ib0"}), hcas=frozenset({"mlx5_0", "mlx5_10"}))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NCCL_SOCKET_IFNAME", "hsn", 'no interface of the node begins with "hsn".*there are eth0'),
        ("NCCL_SOCKET_IFNAME", "=eth", 'no interface of the node is "eth"'),
        ("GLOO_SOCKET_IFNAME", "eth1", 'no interface of the node is "eth1"'),
        ("NCCL_IB_HCA", "=mlx5_1", 'no adapter of the node is "mlx5_1".*mlx5_0, mlx5_10'),
        ("NCCL_IB_HCA", "ib0", "a network interface, not an adapter"),
    ],
)
def test_a_name_is_held_against_what_the_node_has(name, value, told):
    assert any(re.search(told, message) for message in messages(name, value, ERROR, NODE))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0"),
        ("NCCL_IB_HCA", "=mlx5_0:1"),
        ("NCCL_IB_HCA", "mlx5"),
        ("NCCL_IB_HCA", "^=mlx5_7"),
    ],
)
def test_a_name_that_the_node_has_is_accepted(name, value):
    assert messages(name, value, ERROR, NODE) == []


def test_an_adapter_that_is_called_like_an_interface_is_accepted_where_the_node_has_it():
    node = Context(netdevs=frozenset({"eth0"}), hcas=frozenset({"ib0"}))

    assert messages("NCCL_IB_HCA", "=ib0", ERROR, node) == []
    assert messages("NCCL_IB_HCA", "=ib0", ERROR, Context())


def test_loopback_is_fine_on_one_node():
    assert messages("NCCL_SOCKET_IFNAME", "lo", ERROR, Context(multi_node=False)) == []


def test_lists_for_functions_are_refused_for_a_nccl_that_cannot_read_them():
    old, new = Context(nccl="2.23.4"), Context(nccl="2.24")

    assert "that came with 2.24" in messages("NCCL_ALGO", "AllReduce:Tree", ERROR, old)[0]
    assert messages("NCCL_ALGO", "AllReduce:Tree", ERROR, new) == []
    for value in ("Simple,LL128", "AllReduce:LL128", "Simple;Reduce:ll128,LL"):
        assert "data come out wrong" in messages("NCCL_PROTO", value, WARNING)[0]
    for value in ("^LL128", "Simple;AllReduce:^LL,LL128", "AllReduce:^LL128", "LL;Reduce:Simple"):
        assert messages("NCCL_PROTO", value, WARNING) + messages("NCCL_PROTO", value, ERROR) == []


def test_an_index_that_an_older_nccl_needs_is_left_in_peace():
    assert messages("NCCL_IB_GID_INDEX", "3", DEBUG, Context(nccl="2.20.5")) == []
    assert messages("NCCL_IB_GID_INDEX", "-1", DEBUG, Context(nccl="2.27")) == []


def test_errors_come_first_and_names_without_problems_are_left_out():
    env = {"NCCL_BUFFSIZE": "8M", "NCCL_CROSS_NIC": "1"}

    found = check_environment(env, ANYWHERE)

    assert list(found) == ["NCCL_BUFFSIZE"]
    assert [one.level for one in found["NCCL_BUFFSIZE"]] == [ERROR, DEBUG]


def test_a_message_stays_on_one_line_and_is_cut_where_the_value_is_long():
    long, broken = (
        messages("NCCL_CROSS_NIC", "x" * 500, ERROR),
        messages("NCCL_NET", "a\nb", WARNING),
    )

    assert len(long[0]) < 250
    assert broken[0].startswith(r"NCCL_NET='a\nb': ")


def test_the_tables_speak_of_names_that_there_are():
    assert {name for name in RANGES if name.startswith("NCCL_")} <= names.NCCL
    assert {name for name in RANGES if name.startswith("TORCH_")} <= names.TORCH
    assert names.NCCL >= TEXTS
    assert names.NCCL >= names.NCCL_DEBUGGING


RANGE_ROWS = names.TABLE["range"]
WORD_ROWS = names.TABLE["words"]


def levels(name, value):
    return {problem.level for problem in check_variable(name, value, ANYWHERE)}


@pytest.mark.parametrize("row", RANGE_ROWS, ids=lambda row: row["names"][0])
def test_a_range_takes_and_refuses_its_examples(row):
    for name in row["names"]:
        assert [n for n in row["takes"] if ERROR in levels(name, str(n))] == []
        assert [n for n in row["refuses"] if ERROR not in levels(name, str(n))] == []
    assert row["takes"]
    assert row["refuses"]


@pytest.mark.parametrize("row", WORD_ROWS, ids=lambda row: row["name"])
def test_a_set_of_words_takes_its_words_and_refuses_its_examples(row):
    taken = [*row["words"], *row.get("also", ())]

    assert [word for word in taken if ERROR in levels(row["name"], word)] == []
    assert [word for word in row["refuses"] if ERROR not in levels(row["name"], word)] == []
    assert row["refuses"]


def test_a_range_that_is_switched_off_refuses_nothing(monkeypatch):
    """The examples depend on the row: without it each number that it refuses is taken."""
    for row in RANGE_ROWS:
        for name in row["names"]:
            if name in names.NCCL:
                monkeypatch.delitem(values.RANGES, name)
                assert [n for n in row["refuses"] if ERROR in levels(name, str(n))] == []


def test_no_name_is_listed_twice():
    ranged = [name for row in RANGE_ROWS for name in row["names"]]

    assert sorted(ranged) == sorted(set(ranged))
    assert len(WORD_ROWS) == len({row["name"] for row in WORD_ROWS})


ROWS = [*names.TABLE["alone"], *names.TABLE["together"]]
_NAMED = {one for one in names.NCCL | names.TORCH for row in ROWS if re.fullmatch(row["name"], one)}
_READ = sorted({*rules._RULES, *RANGES, *_NAMED})


@settings(max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from(_READ),
        st.one_of(st.text(max_size=8), st.text("^=,;:.*01aR/%$'\"\n ", max_size=12)),
        max_size=4,
    ),
    st.sampled_from([ANYWHERE, ALONE, NODE, *KIND.values()]),
)
def test_whatever_stands_there_is_judged_in_one_line(env, context):
    for name, problems in check_environment(env, context).items():
        assert all(one.message.isprintable() and one.message.startswith(name) for one in problems)


_strtoll = ctypes.CDLL(None).strtoll
_strtoll.restype = ctypes.c_longlong
_strtoll.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int]


def by_c(text: str) -> tuple[int, str]:
    """What this machine's own strtoll reads in base 0, and what it leaves."""
    encoded, end = text.encode(), ctypes.c_char_p()
    number = _strtoll(encoded, ctypes.byref(end), 0)
    return number, (end.value or b"").decode()


@settings(max_examples=60)
@given(st.text(alphabet="0123456789abcdefxX+- kM_\t", max_size=22))
@example("")
@example("0x")
@example("08")
@example("0000000000000000000000000000000000000000000000000000000000000000000000017")
@example("-0x10z")
@example("99999999999999999999")
def test_numbers_are_read_as_c_reads_them(text):
    assert c_number(text) == by_c(text)


@settings(max_examples=60)
@given(st.one_of(st.integers().map(str), st.integers(0).map(hex), st.from_regex(r"[-+]?0?\d+")))
def test_a_number_that_is_accepted_means_the_same_to_c_and_to_a_person(text):
    if not messages("NCCL_WORK_FIFO_BYTES", text, ERROR):
        assert by_c(text) == (int(text, 0), "")


def test_a_beginning_is_told_of_where_the_node_has_an_adapter_that_it_takes_too():
    node = Context(hcas=frozenset({"mlx5_1", "mlx5_10"}))

    [problem] = check_variable("NCCL_IB_HCA", "mlx5_1", node)

    assert problem.level == WARNING
    assert '"mlx5_1" takes mlx5_10 too; write "=mlx5_1"' in problem.message
    assert check_variable("NCCL_IB_HCA", "mlx5_1", Context(hcas=frozenset({"mlx5_1"}))) == []


def test_each_row_has_an_example_above():
    single = [({name: value}, ANYWHERE) for name, value, _ in BAD + MORE_BAD + DOUBTFUL + REASON]
    single += [({"NCCL_ALGO": "AllReduce:Tree"}, Context(nccl="2.23.4"))]
    shown = [*single, *((env, context) for env, context, *_ in TOGETHER)]

    missing = [
        row["message"]
        for row in ROWS
        if not any(rules._fits(row, name, env, context) for env, context in shown for name in env)
    ]

    assert missing == []
