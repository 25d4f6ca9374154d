"""Rules HT401 to HT409: interfaces that torch has left behind, and how calls are rewritten.

tests/unit/lint/test_rules.py and test_fixes.py hold the promises.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hpctrain.lint.rule import SourceEdit
from hpctrain.lint.source import insert_argument, replace_node, span
from hpctrain.lint.syntax import constant, keyword, last, spreads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.lint.reporting import ProgramFacts
    from hpctrain.lint.rule import LintFinding

_AMP = "torch.cuda.amp"
_AMP_CODES = {"GradScaler": "HT401", "autocast": "HT402"}
_DCP = {"load_state_dict": "load", "save_state_dict": "save"}
_OLD_VARIABLES = frozenset(
    {"NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING"}
)
_OLD_COLLECTIVES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}


def check_legacy(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT401 to HT409."""
    yield from _amp(facts)
    yield from _checkpoints(facts)
    yield from _wrappers(facts)
    yield from _variables(facts)
    for call in facts.syntax.calls:
        dotted = facts.syntax.dotted(call.func)
        home, _, name = dotted.rpartition(".")
        if dotted == "torch.utils.checkpoint.checkpoint" and not spreads_keywords(call):
            if keyword(call, "use_reentrant") is None:
                yield facts.finding("HT406", call, "checkpoint() without use_reentrant")
        elif home == "torch.distributed" and name.endswith("_multigpu"):
            yield facts.finding("HT408", call, f"torch.distributed has no {name}()")
        elif home == "torch.distributed" and name in _OLD_COLLECTIVES:
            edits = _renamed(facts, call, _OLD_COLLECTIVES[name])
            yield facts.finding("HT409", call, f"{name}() is {_OLD_COLLECTIVES[name]}() now", edits)


def spreads_keywords(call: ast.Call) -> bool:
    """Whether keyword arguments come out of a dictionary."""
    return any(one.arg is None for one in call.keywords)


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


def _checkpoints(facts: ProgramFacts) -> Iterator[LintFinding]:
    for call in facts.syntax.calls:
        home, _, name = facts.syntax.dotted(call.func).rpartition(".")
        if home not in (
            "torch.distributed.checkpoint",
            "torch.distributed.checkpoint.state_dict_loader",
        ):
            continue
        if name in _DCP:
            plain = not call.args[1:] and not spreads(call) and isinstance(call.func, ast.Attribute)
            by_name = {one.arg for one in call.keywords} <= {
                "state_dict",
                "storage_reader",
                "storage_writer",
                "planner",
                "process_group",
            }
            edits = _renamed(facts, call, _DCP[name]) if plain and by_name else ()
            yield facts.finding("HT403", call, f"{name}() is {_DCP[name]}() now", edits)


def _renamed(facts: ProgramFacts, call: ast.Call, name: str) -> tuple[SourceEdit, ...]:
    """Another last name, where the call is written with its module."""
    if not isinstance(call.func, ast.Attribute):
        return ()
    _, end = span(facts.syntax, call.func)
    return (SourceEdit(end - len(call.func.attr.encode()), end, name),)


def _wrappers(facts: ProgramFacts) -> Iterator[LintFinding]:
    for call in facts.syntax.calls_to("FullyShardedDataParallel", root="torch"):
        yield facts.finding("HT404", call, "FullyShardedDataParallel() is FSDP1")
        break
    several = facts.distributed or facts.mentions("DistributedDataParallel", "init_process_group")
    for call in facts.syntax.calls_to("DataParallel", root="torch"):
        if not facts.trains:
            return
        if several and any(isinstance(one, ast.If) for one in facts.syntax.outer(call)):
            continue  # what is left where no launcher has started several ranks
        yield facts.finding("HT405", call, "DataParallel() drives all GPUs from one process")


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
