"""Other programs' names of tensors made ours: `model.<name>` and `optim.<name>.<what>`.

A number counts only where it is certain whose it is: two weights of one shape, swapped, would train
on without a word.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.exchange.contents import MODEL, OPTIM, PREFIXES, Tensor, scalar, to_dtype
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpctrain.checkpoint.exchange.contents import Contents, NestedValue

WEIGHTS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
LIKE_WEIGHTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""State of an optimizer that has its weight's shape."""
SHOWN = 4


@dataclass(frozen=True)
class NameRequest:
    """What the user asked about names.

    Attributes:
        prefix: Put before the weights' names: "" or something that starts with ``model.``; None
            for ``model.``, unless the names are ours already.
        renames: (old, new): a whole name, or a beginning that ends in a dot; without ``model.``.
        table: Old to new whole names; None leaves the tensor out.
        weights: The key that the weights lie under, where it is not one of WEIGHTS.
        model_only: Leave the optimizer's state out.
    """

    prefix: str | None = None
    renames: Sequence[tuple[str, str]] = ()
    table: Mapping[str, str | None] | None = None
    weights: str | None = None
    model_only: bool = False


@dataclass(frozen=True)
class _Named:
    """A tensor of the model (`key` is "") or of the optimizer's state."""

    name: str
    key: str
    tensor: Tensor

    @property
    def full(self) -> str:
        return f"{OPTIM}{self.name}.{self.key}" if self.key else MODEL + self.name


def name_all(contents: Contents, request: NameRequest) -> tuple[list[Tensor], list[str]]:
    """All tensors under our names, and notes on what was left out or guessed.

    Of weights alone nothing else of the manifest is carried over: it speaks of tensors, and of a
    place in the data, that are not there.

    Raises:
        CheckpointError: there are no weights, or it is not certain which is which.
        UsageError: a rename or the table does not fit.
    """
    if request.model_only:
        contents.state = {}
    if contents.full_names and request.prefix is None:
        return _as_they_are(contents, request)
    finder = _StateFinder(contents, request)
    named = _renamed(finder.weights() + finder.state(), request)
    prefix = MODEL if request.prefix is None else request.prefix
    if prefix and not prefix.startswith(MODEL):
        raise UsageError(f"--prefix {prefix} does not start with {MODEL}; training looks there")
    if prefix:
        named = [replace(entry, name=prefix.removeprefix(MODEL) + entry.name) for entry in named]
    else:
        named = [replace(entry, name=_without_model(entry.name)) for entry in named]
    tensors = [replace(entry.tensor, name=entry.full) for entry in named]
    _check(tensors)
    return tensors, finder.notes


def in_dtype(tensors: Sequence[Tensor], target: str | None) -> list[Tensor]:
    """The weights' floats rounded to what a run trains in; None leaves them as they are."""
    if target is None:
        return list(tensors)
    return [to_dtype(one, target) if one.name.startswith(MODEL) else one for one in tensors]


def _as_they_are(contents: Contents, request: NameRequest) -> tuple[list[Tensor], list[str]]:
    named, rest = [], []
    for leaf in contents.leaves:
        if leaf.tensor is None:
            continue
        name = leaf.tensor.name
        if name.startswith(MODEL):
            named.append(_Named(name.removeprefix(MODEL), "", leaf.tensor))
        elif name.startswith(OPTIM):
            stem, _, key = name.removeprefix(OPTIM).rpartition(".")
            named.append(_Named(stem, key, leaf.tensor))
        else:
            rest.append(leaf.tensor)
    if request.model_only:
        named, rest = [entry for entry in named if not entry.key], []
    tensors = [replace(entry.tensor, name=entry.full) for entry in _renamed(named, request)] + rest
    _check(tensors)
    return tensors, []


