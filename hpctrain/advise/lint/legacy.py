"""Rules HT401, HT402 and HT407: old names of AMP and of variables, and how they are rewritten.

tests/unit/lint/test_rules.py and test_fixes.py hold the promises.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hpctrain.advise.lint.rule import SourceEdit
from hpctrain.advise.lint.source import insert_argument, replace_node, span
from hpctrain.advise.lint.syntax import constant, last

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.reporting import ProgramFacts
    from hpctrain.advise.lint.rule import LintFinding

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
    """The new call, where its arguments can be told for certain."""
    if any(isinstance(one, ast.Starred) for one in call.args):
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
