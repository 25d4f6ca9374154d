"""Cutting a model into pipeline stages: which layers go together, and what a rank keeps of them.

A model is taken to be a chain: one tensor passes through its children in order, through the blocks
of its block list one by one. A stage keeps a run of the chain. What it does not keep is replaced by
a module that hands its input on, so that the model's own forward can be called for each stage, and
every parameter keeps the name that it has in the whole model.

No communication; the same on every rank. tests/engines/test_pipeline.py holds the promises.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpctrain.engines.blocks import find_blocks
from hpctrain.errors import UsageError
from hpctrain.world import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hpctrain.settings.schema import EngineSettings


@dataclass(frozen=True)
class ChainModule:
    """One link of the chain.

    Attributes:
        name: In the whole model.
        module: Itself.
        is_block: Whether it is one of the repeated blocks.
    """

    name: str
    module: nn.Module
    is_block: bool


@dataclass(frozen=True)
class Stages:
    """What one rank keeps of a model.

    Attributes:
        parts: Its stages, each to be called like the whole model, with one tensor.
        numbers: Which of all stages they are.
        count: How many stages there are.
        model: All that the rank keeps, by the whole model's names; not to be called.
        hollow: The whole model without any layer.
    """

    parts: list[nn.Module]
    numbers: list[int]
    count: int
    model: nn.Module
    hollow: HollowModel


class PassThrough(nn.Identity):
    """Stands where a layer was that another stage has; hands its first argument on."""

    def forward(self, input: Tensor, *_args: object, **_kwargs: object) -> Tensor:  # noqa: A002
        """Of any shape."""
        return input


class _Noted(PassThrough):
    """The same, and says that it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__()
        self.name = name
        self.calls = calls

    def forward(self, input: Tensor, *_args: object, **_kwargs: object) -> Tensor:  # noqa: A002
        """Of any shape."""
        self.calls.append(self.name)
        return input


class HollowModel:
    """A model whose layers are all gone: it shows what its forward does beside calling them.

    Every stage runs the whole forward. So what stands in it beside the layers (a scale, positions
    that are added) would be done once per stage, and layers that are called in another order than
    they were cut in would be in a wrong stage; both would train on without an error.
    """

    def __init__(self, model: nn.Module, links: Sequence[ChainModule]) -> None:
        self._order = [link.name for link in links]
        self._calls: list[str] = []
        self._name = type(model).__name__
        names = set(self._order)
        self._module = _keep(model, names, (), lambda name: _Noted(name, self._calls))

    def check(self, x: Tensor) -> None:
        """Whether a stage's input comes out unchanged, and the layers are called in their order.

        Raises:
            UsageError: the model is not such a chain.
        """
        self._calls.clear()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                out = self._module(x)
        except Exception as error:
            raise UsageError(
                f"engine.pp calls {self._name} for each stage with one tensor, here of shape "
                f"{list(x.shape)}, and its own forward fails: {one_line(error)}"
            ) from error
        if self._calls != self._order:
            raise UsageError(
                f"engine.pp has cut {self._name} in the order {_listed(self._order)}, but its "
                f"forward calls {_listed(self._calls)}; give parallelize() a "
                f"ModelPlan(stage_order=...)"
            )
        same = isinstance(out, Tensor) and torch.equal(out.to(x.dtype), x)
        if not same:
            raise UsageError(
                f"engine.pp cannot cut {self._name}: its forward does more than to pass one tensor "
                f"through its layers; move the rest into one of {_listed(self._order)}"
            )


def cut(
    model: nn.Module,
    pp_rank: int,
    pp: int,
    settings: EngineSettings,
    stage_order: Sequence[str] | None = None,
) -> Stages:
    """Keep one pipeline rank's layers of a model; the others are taken out of it, and freed.

    Stages have about equally many parameters, the embedding and the head counted, and at least one
    block each. With `engine.pp_schedule` interleaved a rank has several: rank, rank + pp, ...

    Args:
        model: Of one process, not wrapped; only the kept layers are left in it.
        pp_rank: Which rank of the pipeline.
        pp: How many there are.
        settings: The schedule.
        stage_order: Names of the modules that the tensor passes through, in order; None for the
            model's children, with its blocks in the place of their list.

    Raises:
        UsageError: the model cannot be cut into so many stages.
    """
    each = settings.pp_stages_per_rank if settings.pp_schedule == "interleaved" else 1
    count = pp * each
    links = chain(model, stage_order)
    _refuse_loose(model, links)
    _refuse_few(links, count, pp, each)
    runs = balance([_size(link) for link in links], [link.is_block for link in links], count)
    _refuse_tied(links, runs)
    numbers = list(range(pp_rank, count, pp))
    hollow = HollowModel(model, links)
    kept = [{links[place].name for place in runs[number]} for number in numbers]
    names = {link.name for link in links}
    parts = [_keep(model, names, part, _gone) for part in kept]
    whole = _keep(model, names, set().union(*kept), _gone, in_place=True)
    return Stages(parts, numbers, count, whole, hollow)


def chain(model: nn.Module, order: Sequence[str] | None = None) -> list[ChainModule]:
    """The modules that a model's tensor passes through, in order; see `cut`.

    Raises:
        UsageError: `order` names a module that is not there, or one twice.
    """
    blocks = {id(block) for block in find_blocks(model)}
    if order is None:
        links = list(_children("", model, blocks))
    else:
        named = dict(model.named_modules(remove_duplicate=False))
        missing = [name for name in order if name not in named]
        if missing:
            raise UsageError(
                f"stage_order names {missing[0]!r}, which the model has not; "
                f"it has {_listed([name for name, _ in model.named_children()])}"
            )
        links = [link for name in order for link in _links(name, named[name], blocks)]
    names = [link.name for link in links]
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise UsageError(f"stage_order has {twice[0]!r} twice; name each module once")
    # Without a list of blocks any of the modules will do.
    return (
        links if blocks else [ChainModule(link.name, link.module, is_block=True) for link in links]
    )


