"""Cutting a model into pipeline stages: which layers go together, and what a rank keeps of them.

A model is taken to be a chain: one tensor passes through its children in order, through the blocks
of its block list one by one. What it does not keep is replaced by a module that hands its input on,
so that the model's own forward can be called for each stage, and every parameter keeps the name
that it has in the whole model.

No communication; the same on every rank. tests/engines/test_pipeline.py holds the promises.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.core.world import one_line
from hpctrain.errors import UsageError
from hpctrain.ledger.plan.mesh import balance, stages_per_rank
from hpctrain.train.engines.blocks import find_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hpctrain.core.settings.schema import EngineSettings

    Call = tuple[str, object]


@dataclass(frozen=True)
class ChainModule:
    """One link of the chain.

    Attributes:
        is_block: Whether it is one of the repeated blocks.
    """

    name: str
    module: nn.Module
    is_block: bool


@dataclass(frozen=True)
class Tied:
    """A parameter that two stages have, under all the names that it has in the whole model.

    Each adds the other's gradient to its own; so both stay the same, bit for bit.

    Attributes:
        names: In the model's order.
        stages: The numbers of both.
    """

    names: tuple[str, ...]
    stages: tuple[int, int]


@dataclass(frozen=True)
class Stages:
    """What one rank keeps of a model.

    Attributes:
        parts: Its stages, each to be called like the whole model, with one tensor.
        numbers: Which of all stages they are.
        model: All that the rank keeps, by the whole model's names; not to be called.
        hollow: The whole model without any layer.
        tied: Parameters that other ranks have too.
    """

    parts: list[nn.Module]
    numbers: list[int]
    count: int
    model: nn.Module
    hollow: HollowModel
    tied: list[Tied]


PLAIN = (bool, int, float, str, type(None))


class PassThrough(nn.Identity):
    """Stands where a layer was that another stage has; hands its first argument on.

    It has the layer's plain attributes: a model may choose by them what it hands to a layer.

    Attributes:
        calls: Where it is not None, each call is noted there: the name, and what the layer was
            given beside its tensor.
    """

    def __init__(self, link: ChainModule, calls: list[Call] | None = None) -> None:
        super().__init__()
        plain = {key: v for key, v in vars(link.module).items() if isinstance(v, PLAIN)}
        vars(self).update(plain | vars(self))
        self.name = link.name
        self.calls = calls

    def forward(self, input: Tensor, *args: object, **kwargs: object) -> Tensor:  # noqa: A002
        """Of any shape."""
        if self.calls is not None:
            self.calls.append((self.name, _fingerprint((args, kwargs))))
        # What a stage returns must be no view (of the last tokens, say): FSDP2 would lose its hook.
        return input if input._base is None else input.clone()  # noqa: SLF001


def _fingerprint(value: object) -> object:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        raw = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return (tuple(value.shape), str(value.dtype), hashlib.blake2b(raw.tobytes()).hexdigest())
    if isinstance(value, Mapping):
        return tuple((key, _fingerprint(inner)) for key, inner in value.items())
    if isinstance(value, tuple | list):
        return tuple(_fingerprint(inner) for inner in value)
    return value if isinstance(value, PLAIN) else type(value).__name__


def passed_on(output: object) -> Tensor | None:
    """The one tensor in what a model returned: itself, or a field of it; None where not one is.

    Fields with anything else do not count, such as a cache.
    """
    fields = output.values() if isinstance(output, Mapping) else [output]
    tensors = [field for field in fields if isinstance(field, Tensor)]
    return tensors[0] if len(tensors) == 1 else None


class HollowModel:
    """A model whose layers are all gone: it shows what its forward does beside calling them.

    Every stage runs the whole forward. So what stands in it beside the layers (a scale, positions
    that are added) would be done once per stage; layers that are called in another order than
    they were cut in would be in a wrong stage; and what is made of the model's input for layers
    of later stages would be made of something else. Each would train on without an error.
    """

    def __init__(self, model: nn.Module, links: Sequence[ChainModule]) -> None:
        self._order = [link.name for link in links]
        self._calls: list[Call] = []
        self._name = type(model).__name__
        stems = tuple(name + "." for name in self._order)
        self._tables = [
            name
            for name, module in model.named_modules()
            if _makes_tables(module) and not (name + ".").startswith(stems)
        ]
        layers = {link.name: PassThrough(link, self._calls) for link in links}
        self._module = _keep(model, layers.keys(), layers)

    def check(self, x: Tensor, begun: Sequence[Call] = ()) -> None:
        """Check that a stage's input comes out unchanged and the layers are called as they must be.

        `begun` are the calls of later stages' layers that the first stage has noted.

        Raises:
            UsageError: the model is not such a chain.
        """
        out = self._called(x)
        names = [name for name, _ in self._calls]
        if names != self._order:
            raise UsageError(
                f"engine.pp has cut {self._name} in the order {_listed(self._order)}, but its "
                f"forward calls {_listed(names)}; give parallelize() a "
                f"ModelPlan(stage_order=...)"
            )
        same = out is not None and torch.equal(out.to(x.dtype), x)
        if not same:
            tables = [f"; if its tensor passes through {name}, " for name in self._tables[:1]]
            raise UsageError(
                f"engine.pp cannot cut {self._name}: its forward does more than to pass one tensor "
                f"through its layers; move the rest into one of {_listed(self._order)}"
                + "".join(each + "name it in a ModelPlan(stage_order=...)" for each in tables)
            )
        here = dict(self._calls)
        other = [name for name, given in begun if here[name] != given]
        if other:
            raise UsageError(
                f"engine.pp cannot cut {self._name}: what its forward hands to {other[0]} beside "
                f"the tensor differs from stage to stage, as what is made of the model's own "
                f"input does; make it inside the layer, of the tensor's shape and dtype alone"
            )

    def _called(self, x: Tensor) -> Tensor | None:
        self._calls.clear()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return passed_on(self._module(x))
        except Exception as error:
            raise UsageError(
                f"engine.pp calls {self._name} for each stage with one tensor, here of shape "
                f"{list(x.shape)}, and its own forward fails: {one_line(error)}"
            ) from error


def cut(
    model: nn.Module,
    pp_rank: int,
    pp: int,
    settings: EngineSettings,
    stage_order: Sequence[str] | None = None,
) -> Stages:
    """Keep one pipeline rank's layers of a model; the others are taken out of it, and freed.

    Stages have about equally many parameters, the embedding and the head counted, and at least one
    block each. What only makes tables is on all of them. A rank may have several stages, `pp`
    apart.

    The model is not wrapped yet. `stage_order` names the modules that the tensor passes through, in
    order. None means the model's children, with its blocks in the place of their list.

    Raises:
        UsageError: the model cannot be cut into so many stages.
    """
    each = stages_per_rank(settings)
    count = pp * each
    links = chain(model, stage_order)
    _refuse_loose(model, links)
    blocks = sum(link.is_block for link in links)
    if blocks < count:
        stages = f"engine.pp {pp}" + (f" x engine.pp_stages_per_rank {each}" if each > 1 else "")
        raise UsageError(
            f"{stages} asks for {count} pipeline stages, and the model has {blocks} blocks; "
            f"set engine.pp lower, or give the model more layers"
        )
    runs = balance([_size(link) for link in links], [link.is_block for link in links], count)
    tied = _tied(links, runs, pp)
    numbers = list(range(pp_rank, count, pp))
    hollow = HollowModel(model, links)
    names = {link.name for link in links}
    parts, kept, gone = [], set[str](), dict[str, PassThrough]()
    for number in numbers:
        own = {links[place].name for place in runs[number]}
        shared = [name for each in tied if number in each.stages for name in each.names]
        absent = _stand_ins(model, [link for link in links if link.name not in own], shared)
        parts.append(_keep(model, names, absent))
        kept |= own
        gone |= {k: v for k, v in absent.items() if k not in gone or list(v.parameters())}
    whole = {name: stand_in for name, stand_in in gone.items() if name not in kept}
    left = _keep(model, names, whole, in_place=True)
    tied = [each for each in tied if not {*each.stages}.isdisjoint(numbers)]
    return Stages(parts, numbers, count, left, hollow, tied)


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


def _links(name: str, module: nn.Module, blocks: Collection[int]) -> Iterator[ChainModule]:
    """A module as links: itself, or its children where blocks are among what it holds."""
    if id(module) in blocks or not any(id(inner) in blocks for inner in module.modules()):
        yield ChainModule(name, module, id(module) in blocks)
    else:
        yield from _children(name + ".", module, blocks)


def _children(prefix: str, module: nn.Module, blocks: Collection[int]) -> Iterator[ChainModule]:
    for key, child in module._modules.items():  # noqa: SLF001 - named_children() leaves out twins
        if child is not None and (isinstance(module, nn.Sequential) or not _makes_tables(child)):
            yield from _links(prefix + key, child, blocks)


def _makes_tables(module: nn.Module) -> bool:
    """Return whether all that a module has is computed when it is made, as rotary frequencies."""
    return any(True for _ in module.buffers()) and not module.state_dict()


def _size(link: ChainModule) -> int:
    return sum(parameter.numel() for parameter in link.module.parameters())


# ---- what a rank keeps


def _keep(
    module: nn.Module,
    links: Collection[str],
    absent: Mapping[str, nn.Module],
    *,
    prefix: str = "",
    in_place: bool = False,
) -> nn.Module:
    """A module with those of its links replaced that are absent; it shares the others."""
    whole = module if in_place else _twin(module)
    for key, child in list(whole._modules.items()):  # noqa: SLF001 - lists have no setattr of keys
        name = prefix + key
        if name in links:
            whole._modules[key] = absent.get(name, child)  # noqa: SLF001
        elif child is not None and any(link.startswith(name + ".") for link in links):
            inner = _keep(child, links, absent, prefix=name + ".", in_place=in_place)
            whole._modules[key] = inner  # noqa: SLF001
    return whole


def _stand_ins(
    model: nn.Module, links: Sequence[ChainModule], shared: Collection[str]
) -> dict[str, PassThrough]:
    """For the links that a stage does not keep; they hold those of its parameters that are tied."""
    absent = {link.name: PassThrough(link) for link in links}
    for name in shared:
        link = next((link for link in absent if name.startswith(link + ".")), None)
        if link is None:
            continue
        holder: nn.Module = absent[link]
        *path, own = name.removeprefix(link + ".").split(".")
        for key in path:
            if key not in holder._modules:  # noqa: SLF001 - hasattr would find a plain attribute
                holder.add_module(key, nn.Module())
            holder = holder.get_submodule(key)
        holder.register_parameter(own, model.get_parameter(name))
    return absent


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own with the same children: hooks and replacements on one leave the other."""
    twin = copy.copy(module)
    for key in vars(nn.Module()).keys() - {"_buffers"}:  # what moves one's tables moves all twins'
        vars(twin)[key] = copy.copy(vars(module)[key])
    return twin


