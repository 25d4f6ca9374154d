"""What a checkpoint and a program have in common, what each has alone, and what follows.

What would be lost, or begin anew, without a word is refused with the flag that allows it: tensors
of the model, the state of another optimizer, and parameter groups. docs/checkpoints.md has the rule
for users; tests/engines/test_changed_programs.py and test_param_groups.py hold the promises.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import OrderedDict, defaultdict
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from hpctrain.checkpoint.tensors.values import encode
from hpctrain.core.settings.schema import CHANGES
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.train.engines import state as names
from hpctrain.train.engines.state import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from hpctrain.checkpoint.format.manifest import TensorEntry


NEW, DROPPED, OPTIMIZER = CHANGES
SHOWN = 3
"""Names in one line."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """What is loaded of a model's tensors.

    Attributes:
        fresh: Names of the model's that keep the values they have.
        dropped: Names of the checkpoint's that nothing is loaded from.
        notes: A line for each kind of difference.
    """

    fresh: frozenset[str]
    dropped: frozenset[str]
    notes: tuple[str, ...]


def fit(
    ours: Mapping[str, Shape],
    elsewhere: Iterable[str],
    saved: Mapping[str, Shape],
    allow: Iterable[str],
) -> Fit:
    """Compare a model's tensors (names and shapes) with those of a checkpoint.

    `ours` are this rank's, `elsewhere` names that only other ranks hold. `allow` are some of
    CHANGES.

    Raises:
        CheckpointError: they differ in a way that is not allowed.
    """
    allowed = frozenset(allow)
    other_shape = [name for name, shape in ours.items() if saved.get(name, shape) != shape]
    new = [name for name in ours if name not in saved]
    held = ours.keys() | frozenset(elsewhere)
    gone = [name for name in saved if name not in held]
    missing = [
        flag
        for flag, names in ((NEW, new + other_shape), (DROPPED, gone + other_shape))
        if names and flag not in allowed
    ]
    lines = []
    if other_shape:
        name = other_shape[0]
        lines.append(
            f"{_plain(name)}{_more(other_shape)} has shape {list(saved[name])} in the checkpoint "
            f"and {list(ours[name])} in the model"
        )
    if new:
        lines.append(f"{_plain(new[0])}{_more(new)} is in the model and not in the checkpoint")
    if gone:
        lines.append(f"{_plain(gone[0])}{_more(gone)} is in the checkpoint and not in the model")
    if missing:
        raise CheckpointError(f"{'; '.join(lines)}. {way_out(missing)}")
    notes = []
    if new or other_shape:
        notes.append(f"{counted(new + other_shape)} begin anew: not in the checkpoint")
    if gone or other_shape:
        notes.append(f"{counted(gone + other_shape)} of the checkpoint are dropped")
    return Fit(frozenset(new + other_shape), frozenset(gone + other_shape), tuple(notes))


def require_known(allow: Sequence[str]) -> None:
    """Refuse changes that nothing can allow.

    Raises:
        UsageError: one is not of CHANGES.
    """
    for change in allow:
        if change not in CHANGES:
            raise UsageError(f"allow has {change!r}; it takes {', '.join(CHANGES)}")


def way_out(missing: Iterable[str]) -> str:
    """Say what a person types to let changes pass."""
    flags = ",".join(missing)
    return f"If the program was changed on purpose, resume with --set resume.allow={flags}"


def counted(names: Sequence[str]) -> str:
    """Return how many parameters there are and the first names, such as `2 parameters (a, b)`."""
    shown = ", ".join(_plain(name) for name in names[:SHOWN])
    rest = ", ..." if len(names) > SHOWN else ""
    return f"{len(names)} parameter{'s' * (len(names) != 1)} ({shown}{rest})"


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def class_name(optimizer: Any) -> str:
    """Return the name of an optimizer's class, without wrappers around it."""
    inner = getattr(optimizer, "optimizer", None)
    return class_name(inner) if isinstance(inner, Optimizer) else type(optimizer).__name__


# ---- another optimizer


def other_optimizer(
    optimizer: Any, model: nn.Module, saved: Mapping[str, TensorEntry], saved_class: str | None
) -> str:
    """Return how a checkpoint's state is another optimizer's; "" if it is not.

    `saved_class` is the class name of the checkpoint's optimizer, if it has one.
    """
    ours = class_name(optimizer)
    if saved_class is not None and saved_class != ours:
        return f"the checkpoint has the state of {saved_class}, and the program trains by {ours}"
    theirs = names.state_keys(saved, model)
    for parameter, group in _samples(optimizer, model, theirs.keys()):
        kept, made = theirs[parameter], keys_made(optimizer, group, parameter.ndim)
        if made is None:
            return ""
        if missing := sorted(made - kept):
            return (
                f"{ours} keeps {', '.join(missing)} of each parameter, which the checkpoint lacks"
            )
        if saved_class is None and (odd := sorted(kept - made)):
            return f"the checkpoint has {', '.join(odd)} of each parameter, which {ours} has not"
    return ""


