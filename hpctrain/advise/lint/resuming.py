"""Rules HT116, HT310 and HT609: what a process that starts has otherwise than others, or before."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hpctrain.advise.lint.loading import nearest_value
from hpctrain.advise.lint.reporting import (
    ProgramFacts,
    inside_loop,
    methods,
    owner_of,
    under_rank_test,
)
from hpctrain.advise.lint.syntax import keyword, last

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.rule import LintFinding

_DDP = "DistributedDataParallel"
_TEXTS = re.compile(r"word|token|char|vocab|text|name|split\(|lower\(|\bstr")
_SCHEDULE = re.compile(r"lr_scheduler\.\w+$|get_\w*schedule\w*$")


def check_resuming(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT116, HT310 and HT609."""
    if facts.mentions(_DDP) and not facts.mentions("broadcast", "broadcast_object_list"):
        yield from _loaded_by_one(facts)
    if facts.syntax.imports_any("torch", "lightning", "pytorch_lightning"):
        for call in facts.syntax.calls_to("enumerate"):
            yield from _numbered(facts, call)
    yield from _schedule_left_out(facts)


def _loaded_by_one(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT116: DDP has sent its model to all ranks already; an optimizer's state, it never sends."""
    if facts.mentions("FullyShardedDataParallel", "ZeroRedundancyOptimizer"):
        return
    wrapped = {
        ast.unparse(target): one.lineno
        for scope in facts.syntax.scopes
        for one in scope.of(ast.Assign)
        if isinstance(one.value, ast.Call) and last(facts.syntax.dotted(one.value.func)) == _DDP
        for target in one.targets
    }
    for call in methods(facts, "load_state_dict"):
        owner = owner_of(call)
        since = wrapped.get(owner.removesuffix(".module"), call.lineno)
        if (since < call.lineno or "opt" in owner.lower()) and under_rank_test(facts, call):
            yield facts.finding("HT116", call, f"{owner} is loaded on one rank only")


def _numbered(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    """HT310: `{word: number for number, word in enumerate(set(words))}`, or such a loop."""
    value = nearest_value(facts, call.args[0]) if call.args else None
    while isinstance(value, ast.Call) and facts.syntax.dotted(value.func) in ("list", "tuple"):
        value = nearest_value(facts, value.args[0]) if value.args else None
    if not isinstance(value, ast.SetComp) and not (
        isinstance(value, ast.Call) and facts.syntax.dotted(value.func) == "set" and value.args
    ):
        return
    around = facts.syntax.parents[call]
    if not isinstance(around, ast.For | ast.comprehension):
        return
    both = around.target.elts if isinstance(around.target, ast.Tuple) else []
    if len(both) != 2 or not _TEXTS.search(ast.unparse(both[1]) + ast.unparse(value).lower()):  # noqa: PLR2004 - number, text
        return
    number = ast.unparse(both[0])
    if isinstance(around, ast.comprehension):
        made = facts.syntax.parents[around]
        kept = isinstance(made, ast.DictComp) and number in ast.unparse(made.value)
    else:
        kept = any(
            isinstance(one, ast.Assign)
            and isinstance(one.targets[0], ast.Subscript)
            and number == ast.unparse(one.value)
            for one in around.body
        )
    named = call.args[0]
    is_sorted = isinstance(named, ast.Name) and any(
        owner_of(one) == named.id for one in methods(facts, "sort")
    )
    if kept and not is_sorted:
        yield facts.finding(
            "HT310", call, f"{facts.syntax.code(call.args[0], 40)} has a set's order"
        )


def _schedule_left_out(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT609: the optimizer's state is saved and loaded, the schedule's is not."""
    saved = {owner_of(one) for one in methods(facts, "state_dict")}
    loaded = {owner_of(one) for one in methods(facts, "load_state_dict")}
    if not any("opt" in last(one).lower() for one in saved & loaded):
        return
    for scope in facts.syntax.scopes:
        for one in scope.of(ast.Assign):
            name = ast.unparse(one.targets[0])
            if (
                isinstance(one.value, ast.Call)
                and _SCHEDULE.search(facts.syntax.dotted(one.value.func))
                and keyword(one.value, "last_epoch") is None
                and inside_loop(facts.syntax, one) is None
                and _only_steps(facts, name)
            ):
                yield facts.finding("HT609", one, f"{name} begins anew where its optimizer resumes")


def _only_steps(facts: ProgramFacts, name: str) -> bool:
    """Whether a schedule is given to nothing, and goes one step on at one place."""
    read: list[ast.Name | ast.Attribute] = []
    for scope in facts.syntax.scopes:
        read += [*scope.of(ast.Name), *scope.of(ast.Attribute)]
    uses = [
        facts.syntax.parents[one]
        for one in read
        if isinstance(one.ctx, ast.Load) and ast.unparse(one) == name
    ]
    attributes = [one.attr for one in uses if isinstance(one, ast.Attribute)]
    steps = [one for one in methods(facts, "step") if owner_of(one) == name]
    return (
        len(attributes) == len(uses)
        and set(attributes) <= {"step", "get_last_lr", "get_lr"}
        and len(steps) == 1
        and not steps[0].args
    )