# ---- what cannot be cut


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


def _tied(links: Sequence[ChainModule], runs: Sequence[range], pp: int) -> list[Tied]:
    """Return the parameters that two stages have.

    Refuse those of a block, of more than two stages, or of two stages of one rank.
    """
    places: dict[int, list[tuple[int, str, bool]]] = {}
    for number, run in enumerate(runs):
        for link in (links[place] for place in run):
            named = link.module.named_parameters(prefix=link.name, remove_duplicate=False)
            for name, parameter in named:
                places.setdefault(id(parameter), []).append((number, name, link.is_block))
    tied = []
    for own in places.values():
        stages = sorted({number for number, _, _ in own})
        if len(stages) == 1:
            continue
        first, last = own[0], own[-1]
        apart = len(stages) == 2 and stages[0] % pp != stages[1] % pp  # noqa: PLR2004 - a pair
        if not apart or any(is_block for _, _, is_block in own):
            raise UsageError(
                f"engine.pp cannot cut this model: {first[1]} and {last[1]} are one parameter, on "
                f"stages {first[0]} and {last[0]}; only what lies outside the blocks may be on "
                f"two stages, as an embedding tied to the head; untie them, or set engine.pp to 1"
            )
        tied.append(Tied(tuple(name for _, name, _ in own), (stages[0], stages[1])))
    return tied


def _listed(names: Sequence[str]) -> str:
    shown = list(names) if len(names) <= 8 else [*names[:3], "...", *names[-3:]]  # noqa: PLR2004
    return ", ".join(shown) if shown else "nothing"
