"""All rules for environment values: what their reader makes of them, before a job finds out.

They parse values as NCCL, RCCL, libfabric, Gloo and torch do: closed sets in `words.py`, ranges in
`numbers.py`, lists in `lists.py`, what several mean together in `pairs.py`. variables.toml has all
names, ranges and sets of words. Pure: what is known of the site is a `Context`.
tests/unit/nccl/test_nccl_rules.py has a good and a wrong value for each rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.cluster.nccl import lists, numbers, words
from hpctrain.cluster.nccl.names import check_name
from hpctrain.cluster.nccl.pairs import RULES as PAIR_RULES
from hpctrain.cluster.nccl.rule import DEBUG, ERROR, WARNING, Context, Problem, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEBUG",
    "ERROR",
    "WARNING",
    "Context",
    "Problem",
    "check_environment",
    "check_variable",
]

_RULES: dict[str, Rule] = words.RULES | {
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
    problems = list(check_name(name, value, context))
    if any(problem.level == ERROR for problem in problems):
        return problems
    for rule in (_RULES.get(name), numbers.rule_for(name)):
        problems += rule(name, value, context) if rule else ()
    if name == "NCCL_IB_GID_INDEX":
        problems += lists.ib_gid(name, value, context)
    return problems


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
            by_name[name].append(problem)
    order = (ERROR, WARNING, DEBUG)
    return {
        name: sorted(problems, key=lambda problem: order.index(problem.level))
        for name, problems in by_name.items()
        if problems
    }
