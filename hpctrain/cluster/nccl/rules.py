"""All rules for environment values: what their reader makes of them, before a job finds out.

They parse values as NCCL, RCCL, libfabric, Gloo and torch do: numbers and closed sets in
`values.py`, lists in `lists.py`. What single values and several together mean is rows of
variables.toml (`alone`, `together`); here are the pairs that have to be computed. Each of these
rules takes a whole environment and yields (the variable to tell of, what); values that are wrong
by themselves are reported by the other rules and pass here. Pure: what is known of the site is a
`Context`. tests/unit/nccl/test_nccl_rules.py has a good and a wrong value for each rule.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpctrain.cluster.nccl import lists, values
from hpctrain.cluster.nccl.names import (
    DEBUG,
    ERROR,
    TABLE,
    WARNING,
    Context,
    Problem,
    Rule,
    as_version,
    check_name,
    check_secret,
    cut,
    error,
    of_variable,
    warning,
)
from hpctrain.cluster.nccl.values import FAMILIES, c_number

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

_MOST_SOCKETS = 64
_TICK_S = 4.096e-6
_HEARTBEAT_S = 480
_RDZV_OPTION = "--network=disable_rdzv_get"
_PART = re.compile(r"\{(\w+)\}")


def _by_rows(rows: Sequence[Mapping[str, Any]], env: Env, context: Context) -> Found:
    """Yield what rows of variables.toml say."""
    for name, value in env.items():
        parts = {**env, "value": value, "kind": context.kind, "nccl": context.nccl}
        for row in rows:
            if _fits(row, name, env, context):
                pieces = _PART.split(row["message"])  # every second one is a part's name
                text = "".join(cut(parts[one]) if n % 2 else one for n, one in enumerate(pieces))
                yield name, Problem(row["level"], text)


def _fits(row: Mapping[str, Any], name: str, env: Env, context: Context) -> bool:
    beside, unless = row.get("beside", {}), row.get("unless", {})
    return (
        re.fullmatch(row["name"], name) is not None
        and _is(env[name], row.get("value", ".*"))
        and _is(context.kind, row.get("kind", ".*"))
        and row.get("multi_node", context.multi_node) is context.multi_node
        and row.get("old_plugin", context.old_plugin) is context.old_plugin
        and not context.older_than(as_version(row.get("since", "")))
        and ("before" not in row or context.older_than(as_version(row["before"])))
        and all(other in env and _is(env[other], wanted) for other, wanted in beside.items())
        and not any(other in env and _is(env[other], unfit) for other, unfit in unless.items())
    )


def _is(value: str, wanted: str | int) -> bool:
    """Return whether a pattern fits the value, or NCCL reads it as this number."""
    if isinstance(wanted, int):
        return bool(value) and c_number(value)[0] == wanted
    return re.fullmatch(wanted, value, re.DOTALL) is not None


def _int(env: Env, name: str) -> int | None:
    """The number as NCCL reads it, None where the variable is not set."""
    return c_number(env[name])[0] if env.get(name) else None


def rendezvous(env: Env, context: Context) -> Found:
    """Slingshot's other protocol works only with an option of sbatch's."""
    words = " ".join(context.required).replace("--network ", "--network=").split()
    networks = [one.removeprefix("--network=") for one in words if one.startswith("--network=")]
    has_option = any("disable_rdzv_get" in one.strip("\"'").split(",") for one in networks)
    name = "FI_CXI_RDZV_PROTO"
    if env.get(name, "").replace("-", "_") == "alt_read" and not has_option:
        yield (
            name,
            error(
                "works only where the job turns the other protocol off in the driver, and "
                f'collectives hang without; add "{_RDZV_OPTION}" to slurm.required'
            ),
        )


def provider(env: Env, context: Context) -> Found:
    """FI_PROVIDER leaves out what the fabric needs."""
    name, value = "FI_PROVIDER", env.get("FI_PROVIDER", "")
    wants = {"slingshot": "cxi", "efa": "efa"}.get(context.kind)
    if not value or not wants:
        return
    words = value.lower().removeprefix("^").replace(";", ",").split(",")
    if value.startswith("^") == (wants in words):
        yield (
            name,
            error(
                f"leaves out {wants}, the provider of a {context.kind} fabric, so libfabric finds "
                f'no network; write "{wants}", or leave it out'
            ),
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
            yield least, error(f"is more than {most}={high}; write {high} at most")
    threads, each = _int(env, "NCCL_SOCKET_NTHREADS"), _int(env, "NCCL_NSOCKS_PERTHREAD")
    if threads and each and threads * each > _MOST_SOCKETS:
        yield (
            "NCCL_SOCKET_NTHREADS",
            error(
                f"times NCCL_NSOCKS_PERTHREAD={each} is {threads * each} sockets for each "
                f"connection, and NCCL takes {_MOST_SOCKETS} at most; write "
                f"{max(1, _MOST_SOCKETS // each)}"
            ),
        )
    new, old = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    if env.get(new) and env.get(old) and env[new] != env[old]:
        yield (
            old,
            warning(
                f"is the old name of {new}, which has {env[new]} and wins where torch knows both; "
                f'write "{env[new]}" in both'
            ),
        )


def patience(env: Env, context: Context) -> Found:
    """How long InfiniBand continues trying, against torch's heartbeat."""
    exponent, tries = _int(env, "NCCL_IB_TIMEOUT"), _int(env, "NCCL_IB_RETRY_CNT")
    if exponent is None or not 1 <= exponent <= 31:  # noqa: PLR2004
        return
    wait_s = _TICK_S * 2**exponent * (7 if tries is None else tries)
    heartbeat_s = _int(env, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC") or _HEARTBEAT_S
    if wait_s > heartbeat_s:
        yield (
            "NCCL_IB_TIMEOUT",
            warning(
                f"a dead link is tried for {wait_s:.0f} s, and torch's monitor kills the rank "
                f"after {heartbeat_s} s, which looks like a crash; write 22 or less"
            ),
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
        yield (
            name,
            error(
                f"is of IPv{version} and NCCL reads it as {family}, so it ignores the range; write "
                f'NCCL_IB_ADDR_FAMILY = "{right}" beside it'
            ),
        )


PAIR_RULES: tuple[PairRule, ...] = (rendezvous, provider, counts, patience, addresses)


_RULES: dict[str, Rule] = values.RULES | {
    "GLOO_SOCKET_IFNAME": lists.gloo_ifname,
    "NCCL_IB_HCA": lists.ib_hca,
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
        problems += (one for _, one in _by_rows(TABLE["alone"], {name: value}, context))
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
    pairs = [rule(env, context) for rule in PAIR_RULES]
    for problems_of_rule in (_by_rows(TABLE["together"], env, context), *pairs):
        for name, problem in problems_of_rule:
            by_name[name].append(of_variable(name, env[name], problem))
    order = (ERROR, WARNING, DEBUG)
    return {
        name: sorted(problems, key=lambda problem: order.index(problem.level))
        for name, problems in by_name.items()
        if problems
    }
