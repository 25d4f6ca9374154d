"""Rules HT501 to HT516: what ties a program to one machine, and how it joins the other ranks.

tests/unit/lint/test_rules.py holds the promises.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hpctrain.lint.collectives import FSDP_NAMES
from hpctrain.lint.dependence import LOCAL_VARIABLES, RANK_VARIABLES, environment_name
from hpctrain.lint.reporting import for_main_only, inside_loop, is_backward
from hpctrain.lint.syntax import argument, constant, given, is_true, keyword, last, spreads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.lint.reporting import ProgramFacts
    from hpctrain.lint.rule import LintFinding

_INTERFACES = frozenset(
    {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "TP_SOCKET_IFNAME"}
)
_TRANSPORTS = frozenset({"NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"})
_TUNED = frozenset({"NCCL_ALGO", "NCCL_PROTO"})
_HERE = frozenset({"localhost", "127.0.0.1", "0.0.0.0"})  # noqa: S104 - looked for, not bound
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"})
_DEVICE_CALLS = frozenset(
    {"torch.cuda.set_device", "torch.device", "torch.accelerator.set_device_index"}
)
_WRAP_POLICY = "transformer_auto_wrap_policy"
_TEMPLATE = re.compile(r"cuda:")


def check_cluster(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT501 to HT510, and HT513 to HT516; signals are in `signals`."""
    for name, value, node in _environment(facts):
        yield from _variable(facts, name, value, node)
    for call in facts.syntax.calls_to("init_process_group", root="torch.distributed"):
        yield from _process_group(facts, call)
    for call in facts.syntax.calls:
        yield from _device(facts, call)
        yield from _wrapper(facts, call)
        yield from _sampler_rank(facts, call)
    yield from _no_sync(facts)
    yield from _profilers(facts)
    for call in facts.syntax.calls_to("init", root="wandb"):
        grouped = keyword(call, "group") is not None or spreads(call)
        if facts.distributed and not grouped and not for_main_only(facts, call):
            yield facts.finding("HT519", call, "every rank calls wandb.init()")


