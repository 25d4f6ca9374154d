"""Rules HT103, HT401, HT402, HT407 and HT506: what calls are given, and old names of torch."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hpctrain.advise.lint.collectives import always_comes_to
from hpctrain.advise.lint.dependence import LOCAL_VARIABLES, RANK_VARIABLES, environment_name
from hpctrain.advise.lint.rule import LintFinding, SourceEdit
from hpctrain.advise.lint.syntax import (
    argument,
    constant,
    insert_argument,
    keyword,
    last,
    last_attribute,
    replace_node,
    span,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.reporting import ProgramFacts

_OF_TENSORS = frozenset({"all_reduce", "reduce", "broadcast", "all_gather_into_tensor"})
_HOME = "torch.distributed."
_PLAIN_CALLS = frozenset({"int", "float", "bool", "len", "str", "sum", "round"})
_READERS = frozenset({"item", "tolist"})
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"})
_DEVICE_CALLS = frozenset(
    {"torch.cuda.set_device", "torch.device", "torch.accelerator.set_device_index"}
)
_TEMPLATE = re.compile(r"cuda:")


def check_arguments(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT103 and HT506."""
    for call in facts.syntax.calls:
        yield from _device(facts, call)
        dotted = facts.syntax.dotted(call.func)
        name = last(dotted)
        if dotted != _HOME + name:
            continue
        if name in _OF_TENSORS:
            yield from _no_tensor(facts, call, name)
            yield from _passed_in(facts, call, name)


def _no_tensor(facts: ProgramFacts, call: ast.Call, name: str) -> Iterator[LintFinding]:
    value = call.args[0] if call.args else keyword(call, "tensor")
    if value is None:
        return
    kind = _plain_kind(facts, value)
    if kind:
        text = facts.syntax.code(value, 40)
        yield facts.finding("HT103", call, f"{name}() takes a tensor, and {text} is {kind}")


def _passed_in(facts: ProgramFacts, call: ast.Call, name: str) -> Iterator[LintFinding]:
    """A parameter that some caller in this file gives what is no tensor."""
    value = call.args[0] if call.args else keyword(call, "tensor")
    scope = facts.syntax.scope_of[call]
    if not isinstance(value, ast.Name) or value.id not in scope.parameters or scope.owner:
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
            yield facts.finding("HT103", other, f"{name}() takes a tensor, and {given}")


def _plain_kind(  # noqa: PLR0911 - a line per kind
    facts: ProgramFacts, node: ast.expr
) -> str:
    """What a value is, where it is certainly no tensor."""
    if isinstance(node, ast.Constant):
        return f"a {type(node.value).__name__}"
    if isinstance(node, ast.JoinedStr | ast.Dict):
        return "no tensor"
    if isinstance(node, ast.Call):
        if last_attribute(node) in _READERS and not node.args:
            return "a Python number"
        builtin = isinstance(node.func, ast.Name) and node.func.id in _PLAIN_CALLS - {
            "sum",
            "round",
        }
        return "a Python value" if builtin else ""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "a bool"
    if isinstance(node, ast.Compare):
        return "a bool" if _compares_plain(node) else ""
    return _kind_of_name(facts, node) if isinstance(node, ast.Name) else ""


def _compares_plain(node: ast.Compare) -> bool:
    """Whether a comparison gives a bool: of numbers in hand, not of tensors."""
    if all(isinstance(one, ast.In | ast.NotIn | ast.Is | ast.IsNot) for one in node.ops):
        return True
    left = ast.unparse(node.left.func) if isinstance(node.left, ast.Call) else ""
    return last(left) in _PLAIN_CALLS | _READERS


def _kind_of_name(facts: ProgramFacts, node: ast.Name) -> str:
    """What all values that a name may have there agree on."""
    values = facts.dependence.values_at(node)
    kinds = {"" if isinstance(value, ast.Name) else _plain_kind(facts, value) for value in values}
    return kinds.pop() if len(kinds) == 1 else ""


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
            if not any(_TEMPLATE.match(str(constant(one))) for one in value.values[:1]):
                continue
            parts = [one.value for one in value.values if isinstance(one, ast.FormattedValue)]
        if any(rank_origin(facts, part) == "global" for part in parts):
            text = facts.syntax.code(call.func)
            yield facts.finding(
                "HT506", value, f"{text}() takes the rank among all nodes for a device"
            )
            return


_AMP = "torch.cuda.amp"
_AMP_CODES = {"GradScaler": "HT401", "autocast": "HT402"}
_OLD_VARIABLES = frozenset(
    {"NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING"}
)


