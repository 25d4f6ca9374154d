"""Tensor parallelism: each matrix of a layer is cut over ranks that work on the same samples.

With sequence parallelism the norms and the residual stream between two matrices are cut too, along
the sequence. Every parameter becomes a DTensor that knows the `tp` axis, cut or not: so FSDP2
shards all of them over one mesh, and a norm or a checkpoint can tell a part from a copy.
tests/engines/test_tensor_parallel.py holds the promises.
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hpctrain.engines.blocks import every_block
from hpctrain.engines.layouts import ASK, HEAD_COUNTS, owners, recognise
from hpctrain.engines.stages import PassThrough
from hpctrain.engines.torch_private import map_tensors, root_of
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from hpctrain.engines.layouts import BlockNames
    from hpctrain.settings.schema import EngineSettings

SEQUENCE = 1
"""Activations are [batch, time, width]."""


class Replicated(ParallelStyle):
    """A module that works on the same numbers on every rank, with parameters that know it.

    What goes in and comes out are plain tensors, equal on all ranks. So every rank has the whole
    gradient already, and nothing is added up.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))

        def lift(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return tensor
            return DTensor.from_local(tensor, device_mesh, [Replicate()], run_check=False)

        module.register_forward_pre_hook(
            lambda _, args, kwargs: map_tensors(torch.Tensor, lift, (args, kwargs)),
            with_kwargs=True,
        )
        module.register_forward_hook(
            lambda _module, _args, out: map_tensors(DTensor, DTensor.to_local, out)
        )
        return module


class Gathered(ParallelStyle):
    """A module that gets a part of the sequence on each rank and works on all of it.

    Its first tensor of floats is the activation, whatever it is called; the rest is left alone.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    given[key] = _whole_sequence(value, device_mesh)
                    break
            return tuple(given.pop(number) for number in range(len(args))), given

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _whole_sequence(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if not isinstance(part, DTensor):
        part = DTensor.from_local(part, mesh, [Shard(SEQUENCE)], run_check=False)
    return part.redistribute(placements=[Replicate()])


def default_plan(model: nn.Module, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Names of a decoder's modules to how each is cut.

    Args:
        model: The whole model or a pipeline's part of it.
        sequence_parallel: See `EngineSettings.sequence_parallel`.

    Raises:
        UsageError: the layout is not a common one, or has no place for what was asked.
    """
    layout = recognise(model)
    if sequence_parallel and layout.tables is not None:
        raise UsageError(
            f"engine.sequence_parallel: {layout.tables} makes tables of positions from the "
            "embedding's output, of which each rank would have a part; set "
            "engine.sequence_parallel = false, or " + ASK
        )
    between = Shard(SEQUENCE) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if layout.embedding is not None:
        plan[layout.embedding] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    for block in layout.blocks:
        plan |= _block_plan(block, sequence_parallel=sequence_parallel)
    if layout.norm is not None:
        plan[layout.norm] = SequenceParallel() if sequence_parallel else Replicated()
    if layout.head is not None:
        plan[layout.head] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    return plan


def _block_plan(block: BlockNames, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    between = Shard(SEQUENCE) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    for name in (block.attention_norm, block.mlp_norm):
        plan[name] = SequenceParallel() if sequence_parallel else Replicated()
    if sequence_parallel:
        plan |= {block.attention: Gathered(), block.mlp: Gathered()}
    for name in (block.query, block.key, block.value, block.gate, block.up):
        plan[name] = ColwiseParallel()
    for name in (block.mix, block.down):
        plan[name] = RowwiseParallel(output_layouts=between)
    return plan


def tensor_parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    settings: EngineSettings,
    plan: Mapping[str, ParallelStyle] | None,
) -> None:
    """Cut a model in place. Collective over the mesh: its ranks call it with equal models.

    Args:
        model: On the CPU, not wrapped yet; the whole model or a pipeline's part of it.
        mesh: The `tp` axis of the run's mesh.
        settings: `sequence_parallel` and `compile` matter.
        plan: Module names to styles, with * as in torch's own plans; None for a decoder's default.
            Parameters that it leaves out become copies: their modules must work on activations
            that are equal on all ranks.

    Raises:
        UsageError: the model cannot be cut that way; nothing has been changed then.
    """
    refuse_shared(model)
    if plan is None:
        styles = default_plan(model, sequence_parallel=settings.sequence_parallel)
        check_heads(model, mesh.size())
        refuse_rest(model, styles, sequence_parallel=settings.sequence_parallel)
    else:
        styles = expand(model, plan, whole=_is_whole(mesh))
    styles |= rest(model, styles)
    check_sizes(model, styles, mesh.size())
    if plan is None:
        share_heads(model, mesh.size())
    parallelize_module(model, mesh, styles)
    refuse_plain(model)
    # FSDP2 warns of logits that are a view of a DTensor's part. Its hazard, a change in place that
    # drops a hook, is an error here: autograd forbids it for such a view.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    if settings.compile != "no":
        keep_gradients_through_compile(model, styles)


def refuse_shared(model: nn.Module) -> None:
    """One parameter in two places would become two, and train apart without a word."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise UsageError(
                f"engine.tp: {other} and {name} are one parameter, which tensor parallelism would "
                "make two; give the model two, or set engine.tp to 1"
            )


def refuse_rest(
    model: nn.Module, styles: Mapping[str, ParallelStyle], *, sequence_parallel: bool
) -> None:
    """With sequence parallelism every parameter must have a place: no activation is equal then."""
    for name, module in owners(model):
        if sequence_parallel and name not in styles:
            raise UsageError(
                f"engine.sequence_parallel: {name or 'the model itself'} "
                f"({type(module).__name__}) has parameters and is no part of a common decoder; "
                f"set engine.sequence_parallel = false, or {ASK}"
            )


def rest(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Styles for the modules that a plan leaves out.

    Raises:
        UsageError: one of them has other modules inside, whose inputs cannot be told.
    """
    styles_of_rest: dict[str, ParallelStyle] = {}
    for name, module in owners(model):
        if name in styles:
            continue
        if next(module.children(), None) is not None:
            held = next(iter(dict(module.named_parameters(recurse=False))))
            raise UsageError(
                f"engine.tp: {f'{name}.{held}' if name else held} belongs to a "
                f"{type(module).__name__} with modules inside and cannot be placed; put it into a "
                f"module of its own, or {ASK}"
            )
        styles_of_rest[name] = Replicated()
    return styles_of_rest


def refuse_plain(model: nn.Module) -> None:
    """A parameter that a user's own style has left as it was would be taken for a copy."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UsageError(
                f"engine.tp: the style that plan.tensor_parallel gives {name.rpartition('.')[0]} "
                "leaves its parameters plain tensors; name one that makes DTensors of them"
            )


def expand(
    model: nn.Module, plan: Mapping[str, ParallelStyle], *, whole: bool
) -> dict[str, ParallelStyle]:
    """A plan with each * replaced by the names that it stands for; one * for one name.

    Args:
        model: What the plan is for.
        plan: Names to styles.
        whole: Whether every name must be there: a pipeline's part has some of them only.

    Raises:
        UsageError: a name is not there.
    """
    expanded: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        parts = pattern.split(".")
        matches = [
            name
            for name, module in model.named_modules()
            if len(own := name.split(".")) == len(parts)
            and all(map(fnmatchcase, own, parts))
            and not isinstance(module, PassThrough)
        ]
        if whole and not matches:
            raise UsageError(
                f"plan.tensor_parallel names {pattern!r}, and the model has no such module; "
                f"known are {', '.join(name for name, _ in owners(model))}"
            )
        expanded |= dict.fromkeys(matches, style)
    return expanded


def check_heads(model: nn.Module, tp: int) -> None:
    """Refuse a number of ranks that would cut through a head.

    Raises:
        UsageError: with the matrix.
    """
    for block in recognise(model).blocks:
        attention = model.get_submodule(block.attention)
        head = getattr(attention, "head_dim", None)
        for name in (block.query, block.key, block.value):
            width = _weight(model, name).shape[0]
            heads = f"{width // head} heads" if isinstance(head, int) else f"width {width}"
            if width % (tp * head if isinstance(head, int) else tp):
                raise UsageError(
                    f"engine.tp {tp} does not divide the {heads} of {name}; set engine.tp to a "
                    "divisor, or change the model's number of heads (train.heads)"
                )
        for count in HEAD_COUNTS:
            number = getattr(attention, count, None)
            if isinstance(number, int) and number % tp:
                raise UsageError(
                    f"engine.tp {tp} does not divide {block.attention}.{count} = {number}; set "
                    "engine.tp to a divisor, or change the model's number of heads (train.heads)"
                )


def _weight(model: nn.Module, name: str) -> torch.Tensor:
    weight: torch.Tensor = model.get_submodule(name).get_parameter("weight")
    return weight


def share_heads(model: nn.Module, tp: int) -> None:
    """Tell each attention how many heads this rank has, where it keeps a number."""
    for block in recognise(model).blocks:
        attention = model.get_submodule(block.attention)
        for count in HEAD_COUNTS:
            number = getattr(attention, count, None)
            if isinstance(number, int):
                setattr(attention, count, number // tp)


def check_sizes(model: nn.Module, styles: Mapping[str, ParallelStyle], tp: int) -> None:
    """Refuse matrices that cannot be cut into equal parts.

    Raises:
        UsageError: with the matrix.
    """
    for name, style in styles.items():
        module = model.get_submodule(name)
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise UsageError(
                f"engine.tp: {name} is a {type(module).__name__}, and {type(style).__name__} cuts "
                "nn.Linear and nn.Embedding; give it another style in plan.tensor_parallel"
            )
        by_rows = isinstance(style, ColwiseParallel) == isinstance(module, nn.Linear)
        size = module.weight.shape[0 if by_rows else 1]
        if size % tp:
            raise UsageError(
                f"engine.tp {tp} does not divide dimension {0 if by_rows else 1} of {name}.weight, "
                f"which is {size}; set engine.tp to a divisor, or change the model's sizes"
            )


def keep_gradients_through_compile(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    """Copy what goes from outside into the first compiled block.

    A module's output that is still under way between ranks (torch's AsyncCollectiveTensor) goes
    into a compiled block as it is, and its gradient does not come out: an embedding's was exactly
    zero. A copy is a plain tensor.
    """
    inside = {id(module) for block in every_block(model) for module in block.modules()}
    behind = False
    for name, module in model.named_modules():
        if id(module) in inside:
            behind = True
        elif name in styles and (not behind or isinstance(module, nn.Embedding)):
            module.register_forward_hook(
                lambda _module, _args, out: map_tensors(torch.Tensor, torch.Tensor.clone, out)
            )


def _is_whole(mesh: DeviceMesh) -> bool:
    root = root_of(mesh)
    names = root.mesh_dim_names or ()
    return "pp" not in names or root["pp"].size() == 1