def other_inner(saved: AbstractSet[str], ours: AbstractSet[str]) -> str:
    """Say which inner optimizer only one side has, by their names; "" if both have the same."""
    if not (differ := sorted(saved ^ ours)):
        return ""
    where = "checkpoint" if differ[0] in saved else "program"
    return f"only the {where} has an optimizer at {differ[0].removeprefix('hpctrain.')}"


def keys_made(optimizer: Any, group: dict[str, Any], dimensions: int) -> frozenset[str] | None:
    """Return under which keys an optimizer of torch's keeps state of a parameter.

    It is asked of a copy that steps a tensor of one element; None where that is not possible.
    """
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind in {LBFGS, SparseAdam}:
        return None
    tiny = nn.Parameter(torch.zeros((1,) * dimensions))
    tiny.grad = torch.zeros_like(tiny)
    probe: Optimizer = copy.copy(optimizer)
    probe._optimizer_step_pre_hooks = OrderedDict()  # noqa: SLF001 - the program's are not to run
    probe._optimizer_step_post_hooks = OrderedDict()  # noqa: SLF001 - the same
    probe.state = defaultdict(dict)
    plainly = dict.fromkeys(("foreach", "fused", "capturable"), False)
    own = {key: value for key, value in plainly.items() if key in group}
    probe.param_groups = [{**group, **own, "params": [tiny]}]
    probe.step()
    return frozenset(probe.state[tiny])