def check_legacy(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT401, HT402 and HT407."""
    yield from _amp(facts)
    yield from _variables(facts)


def _amp(facts: ProgramFacts) -> Iterator[LintFinding]:
    """Each old call; names that were imported change with their import or not at all."""
    calls = [
        call
        for call in facts.syntax.calls
        if facts.syntax.dotted(call.func).rpartition(".")[0] == _AMP
        and last(facts.syntax.dotted(call.func)) in _AMP_CODES
    ]
    new = {facts.syntax.dotted(call.func) for call in facts.syntax.calls}
    by_import = {call: isinstance(call.func, ast.Name) for call in calls}
    moved = _moved_import(facts, [call for call in calls if by_import[call]])
    for call in calls:
        name = last(facts.syntax.dotted(call.func))
        edits = moved if by_import[call] else _amp_call(facts, call, name)
        if f"torch.amp.{name}" in new:
            continue  # both are there: what older versions of torch get
        yield facts.finding(
            _AMP_CODES[name],
            call,
            f'torch.cuda.amp.{name}() is torch.amp.{name}("cuda") now',
            edits,
        )


def _amp_call(facts: ProgramFacts, call: ast.Call, name: str) -> tuple[SourceEdit, ...]:
    """The new call, if its arguments are certain."""
    if any(isinstance(one, ast.Starred) for one in call.args) or keyword(call, "device_type"):
        return ()
    edits = list(insert_argument(facts.syntax, call, '"cuda"'))
    if not edits:
        return ()
    if name == "autocast" and call.args:
        if len(call.args) > 1:
            return ()
        start, _ = span(facts.syntax, call.args[0])  # what came first was `enabled`
        edits = [SourceEdit(start, start, '"cuda", enabled=')]
    if isinstance(call.func, ast.Attribute):
        written = facts.syntax.raw[slice(*span(facts.syntax, call.func))].decode()
        if written != f"torch.cuda.amp.{name}":
            return ()
        edits.append(replace_node(facts.syntax, call.func, f"torch.amp.{name}"))
    return tuple(edits)


def _moved_import(facts: ProgramFacts, calls: list[ast.Call]) -> tuple[SourceEdit, ...]:
    """`from torch.amp import ...` and all its calls at once, where every use is such a call."""
    edits: list[SourceEdit] = []
    used = {id(call.func) for call in calls}
    for node in _amp_imports(facts):
        if any(one.name not in _AMP_CODES or one.asname for one in node.names) or node.level:
            return ()
        names = {one.name for one in node.names}
        for scope in facts.syntax.scopes:
            for name in scope.of(ast.Name):
                if name.id in names and id(name) not in used:
                    return ()
        line = facts.syntax.offsets[node.lineno - 1] + node.col_offset
        head = f"from {_AMP} import"
        if facts.syntax.raw[line : line + len(head)].decode(errors="ignore") != head:
            return ()
        place = line + len("from ")
        edits.append(SourceEdit(place, place + len(_AMP), "torch.amp"))
    changes = [_amp_call(facts, call, last(facts.syntax.dotted(call.func))) for call in calls]
    if not all(changes):
        return ()
    return (*edits, *(edit for change in changes for edit in change))


def _amp_imports(facts: ProgramFacts) -> list[ast.ImportFrom]:
    return [
        node
        for scope in facts.syntax.scopes
        for node in scope.of(ast.ImportFrom)
        if node.module == _AMP
    ]


def _variables(facts: ProgramFacts) -> Iterator[LintFinding]:
    """Old names where `os.environ` is given them."""
    for node in facts.strings:
        name = constant(node)
        if name not in _OLD_VARIABLES or not _is_key(facts, node):
            continue
        start, end = span(facts.syntax, node)
        raw = facts.syntax.raw[start:end].decode()
        edits = [SourceEdit(start + 1, start + 1, "TORCH_")] if raw[1:-1] == name else []
        yield facts.finding("HT407", node, f"{name} is TORCH_{name} now", edits)


def _is_key(facts: ProgramFacts, node: ast.Constant) -> bool:
    """Whether a text names an environment variable: `os.environ[...]`, `.setdefault`, `.update`."""
    parent = facts.syntax.parents[node]
    if isinstance(parent, ast.Subscript):
        return facts.syntax.dotted(parent.value) == "os.environ"
    if isinstance(parent, ast.Call) and parent.args and parent.args[0] is node:
        return facts.syntax.dotted(parent.func) in ("os.environ.setdefault", "os.putenv")
    return False
