"""Rules HT301, HT302 and HT306 to HT308: samplers, loaders and their workers.

tests/unit/lint/test_rules.py holds the promises.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hpctrain.advise.lint.reporting import is_backward
from hpctrain.advise.lint.syntax import argument, constant, given, is_true, keyword, last, spreads
from hpctrain.core.base.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.reporting import ProgramFacts
    from hpctrain.advise.lint.rule import LintFinding

_SAMPLERS = ("DistributedSampler",)
_BY_OTHERS = (
    "accelerate",
    "deepspeed",
    "hpctrain",
    "lightning",
    "megatron",
    "pytorch_lightning",
    "transformers",
    "torchdata",
    "webdataset",
)
"""Libraries that give ranks samples of their own without a sampler in the program."""
_SAMPLER_PLACE, _WORKERS_PLACE, _SHUFFLE_PLACE = 3, 5, 2


def check_loading(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT301, HT302 and HT306 to HT308."""
    yield from _set_epoch(facts)
    loaders = [
        call
        for call in facts.syntax.calls_to("DataLoader")
        if facts.syntax.dotted(call.func).startswith("torch.utils.data")
    ]
    for call in loaders:
        yield from _loader(facts, call)
    yield from _filtered(facts)


def _set_epoch(facts: ProgramFacts) -> Iterator[LintFinding]:
    if facts.mentions("set_epoch") or not (facts.trains or _has_epochs(facts)):
        return
    if facts.imports_where(lambda module: module.mentions_set_epoch):
        return
    if facts.syntax.imports_any("accelerate", "lightning", "pytorch_lightning", "transformers"):
        return
    for call in facts.syntax.calls_to(*_SAMPLERS, root="torch.utils.data"):
        shuffle = argument(call, "shuffle", 3)
        if spreads(call) or (shuffle is not None and not is_true(shuffle)):
            continue
        if not _is_for_training(facts, call):
            continue
        yield facts.finding(
            "HT301", call, "the sampler is never told the epoch: set_epoch() is nowhere"
        )


def _has_epochs(facts: ProgramFacts) -> bool:
    """Whether a loop counts epochs, so that the backward pass may be in another function."""
    return any(
        isinstance(loop.target, ast.Name) and "epoch" in loop.target.id.lower()
        for scope in facts.syntax.scopes
        for loop in scope.of(ast.For)
    )


def _is_for_training(facts: ProgramFacts, call: ast.Call) -> bool:
    """Whether a sampler's or loader's name does not say that it is for something else."""
    parent = facts.syntax.parents[call]
    while isinstance(parent, ast.IfExp | ast.keyword | ast.Call):
        parent = facts.syntax.parents[parent]
    target = ast.unparse(parent.targets[0]).lower() if isinstance(parent, ast.Assign) else ""
    return not any(word in target for word in ("val", "test", "eval", "dev"))


def _loader(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    if spreads(call):
        return
    sampler = argument(call, "sampler", _SAMPLER_PLACE)
    workers = argument(call, "num_workers", _WORKERS_PLACE)
    shuffle = argument(call, "shuffle", _SHUFFLE_PLACE)
    if (
        isinstance(sampler, ast.Name | ast.Call)
        and is_true(shuffle)
        and _is_sampler(facts, sampler)
    ):
        yield facts.finding("HT306", call, "DataLoader() is given a sampler and shuffle=True")
    number = constant(workers)
    if facts.cpus and isinstance(number, int) and number > facts.cpus:
        yield facts.finding("HT308", call, f"{number} workers on {count(facts.cpus, 'CPU')}")
    own = given(sampler) or given(keyword(call, "batch_sampler"))
    if not own and _trains_alone(facts, call):
        yield facts.finding("HT302", call, "every rank reads all samples: no DistributedSampler")


def _is_sampler(facts: ProgramFacts, node: ast.expr) -> bool:
    """Whether it is certainly a sampler: a call, or a name that is given one and nothing else."""
    if isinstance(node, ast.Call):
        return last(facts.syntax.dotted(node.func)) == "DistributedSampler"
    scope = facts.syntax.scope_of[node]
    values = [
        one.value
        for one in scope.of(ast.Assign)
        if isinstance(node, ast.Name)
        and any(isinstance(target, ast.Name) and target.id == node.id for target in one.targets)
    ]
    return len(values) == 1 and isinstance(values[0], ast.Call) and _is_sampler(facts, values[0])


def _trains_alone(facts: ProgramFacts, call: ast.Call) -> bool:
    """Whether a loader feeds a backward pass of several ranks, and none has a share of its own."""
    if not facts.distributed or not facts.trains or facts.syntax.imports_any(*_BY_OTHERS):
        return False
    if facts.mentions("DistributedSampler", "IterableDataset", "split_dataset_by_node", "Subset"):
        return False
    if any("sampler" in word.lower() for word in facts.words):
        return False
    parent = facts.syntax.parents[call]
    if not isinstance(parent, ast.Assign) or not isinstance(parent.targets[0], ast.Name):
        return False
    name = parent.targets[0].id
    return any(
        isinstance(loop, ast.For) and _goes_over(loop.iter, name) and _has_backward(loop)
        for scope in facts.syntax.scopes
        for loop in scope.of(ast.For)
    )


def _goes_over(node: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _has_backward(loop: ast.For) -> bool:
    return any(isinstance(one, ast.Call) and is_backward(one) for one in ast.walk(loop))


def _filtered(facts: ProgramFacts) -> Iterator[LintFinding]:
    """`[x for x in dataset if valid(x)]`, in a program of several ranks."""
    if not facts.distributed:
        return
    for scope in facts.syntax.scopes:
        for node in scope.of(ast.ListComp):
            first = node.generators[0]
            names = (first.iter, first.target, node.elt)
            if not first.ifs or not all(isinstance(one, ast.Name) for one in names):
                continue
            source, target, result = (ast.unparse(one) for one in names)
            if result == target and "dataset" in source.lower():
                yield facts.finding("HT307", node, f"reads all of {source} on every rank")