def _samples(
    optimizer: Any, model: nn.Module, have: Any
) -> list[tuple[nn.Parameter, dict[str, Any]]]:
    """One parameter with saved state for each group and number of dimensions."""
    members = {id(parameter) for _, parameter in parameters(model)}
    samples: dict[tuple[int, int], tuple[nn.Parameter, dict[str, Any]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in members and parameter in have:
                samples.setdefault((number, parameter.ndim), (parameter, group))
    return list(samples.values())


# ---- parameter groups of the optimizer

NAME = "optimizer"
"""Of the groups among what is tracked; `Run.track` gives it to nothing else."""
FOLLOWS = frozenset({"params", "param_names", "initial_lr"})
"""Keys of a group that are no values of their own."""
NUMBERS = frozenset({bool, int, float, complex})
MISSING: Any = object()
"""In place of a value that a group does not have."""


class ParamGroups:
    """The groups of the tracked optimizer, as something that is tracked itself.

    Attributes:
        notes: Lines on differences that the last load has found.
        order: For each group of the program the number of the checkpoint's group that it resumes
            from, None for a new one. None before a load.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        driven: Callable[[], frozenset[str]] = frozenset,
        allow: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """Take the tracked optimizer and model; nothing is noted yet.

        `driven` returns the keys that tracked schedulers set. `allow` returns the changes that may
        pass, of `fitting.CHANGES`.
        """
        self.optimizer, self.model = optimizer, model
        self.notes: list[str] = []
        self.order: list[int | None] | None = None
        self._driven, self._allow = driven, allow
        self._begun: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []
        """The groups of which `_begun` has the values."""
        self._saved: list[dict[str, Any]] = []
        """The checkpoint's groups, as `state_dict` has them, each with its members."""
        self._taken: set[int] = set()
        """Numbers of those that a group of this program resumes from."""
        self._is_named = True
        self._far: list[list[str]] = []
        self._members: tuple[Any, list[list[str]]] = (None, [])

    def begin(self, gathered: Callable[[Any], list[Any]] | None = None) -> None:
        """Note how the program has made its groups, before anything is loaded or trained.

        `gathered` returns what all ranks give, if ranks hold different parameters. Collective then.
        """
        self._note_new()
        # A group that the loop adds is noted, and given its values, before its first step.
        # A wrapper around an optimizer may have no hooks: there it is at a save.
        with contextlib.suppress(AttributeError):
            self.optimizer.register_step_pre_hook(lambda *_: self._note_new())
        if gathered is not None:
            ranks = gathered(self._own_members())
            self._far = [list(dict.fromkeys(chain(*each))) for each in zip(*ranks, strict=True)]

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Everything of the groups but the parameters, whose names stand for them.

        The largest group has no names: it has the parameters that are neither in another group nor
        `outside`.
        """
        self._note_new()
        *members, outside = self._all_members()
        rows = [
            {**_row(group, begun), "members": names}
            for group, begun, names in zip(
                self.optimizer.param_groups, self._begun, members, strict=True
            )
        ]
        is_named = any(row["members"] for row in rows)
        if is_named:
            max(rows, key=lambda row: len(row["members"]))["members"] = None
        waiting = [row for number, row in enumerate(self._saved) if number not in self._taken]
        taken = {name for row in waiting for name in row["members"]}
        return {
            "class": class_name(self.optimizer),
            "is_named": is_named,
            "groups": rows + waiting,
            "outside": [name for name in outside if name not in taken],
        }

    def _note_new(self) -> None:
        """Note groups that have come since or are gone, and give new ones what waits for them."""
        groups = self.optimizer.param_groups
        there, noted = [*map(id, groups)], [*map(id, self._noted)]
        if there == noted:
            return
        begun_of = dict(zip(noted, self._begun, strict=True))
        if begun_of.keys().isdisjoint(there):  # a load of the optimizer's own has made all anew
            begun_of = dict(zip(there, self._begun, strict=False))
        new = [number for number, group in enumerate(there) if group not in begun_of]
        self._begun = [begun_of.get(id(group)) or _values(group) for group in groups]
        self._noted = [*groups]
        for number in new if self._saved else ():
            self._take(number)

    def _own_members(self) -> list[list[str]]:
        """Names in each group of this rank's, and of what is in none."""
        named: dict[int, str] = {}
        for name, parameter in parameters(self.model):
            named.setdefault(id(parameter), name)
        members = [
            [named.pop(id(each)) for each in group["params"] if id(each) in named]
            for group in self.optimizer.param_groups
        ]
        return [*members, list(named.values())]

    def _all_members(self) -> list[list[str]]:
        """The same over all ranks; kept, since a save must not walk through the model twice."""
        groups = self.optimizer.param_groups
        key = [(len(group["params"]), *map(id, group["params"][:1])) for group in groups]
        if self._members[0] != key:
            members = self._own_members()
            if len(self._far) == len(members):
                members = [sorted({*a, *b}) for a, b in zip(members, self._far, strict=True)]
            self._members = key, members
        return self._members[1]

    # ---- loading

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the groups of a checkpoint.

        Raises:
            CheckpointError: groups that had different values of their own have become one.
        """
        self.notes = []
        listed = {name for row in state["groups"] for name in row["members"] or ()}
        all_names = {name for names in self._all_members() for name in names}
        rest = sorted(all_names - listed - set(state["outside"]))
        self._saved = [
            {**row, "members": rest if row["members"] is None else row["members"]}
            for row in state["groups"]
        ]
        self._taken = set()
        self._is_named = bool(state["is_named"])
        self.order = [self._take(number) for number in range(len(self.optimizer.param_groups))]
        self._taken |= {n for n, row in enumerate(self._saved) if not row["members"]}

    def _take(self, number: int) -> int | None:
        """Give a group what the checkpoint has of it; returns the number of the first match."""
        matches = self._matching(number)
        if not matches:
            return None
        group, begun = self.optimizer.param_groups[number], self._begun[number]
        saved = [self._saved[each] for each in matches]
        for key in dict.fromkeys(key for row in saved for key in row["values"]):
            values = [row["values"].get(key, MISSING) for row in saved]
            if all(_same(value, values[0]) for value in values):
                self._decide(group, begun, key, saved[0])
            elif OPTIMIZER not in self._allow() and not all(
                map(_same, values, (_begun(row, key) for row in saved))
            ):
                raise CheckpointError(
                    f"parameter groups that had {key} {' and '.join(map(shown, values))} in the "
                    f"checkpoint are one group in the program. {way_out([OPTIMIZER])}"
                )
        self._taken.update(matches)
        return matches[0]

    def _matching(self, number: int) -> list[int]:
        """Numbers of the checkpoint's groups that a group's parameters were in."""
        *members, _ = self._all_members()
        if not self._is_named or not any(members):
            # An engine has put other tensors in place of the model's parameters.
            return [number] if len(members) == len(self._saved) else []
        if not members[number]:
            both_empty = number < len(self._saved) and not self._saved[number]["members"]
            return [number] if both_empty else []
        own = set(members[number])
        return [n for n, row in enumerate(self._saved) if own.intersection(row["members"])]

    def _decide(
        self, group: dict[str, Any], begun: Mapping[str, Any], key: str, saved: Mapping[str, Any]
    ) -> None:
        """Set one value of a group, or leave it; see the module's text."""
        value, was, now = saved["values"][key], _begun(saved, key), begun.get(key, MISSING)
        if key in self._driven():
            if not _same(now, was):
                self._note(key, was, now, "the checkpoint's counts, as a tracked scheduler sets it")
            _set(group, key, value)
        elif _same(value, was):
            if not _same(now, value) and now is not MISSING:
                self._note(key, value, now, "the program's counts")
        elif _same(now, was) or key not in _arguments(self.optimizer):
            _set(group, key, value)
        else:
            self._note(key, was, now, f"the program's counts, not {shown(value)} of the end")

    def _note(self, key: str, value: Any, now: Any, which: str) -> None:
        line = f"{key} was set to {shown(value)} before and is set to {shown(now)} now: {which}"
        if line not in self.notes:
            self.notes.append(line)


def shown(value: Any) -> str:
    """Return a value for a message."""
    if isinstance(value, torch.Tensor):
        number = _number(value)
        return f"a tensor of {value.dtype}" if number is None else f"{number:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's values."""
    values = {key: value for key, value in group.items() if key not in FOLLOWS}
    return {key: deepcopy(value) if _is_plain(value) else value for key, value in values.items()}


def _row(group: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's values, and start values of changed ones; refuse what cannot be saved."""
    values = {key: value for key, value in group.items() if key not in FOLLOWS}
    odd = [key for key, value in values.items() if not _is_plain(value)]
    for key in odd:
        if begun.get(key, MISSING) is not values[key]:
            kind = type(values[key]).__name__
            raise CheckpointError(f"the optimizer has put a {kind} into {key} of a group")
        del values[key]  # as the program has made it
    changed = {
        key: [begun[key]] if key in begun else []
        for key, value in values.items()
        if not _same(value, begun.get(key, MISSING))
    }
    return {"values": values, "begun": changed}


def _begun(row: Mapping[str, Any], key: str) -> Any:
    """The value at the start of the program that has saved; MISSING where there was none."""
    changed = row["begun"]
    if key in changed:
        return changed[key][0] if changed[key] else MISSING
    return row["values"].get(key, MISSING)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    now = group.get(key)
    is_tensor = isinstance(value, torch.Tensor)
    form = (value.dtype, value.shape) if is_tensor else None
    if isinstance(now, torch.Tensor) and form in {None, (now.dtype, now.shape)}:
        # which a compiled step may hold
        with torch.no_grad():
            now.copy_(torch.as_tensor(value, dtype=now.dtype))
    else:
        group[key] = deepcopy(value)


def _same(earlier: Any, other: Any) -> bool:
    """Whether two values of a group are the same; a number in a tensor is that number."""
    if earlier is other:
        return True
    if isinstance(earlier, torch.Tensor) or isinstance(other, torch.Tensor):
        return _same_tensors(earlier, other)
    if isinstance(earlier, list | tuple) and isinstance(other, list | tuple):
        return len(earlier) == len(other) and all(map(_same, earlier, other))
    if isinstance(earlier, dict) and isinstance(other, dict):
        return earlier.keys() == other.keys() and all(
            _same(earlier[key], other[key]) for key in earlier
        )
    if type(earlier) in NUMBERS and type(other) in NUMBERS:
        return bool(earlier == other) or (earlier != earlier and other != other)  # noqa: PLR0124 - NaN
    return _same_form(earlier, other)


def _same_tensors(earlier: Any, other: Any) -> bool:
    """The same where one is a tensor, or both: bits, or where types differ the number."""
    both = isinstance(earlier, torch.Tensor) and isinstance(other, torch.Tensor)
    if both and earlier.dtype == other.dtype:
        bits = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in (earlier, other)]
        is_same_shape = earlier.shape == other.shape
        return is_same_shape and (
            not earlier.numel() or torch.equal(*(each.view(torch.uint8) for each in bits))
        )
    left, right = _number(earlier), _number(other)
    if left is None or right is None:
        return False
    if not both:  # a number is rounded as the tensor is
        dtype = earlier.dtype if isinstance(earlier, torch.Tensor) else other.dtype
        left, right = (torch.as_tensor(each, dtype=dtype).item() for each in (left, right))
    return _same(left, right)


def _same_form(earlier: Any, other: Any) -> bool:
    """Whether two objects are saved alike: not all that can be saved can be compared."""
    try:
        (form, tensors), (other_form, others) = encode(earlier, "group"), encode(other, "group")
    except CheckpointError:
        return False
    alike = form == other_form and tensors.keys() == others.keys()
    return alike and all(_same_tensors(tensors[name], others[name]) for name in tensors)


def _number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if type(value) in NUMBERS else None
    try:
        return value.item() if value.numel() == 1 else None
    except (NotImplementedError, RuntimeError):  # torch has types of which it gives no elements
        return None


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in {bool, int, float, str}:
        return True
    try:
        encode(value, "group")
    except CheckpointError:
        return False
    return True


def _arguments(optimizer: Any) -> frozenset[str]:
    """Names of the arguments of an optimizer's constructor, and of those that it calls."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return _arguments(inner)
    made_by = [
        vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)
    ]
    return frozenset(chain(*(inspect.signature(each).parameters for each in made_by)))
