"""Which calls all ranks must make together, and which functions of the program make them.

Calls on a group of their own are left out: only the members meet there, and who they are is seldom
written where one can read it. tests/unit/lint/test_rules.py holds the promises.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.lint.syntax import argument, given, last

if TYPE_CHECKING:
    from hpctrain.lint.syntax import LintScope, ProgramSyntax

GROUP_PLACES = {
    "all_reduce": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "monitored_barrier": 0,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
}
"""torch.distributed's collectives, with the place of their argument `group`."""
_MAKERS = frozenset({"new_group", "new_subgroups", "init_device_mesh", "split_group"})
"""What every rank must call, also those that are in none of the groups that it makes."""
_CHECKPOINTS = frozenset({"save", "load", "async_save", "save_state_dict", "load_state_dict"})
_STATE_CALLS = frozenset(
    {"get_state_dict", "get_model_state_dict", "get_optimizer_state_dict", "set_state_dict"}
    | {"set_model_state_dict", "set_optimizer_state_dict"}
)
_HOMES = ("torch.distributed", "deepspeed.comm", "deepspeed", "torch.distributed.distributed_c10d")
_ACCELERATE = frozenset({"gather_for_metrics", "pad_across_processes", "wait_for_everyone"})
_ACCELERATOR = frozenset({"gather", "reduce"})
_ENGINE = frozenset(
    {"backward", "step", "save_checkpoint", "load_checkpoint", "save_16bit_model", "train_batch"}
)
_WRAPPED = frozenset({"state_dict", "load_state_dict", "clip_grad_norm_", "summon_full_params"})
FSDP_NAMES = frozenset({"FullyShardedDataParallel", "fully_shard", "FSDP"})


@dataclass(frozen=True)
class CollectiveCall:
    """A call that all ranks must make."""

    node: ast.Call
    name: str
    via: str = ""
    """The program's own function that makes it; the call is that function's then."""
    line: int = 0
    """Where it is made, if through a function."""

    @property
    def text(self) -> str:
        """How a message speaks of it."""
        return (
            f"{self.via}(), which calls {self.name}() at line {self.line},"
            if self.via
            else f"{self.name}()"
        )


class CollectiveCalls:
    """The collectives of a program."""

    def __init__(self, syntax: ProgramSyntax) -> None:
        """Find out which functions make any, through three levels of calls."""
        self.syntax = syntax
        self.sharded = self._targets_of(*FSDP_NAMES)
        self.engines = self._targets_of("initialize", root="deepspeed")
        self.direct: dict[ast.Call, CollectiveCall] = {}
        for call in syntax.calls:
            name = self._name(call)
            if name:
                self.direct[call] = CollectiveCall(call, name)
        self.made_by: dict[LintScope, CollectiveCall] = {}
        for _ in range(3):
            self._through_calls()

    def _targets_of(self, *names: str, root: str = "") -> set[str]:
        """Variables that hold what such a call returns, or that it changes in place."""
        targets: set[str] = set()
        for call in self.syntax.calls_to(*names):
            dotted = self.syntax.dotted(call.func)
            if root and not dotted.startswith(root):
                continue
            parent = self.syntax.parents[call]
            if isinstance(parent, ast.Assign):
                target = parent.targets[0]
                first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
                targets.add(ast.unparse(first))
            elif last(dotted) == "fully_shard" and call.args:
                targets.add(ast.unparse(call.args[0]))
        return targets

    def _name(self, call: ast.Call) -> str:
        """The collective that a call is; "" for any other call, and for one on a group."""
        dotted = self.syntax.dotted(call.func)
        home, _, name = dotted.rpartition(".")
        if home in _HOMES and (name in GROUP_PLACES or name in _MAKERS):
            return "" if self._has_group(call, name) else name
        if "distributed.checkpoint" in home and name in _CHECKPOINTS | _STATE_CALLS:
            return "" if given(_keyword_group(call)) or _alone(call) else name
        if not isinstance(call.func, ast.Attribute):
            return ""
        if name == "full_tensor" and not call.args and self.syntax.imports_any("torch.distributed"):
            return name
        return name if self._is_of_library(call.func, name) else ""

    def _has_group(self, call: ast.Call, name: str) -> bool:
        """Whether it is for the members of a group; a mesh is made by all."""
        if name in _MAKERS:
            return False
        group = argument(call, "group", GROUP_PLACES[name])
        if group is None:
            return any(one.arg is None for one in call.keywords) or any(
                isinstance(one, ast.Starred) for one in call.args
            )
        return given(group) and not self.syntax.dotted(group).endswith("group.WORLD")

    def _is_of_library(self, func: ast.Attribute, name: str) -> bool:
        owner = ast.unparse(func.value) if isinstance(func.value, ast.Name | ast.Attribute) else ""
        if name in _ACCELERATE:
            return self.syntax.imports_any("accelerate")
        if name in _ACCELERATOR and "accelerator" in owner.lower():
            return self.syntax.imports_any("accelerate")
        if owner in self.engines and name in _ENGINE:
            return True
        return bool(owner) and owner in self.sharded and name in _WRAPPED

    def _through_calls(self) -> None:
        makers: dict[LintScope, CollectiveCall] = {}
        for scope in self.syntax.scopes[1:]:
            if scope in self.made_by:
                continue
            for call in scope.of(ast.Call):
                made = self.of(call, scope)
                if made is not None:
                    line = made.line or call.lineno
                    makers[scope] = CollectiveCall(made.node, made.name, scope.name, line)
                    break
        self.made_by |= makers

    def of(self, call: ast.Call, scope: LintScope) -> CollectiveCall | None:
        """The collective that a call makes, itself or in the function that it calls."""
        direct = self.direct.get(call)
        if direct is not None:
            return direct
        inner = self.syntax.resolve(call, scope)
        made = self.made_by.get(inner) if inner is not None and inner is not scope else None
        return None if made is None else CollectiveCall(call, made.name, made.via, made.line)


def _keyword_group(call: ast.Call) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == "process_group"), None)


def _alone(call: ast.Call) -> bool:
    """Whether `no_dist=True` has it done by one process."""
    return any(
        one.arg == "no_dist" and isinstance(one.value, ast.Constant) and one.value.value is True
        for one in call.keywords
    )


def is_distributed(syntax: ProgramSyntax) -> bool:
    """Whether the program itself starts, wraps for or asks about several ranks."""
    telling = {"init_process_group", "DistributedDataParallel", "DistributedSampler", "Accelerator"}
    telling |= FSDP_NAMES | {"init_distributed", "init_device_mesh"}
    telling |= {"is_main_process", "get_world_size", "is_dist_avail_and_initialized"}
    if any(last(syntax.dotted(call.func)) in telling for call in syntax.calls):
        return True
    return any(
        syntax.dotted(call.func) in ("deepspeed.initialize", "torch.distributed.get_rank")
        for call in syntax.calls
    )