class _StateFinder:
    """Looks for weights and for an optimizer's state in what a source holds."""

    def __init__(self, contents: Contents, request: NameRequest) -> None:
        self._contents = contents
        self._request = request
        # Without a path it is the whole source: a dictionary whose keys are no names.
        self._leaves = _unwrapped([leaf for leaf in contents.leaves if leaf.path])
        self._weights: list[_Named] = []
        self._left_out: set[str] = set()
        self.notes: list[str] = []

    def weights(self) -> list[_Named]:
        sections = (self._request.weights,) if self._request.weights else WEIGHTS
        section = self._section(
            sections, "weights", "name the one that is meant with --weights KEY"
        )
        if section is None and self._request.weights:
            leaves = []
        elif section is not None:
            leaves = [replace(leaf, path=leaf.path[1:]) for leaf in self._under(section)]
        else:
            others = (*OPTIMIZERS, "param_groups")
            leaves = [leaf for leaf in self._leaves if leaf.path[0] not in others]
            leaves = [leaf for leaf in leaves if len(leaf.path) == 1]
        self._weights = [
            _Named(".".join(map(str, leaf.path)), "", leaf.tensor)
            for leaf in leaves
            if leaf.tensor is not None
        ]
        if not self._weights:
            keys = dict.fromkeys(str(leaf.path[0]) for leaf in self._leaves)
            raise CheckpointError(
                f"{self._contents.source} has no weights where they were looked for; its keys are "
                f"{some(list(keys))}: name theirs with --weights KEY"
            )
        used: set[str | int] = {leaf.path[0] for leaf in leaves} if section is None else {section}
        self._note_left_out(used)
        return self._weights

    def state(self) -> list[_Named]:
        if self._request.model_only:
            return []
        section = self._section(OPTIMIZERS, "optimizer states", "take --what model")
        if section is None:
            return []
        leaves = [replace(leaf, path=leaf.path[1:]) for leaf in self._under(section)]
        named = self._named_state(leaves)
        if self._left_out:
            listed = some(sorted(self._left_out))
            self.notes.append(f"left out of the optimizer's state, since no tensors: {listed}")
        weights = {entry.name for entry in self._weights}
        unknown = [entry.name for entry in named if entry.name not in weights]
        if unknown:
            raise CheckpointError(
                f"{self._contents.source} has optimizer state for {unknown[0]}, and no weights of "
                "that name; take the weights alone with --what model"
            )
        return named

    def _named_state(self, leaves: Sequence[NestedValue]) -> list[_Named]:
        by_number: list[NestedValue] = []
        named: list[_Named] = []
        for leaf in leaves:
            match leaf.path:
                case ("param_groups", *_):
                    continue
                case ("state", number, _) if self._is_number(number):
                    by_number.append(leaf)
                case ("state", str(name), str(key)) | (str(name), str(key)):
                    self._take(named, name, key, leaf)
                case (str(text),) if text.startswith("state."):
                    name, _, key = text.removeprefix("state.").rpartition(".")
                    self._take(named, name, key, leaf)
                case ("state", _, key, *_):
                    self._left_out.add(str(key))
                case _:
                    continue
        if by_number:
            self._take_numbered(named, leaves, by_number)
        return named

    def _take_numbered(
        self, named: list[_Named], leaves: Sequence[NestedValue], by_number: Sequence[NestedValue]
    ) -> None:
        whose = self._numbered(leaves, by_number)
        for leaf in by_number:
            number = int(leaf.path[1])
            if number not in whose:
                raise CheckpointError(
                    f"{self._contents.source} has optimizer state for number {number}, which no "
                    "group has"
                )
            self._take(named, whose[number], str(leaf.path[2]), leaf)

    def _section(self, keys: Sequence[str], what: str, advice: str) -> str | None:
        tops = {leaf.path[0] for leaf in self._leaves if len(leaf.path) > 1}
        there = [key for key in keys if key in tops]
        if len(there) > 1:
            raise CheckpointError(
                f"{self._contents.source} has several {what}: {some(there)}; {advice}"
            )
        return there[0] if there else None

    def _under(self, section: str) -> list[NestedValue]:
        return [leaf for leaf in self._leaves if leaf.path[0] == section and len(leaf.path) > 1]

    def _is_number(self, key: str | int) -> bool:
        """Whether a key counts a weight instead of naming it; torch DCP makes text of numbers."""
        return isinstance(key, int) or (
            key.isdecimal() and all(one.name != key for one in self._weights)
        )

    def _take(self, named: list[_Named], name: str, key: str, leaf: NestedValue) -> None:
        if leaf.tensor is not None:
            named.append(_Named(name, key, leaf.tensor))
            return
        value = leaf.load()
        if isinstance(value, int | float) and not isinstance(value, bool):
            named.append(_Named(name, key, scalar(f"{name}.{key}", float(value))))
        elif value is not None:
            self._left_out.add(key)

    def _numbered(
        self, leaves: Sequence[NestedValue], by_number: Sequence[NestedValue]
    ) -> dict[int, str]:
        """Number to name: as the groups say, or in the weights' order where that is certain."""
        groups = _groups(leaves)
        problem = "has no list of them"
        if groups and _are_lists(groups):
            numbers = [number for one in groups for number in one.get("params", [])]
            names = [name for one in groups for name in one.get("param_names", [])]
            if names and len(names) == len(numbers):
                return dict(zip(map(int, numbers), map(str, names), strict=True))
            problem = self._order_problem(groups, numbers, by_number)
            if not problem:
                self.notes.append(
                    "the optimizer's state goes by number; taken in the weights' order, which "
                    "every shape fits"
                )
                weights = self._distinct()
                return {n: one.name for n, one in zip(numbers, weights, strict=True)}
        raise CheckpointError(
            f"{self._contents.source}: the optimizer's state goes by number, not by name, and "
            f"{problem}, so nobody can say whose it is; take the weights alone with --what model, "
            "or save the state by name (torch.distributed.checkpoint.state_dict)"
        )

    def _order_problem(
        self, groups: Sequence[Any], numbers: Sequence[int], by_number: Sequence[NestedValue]
    ) -> str:
        if len(groups) > 1:
            return f"has {len(groups)} groups, each with an order of its own"
        weights = self._distinct()
        if len(numbers) != len(weights):
            return f"counts {len(numbers)} weights where there are {len(weights)}"
        shapes = {n: weight.tensor.shape for n, weight in zip(numbers, weights, strict=True)}
        for leaf in by_number:
            number, key = int(leaf.path[1]), leaf.path[2]
            if number not in shapes:
                return f"has state for number {number}, which no group has"
            if (
                leaf.tensor is not None
                and key in LIKE_WEIGHTS
                and leaf.tensor.shape != shapes[number]
            ):
                return f"number {number} has {leaf.tensor.text} where the weights' order has none"
        return ""

    def _distinct(self) -> list[_Named]:
        """The weights, those that share memory with an earlier one left out."""
        shared = self._contents.shared
        return [one for one in self._weights if one.tensor.name not in shared]

    def _note_left_out(self, used: set[str | int]) -> None:
        counts = Counter(
            str(leaf.path[0])
            for leaf in self._leaves
            if (leaf.path[0] not in used or leaf.tensor is None)
            and (leaf.path[0] not in OPTIMIZERS or self._request.model_only)
        )
        if counts:
            listed = some([f"{key} ({count:,})" for key, count in counts.items()])
            self.notes.append(f"left out, with the number of values: {listed}")


