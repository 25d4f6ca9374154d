"""Rules HT117, HT203 to HT205, HT208 to HT211, HT213, HT215, HT515 and HT518: a step."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hpctrain.advise.lint.reporting import ProgramFacts, exclusive, inside_loop, is_backward
from hpctrain.advise.lint.syntax import (
    LintScope,
    constant,
    given,
    keyword,
    last,
    last_attribute,
    owner_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.rule import LintFinding

_CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_"})


def check_precision(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT117, HT203 to HT205, HT208 to HT211, HT213, HT215, HT515 and HT518."""
    yield from _scalers(facts)
    yield from _steps(facts)
    yield from _items(facts)
    yield from _sharded_later(facts)
    yield from _clipped_shards(facts)
    yield from _no_sync(facts)
    yield from _bypassed(facts)
    yield from _profilers(facts)
    yield from _running_totals(facts)


def _running_totals(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT215: `total += x` and `all_reduce(total)` in one loop, which begins no total anew."""
    for call in facts.syntax.calls_to("all_reduce", root="torch.distributed"):
        loop = inside_loop(facts.syntax, call)
        name = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""
        statement = facts.syntax.parents[call]
        if loop is None or not name or statement not in loop.body or len(call.args) > 1:
            continue
        op = keyword(call, "op")
        if op is not None and last(facts.syntax.dotted(op)) != "SUM":
            continue
        uses = [one for one in ast.walk(loop) if isinstance(one, ast.Name) and one.id == name]
        changes = [one for one in uses if not isinstance(one.ctx, ast.Load)]
        adds = [facts.syntax.parents[one] for one in changes]
        added = all(isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Add) for one in adds)
        methods = [facts.syntax.parents[one] for one in uses if isinstance(one.ctx, ast.Load)]
        only_once = loop.body.index(statement) + 1 < len(loop.body) and isinstance(
            loop.body[-1], ast.Break | ast.Return
        )
        resets = any(isinstance(one, ast.Attribute) and one.attr.endswith("_") for one in methods)
        if changes and added and not only_once and not resets:
            yield facts.finding("HT215", call, f"{name} holds earlier sums over ranks already")


def _clipped_shards(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT213: what FSDP1 wraps, clipped by what knows no shards."""
    wrapped = {
        ast.unparse(parent.targets[0])
        for call in facts.syntax.calls_to("FullyShardedDataParallel", root="torch")
        if isinstance(parent := facts.syntax.parents[call], ast.Assign)
    }
    for call in facts.syntax.calls_to("clip_grad_norm_", root="torch.nn.utils"):
        model = _whose_parameters(call)
        if model in wrapped:
            yield facts.finding("HT213", call, f"{model} is FSDP1's: its own clip_grad_norm_()")


def _whose_parameters(call: ast.Call) -> str:
    """The model whose parameters() are a call's first argument, as it is written."""
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Call) or last_attribute(first) != "parameters":
        return ""
    return owner_of(first)


def _scalers(facts: ProgramFacts) -> Iterator[LintFinding]:
    names: dict[str, ast.Call] = {}
    for call in facts.syntax.calls_to("GradScaler", root="torch"):
        parent = facts.syntax.parents[call]
        if isinstance(parent, ast.Assign) and constant(keyword(call, "enabled")) is not False:
            names[ast.unparse(parent.targets[0])] = call
    if not names:
        return
    called: dict[str, set[str]] = {name: set() for name in names}
    for call in facts.syntax.calls:
        called.get(owner_of(call), set()).add(last_attribute(call))
    for name, used in called.items():
        if "step" in used and "update" not in used:
            message = f"{name}.step() is called, {name}.update() never"
            yield facts.finding("HT209", names[name], message)
        yield from _left_scaled(facts, name)
    casts = facts.syntax.calls_to("autocast", root="torch")
    if {last(facts.syntax.dotted(keyword(one, "dtype") or one)) for one in casts} == {"bfloat16"}:
        for name, call in names.items():
            if keyword(call, "enabled") is None and "scale" in called[name]:
                yield facts.finding("HT208", call, "every autocast of this file is bfloat16")


def _left_scaled(facts: ProgramFacts, name: str) -> Iterator[LintFinding]:
    """HT209: unscale_() at each step, update() at some: the next unscale_() raises."""
    unscaled = [one for one in facts.syntax.methods("unscale_") if owner_of(one) == name]
    updated = [one for one in facts.syntax.methods("update") if owner_of(one) == name]
    loop = inside_loop(facts.syntax, unscaled[0]) if len(unscaled) == len(updated) == 1 else None
    if loop is None or facts.syntax.parents[unscaled[0]] not in loop.body:
        return
    around = facts.syntax.outer(updated[0])
    test = next((one for one in around if isinstance(one, ast.If | ast.For | ast.While)), None)
    if isinstance(test, ast.If) and test in ast.walk(loop):
        message = f"{name}.unscale_() is called at each step, update() only under a test"
        yield facts.finding("HT209", updated[0], message)


