"""All rules for environment values: what their reader makes of them, before a job finds out.

They parse values as NCCL, RCCL, libfabric, Gloo and torch do: numbers and closed sets in
`values.py`, lists in `lists.py`, and here what several variables mean together, on this fabric,
with these options of sbatch. Each of these rules takes a whole environment and yields (the variable
to tell of, what); values that are wrong by themselves are reported by the other rules and pass
here. variables.toml has all names, ranges and sets of words. Pure: what is known of the site is a
`Context`. tests/unit/nccl/test_nccl_rules.py has a good and a wrong value for each rule.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence

from hpctrain.cluster.nccl import lists, values
from hpctrain.cluster.nccl.names import (
    DEBUG,
    ERROR,
    TABLE,
    WARNING,
    Context,
    Problem,
    Rule,
    check_name,
    check_secret,
    error,
    of_variable,
    warning,
)
from hpctrain.cluster.nccl.values import FAMILIES, LIBFABRIC_NETS, c_number

__all__ = [
    "DEBUG",
    "ERROR",
    "WARNING",
    "Context",
    "Problem",
    "check_environment",
    "check_variable",
]

Env = Mapping[str, str]
Found = Iterator[tuple[str, Problem]]
PairRule = Callable[[Env, Context], Found]

_VERBS = frozenset({"ib", "roce"})
_MOST_SOCKETS = 64
_TICK_S = 4.096e-6
_HEARTBEAT_S = 480
_RDZV_OPTION = "--network=disable_rdzv_get"


def _wrong(name: str, message: str) -> tuple[str, Problem]:
    return name, error(message)


def _doubtful(name: str, message: str) -> tuple[str, Problem]:
    return name, warning(message)


def _int(env: Env, name: str) -> int | None:
    """The number as NCCL reads it, None where the variable is not set."""
    return c_number(env[name])[0] if env.get(name) else None


def _has_network_word(required: Sequence[str], word: str) -> bool:
    """Whether --network, in one option or two words, has that word in its list."""
    words = " ".join(required).replace("--network ", "--network=").split()
    lists = [one.removeprefix("--network=") for one in words if one.startswith("--network=")]
    return any(word in one.strip("\"'").split(",") for one in lists)


def slingshot(env: Env, context: Context) -> Found:
    """What Slingshot's provider needs beside its variables, and what breaks it."""
    proto = env.get("FI_CXI_RDZV_PROTO", "").replace("-", "_")
    if proto == "alt_read" and not _has_network_word(context.required, "disable_rdzv_get"):
        name = "FI_CXI_RDZV_PROTO"
        yield _wrong(
            name,
            "works only where the job turns the other protocol off in the driver, and "
            f'collectives hang without; add "{_RDZV_OPTION}" to slurm.required',
        )
    if context.kind != "slingshot":
        return
    if env.get("FI_MR_CACHE_MONITOR") == "memhooks":
        name = "FI_MR_CACHE_MONITOR"
        yield _wrong(
            name,
            "can deadlock together with NCCL's plugin on Slingshot (OLCF); write "
            '"userfaultfd", or "kdreg2" where the site has its module',
        )
    if not context.multi_node and "NCCL_NET" in env:
        name = "NCCL_NET"
        yield _wrong(
            name,
            "on one node the plugin does not start and NCCL stops, since nothing else may "
            "take its place; move it to env.multi_node",
        )


_PROVIDER_OF = {"slingshot": "cxi", "efa": "efa"}


