"""Rules HT301, HT302, HT306 to HT309, HT511, HT512, HT601, HT605 and HT608.

Samplers, loaders and their workers; signals, saves and loads.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from hpctrain.advise.lint.dependence import RANKS
from hpctrain.advise.lint.reporting import ProgramFacts, for_main_only, is_backward
from hpctrain.advise.lint.syntax import (
    NAMES,
    LintScope,
    argument,
    constant,
    given,
    keyword,
    last,
    spreads,
)
from hpctrain.core.base.text import count
from hpctrain.launch.begins_anew import begins_anew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.advise.lint.rule import LintFinding

_SAMPLER = "DistributedSampler"
_SAMPLER_PLACE, _WORKERS_PLACE, _SHUFFLE_PLACE = 3, 5, 2
_SEED_PLACE = 4


def check_loading(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT301, HT302 and HT306 to HT309."""
    yield from _set_epoch(facts)
    for call in facts.syntax.calls_to(_SAMPLER, root="torch.utils.data"):
        seed = argument(call, "seed", _SEED_PLACE)
        if seed is not None and not spreads(call) and facts.dependence.of(seed) & RANKS:
            text = facts.syntax.code(seed)
            yield facts.finding("HT309", call, f"seed={text} is another number on each rank")
    for call in facts.syntax.calls_to("DataLoader", root="torch.utils.data"):
        if not spreads(call):
            yield from _loader(facts, call)
    yield from _filtered(facts)


def _set_epoch(facts: ProgramFacts) -> Iterator[LintFinding]:
    if facts.mentions("set_epoch") or facts.imports_where(lambda one: one.mentions_set_epoch):
        return
    if facts.syntax.imports_any("accelerate", "lightning", "pytorch_lightning", "transformers"):
        return
    loops = [one.target for scope in facts.syntax.scopes for one in scope.of(ast.For)]
    # The backward pass may be in another function than the loop that counts epochs.
    if not facts.trains and not any(
        isinstance(one, ast.Name) and "epoch" in one.id.lower() for one in loops
    ):
        return
    for call in facts.syntax.calls_to(_SAMPLER, root="torch.utils.data"):
        shuffle = argument(call, "shuffle", 3)
        may_shuffle = facts.distributed and constant(shuffle) is None
        shuffles = shuffle is None or constant(shuffle) is True or may_shuffle
        if shuffles and not spreads(call) and _is_for_training(facts, call):
            message = "the sampler is never told the epoch: set_epoch() is nowhere"
            yield facts.finding("HT301", call, message)


def _is_for_training(facts: ProgramFacts, call: ast.Call) -> bool:
    """Whether a sampler's or loader's name does not say that it is for something else."""
    parent = facts.syntax.parents[call]
    while isinstance(parent, ast.IfExp | ast.keyword | ast.Call):
        parent = facts.syntax.parents[parent]
    target = ast.unparse(parent.targets[0]).lower() if isinstance(parent, ast.Assign) else ""
    return not any(word in target for word in ("val", "test", "eval", "dev"))


def _loader(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    sampler = argument(call, "sampler", _SAMPLER_PLACE)
    values = facts.dependence.values_at(sampler) if isinstance(sampler, ast.Name) else [sampler]
    made = [facts.syntax.dotted(one.func) if isinstance(one, ast.Call) else "" for one in values]
    shuffles = constant(argument(call, "shuffle", _SHUFFLE_PLACE)) is True
    if shuffles and len(made) == 1 and last(made[0]) == _SAMPLER:
        yield facts.finding("HT306", call, "DataLoader() is given a sampler and shuffle=True")
    number = constant(argument(call, "num_workers", _WORKERS_PLACE))
    if facts.cpus and isinstance(number, int) and number > facts.cpus:
        yield facts.finding("HT308", call, f"{number} workers on {count(facts.cpus, 'CPU')}")
    own = given(sampler) or given(keyword(call, "batch_sampler"))
    if not own and _trains_alone(facts, call):
        yield facts.finding("HT302", call, "every rank reads all samples: no DistributedSampler")


def _trains_alone(facts: ProgramFacts, call: ast.Call) -> bool:
    """Whether a loader feeds a backward pass of several ranks, and none has a share of its own."""
    if not facts.distributed or not facts.trains or facts.syntax.imports_any(*NAMES["shares"]):
        return False
    if facts.mentions(_SAMPLER, "split_dataset_by_node", "Subset"):
        return False
    if facts.mentions("IterableDataset") and not _yields_alike(facts, call):
        return False
    if any("sampler" in word.lower() for word in facts.words):
        return False
    parent = facts.syntax.parents[call]
    if not isinstance(parent, ast.Assign) or not isinstance(parent.targets[0], ast.Name):
        return False
    name = parent.targets[0].id
    return any(
        any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(loop.iter))
        and any(isinstance(one, ast.Call) and is_backward(one) for one in ast.walk(loop))
        for scope in facts.syntax.scopes
        for loop in scope.of(ast.For)
    )


