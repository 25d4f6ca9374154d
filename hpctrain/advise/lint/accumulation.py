"""Rules HT216, HT217 and HT515: gradients of several batches for one step."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from hpctrain.advise.lint.reporting import (
    ProgramFacts,
    inside_loop,
    is_backward,
    last_attribute,
    methods,
    owner_of,
)
from hpctrain.advise.lint.syntax import constant, keyword, last

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.rule import LintFinding

_STEPS = "gradient_accumulation_steps"


def check_accumulation(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT216, HT217 and HT515."""
    yield from _cleared_by_hand(facts)
    yield from _with_accelerate(facts)
    yield from _no_sync(facts)


def _cleared_by_hand(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT216: `zero_grad()` for each batch, the same optimizer's `step()` for each nth."""
    for call in methods(facts, "zero_grad"):
        owner, loop = owner_of(call), inside_loop(facts.syntax, call)
        if loop is None or not _is_each_round(facts, call, loop):
            continue
        steps = [
            one
            for one in methods(facts, "step")
            if owner_of(one) == owner and inside_loop(facts.syntax, one) is loop
        ]
        tests = [around for one in steps if (around := _nth_around(facts, one)) is not None]
        backward = any(
            is_backward(one) and _is_each_round(facts, one, loop) for one in facts.syntax.calls
        )
        if backward and tests and len(tests) == len(steps) and _accumulates(tests[0], owner):
            message = f"{owner}.zero_grad() for each batch, step() only at line {steps[0].lineno}"
            yield facts.finding("HT216", call, message)


def _with_accelerate(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT216 and HT217 where `Accelerator(gradient_accumulation_steps=...)` is more than 1."""
    given = [keyword(one, _STEPS) for one in facts.syntax.calls_to("Accelerator")]
    divisors = {ast.unparse(one) for one in given if one is not None and constant(one) != 1}
    if not divisors:
        return
    for call in facts.syntax.calls:
        if is_backward(call) and last(owner_of(call)) == "accelerator" and call.args:
            divided = _division(facts, call)
            if divided is not None and (
                ast.unparse(divided) in divisors or last(facts.syntax.dotted(divided)) == _STEPS
            ):
                message = f"backward() divides by {ast.unparse(divided)}, too"
                yield facts.finding("HT217", call, message)
    for block in (one for scope in facts.syntax.scopes for one in scope.of(ast.With)):
        if any(".accumulate(" in ast.unparse(item.context_expr) for item in block.items):
            yield from _cleared_in(facts, block)


def _cleared_in(facts: ProgramFacts, block: ast.With) -> Iterator[LintFinding]:
    """An optimizer that accelerate wraps waits for the last batch; its model does not wait."""
    backward = [
        one.lineno
        for one in facts.syntax.calls
        if is_backward(one) and block in facts.syntax.outer(one)
    ]
    for call in methods(facts, "zero_grad"):
        owner = owner_of(call)
        waits = "opt" in owner.lower() and call.lineno > min(backward, default=0)
        if backward and not waits and facts.syntax.parents[call] in block.body:
            yield facts.finding("HT216", call, f"{owner}.zero_grad() for each batch of a step")


def _division(facts: ProgramFacts, call: ast.Call) -> ast.expr | None:
    """What the loss that a call is given was divided by last."""
    value = call.args[0]
    if isinstance(value, ast.Name):
        scope = facts.syntax.scope_of[call]
        changes: list[ast.Assign | ast.AugAssign] = [
            *scope.of(ast.Assign),
            *scope.of(ast.AugAssign),
        ]
        changes = [
            one
            for one in changes
            if one.lineno < call.lineno
            and value.id in {ast.unparse(target) for target in _targets(one)}
        ]
        latest = max(changes, key=lambda one: one.lineno, default=None)
        if isinstance(latest, ast.AugAssign):
            return latest.value if isinstance(latest.op, ast.Div) else None
        value = latest.value if latest is not None else value
    is_division = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
    return value.right if isinstance(value, ast.BinOp) and is_division else None


def _targets(node: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _is_each_round(facts: ProgramFacts, call: ast.Call, loop: ast.For | ast.While) -> bool:
    """Whether a call is made in each round of this loop: under no test, in no inner loop."""
    for around in facts.syntax.outer(call):
        if around is loop:
            return True
        if not isinstance(around, ast.With | ast.Expr):
            return False
    return False


def _nth_around(facts: ProgramFacts, call: ast.Call) -> ast.If | None:
    for around in facts.syntax.outer(call):
        if isinstance(around, ast.If) and _is_each_nth(around.test):
            return around
    return None


def _accumulates(test: ast.If, owner: str) -> bool:
    """Whether every nth batch is meant to end a sum, and not to train something less often."""
    cleared = f"{owner}.zero_grad(" in ast.unparse(ast.Module(test.body, []))
    return cleared or "accum" in ast.unparse(test.test).lower()


def _no_sync(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT515: `optimizer.step()` under `% accumulation`, DDP, and no no_sync in the file."""
    if not facts.mentions("DistributedDataParallel"):
        return
    if facts.mentions("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"):
        return
    for call in facts.syntax.calls:
        if not is_backward(call):
            continue
        loop = inside_loop(facts.syntax, call)
        for node in ast.walk(loop) if loop is not None else ():
            if isinstance(node, ast.If) and _is_each_nth(node.test) and _steps_in(node):
                yield facts.finding(
                    "HT515",
                    call,
                    f"every backward() reduces, and line {node.lineno} steps now and then",
                )
                return


def _is_each_nth(test: ast.expr) -> bool:
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in ast.walk(test))


def _steps_in(node: ast.If) -> bool:
    return any(
        isinstance(one, ast.Call)
        and last_attribute(one) == "step"
        and "opt" in owner_of(one).lower()
        for part in node.body
        for one in ast.walk(part)
    )