def network(env: Env, context: Context) -> Found:
    """Choices of a network that the fabric does not have, or that pass it by."""
    name, value = "NCCL_NET", env.get("NCCL_NET", "").strip().lower()
    plugin = env.get("NCCL_NET_PLUGIN", "")
    if plugin.lower() == "none" and value in LIBFABRIC_NETS:
        yield _wrong(
            name,
            "comes from the plugin that NCCL_NET_PLUGIN=none turns off, and NCCL stops "
            "without a network; leave one of the two out",
        )
    elif plugin and value:
        yield _doubtful(
            name,
            f"NCCL first looks for the plugin of NCCL_NET_PLUGIN={plugin}, which wins (CSCS); "
            "leave one of the two out",
        )
    wants = _PROVIDER_OF.get(context.kind)
    if context.multi_node and value == "ib" and wants:
        yield _wrong(
            name,
            f"a fabric of kind {context.kind} has no InfiniBand, and NCCL stops; write "
            '"AWS Libfabric"',
        )
    elif context.multi_node and value == "socket" and context.kind not in {"", "tcp"}:
        yield _doubtful(
            name,
            f"all traffic between nodes goes over TCP and past the {context.kind} fabric; "
            "leave it out",
        )
    yield from _provider(env, context, wants)
    if _int(env, "NCCL_IB_DISABLE") == 1 and "NCCL_IB_HCA" in env:
        rest = "leaves out all adapters, those of NCCL_IB_HCA too; leave out one of the two"
        yield _doubtful("NCCL_IB_DISABLE", rest)
    if _int(env, "NCCL_IB_DISABLE") == 1 and context.kind in _VERBS:
        name = "NCCL_IB_DISABLE"
        yield _doubtful(
            name,
            f"NCCL leaves the {context.kind} fabric out and goes over TCP, many times slower; "
            "leave it out",
        )


def _provider(env: Env, context: Context, wants: str | None) -> Found:
    name, value = "FI_PROVIDER", env.get("FI_PROVIDER", "")
    if not value or not wants:
        return
    words = value.lower().removeprefix("^").replace(";", ",").split(",")
    if value.startswith("^") == (wants in words):
        yield _wrong(
            name,
            f"leaves out {wants}, the provider of a {context.kind} fabric, so libfabric finds "
            f'no network; write "{wants}", or leave it out',
        )


def other_fabric(env: Env, context: Context) -> Found:
    """Variables of another fabric than the site's, which do nothing here."""
    for name in env:
        prefixes = TABLE["only_on"].items()
        kinds = next((kinds for prefix, kinds in prefixes if name.startswith(prefix)), None)
        if kinds and context.kind not in {"", *kinds} and name != "NCCL_IB_DISABLE":
            yield _doubtful(
                name,
                f"does nothing on a fabric of kind {context.kind}, only on "
                f"{' and '.join(kinds)}; leave it out",
            )


def counts(env: Env, context: Context) -> Found:
    """Numbers that must agree."""
    for least, most in (
        ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
        ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
        ("NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"),
    ):
        low, high = _int(env, least), _int(env, most)
        if low is not None and high is not None and 0 < high < low:
            yield _wrong(least, f"is more than {most}={high}; write {high} at most")
    threads, each = _int(env, "NCCL_SOCKET_NTHREADS"), _int(env, "NCCL_NSOCKS_PERTHREAD")
    if threads and each and threads * each > _MOST_SOCKETS:
        name = "NCCL_SOCKET_NTHREADS"
        yield _wrong(
            name,
            f"times NCCL_NSOCKS_PERTHREAD={each} is {threads * each} sockets for each "
            f"connection, and NCCL takes {_MOST_SOCKETS} at most; write "
            f"{max(1, _MOST_SOCKETS // each)}",
        )
    split, pairs = _int(env, "NCCL_IB_SPLIT_DATA_ON_QPS"), _int(env, "NCCL_IB_QPS_PER_CONNECTION")
    if split == 1 and pairs in {None, 1}:
        name = "NCCL_IB_SPLIT_DATA_ON_QPS"
        yield _doubtful(
            name,
            "does nothing with one queue pair; set NCCL_IB_QPS_PER_CONNECTION too, or leave it out",
        )
    yield from _patience(env)