def _profilers(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT518: a profiler with a schedule whose name is neither stepped nor given away."""
    for call in facts.syntax.calls_to("profile", root="torch.profiler"):
        holder = facts.syntax.parents[call]
        name = holder.optional_vars if isinstance(holder, ast.withitem) else None
        if not isinstance(name, ast.Name) or not given(keyword(call, "schedule")):
            continue
        uses = [
            one
            for one in facts.syntax.scope_of[call].of(ast.Name)
            if one.id == name.id and isinstance(one.ctx, ast.Load)
        ]
        elsewhere = [
            one for one in uses if not isinstance(facts.syntax.parents[one], ast.Attribute)
        ]
        stepped = [
            one for one in uses if facts.syntax.dotted(facts.syntax.parents[one]).endswith(".step")
        ]
        if not stepped and not elsewhere:
            yield facts.finding("HT518", call, f"{name.id}.step() is never called")


def _environment(facts: ProgramFacts) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    """Each (variable, value, where) that a program sets, tunings also by `setdefault`."""
    for scope in facts.syntax.scopes:
        for node in scope.of(ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Subscript):
                    continue
                name = constant(target.slice)
                if facts.syntax.dotted(target.value) == "os.environ" and isinstance(name, str):
                    yield name, node.value, node
    for call in facts.syntax.calls:
        yield from _by_call(facts, call)


def _by_call(facts: ProgramFacts, call: ast.Call) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    dotted = facts.syntax.dotted(call.func)
    if dotted == "os.environ.update":
        for arg in call.args:
            for key, value in _pairs(arg):
                yield str(constant(key)), value, key
    elif dotted in ("os.putenv", "os.environ.setdefault") and len(call.args) > 1:
        name = str(constant(call.args[0]))
        if dotted == "os.putenv" or name in _INTERFACES | _TUNED:
            yield name, call.args[1], call


def _pairs(node: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The keys and values of a literal dictionary."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield key, value


def _variable(
    facts: ProgramFacts, name: str, value: ast.expr, node: ast.AST
) -> Iterator[LintFinding]:
    given_value = constant(value)
    text = f"{name}={given_value}"
    if name in _INTERFACES and isinstance(given_value, str):
        if given_value and not given_value.startswith("^") and given_value != "lo":
            yield facts.finding("HT501", node, f"{text} holds on one cluster only")
    elif name in _TUNED and isinstance(given_value, str):
        if given_value.startswith("^") or _for_determinism(facts, node):
            return
        yield facts.finding("HT502", node, f"{text} overrules NCCL's choice everywhere")
    elif name == "NCCL_TIMEOUT":
        yield facts.finding("HT503", node, "nobody reads NCCL_TIMEOUT")
    elif name == "NCCL_IB_DISABLE" and str(given_value) == "0":
        yield facts.finding("HT504", node, f"{text} is what NCCL does without it")
    elif name in _TRANSPORTS and str(given_value) == "1":
        if not _for_determinism(facts, node):
            yield facts.finding("HT517", node, f"{text} holds on every cluster")
    elif given_value is not None and (
        name == "MASTER_PORT" or (name == "MASTER_ADDR" and given_value in _HERE)
    ):
        yield from _address(facts, text, node)


def _address(facts: ProgramFacts, text: str, node: ast.AST) -> Iterator[LintFinding]:
    if not _is_guarded(facts, node):
        yield facts.finding("HT505", node, f"{text} overrules what the launcher has set")


def _for_determinism(facts: ProgramFacts, node: ast.AST) -> bool:
    """Whether it is set so that sums have one order: what it is there for."""
    scope = facts.syntax.scope_of[node]
    first, end = getattr(scope.node, "lineno", 1), getattr(scope.node, "end_lineno", None)
    lines = facts.syntax.lines[first - 1 : end]
    return "determin" in scope.name or any("determin" in line.lower() for line in lines)


def _is_guarded(facts: ProgramFacts, node: ast.AST) -> bool:
    """Whether it holds on one machine only: under a test, or where ranks are spawned."""
    if facts.spawns or facts.mentions("spawn", "mp", "multiprocessing"):
        return True
    return any(isinstance(one, ast.If | ast.ExceptHandler) for one in facts.syntax.outer(node))


def _process_group(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    if spreads(call):
        return
    backend = constant(argument(call, "backend", 0))
    if keyword(call, "timeout") is None and not call.args[2:]:
        yield facts.finding("HT508", call, "init_process_group() without a time-out of your own")
    chosen = facts.mentions("set_device", "set_device_index", "set_device_idx", "device_id")
    if backend != "gloo" and not chosen and not facts.says("CUDA_VISIBLE_DEVICES"):
        yield facts.finding("HT507", call, "no set_device() and no device_id in this file")
    if (
        backend == "gloo"
        and facts.trains
        and facts.mentions("DistributedDataParallel", "DDP", *FSDP_NAMES)
    ) and _on_gpus(facts):
        yield facts.finding("HT510", call, "the model is on GPUs and its gradients go through gloo")
    address = str(constant(keyword(call, "init_method")))
    if any(f"://{host}:" in address for host in _HERE) and not _is_guarded(facts, call):
        yield facts.finding("HT505", call, f"{address} overrules what the launcher has set")
    world_size = constant(argument(call, "world_size", 3))
    if isinstance(world_size, int) and world_size > 1 and not facts.spawns:
        yield facts.finding("HT516", call, f"world_size={world_size} holds for one number of nodes")
    rank = keyword(call, "rank")
    one_node = facts.spawns or facts.mentions("device_count") or facts.says("LOCAL_WORLD_SIZE")
    if rank is not None and _origin(facts, rank) == "local" and not one_node:
        yield facts.finding("HT513", rank, f"rank={facts.syntax.code(rank)} is LOCAL_RANK")


def _on_gpus(facts: ProgramFacts) -> bool:
    """Whether something is brought to a GPU whatever there is."""
    if facts.mentions("is_available"):
        return False
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args
        for call in facts.syntax.calls
    )


def _origin(facts: ProgramFacts, node: ast.expr, depth: int = 0) -> str:
    """The rank that a value is for certain, unchanged: "global", "local", or nothing."""
    variable = environment_name(facts.syntax, node)
    if variable in RANK_VARIABLES:
        return "global"
    if variable in LOCAL_VARIABLES:
        return "local"
    if isinstance(node, ast.Call):
        dotted = facts.syntax.dotted(node.func)
        if dotted == "int" and len(node.args) == 1:
            return _origin(facts, node.args[0], depth)
        return "global" if dotted == "torch.distributed.get_rank" and not node.args else ""
    if not isinstance(node, ast.Name) or depth > 1:
        return ""
    origins = {_origin(facts, value, depth + 1) for value in facts.dependence.values_at(node)}
    return origins.pop() if len(origins) == 1 else ""


def _device(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    """HT506: set_device(rank), .to(rank), .cuda(rank), device_ids=[rank], f"cuda:{rank}"."""
    dotted = facts.syntax.dotted(call.func)
    values: list[ast.expr] = []
    ids = keyword(call, "device_ids") or (
        call.args[1] if last(dotted) in _WRAPPERS and call.args[1:] else None
    )
    if isinstance(ids, ast.List):
        values += ids.elts
    if dotted in _DEVICE_CALLS:
        values += call.args
    elif isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda"):
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
        if any(_origin(facts, part) == "global" for part in parts):
            text = facts.syntax.code(call.func)
            yield facts.finding(
                "HT506", value, f"{text}() takes the rank among all nodes for a device"
            )
            return


def _wrapper(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    dotted = facts.syntax.dotted(call.func)
    name = last(dotted)
    if isinstance(facts.syntax.parents[call], ast.Expr):
        if name in _WRAPPERS and dotted.startswith("torch."):
            yield facts.finding("HT514", call, f"what {name}() returns is thrown away")
        elif dotted == "torch.compile" and call.args:
            yield facts.finding("HT514", call, "what torch.compile() returns is thrown away")
        elif name == "prepare" and "accelerator" in dotted.lower() and len(call.args) > 1:
            yield facts.finding("HT514", call, "what accelerator.prepare() returns is thrown away")
    if name == "DistributedDataParallel" and is_true(keyword(call, "find_unused_parameters")):
        yield facts.finding("HT509", call, "find_unused_parameters=True")
    if dotted.startswith("torch.distributed.fsdp") and name == "FullyShardedDataParallel":
        policy = keyword(call, "auto_wrap_policy")
        if policy is not None and last(facts.syntax.dotted(policy)) == _WRAP_POLICY:
            yield facts.finding("HT607", policy, f"{_WRAP_POLICY} without transformer_layer_cls")
        for option in call.keywords:
            if option.arg in (
                "state_dict_type",
                "full_state_dict",
                "reshard_after_forward",
                "mesh",
            ):
                yield facts.finding(
                    "HT606", option.value, f"FullyShardedDataParallel() has no {option.arg}"
                )


def _sampler_rank(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    if last(facts.syntax.dotted(call.func)) != "DistributedSampler" or facts.spawns:
        return
    rank = argument(call, "rank", 2)
    if rank is not None and _origin(facts, rank) == "local":
        yield facts.finding("HT513", rank, f"rank={facts.syntax.code(rank)} is LOCAL_RANK")


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
        and isinstance(one.func, ast.Attribute)
        and one.func.attr == "step"
        and "opt" in ast.unparse(one.func.value).lower()
        for part in node.body
        for one in ast.walk(part)
    )
