"""Rules HT103 and HT506: what calls are given."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hpctrain.advise.lint.collectives import always_comes_to
from hpctrain.advise.lint.dependence import LOCAL_VARIABLES, RANK_VARIABLES, environment_name
from hpctrain.advise.lint.syntax import (
    argument,
    constant,
    keyword,
    last,
    last_attribute,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.reporting import ProgramFacts
    from hpctrain.advise.lint.rule import LintFinding

_OF_TENSORS = frozenset(
    f"torch.distributed.{name}"
    for name in ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor")
)
_PLAIN_CALLS = frozenset({"int", "float", "bool", "len", "str"})
_READERS = frozenset({"item", "tolist"})
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"})
_DEVICE_CALLS = frozenset(
    {"torch.cuda.set_device", "torch.device", "torch.accelerator.set_device_index"}
)


def check_arguments(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT103 and HT506."""
    for call in facts.syntax.calls:
        yield from _device(facts, call)
        dotted = facts.syntax.dotted(call.func)
        value = call.args[0] if call.args else keyword(call, "tensor")
        if dotted not in _OF_TENSORS or value is None:
            continue
        if kind := _plain_kind(facts, value):
            message = (
                f"{last(dotted)}() takes a tensor, and {facts.syntax.code(value, 40)} is {kind}"
            )
            yield facts.finding("HT103", call, message)
        elif isinstance(value, ast.Name):
            yield from _passed_in(facts, call, value)


def _passed_in(facts: ProgramFacts, call: ast.Call, value: ast.Name) -> Iterator[LintFinding]:
    """A parameter that some caller in this file gives what is no tensor."""
    scope = facts.syntax.scope_of[call]
    if value.id not in scope.parameters or scope.owner:
        return
    stored = any(
        one.id == value.id and isinstance(one.ctx, ast.Store) for one in scope.of(ast.Name)
    )
    if stored or not always_comes_to(facts.syntax, call, facts.collectives.direct):
        return
    for other in facts.syntax.callers(scope):
        passed = argument(other, value.id, scope.parameters.index(value.id))
        kind = _plain_kind(facts, passed) if passed is not None else ""
        if passed is not None and kind:
            given = f"{facts.syntax.code(passed, 40)}, which {scope.name}() hands it, is {kind}"
            name = last(facts.syntax.dotted(call.func))
            yield facts.finding("HT103", other, f"{name}() takes a tensor, and {given}")


def _plain_kind(  # noqa: PLR0911 - a line per kind
    facts: ProgramFacts, node: ast.expr
) -> str:
    """What a value is, where it is certainly no tensor."""
    match node:
        case ast.Constant():
            return f"a {type(node.value).__name__}"
        case ast.JoinedStr() | ast.Dict():
            return "no tensor"
        case ast.Call():
            if last_attribute(node) in _READERS and not node.args:
                return "a Python number"
            is_builtin = isinstance(node.func, ast.Name) and node.func.id in _PLAIN_CALLS
            return "a Python value" if is_builtin else ""
        case ast.UnaryOp(op=ast.Not()):
            return "a bool"
        case ast.Compare():  # a bool if it is of numbers in hand, not of tensors
            always = all(
                isinstance(one, ast.In | ast.NotIn | ast.Is | ast.IsNot) for one in node.ops
            )
            left = ast.unparse(node.left.func) if isinstance(node.left, ast.Call) else ""
            plain = last(left) in _PLAIN_CALLS | _READERS | {"sum", "round"}
            return "a bool" if always or plain else ""
        case ast.Name():  # what all values that it may have there agree on
            values = facts.dependence.values_at(node)
            given = {"" if isinstance(one, ast.Name) else _plain_kind(facts, one) for one in values}
            return given.pop() if len(given) == 1 else ""
    return ""


def rank_origin(facts: ProgramFacts, node: ast.expr, depth: int = 0) -> str:
    """The rank that a value is for certain, unchanged: "global", "local", or nothing."""
    variable = environment_name(facts.syntax, node)
    if variable in RANK_VARIABLES:
        return "global"
    if variable in LOCAL_VARIABLES:
        return "local"
    if isinstance(node, ast.Call):
        dotted = facts.syntax.dotted(node.func)
        if dotted == "int" and len(node.args) == 1:
            return rank_origin(facts, node.args[0], depth)
        return "global" if dotted == "torch.distributed.get_rank" and not node.args else ""
    if not isinstance(node, ast.Name) or depth > 1:
        return ""
    origins = {rank_origin(facts, value, depth + 1) for value in facts.dependence.values_at(node)}
    return origins.pop() if len(origins) == 1 else ""


def _device(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    """HT506: set_device(rank), .to(rank), .cuda(rank), device_ids=[rank], f"cuda:{rank}"."""
    if facts.spawns:
        return  # all of its ranks are on one node
    dotted = facts.syntax.dotted(call.func)
    values: list[ast.expr] = []
    ids = keyword(call, "device_ids") or (
        call.args[1] if last(dotted) in _WRAPPERS and call.args[1:] else None
    )
    if isinstance(ids, ast.List):
        values += ids.elts
    if dotted in _DEVICE_CALLS:
        values += call.args
    elif last_attribute(call) in ("to", "cuda"):
        values += call.args[:1]
    if last(dotted) == "init_process_group":
        device = keyword(call, "device_id")
        values += [device] if device is not None else []
    for value in values:
        parts = [value]
        if isinstance(value, ast.JoinedStr):
            if not any(str(constant(one)).startswith("cuda:") for one in value.values[:1]):
                continue
            parts = [one.value for one in value.values if isinstance(one, ast.FormattedValue)]
        if any(rank_origin(facts, part) == "global" for part in parts):
            text = facts.syntax.code(call.func)
            yield facts.finding(
                "HT506", value, f"{text}() takes the rank among all nodes for a device"
            )
            return