def _groups(leaves: Sequence[NestedValue]) -> Any:
    """An optimizer's groups, as a list or, as torch DCP has it, value by value."""
    groups: dict[int, dict[str, Any]] = {}
    for leaf in leaves:
        match leaf.path:
            case ("param_groups",):
                return leaf.load()
            case ("param_groups", number, "params" | "param_names" as key):
                groups.setdefault(int(number), {})[key] = leaf.load()
            case _:
                continue
    return [groups[number] for number in sorted(groups)]


def _are_lists(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(one, dict)
        and all(isinstance(one.get(key, []), list) for key in ("params", "param_names"))
        for one in groups
    )


def _unwrapped(leaves: Sequence[NestedValue]) -> list[NestedValue]:
    """Without one outer key: torch's tutorial saves ``{"app": {"model": ..., "optim": ...}}``."""
    inner = list(leaves)
    while (
        inner
        and len({leaf.path[0] for leaf in inner}) == 1
        and any(len(leaf.path) > 2 and leaf.path[1] in WEIGHTS for leaf in inner)  # noqa: PLR2004
        and inner[0].path[0] not in WEIGHTS
    ):
        inner = [replace(leaf, path=leaf.path[1:]) for leaf in inner if len(leaf.path) > 1]
    return inner


def _without_model(name: str) -> str:
    if not name.startswith(MODEL):
        raise UsageError(
            f"with an empty --prefix names start with {MODEL} already; {name} does not"
        )
    return name.removeprefix(MODEL)


def _renamed(named: list[_Named], request: NameRequest) -> list[_Named]:
    table, unused = request.table or {}, set(request.table or {})
    hits = [0] * len(request.renames)
    done = []
    for entry in named:
        name: str | None = entry.name
        if entry.name in table:
            unused.discard(entry.name)
            name = table[entry.name]
        else:
            for at, (old, new) in enumerate(request.renames):
                if entry.name == old or (old.endswith(".") and entry.name.startswith(old)):
                    hits[at] += 1
                    name = new + entry.name[len(old) :]
                    break
        if name is not None:
            done.append(replace(entry, name=name))
    for (old, _), count in zip(request.renames, hits, strict=True):
        if not count:
            raise UsageError(
                f"--rename {old}=...: no name is {old!r}"
                f"{' or starts so' if old.endswith('.') else ''}; there are "
                f"{some([entry.name for entry in named])}"
            )
    if unused:
        raise UsageError(f"--map names {min(unused)!r}, which is not in the source")
    return done


def _check(tensors: Sequence[Tensor]) -> None:
    """Refuse what could not be stored, or would be stored twice, or cannot belong together."""
    by_name: dict[str, Tensor] = {}
    for tensor in tensors:
        if not tensor.name.isprintable() or not tensor.name.startswith(PREFIXES):
            raise UsageError(
                f"{tensor.name!r} cannot be a tensor's name here: it must start with "
                f"{' or '.join(PREFIXES)} and be printable"
            )
        other = by_name.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise UsageError(
                f"two tensors would be called {tensor.name}: {other.text} and {tensor.text}; "
                "rename one"
            )
    for tensor in tensors:
        stem, _, key = tensor.name.removeprefix(OPTIM).rpartition(".")
        weight = by_name.get(MODEL + stem)
        if not tensor.name.startswith(OPTIM) or key not in LIKE_WEIGHTS or weight is None:
            continue
        if tensor.shape != weight.shape:
            raise UsageError(
                f"{tensor.name} is {tensor.text} and {weight.name} is {weight.text}: their names "
                "do not belong together"
            )


def some(names: Sequence[str]) -> str:
    """The first of several names, and how many there are beside."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