def _steps(facts: ProgramFacts) -> Iterator[LintFinding]:
    """The order of backward, unscale, clip and step in each function."""
    for scope in facts.syntax.scopes:
        moves = _moves(scope)
        if any(kind == "backward" for kind, _, _ in moves):
            yield from _clip_order(facts, moves)
            yield from _no_zero_grad(facts, moves)


def _moves(scope: LintScope) -> list[tuple[str, ast.Call, str]]:
    """(what, call, of whom) for each move of a training step, in the order of the text."""
    moves: list[tuple[str, ast.Call, str]] = []
    for call in scope.of(ast.Call):
        name, owner = last(ast.unparse(call.func)), owner_of(call)
        if is_backward(call):
            inner = call.func.value if isinstance(call.func, ast.Attribute) else call
            scaled = isinstance(inner, ast.Call) and last_attribute(inner) == "scale"
            moves.append(("backward", call, owner if scaled else ""))
        elif name in _CLIPS:
            moves.append(("clip", call, owner))
        elif name in ("unscale_", "step", "zero_grad", "unscale_gradients"):
            moves.append((name, call, owner))
    return sorted(moves, key=lambda one: (one[1].lineno, one[1].col_offset))


def _clip_order(
    facts: ProgramFacts, moves: list[tuple[str, ast.Call, str]]
) -> Iterator[LintFinding]:
    for index, (kind, call, owner) in enumerate(moves):
        if kind != "clip" or "accelerator" in owner:
            continue
        before = [one for one in moves[:index] if not exclusive(facts.syntax, one[1], call)]
        by_scaler = any(what == "backward" and scaler for what, _, scaler in before)
        if by_scaler and not {"unscale_", "unscale_gradients"} & {what for what, _, _ in before}:
            yield facts.finding("HT203", call, "gradients are clipped before scaler.unscale_()")
        loop = inside_loop(facts.syntax, call)  # None: the function itself, whose moves these are
        since = [one for one in moves[:index] if inside_loop(facts.syntax, one[1]) is loop]
        later = [one for one in moves[index + 1 :] if inside_loop(facts.syntax, one[1]) is loop]
        stepped = [one for one in since if one[0] == "step" and _is_optimizer(one)]
        again = any(one[0] in ("step", "backward") for one in later)
        if stepped and any(one[0] == "backward" for one in since) and not again:
            yield facts.finding(
                "HT210", call, f"gradients are clipped after {stepped[-1][2]}.step()"
            )


def _is_optimizer(move: tuple[str, ast.Call, str]) -> bool:
    owner = last(move[2]).lower()
    return "opt" in owner or (bool(move[1].args) and "scaler" in owner)


def _no_zero_grad(
    facts: ProgramFacts, moves: list[tuple[str, ast.Call, str]]
) -> Iterator[LintFinding]:
    steps = [move for move in moves if move[0] == "step" and _is_optimizer(move)]
    steps = [move for move in steps if not move[1].args or "scaler" in move[2].lower()]
    if not steps or facts.mentions("zero_grad", "zero_grad_buffer") or facts.mentions("grad"):
        return
    backward = next(call for kind, call, _ in moves if kind == "backward")
    loop = inside_loop(facts.syntax, backward)
    if loop is None or facts.syntax.imports_any("deepspeed"):
        return
    yield facts.finding(
        "HT204", steps[0][1], f"{steps[0][2]}.step() in a loop that never calls zero_grad()"
    )


def _items(facts: ProgramFacts) -> Iterator[LintFinding]:
    """One `.item()` of a loss for each loop, where nothing keeps it from every step."""
    loops: set[ast.AST] = set()
    for call in facts.syntax.methods("item"):
        loop = inside_loop(facts.syntax, call)
        if call.args or loop is None or loop in loops:
            continue
        around = list(facts.syntax.outer(call))
        inside = around[: around.index(loop)]
        if any(isinstance(one, ast.If | ast.IfExp | ast.ExceptHandler) for one in inside):
            continue
        if any(is_backward(one) for one in ast.walk(loop) if isinstance(one, ast.Call)):
            loops.add(loop)
            text = facts.syntax.code(call)
            yield facts.finding("HT205", call, f"{text} at every step of the loop")