def balance(sizes: Sequence[int], blocks: Sequence[bool], count: int) -> list[range]:
    """Cut a chain into runs, so that the largest is as small as can be and the rest are alike.

    Args:
        sizes: Of each link.
        blocks: Which links are blocks; each run gets one at least. There are `count` or more.
        count: How many runs.

    Returns:
        The links of each run, by their places.
    """
    totals = [0, *accumulate(sizes)]
    seen = [0, *accumulate(map(int, blocks))]

    def size(start: int, end: int) -> float:
        return totals[end] - totals[start] if seen[end] > seen[start] else math.inf

    def square(start: int, end: int) -> float:
        return size(start, end) ** 2 if size(start, end) <= largest else math.inf

    largest, _ = _cheapest(len(sizes), count, size, max)
    _, runs = _cheapest(len(sizes), count, square, operator.add)
    return runs


def _cheapest(
    length: int,
    count: int,
    cost: Callable[[int, int], float],
    add: Callable[[float, float], float],
) -> tuple[float, list[range]]:
    """The best way to cut [0, length) into runs, given what a run costs, and how costs add up."""
    best: dict[int, tuple[float, list[range]]] = {0: (0.0, [])}
    for _ in range(count):
        longer = {}
        for end in range(1, length + 1):
            starts = [start for start in best if start < end]
            if starts:
                costs = [add(best[start][0], cost(start, end)) for start in starts]
                start = starts[costs.index(min(costs))]
                longer[end] = (min(costs), [*best[start][1], range(start, end)])
        best = longer
    return best[length]


def _links(name: str, module: nn.Module, blocks: Collection[int]) -> Iterator[ChainModule]:
    """A module as links: itself, or its children where blocks are among what it holds."""
    if id(module) in blocks or not any(id(inner) in blocks for inner in module.modules()):
        yield ChainModule(name, module, id(module) in blocks)
    else:
        yield from _children(name + ".", module, blocks)


def _children(prefix: str, module: nn.Module, blocks: Collection[int]) -> Iterator[ChainModule]:
    for key, child in module._modules.items():  # noqa: SLF001 - named_children() leaves out twins
        if child is not None:
            yield from _links(prefix + key, child, blocks)


def _size(link: ChainModule) -> int:
    return sum(parameter.numel() for parameter in link.module.parameters())


# ---- what a rank keeps


def _gone(_name: str) -> nn.Module:
    return PassThrough()


def _keep(
    module: nn.Module,
    links: Collection[str],
    kept: Collection[str],
    stand_in: Callable[[str], nn.Module],
    *,
    prefix: str = "",
    in_place: bool = False,
) -> nn.Module:
    """A module with those of its links that are not kept replaced; it shares the others."""
    whole = module if in_place else _twin(module)
    for key, child in list(whole._modules.items()):  # noqa: SLF001 - lists have no setattr of keys
        name = prefix + key
        if name in links:
            if name not in kept:
                whole._modules[key] = stand_in(name)  # noqa: SLF001
        elif child is not None and any(link.startswith(name + ".") for link in links):
            inner = _keep(child, links, kept, stand_in, prefix=name + ".", in_place=in_place)
            whole._modules[key] = inner  # noqa: SLF001
    return whole


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own with the same children: hooks and replacements on one leave the other."""
    twin = copy.copy(module)
    for key in vars(nn.Module()):
        vars(twin)[key] = copy.copy(vars(module)[key])
    return twin


# ---- what cannot be cut


def _refuse_few(links: Sequence[ChainModule], count: int, pp: int, each: int) -> None:
    blocks = sum(link.is_block for link in links)
    if blocks < count:
        stages = f"engine.pp {pp}" + (f" x engine.pp_stages_per_rank {each}" if each > 1 else "")
        raise UsageError(
            f"{stages} asks for {count} pipeline stages, and the model has {blocks} blocks; "
            f"set engine.pp lower, or give the model more layers"
        )


def _refuse_loose(model: nn.Module, links: Sequence[ChainModule]) -> None:
    """What lies beside the chain would be on every stage, and be trained there apart."""
    stems = tuple(link.name + "." for link in links)
    loose = [name for name in model.state_dict() if not name.startswith(stems)]
    if loose:
        raise UsageError(
            f"engine.pp cannot cut {type(model).__name__}: {loose[0]} is in none of the modules "
            f"that its tensor passes through ({_listed([link.name for link in links])}); "
            f"move it into one of them"
        )


def _refuse_tied(links: Sequence[ChainModule], runs: Sequence[range]) -> None:
    """A parameter of two stages would be two parameters, and grow apart."""
    first: dict[int, tuple[int, str]] = {}
    for number, run in enumerate(runs):
        for place in run:
            link = links[place]
            for name, parameter in link.module.named_parameters(prefix=link.name):
                stage, other = first.setdefault(id(parameter), (number, name))
                if stage != number:
                    raise UsageError(
                        f"engine.pp cannot cut this model: {other} and {name} are one parameter, "
                        f"on stages {stage} and {number}; untie them, or set engine.pp to 1"
                    )


def _listed(names: Sequence[str]) -> str:
    """Names in one short line."""
    shown = list(names) if len(names) <= 8 else [*names[:3], "...", *names[-3:]]  # noqa: PLR2004
    return ", ".join(shown) if shown else "nothing"
