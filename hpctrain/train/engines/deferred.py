"""A model that is built without its values, and each value made later, by itself.

`DeferredModel` runs a model's constructor on torch's meta device, which it takes for the CPU, and
writes down each operation that would have made or changed a value. So a rank never holds more than
one whole tensor beside its own shards, whatever the constructor does: torch's inits, the program's
own, rotary tables, tied weights.

Each random operation draws from a seed of its own: the run's (or its generator's, where it names
one), and its number among them. A value is a function of seed and constructor then, not of the
ranks, nor of what else is made.
tests/engines/test_deferred.py holds the promises.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.checkpoint.tensors.boxes import State, held
from hpctrain.core.torch_private import intercepting, map_tensors, without_modes
from hpctrain.errors import UsageError
from hpctrain.train.engines.state import modules

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from hpctrain.core.world import World
    from hpctrain.train.engines.pretrained import Pretrained

CPU, META = torch.device("cpu"), torch.device("meta")
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that make memory and no values."""
OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_"})
"""Operators that ask nothing of the values which their first tensor had."""
ITEM = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - `item()`, by its operator's name
READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""They read memory without an operator."""


@dataclass(frozen=True)
class _View:
    """A tensor of the meta device as it was then; `tensor.data = ...` may change it later.

    `memory` is its storage, which lives on by this. `offset` is that of its first element, in
    elements.
    """

    memory: torch.UntypedStorage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def storage(self) -> int:
        """What tells its memory from all other memory."""
        return int(self.memory._cdata)  # noqa: SLF001 - without values there is no address


@dataclass(frozen=True)
class _Operation:
    """One of the constructor's, as it was called.

    Attributes:
        seed: Of what it draws at random; None for one that draws nothing.
        args: Tensors without values as `_View`.
        kwargs: The same.
        made: What it returned, in order; None for a tensor in the memory of an argument.
        reads: Storages whose values it asks for.
        writes: Storages that it has made or changed.
        clears: The storage of which it leaves nothing that was there before; else None.
    """

    seed: int | None
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[_View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    clears: int | None


class DeferredModel:
    """A model on the meta device, with all that would have filled it.

    Attributes:
        model: Its parameters and buffers are on the meta device.
        pretrained: Where values are read that the constructor's are passed over for; None for none.
    """

    def __init__(self, build: Callable[[], nn.Module], seed: int) -> None:
        """Run a constructor without its values. Not collective.

        It must make the same model on every rank. Random values come from `seed`.

        Raises:
            UsageError: it makes no module.
        """
        self.pretrained: Pretrained | None = None
        self._seed = seed
        self._operations: list[_Operation] = []
        self._draws = 0
        with intercepting(self._operator, self._function):
            self.model = build()
        if not isinstance(self.model, nn.Module):
            raise UsageError(
                f"run.parallelize was given a function that makes a {type(self.model).__name__}; "
                "it has to return the model, a torch.nn.Module"
            )
        self._tensors = {name: _as_it_is(table[own]) for name, table, own in _places(self.model)}
        self._to_meta()

    def value(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer as read, or as the constructor left it: whole, on the CPU.

        `name` is its name in the model as it was built.
        """
        if self.pretrained is not None and name in self.pretrained:
            return self.pretrained.whole(name)
        tensor = self._tensors[name]
        return self._replay(tensor) if isinstance(tensor, _View) else tensor.detach()

    def fill(
        self,
        model: nn.Module,
        world: World,
        *,
        offload: bool = False,
        outlined: bool = False,
        awaited: Collection[str] = (),
    ) -> None:
        """Give every tensor that is on the meta device its memory and this rank's values.

        Not collective. Beside what the model keeps, one whole tensor is held at a time. `model` may
        be a part, and parameters may be DTensors by now.

        With `offload`, parameters stay on the CPU. With `outlined`, they get one element of memory
        each, for an engine that fills them one by one. Names in `awaited` get memory alone: their
        values come from a checkpoint.
        """
        # All memory first: whole tensors between the shards would leave holes that nothing fits.
        filled = dict[int, torch.Tensor]()
        empty = dict[str, torch.Tensor]()
        for name, table, own in _places(model):
            tensor = table[own]
            if tensor.is_meta and id(tensor) not in filled:  # a tied one stays one
                if outlined and isinstance(tensor, nn.Parameter):
                    element = torch.empty((), dtype=tensor.dtype, device=world.device)
                    filled[id(tensor)] = _like(tensor, element.expand(tensor.shape))
                    table[own] = filled[id(tensor)]
                    continue
                stays = offload and isinstance(tensor, nn.Parameter)
                own_part = torch.empty_like(
                    tensor, device=CPU if stays else world.device, requires_grad=False
                )
                filled[id(tensor)] = _like(tensor, own_part)
                empty[name] = own_part
            table[own] = filled.get(id(tensor), tensor)
        for name, own_part in empty.items():
            if name not in awaited:
                self._fill(name, own_part, world)

    def _fill(self, name: str, own_part: torch.Tensor, world: World) -> None:
        (box,) = held(State({name: own_part}), world)
        if self.pretrained is not None and name in self.pretrained:
            self.pretrained.read_into(name, box)
            return
        value = self.value(name)
        cut = zip(box.piece.begin, box.piece.extent, strict=True)
        for axis, (begin, extent) in enumerate(cut):
            value = value.narrow(axis, begin, extent)
        box.local.copy_(value)

    # ---- while the constructor runs

    def _function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """What Python code asks of a tensor."""
        if function == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False  # else torch's inits and others leave it as it is
        if function == torch.Tensor.device.__get__ and args[0].device == META:
            return CPU
        if function in READERS:
            return self._run_now(function, args, kwargs)
        return function(*args, **kwargs)

    def _operator(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator without values, unless it asks for some or has them all; record it.

        A table from numpy or `torch.tensor` is made of values alone and has its values.
        """
        tensors = _tensors_in((args, kwargs))
        has_values = tensors and not any(tensor.is_meta for tensor in tensors)
        changed = _changed(function, args, kwargs)
        if has_values or function is ITEM or any(not tensor.is_meta for tensor in changed):
            return self._run_now(function, args, kwargs)
        try:
            result = _without_values(function, args, kwargs)
        except RuntimeError:  # the result's shape may depend on values, as nonzero's
            return self._run_now(function, args, kwargs)
        args, kwargs = map_tensors(torch.Tensor, _as_it_is, (args, kwargs))
        given = {view.storage for view in _tensors_in((args, kwargs), _View)}
        results = [_view(tensor) for tensor in _tensors_in(result)]
        made = tuple(None if view.storage in given else view for view in results)
        writes = {view.storage for view in made if view is not None}
        writes |= {_view(tensor).storage for tensor in changed}
        if writes:  # else it is a view
            clears = _cleared(function, args)
            operation = _Operation(
                seed=self._next_seed(function, args, kwargs),
                function=function,
                args=args,
                kwargs=kwargs,
                made=made,
                reads=frozenset(given - {clears}),
                writes=frozenset(writes),
                clears=clears,
            )
            self._operations.append(operation)
        return result

    def _to_meta(self) -> None:
        """What the constructor has made with values waits for its part of the model as well."""
        moved = dict[int, torch.Tensor]()
        for _name, table, own in _places(self.model):
            tensor = table[own]
            if not tensor.is_meta:
                if id(tensor) not in moved:
                    moved[id(tensor)] = _like(tensor, tensor.detach().to(META))
                table[own] = moved[id(tensor)]
        for module in self.model.modules():  # what is no buffer is neither cut nor saved
            for name, thing in list(vars(module).items()):
                if isinstance(thing, torch.Tensor) and thing.is_meta:
                    vars(module)[name] = self._replay(_view(thing))

    def _run_now(self, function: Any, args: Any, kwargs: Any) -> Any:
        def real(tensor: torch.Tensor) -> torch.Tensor:
            return self._replay(_view(tensor)) if tensor.is_meta else tensor

        with without_modes():
            args, kwargs = map_tensors(torch.Tensor, real, (args, kwargs))
            return function(*args, **kwargs)

    def _next_seed(self, function: Any, args: Any, kwargs: Any) -> int | None:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        self._draws += 1
        named = _tensors_in((args, kwargs), torch.Generator)
        return seed_of(named[0].initial_seed() if named else self._seed, self._draws)

    # ---- afterwards

    def _replay(self, wanted: _View) -> torch.Tensor:
        """The value of a tensor that has none; in memory of its own."""
        memory = dict[int, torch.UntypedStorage]()

        def real(view: _View) -> torch.Tensor:
            if view.storage not in memory:  # made by one of EMPTY
                memory[view.storage] = torch.UntypedStorage(  # type: ignore[no-untyped-call]
                    view.memory.nbytes()
                )
            empty = torch.empty(0, dtype=view.dtype)
            return empty.set_(memory[view.storage], view.offset, view.shape, view.stride)

        with torch.no_grad(), torch.device("cpu"):
            for operation in self._leading_to(wanted.storage):
                given = map_tensors(_View, real, (operation.args, dict(operation.kwargs)))
                result = _run(operation, *map_tensors(torch.device, lambda _: CPU, given))
                for view, tensor in zip(operation.made, _tensors_in(result), strict=True):
                    if view is None:
                        continue
                    if view.stride == tensor.stride() and not tensor.storage_offset():
                        memory[view.storage] = tensor.untyped_storage()
                    else:
                        real(view).copy_(tensor)
            return real(wanted)

    def _leading_to(self, storage: int) -> list[_Operation]:
        """The operations that a storage's last values come from, in their order."""
        needed, operations = {storage}, list[_Operation]()
        for operation in reversed(self._operations):
            if needed.isdisjoint(operation.writes) or _name(operation.function) in EMPTY:
                continue
            operations.append(operation)
            needed.discard(operation.clears or -1)
            needed |= operation.reads
        return operations[::-1]


def _run(operation: _Operation, args: Any, kwargs: Any) -> Any:
    seed = operation.seed
    if seed is None:
        return operation.function(*args, **kwargs)
    args, kwargs = map_tensors(
        torch.Generator, lambda _: torch.Generator().manual_seed(seed), (args, kwargs)
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return operation.function(*args, **kwargs)


def seed_of(seed: int, draw: int) -> int:
    """What the n-th random operation of a constructor starts from, under a run's seed."""
    digest = hashlib.blake2b(f"{seed}:{draw}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where a model holds tensors: the name, the table that it is in, and its name there."""
    for stem, module in modules(model):
        for table in (module._parameters, module._buffers):  # noqa: SLF001 - as torch's own walks
            for own, tensor in list(table.items()):
                if tensor is not None:
                    yield stem + own, table, own


def _like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(other, requires_grad=tensor.requires_grad)
    return other


def _without_values(function: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator on the meta device, whatever device it names."""
    args, kwargs = map_tensors(torch.Tensor, lambda tensor: tensor.to(META), (args, kwargs))
    args, kwargs = map_tensors(torch.device, lambda _: META, (args, kwargs))
    names = {argument.name for argument in function._schema.arguments}  # noqa: SLF001 - no other
    if "device" in names and kwargs.get("device") is None and not _tensors_in(args):
        kwargs = {**kwargs, "device": META}
    return function(*args, **kwargs)


def _view(tensor: torch.Tensor) -> _View:
    return _View(
        tensor.untyped_storage(),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor | _View:
    """A tensor as an operator has seen it; what comes later does not change that."""
    return _view(tensor) if tensor.is_meta else tensor.detach().clone()


def _tensors_in(value: Any, kind: Any = torch.Tensor) -> list[Any]:
    listed = list[Any]()
    map_tensors(kind, listed.append, value)
    return listed


def _changed(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What an operator writes into, by its schema."""
    changed = list[torch.Tensor]()
    for place, argument in enumerate(function._schema.arguments):  # noqa: SLF001 - no other name
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return changed


def _cleared(function: Any, args: tuple[Any, ...]) -> int | None:
    """The storage of which an operator leaves no value that was there before; None for none."""
    if _name(function) not in OVERWRITES or not args or not isinstance(args[0], _View):
        return None
    view = args[0]
    is_dense = math.prod(view.shape) * view.dtype.itemsize == view.memory.nbytes()
    return view.storage if is_dense and 0 not in view.stride else None


def _name(function: Any) -> str:
    return str(function.overloadpacket.__name__)