def _patience(env: Env) -> Found:
    """How long InfiniBand continues trying, against torch's heartbeat."""
    exponent, tries = _int(env, "NCCL_IB_TIMEOUT"), _int(env, "NCCL_IB_RETRY_CNT")
    if exponent is None or not 1 <= exponent <= 31:  # noqa: PLR2004
        return
    wait_s = _TICK_S * 2**exponent * (7 if tries is None else tries)
    heartbeat_s = _int(env, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC") or _HEARTBEAT_S
    if wait_s > heartbeat_s:
        name = "NCCL_IB_TIMEOUT"
        yield _doubtful(
            name,
            f"a dead link is tried for {wait_s:.0f} s, and torch's monitor kills the rank "
            f"after {heartbeat_s} s, which looks like a crash; write 22 or less",
        )


def addresses(env: Env, context: Context) -> Found:
    """NCCL_IB_ADDR_RANGE is read in the family of NCCL_IB_ADDR_FAMILY, by default AF_INET."""
    name, family = "NCCL_IB_ADDR_RANGE", env.get("NCCL_IB_ADDR_FAMILY") or "AF_INET"
    try:
        version = ipaddress.ip_network(env.get(name, ""), strict=False).version
    except ValueError:
        return
    right = next(key for key, ip in FAMILIES.items() if ip == f"ipv{version}")
    if family in FAMILIES and family != right:
        yield _wrong(
            name,
            f"is of IPv{version} and NCCL reads it as {family}, so it ignores the range; write "
            f'NCCL_IB_ADDR_FAMILY = "{right}" beside it',
        )


def choices(env: Env, context: Context) -> Found:
    """Algorithms and transports that one variable asks for and another turns off."""
    algo = env.get("NCCL_ALGO", "")
    wanted = set() if algo.startswith("^") or ":" in algo else set(algo.lower().split(","))
    nvls_off = _int(env, "NCCL_NVLS_ENABLE") == 0
    if wanted and nvls_off and wanted <= {"nvls", "nvlstree"}:
        yield _wrong(
            "NCCL_ALGO",
            "NCCL_NVLS_ENABLE=0 turns off the only algorithms named, and NCCL stops; leave "
            "one of the two out",
        )
    name = "NCCL_P2P_LEVEL"
    if _int(env, "NCCL_P2P_DISABLE") == 1 and env.get(name) not in {None, "LOC"}:
        yield _doubtful(name, "NCCL_P2P_DISABLE=1 wins over it; leave one of the two out")


def logs(env: Env, context: Context) -> Found:
    """NCCL writes the log that these shape only where NCCL_DEBUG asks for it."""
    shown = env.get("NCCL_DEBUG", "").upper()
    if "NCCL_DEBUG_FILE" in env and shown in {"", "VERSION"}:
        yield _without_debug(env, "NCCL_DEBUG_FILE", "WARN")
    if "NCCL_DEBUG_SUBSYS" in env and shown in {"", "VERSION", "WARN"}:
        yield _without_debug(env, "NCCL_DEBUG_SUBSYS", "INFO")


def _without_debug(env: Env, name: str, level: str) -> tuple[str, Problem]:
    set_to = f"NCCL_DEBUG={env['NCCL_DEBUG']}" if "NCCL_DEBUG" in env else "no NCCL_DEBUG"
    return _doubtful(
        name, f'does nothing with {set_to}; write NCCL_DEBUG = "{level}" beside it, or leave it out'
    )


_FR_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def recorder(env: Env, context: Context) -> Found:
    """The flight recorder of torch, which hpctrain turns on, against what stops its dump."""
    sizes = [env[name] for name in _FR_SIZES if env.get(name)]
    off = bool(sizes) and all(size == "0" for size in sizes)
    yield from _error_handling(env, off=off)
    if len(sizes) > 1 and sizes[0] != sizes[1]:
        yield _doubtful(
            _FR_SIZES[1],
            f"is the old name of {_FR_SIZES[0]}, which has {sizes[0]} and wins where torch "
            f'knows both; write "{sizes[0]}" in both',
        )
    name = "TORCH_NCCL_DUMP_ON_TIMEOUT"
    if off and env.get(name, "").lower() in {"1", "true", "t", "yes", "y"}:
        yield _doubtful(
            name,
            "there is nothing to dump with a buffer of 0; write TORCH_FR_BUFFER_SIZE = "
            '"2000", or leave it out',
        )


def _error_handling(env: Env, *, off: bool) -> Found:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    value = env.get(name)
    if value == "1" and not off:
        yield _doubtful(
            name,
            "aborting the communicators first can block, and then the flight recorder, which "
            'is on by default, writes no dump; write "3"',
        )
    elif value in {"0", "2"}:
        what = "hangs for ever" if value == "0" else "lives on without its communicators"
        yield _doubtful(
            name, f'a rank whose collective fails {what}, and the run never restarts it; write "3"'
        )


def efa(env: Env, context: Context) -> Found:
    """Variables that newer stacks on AWS do not need."""
    if context.kind != "efa":
        return
    for name in ("FI_EFA_ENABLE_SHM_TRANSFER", "FI_EFA_USE_DEVICE_RDMA"):
        if env.get(name) == "1" and not context.old_plugin:
            yield _doubtful(
                name,
                "is the default since libfabric 1.18 and aws-ofi-nccl 1.7, and not needed there "
                "(AWS cheat sheet); leave it out",
            )
    for name in env:
        if name.startswith("RDMAV_"):
            yield _doubtful(
                name,
                "AWS says not to set variables of RDMA core with EFA; leave it out, "
                "FI_EFA_USE_HUGE_PAGE=0 helps where fork fails",
            )


PAIR_RULES: tuple[PairRule, ...] = (
    slingshot,
    network,
    other_fabric,
    efa,
    counts,
    addresses,
    choices,
    logs,
    recorder,
)


_RULES: dict[str, Rule] = values.RULES | {
    "GLOO_SOCKET_IFNAME": lists.gloo_ifname,
    "NCCL_ALGO": lists.algo,
    "NCCL_IB_HCA": lists.ib_hca,
    "NCCL_PROTO": lists.proto,
    "NCCL_SOCKET_IFNAME": lists.socket_ifname,
    "PYTORCH_ALLOC_CONF": lists.alloc_conf,
    "PYTORCH_CUDA_ALLOC_CONF": lists.alloc_conf,
    "PYTORCH_HIP_ALLOC_CONF": lists.alloc_conf,
}


def check_variable(name: str, value: str, context: Context) -> list[Problem]:
    """What is to be said of one variable by itself; an empty list for nothing.

    An accepted value has no problem of level error.
    """
    problems, secret = list(check_name(name, value, context)), list(check_secret(name, value))
    if not secret and not any(problem.level == ERROR for problem in problems):
        for rule in (_RULES.get(name), values.rule_for(name)):
            problems += rule(name, value, context) if rule else ()
        if name == "NCCL_IB_GID_INDEX":
            problems += lists.ib_gid(name, value, context)
    return [*(of_variable(name, value, problem) for problem in problems), *secret]


def check_environment(env: Mapping[str, str], context: Context) -> dict[str, list[Problem]]:
    """What is to be said of a whole environment: of each variable, and of several together.

    Args:
        env: Names and values, all that will hold at once.
        context: What is known of the place.

    Returns:
        Name to problems, errors first; names without any are left out.
    """
    by_name = {name: check_variable(name, value, context) for name, value in env.items()}
    for rule in PAIR_RULES:
        for name, problem in rule(env, context):
            by_name[name].append(of_variable(name, env[name], problem))
    order = (ERROR, WARNING, DEBUG)
    return {
        name: sorted(problems, key=lambda problem: order.index(problem.level))
        for name, problems in by_name.items()
        if problems
    }