def _yields_alike(facts: ProgramFacts, call: ast.Call) -> bool:
    """Whether a loader reads an IterableDataset of this file that knows of no ranks."""
    dataset = argument(call, "dataset", 0)
    if dataset is None:
        return False
    made = nearest_value(facts, dataset)
    name = last(facts.syntax.dotted(made.func)) if isinstance(made, ast.Call) else ""
    kinds = [
        one
        for scope in facts.syntax.scopes
        for one in scope.of(ast.ClassDef)
        if one.name == name
        and [last(facts.syntax.dotted(base)) for base in one.bases] == ["IterableDataset"]
    ]
    return len(kinds) == 1 and not any(
        word in ast.unparse(node).lower() for word in NAMES["sharing"] for node in (kinds[0], made)
    )


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


def check_saving(facts: ProgramFacts) -> Iterator[LintFinding]:
    """HT511, HT512, HT601, HT605 and HT608."""
    # A program whose helpers can load may well do so elsewhere.
    anew = begins_anew(facts.syntax.text, ()) if "save" in facts.syntax.text else None
    if anew is not None and not facts.imports_where(lambda module: module.loads_checkpoints):
        loads = f"loads one only with {anew.option.name}" if anew.option else "loads none"
        yield facts.finding("HT608", anew.save, f"it saves checkpoints here, and {loads}")
    for call in facts.syntax.calls:
        dotted = facts.syntax.dotted(call.func)
        if dotted == "signal.signal":
            yield from _handler(facts, call)
        elif dotted == "torch.load":
            yield from _load(facts, call)
        elif (path := _written(facts, call, dotted)) is not None:
            yield from _shared_file(facts, call, path)


def _written(facts: ProgramFacts, call: ast.Call, dotted: str) -> ast.expr | None:
    """The path that a call writes or removes, unless each process surely has its own."""
    if dotted == "torch.save":
        return None if spreads(call) else argument(call, "f", 1)
    if dotted == "shutil.rmtree":  # all but the first find nothing, and raise
        path = argument(call, "path", 0)
        if path is None or argument(call, "ignore_errors", 1) is not None:
            return None
        is_own = "tmp" in ast.unparse(path) or "temp" in ast.unparse(nearest_value(facts, path))
        return None if is_own else path
    if dotted == "open":  # a text that is written out, so that it is one file
        mode, path = constant(argument(call, "mode", 1)), argument(call, "file", 0)
        is_text = path is not None and isinstance(constant(nearest_value(facts, path)), str)
        return path if is_text and str(mode).startswith(("w", "x")) else None
    return None


