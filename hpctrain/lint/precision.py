"""Rules HT201 to HT211: precision, scaling, clipping, and the order of a training step.

tests/unit/lint/test_rules.py holds the promises.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hpctrain.lint.reporting import exclusive, inside_loop, is_backward
from hpctrain.lint.source import insert_argument
from hpctrain.lint.syntax import argument, constant, keyword, last, spreads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.lint.reporting import ProgramFacts
    from hpctrain.lint.rule import LintFinding
    from hpctrain.lint.syntax import LintScope

_SEEDING = (
    "manual_seed",
    "seed_everything",
    "set_seed",
    "set_random_seed",
    "seed",
    "manual_seed_all",
)
_OTHERS_STEP = (
    "deepspeed",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "megatron",
)
"""Libraries that scale, clip and reset gradients in a program's place."""
_SHORT = frozenset({"bfloat16", "float16", "half"})
_SHORTER = _SHORT | {"amp", "autocast", "bf16", "fp16", "precision", "scaler", "gradscaler"}
_PART = re.compile(r"[a-z]+[0-9]*")
_OF_CUDA = "torch.cuda.amp.autocast"
_WITH_DEVICE = frozenset(
    {"torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"}
)
_AUTOCASTS = _WITH_DEVICE | {_OF_CUDA, "torch.cpu.amp.autocast"}
"""torch's own; those of other makers' modules in torch take other arguments."""
_CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_"})


def check_precision(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT201 to HT211."""
    yield from _autocasts(facts)
    yield from _scalers(facts)
    yield from _steps(facts)
    yield from _items(facts)
    yield from _sharded_later(facts)
    yield from _clipped_shards(facts)
    for call in facts.syntax.calls_to("MixedPrecision", "MixedPrecisionPolicy", root="torch"):
        dtype = keyword(call, "reduce_dtype")
        if dtype is not None and last(facts.syntax.dotted(dtype)) in _SHORT:
            yield facts.finding("HT214", dtype, f"reduce_dtype={facts.syntax.code(dtype)}")
    if facts.distributed and facts.trains and not facts.mentions(*_SEEDING):
        first = next(call for call in facts.syntax.calls if is_backward(call))
        yield facts.finding("HT206", first, "trains without a seed in this file")
    if facts.distributed and facts.trains and facts.mentions("cuda") and _is_all_long(facts):
        first = next(call for call in facts.syntax.calls if is_backward(call))
        yield facts.finding("HT212", first, "no precision below float32 is named in this file")


def _is_all_long(facts: ProgramFacts) -> bool:
    """Whether neither a name nor a text of the program speaks of a shorter number."""
    if facts.syntax.imports_any(*_OTHERS_STEP):
        return False
    words = " ".join([*facts.words, *(str(one.value) for one in facts.strings)]).lower()
    return _SHORTER.isdisjoint(_PART.findall(words)) and "mp_policy" not in facts.words


def _clipped_shards(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT213: what FSDP1 wraps, clipped by what knows no shards."""
    wrapped = {
        ast.unparse(parent.targets[0])
        for call in facts.syntax.calls_to("FullyShardedDataParallel", root="torch")
        if isinstance(parent := facts.syntax.parents[call], ast.Assign)
    }
    for call in facts.syntax.calls_to("clip_grad_norm_", root="torch.nn.utils"):
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Call) and last_attribute(first) == "parameters":
            model = ast.unparse(first.func).removesuffix(".parameters")
            if model in wrapped:
                yield facts.finding("HT213", call, f"{model} is FSDP1's: its own clip_grad_norm_()")


def _autocasts(facts: ProgramFacts) -> Iterator[LintFinding]:
    scaled = any("scaler" in word.lower() for word in facts.words)
    helped = facts.syntax.imports_any(*_OTHERS_STEP)
    for call in facts.syntax.calls_to("autocast", root="torch"):
        dotted = facts.syntax.dotted(call.func)
        if dotted not in _AUTOCASTS:
            continue
        old = dotted not in _WITH_DEVICE
        dtype = keyword(call, "dtype") or (None if old else argument(call, "dtype", 1))
        if not old and not call.args and keyword(call, "device_type") is None and not spreads(call):
            edits = insert_argument(facts.syntax, call, '"cuda"')
            yield facts.finding("HT207", call, "autocast() needs its device type", edits)
        kind = last(facts.syntax.dotted(dtype)) if dtype is not None else ""
        if kind in ("float16", "half") and facts.trains and not scaled and not helped:
            yield facts.finding("HT201", call, "gradients of float16 without a GradScaler")
        device = constant(argument(call, "device_type", 0))
        if dtype is None and (dotted == _OF_CUDA or device == "cuda") and not spreads(call):
            yield facts.finding("HT202", call, "autocast() without a dtype is float16 on CUDA")


def _scalers(facts: ProgramFacts) -> Iterator[LintFinding]:
    names: dict[str, ast.Call] = {}
    for call in facts.syntax.calls_to("GradScaler", root="torch"):
        parent = facts.syntax.parents[call]
        if isinstance(parent, ast.Assign) and constant(keyword(call, "enabled")) is not False:
            names[ast.unparse(parent.targets[0])] = call
    methods: dict[str, set[str]] = {name: set() for name in names}
    for call in facts.syntax.calls:
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in methods:
            methods[ast.unparse(call.func.value)].add(call.func.attr)
    for name, used in methods.items():
        if "step" in used and "update" not in used:
            yield facts.finding(
                "HT209", names[name], f"{name}.step() is called, {name}.update() never"
            )
    dtypes = {last(facts.syntax.dotted(call_dtype)) for call_dtype in _dtypes(facts)}
    if dtypes == {"bfloat16"}:
        for name, call in names.items():
            if keyword(call, "enabled") is None and "scale" in methods[name]:
                yield facts.finding("HT208", call, "every autocast of this file is bfloat16")