def _sharded_later(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT211: `Adam(model.parameters())`, and below it `fully_shard(model)` in the same block."""
    shards = [call for call in facts.syntax.calls_to("fully_shard", root="torch") if call.args]
    if not shards or facts.mentions("param_groups"):
        return  # it may be given the new parameters by hand
    for call in facts.syntax.calls:
        made, model = facts.syntax.parents[call], _whose_parameters(call)
        is_optimizer = (
            isinstance(made, ast.Assign) and "opt" in ast.unparse(made.targets[0]).lower()
        )
        if not is_optimizer or not model:
            continue
        later = [
            shard.lineno
            for shard in shards
            if ast.unparse(shard.args[0]) == model
            and facts.syntax.scope_of[shard] is facts.syntax.scope_of[call]
            and shard.lineno > call.lineno
        ]
        if later:
            message = f"it holds what {model} was before fully_shard() at line {later[0]}"
            yield facts.finding("HT211", call, message)


def _profilers(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT518: a profiler with a schedule whose name is neither stepped nor given away."""
    for call in facts.syntax.calls_to("profile", root="torch.profiler"):
        holder = facts.syntax.parents[call]
        name = holder.optional_vars if isinstance(holder, ast.withitem) else None
        if not isinstance(name, ast.Name) or not given(keyword(call, "schedule")):
            continue
        names = facts.syntax.scope_of[call].of(ast.Name)
        uses = [
            facts.syntax.parents[one]
            for one in names
            if one.id == name.id and isinstance(one.ctx, ast.Load)
        ]
        if not any(
            not isinstance(one, ast.Attribute) or facts.syntax.dotted(one).endswith(".step")
            for one in uses
        ):
            yield facts.finding("HT518", call, f"{name.id}.step() is never called")


def _no_sync(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT515: `optimizer.step()` under `% accumulation`, DDP, and no no_sync in the file."""
    if not facts.mentions("DistributedDataParallel"):
        return
    if facts.mentions("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"):
        return
    for call in facts.syntax.methods("backward"):
        loop = inside_loop(facts.syntax, call)
        for node in ast.walk(loop) if loop is not None else ():
            if not isinstance(node, ast.If):
                continue
            if not any(isinstance(one, ast.Mod) for one in ast.walk(node.test)):
                continue
            inside = [one for part in node.body for one in ast.walk(part)]
            if any(
                isinstance(one, ast.Call)
                and last_attribute(one) == "step"
                and "opt" in owner_of(one).lower()
                for one in inside
            ):
                message = f"every backward() reduces, and line {node.lineno} steps now and then"
                yield facts.finding("HT515", call, message)
                return


def _bypassed(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT117: a loss of `model.module(x)`, in a loop that never calls the DDP model itself."""
    averaged = ("grad" in ast.unparse(one).lower() for one in facts.syntax.calls_to("all_reduce"))
    if not facts.mentions("DistributedDataParallel") or any(averaged):
        return
    for call in facts.syntax.calls:
        loop = inside_loop(facts.syntax, call)
        if not is_backward(call) or loop is None:
            continue
        inside = [part for part in ast.walk(loop) if isinstance(part, ast.Call)]
        called = {ast.unparse(part.func) for part in inside}
        for part in inside:
            model = _behind_module(facts, part.func)
            if model and model not in called and _feeds(facts, part, call, loop):
                yield facts.finding("HT117", part, f"{model} of DDP is never called in this loop")
                break


def _behind_module(facts: ProgramFacts, func: ast.expr) -> str:
    """The DDP model whose `.module`, or a method of it, is called, as far as that is plain."""
    owner = func
    while isinstance(owner, ast.Attribute) and owner.attr != "module":
        owner = owner.value
    values = [owner]
    if isinstance(owner, ast.Name):
        values = facts.dependence.values_at(owner)
    elif isinstance(owner, ast.Call):
        scope = facts.syntax.resolve(owner, facts.syntax.scope_of[owner])
        returns = scope.of(ast.Return) if scope is not None else []
        values = [one.value for one in returns if one.value is not None]
    for value in values:
        plain = value.body if isinstance(value, ast.IfExp) else value
        if isinstance(plain, ast.Attribute) and plain.attr == "module":
            return ast.unparse(plain.value)
    return ""


def _feeds(facts: ProgramFacts, part: ast.Call, backward: ast.Call, loop: ast.AST) -> bool:
    """Whether a loss is made of what a call gives, by the names in between."""
    for around in facts.syntax.outer(part):
        heads = around.items if isinstance(around, ast.With) else []
        if any(re.search("no_grad|inference_mode", ast.unparse(one)) for one in heads):
            return False
    made = [
        (
            {
                one.id
                for target in node.targets
                for one in ast.walk(target)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            },
            node.value,
        )
        for node in ast.walk(loop)
        if isinstance(node, ast.Assign)
    ]
    names: set[str] = set()
    parts: list[ast.expr] = [backward]
    for _ in range(5):
        seen = {one for value in parts for one in ast.walk(value)}
        if part in seen:
            return True
        names |= {one.id for one in seen if isinstance(one, ast.Name)}
        parts = [value for targets, value in made if names & targets]
    return False