def _handler(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    function = argument(call, "handler", 1)
    if not isinstance(function, ast.Name | ast.Attribute):
        return
    name = function.id if isinstance(function, ast.Name) else function.attr
    scopes = facts.syntax.functions.get(name, [])
    if len(scopes) != 1:
        return
    signal_name = last(facts.syntax.dotted(call.args[0])) if call.args else ""
    for inner, done in _done_in(facts, scopes[0]):
        if done == "requeue" and signal_name == "SIGTERM":
            yield facts.finding("HT512", inner, f"{name}() requeues the job on SIGTERM")
        elif done not in ("", "requeue"):
            yield facts.finding("HT511", inner, f"{name}() calls {done} inside the signal handler")
            return


def _done_in(
    facts: ProgramFacts, scope: LintScope, depth: int = 0
) -> Iterator[tuple[ast.Call, str]]:
    """What a handler does that it should not, also in functions that it calls."""
    for call in scope.of(ast.Call):
        dotted = facts.syntax.dotted(call.func)
        if facts.collectives.direct.get(call) is not None or dotted == "torch.save":
            yield call, f"{last(dotted)}()"
        elif any("scontrol requeue" in " ".join(_words(arg)) for arg in call.args):
            yield call, "requeue"
        else:
            inner = facts.syntax.resolve(call, scope)
            if inner is not None and depth < 2:  # noqa: PLR2004 - as deep as handlers go
                for _, done in _done_in(facts, inner, depth + 1):
                    yield call, done
            elif last(dotted) in NAMES["saves"]:
                yield call, f"{last(dotted)}()"


def _words(node: ast.expr) -> list[str]:
    """The literal words of an expression, of a command line for instance."""
    parts = [str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return " ".join(parts).split()


def _shared_file(facts: ProgramFacts, call: ast.Call, path: ast.expr) -> Iterator[LintFinding]:
    """HT601: one file that all ranks write."""
    joins = facts.syntax.calls_to("init_process_group", "init_distributed")
    if not facts.distributed or not (facts.trains or any(joins)):
        return
    if facts.syntax.imports_any("deepspeed", "megatron", "accelerate", "lightning"):
        return
    path = nearest_value(facts, path)
    if _differs(facts, path) or _seems_main(facts, call) or for_main_only(facts, call):
        return
    scope = facts.syntax.scope_of[call]
    callers = facts.syntax.callers(scope)
    is_reached = isinstance(scope.node, ast.Module) or scope.name == "main"
    if is_reached or any(not for_main_only(facts, one) for one in callers):
        does = "remove" if last(facts.syntax.dotted(call.func)) == "rmtree" else "write"
        yield facts.finding("HT601", call, f"all ranks {does} {facts.syntax.code(path, 40)}")


def nearest_value(facts: ProgramFacts, node: ast.expr) -> ast.expr:
    """What a name was given last above the place where it is used; itself for all else."""
    if not isinstance(node, ast.Name):
        return node
    scope = facts.syntax.scope_of[node]
    values = [
        one.value
        for one in scope.of(ast.Assign)
        if one.lineno < node.lineno
        and any(isinstance(target, ast.Name) and target.id == node.id for target in one.targets)
    ]
    return max(values, key=lambda value: value.lineno) if values else node


_OWN_NAMES = re.compile(r"(?i)rank|uuid|pid|mkdtemp|mkstemp|tempfile|hostname|token_")
"""In calls whose result may be another on each rank."""


def _seems_main(facts: ProgramFacts, call: ast.Call, depth: int = 0) -> bool:
    """Whether a test around a save, or around the calls of its function, may mean one rank."""
    for around in facts.syntax.outer(call):
        if isinstance(around, ast.If) and any(
            word in ast.unparse(around.test).lower() for word in NAMES["main_words"]
        ):
            return True
    scope = facts.syntax.scope_of[call]
    for test in scope.of(ast.If):
        leaves = isinstance(test.body[-1], ast.Raise | ast.Return)
        if leaves and test.lineno < call.lineno and "world" in ast.unparse(test.test).lower():
            return True
    calls = facts.syntax.callers(scope) if depth < 2 else []  # noqa: PLR2004 - as deep as helpers go
    return any(_seems_main(facts, other, depth + 1) for other in calls)


def _differs(facts: ProgramFacts, path: ast.expr) -> bool:
    """Whether a path may be another on each rank: it depends on the rank, or is given."""
    if facts.dependence.of(path) & RANKS:
        return True
    calls = [one for one in ast.walk(path) if isinstance(one, ast.Call)]
    calls += [
        value
        for one in ast.walk(path)
        if isinstance(one, ast.Name) and isinstance(value := nearest_value(facts, one), ast.Call)
    ]
    if any(_OWN_NAMES.search(ast.unparse(one)) for one in calls):
        return True
    scope = facts.syntax.scope_of[path]
    return isinstance(path, ast.Name) and path.id in scope.parameters


def _load(facts: ProgramFacts, call: ast.Call) -> Iterator[LintFinding]:
    path = argument(call, "f", 0)
    if path is None or spreads(call):
        return
    sharded = any(".distcp" in word for word in _words(path))
    by_rank = facts.distributed and facts.dependence.of(path) & RANKS
    if sharded or by_rank:
        yield facts.finding("HT605", call, f"{facts.syntax.code(path, 40)} is the part of one rank")