def _dtypes(facts: ProgramFacts) -> Iterator[ast.expr]:
    for call in facts.syntax.calls_to("autocast", root="torch"):
        dtype = keyword(call, "dtype")
        yield dtype if dtype is not None else call


def _steps(facts: ProgramFacts) -> Iterator[LintFinding]:
    """The order of backward, unscale, clip and step in each function."""
    for scope in facts.syntax.scopes:
        moves = _moves(scope)
        if not any(kind == "backward" for kind, _, _ in moves):
            continue
        yield from _clip_order(facts, moves)
        yield from _no_zero_grad(facts, moves)


def _moves(scope: LintScope) -> list[tuple[str, ast.Call, str]]:
    """(what, call, of whom) for each move of a training step, in the order of the text."""
    moves: list[tuple[str, ast.Call, str]] = []
    for call in scope.of(ast.Call):
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if is_backward(call):
            inner = call.func.value if isinstance(call.func, ast.Attribute) else call
            scaled = isinstance(inner, ast.Call) and last_attribute(inner) == "scale"
            moves.append(("backward", call, owner if scaled else ""))
        elif name in _CLIPS:
            moves.append(("clip", call, owner))
        elif name in ("unscale_", "step", "zero_grad", "unscale_gradients"):
            moves.append((name, call, owner))
    return sorted(moves, key=lambda one: (one[1].lineno, one[1].col_offset))


def last_attribute(call: ast.Call) -> str:
    """The attribute that is called, if it is one."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _clip_order(
    facts: ProgramFacts, moves: list[tuple[str, ast.Call, str]]
) -> Iterator[LintFinding]:
    for index, (kind, call, owner) in enumerate(moves):
        if kind != "clip" or "accelerator" in owner:
            continue
        before = [one[0] for one in moves[:index] if not exclusive(facts.syntax, one[1], call)]
        by_scaler = any(
            one[0] == "backward" and one[2] and not exclusive(facts.syntax, one[1], call)
            for one in moves[:index]
        )
        if by_scaler and not {"unscale_", "unscale_gradients"} & set(before):
            yield facts.finding("HT203", call, "gradients are clipped before scaler.unscale_()")
        block = _siblings(facts, call)
        since = [one for one in moves[:index] if _within(facts, one[1], block)]
        later = [one for one in moves[index + 1 :] if _within(facts, one[1], block)]
        stepped = [one for one in since if one[0] == "step" and _is_optimizer(one)]
        again = any(one[0] in ("step", "backward") for one in later)
        if stepped and any(one[0] == "backward" for one in since) and not again:
            yield facts.finding(
                "HT210", call, f"gradients are clipped after {stepped[-1][2]}.step()"
            )


def _siblings(facts: ProgramFacts, node: ast.AST) -> ast.AST:
    """The loop or function that a statement is in."""
    return inside_loop(facts.syntax, node) or facts.syntax.scope_of[node].node


def _within(facts: ProgramFacts, node: ast.AST, block: ast.AST) -> bool:
    return _siblings(facts, node) is block


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
    if loop is None or facts.syntax.imports_any(*_OTHERS_STEP[:1]):
        return
    yield facts.finding(
        "HT204", steps[0][1], f"{steps[0][2]}.step() in a loop that never calls zero_grad()"
    )


def _items(facts: ProgramFacts) -> Iterator[LintFinding]:
    """One `.item()` of a loss for each loop, where nothing keeps it from every step."""
    loops: set[ast.AST] = set()
    for call in facts.syntax.calls:
        if last_attribute(call) != "item" or call.args:
            continue
        loop = inside_loop(facts.syntax, call)
        if loop is None or loop in loops or _is_conditional(facts, call, loop):
            continue
        if any(is_backward(one) for one in ast.walk(loop) if isinstance(one, ast.Call)):
            loops.add(loop)
            yield facts.finding(
                "HT205", call, f"{facts.syntax.code(call)} at every step of the loop"
            )


def _is_conditional(facts: ProgramFacts, node: ast.AST, loop: ast.AST) -> bool:
    for around in facts.syntax.outer(node):
        if around is loop:
            return False
        if isinstance(around, ast.If | ast.IfExp | ast.ExceptHandler):
            return True
    return False


def _sharded_later(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT211: `Adam(model.parameters())`, and below it `fully_shard(model)` in the same block."""
    shards = [call for call in facts.syntax.calls_to("fully_shard", root="torch") if call.args]
    if not shards:
        return
    for call in facts.syntax.calls:
        made = facts.syntax.parents[call]
        if not (
            isinstance(made, ast.Assign)
            and call.args
            and "opt" in ast.unparse(made.targets[0]).lower()
        ):
            continue
        first = call.args[0]
        if not (isinstance(first, ast.Call) and last_attribute(first) == "parameters"):
            continue
        model = ast.unparse(first.func.value) if isinstance(first.func, ast.Attribute) else ""
        scope = facts.syntax.scope_of[call]
        if facts.mentions("param_groups"):
            continue  # it is given the new parameters by hand
        later = [
            shard
            for shard in shards
            if ast.unparse(shard.args[0]) == model
            and facts.syntax.scope_of[shard] is scope
            and shard.lineno > call.lineno
        ]
        if later:
            message = f"it holds what {model} was before fully_shard() at line {later[0].lineno}"
            yield facts.finding("HT211", call, message)
