"""Tensor parallelism: each matrix of a layer is cut over ranks that work on the same samples.

With sequence parallelism the norms and the residual stream between two matrices are cut too, along
the sequence. Every parameter becomes a DTensor that knows the `tp` axis, cut or not: so FSDP2
shards all of them over one mesh, and a norm or a checkpoint can tell a part from a copy.
tests/engines/test_tensor_parallel.py and test_loss.py hold the promises.
"""

from __future__ import annotations

import warnings
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from hpctrain.core.torch_private import map_tensors, root_of
from hpctrain.errors import UsageError
from hpctrain.train.engines.blocks import every_block
from hpctrain.train.engines.layouts import ASK, HEAD_COUNTS, owners, recognise
from hpctrain.train.engines.stages import PassThrough

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.layouts import BlockNames

    Move = Callable[[Tensor, DeviceMesh], Tensor]


SEQUENCE = 1
"""Activations are [batch, time, width]."""


class Placed(ParallelStyle):
    """A module that works on parts as it would on the whole, with parameters that know it.

    What goes in and comes out are plain tensors, this rank's parts. Where a rank's part is enough
    for its share of what comes out, nothing travels but what the placements ask for.
    """

    def __init__(self, activations: Placement, parameters: Placement) -> None:
        """Set how tensors lie on the ranks.

        `activations` go in and come out. If they are `Replicate`, equal on all ranks, each rank has
        the whole gradient of a copied parameter. Else it has a share, and all are added.
        `parameters` are all of the module's own.
        """
        super().__init__()
        self._activations, self.parameters = [activations], parameters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), device_mesh, [self.parameters])
            module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))

        def lift(tensor: torch.Tensor) -> torch.Tensor:
            return _dtensor(tensor, device_mesh, self._activations)

        def lower(tensor: DTensor) -> torch.Tensor:
            return tensor.redistribute(placements=self._activations).to_local()

        module.register_forward_pre_hook(
            lambda _, args, kwargs: map_tensors(torch.Tensor, lift, (args, kwargs)),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda _module, _args, out: map_tensors(DTensor, lower, out))
        return module


class Moved(ParallelStyle):
    """A module whose activations are moved between ranks, before it or behind it."""

    def __init__(self, before: Move | None, after: Move | None = None) -> None:
        """Set what happens to the first tensor of floats that goes in, and to all that come out.

        The first one is the activation, whatever it is called. Both are collective over the mesh.
        """
        super().__init__()
        self._before, self._after = before, after

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        before, after = self._before, self._after

        def move(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    given[key] = before(value, device_mesh) if before is not None else value
                    break
            return tuple(given.pop(number) for number in range(len(args))), given

        if before is not None:
            module.register_forward_pre_hook(move, with_kwargs=True)
        if after is not None:
            module.register_forward_hook(
                lambda _, __, out: map_tensors(
                    torch.Tensor, lambda part: after(part, device_mesh), out
                )
            )
        return module


def _gathered(part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """All of a sequence, of which each rank has a part."""
    lifted = _dtensor(part, mesh, [Shard(SEQUENCE)])
    return lifted.redistribute(placements=[Replicate()])


def _joined(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same as a plain tensor."""
    return _gathered(part, mesh).to_local()


def _parted(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a sequence that all have."""
    _check_parts(whole, mesh)
    return (
        _dtensor(whole, mesh, [Replicate()]).redistribute(placements=[Shard(SEQUENCE)]).to_local()
    )


class CutEmbedding(RowwiseParallel):
    """An embedding of which each rank keeps a part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: _check_parts(args[0], device_mesh))
        return super()._apply(module, device_mesh)


def _check_parts(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Refuse sequences without equal parts: gloo ends the process in the middle of them."""
    time = tensor.shape[SEQUENCE]
    if time % mesh.size():
        raise UsageError(
            f"engine.sequence_parallel: {mesh.size()} ranks of engine.tp cannot share a sequence "
            f"of {time} positions; make its length a multiple of engine.tp, or set "
            "engine.sequence_parallel = false"
        )


def _dtensor(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


def _default_plan(
    model: nn.Module, *, sequence_parallel: bool, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """Map names of a decoder's modules to how each is cut; the model may be a pipeline's part.

    See `EngineSettings.sequence_parallel` and `ModelPlan.loss_parallel`.
    """
    layout = recognise(model)
    between = Shard(SEQUENCE) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {}
    # Tables of positions, and masks, are made from all of what goes into the blocks.
    late = sequence_parallel and layout.tables is not None
    if layout.embedding is not None:
        cuts = sequence_parallel and not late
        style = CutEmbedding if cuts else RowwiseParallel
        begins = between if cuts else Replicate()
        plan[layout.embedding] = style(input_layouts=Replicate(), output_layouts=begins)
    if late:
        first, last = layout.blocks[0].name, layout.blocks[-1].name
        goes_on = layout.norm is None and layout.head is None  # on a pipeline's next stage
        plan[last] = Moved(None, _joined if goes_on else None)
        plan[first] = Moved(_parted, _joined if goes_on and first == last else None)
    for block in layout.blocks:
        plan |= _block_plan(model, block, sequence_parallel=sequence_parallel)
    if layout.norm is not None:
        plan[layout.norm] = Placed(between, Replicate())
    if layout.head is not None:
        plan[layout.head] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    return plan


def _block_plan(
    model: nn.Module, block: BlockNames, *, sequence_parallel: bool
) -> dict[str, ParallelStyle]:
    between = Shard(SEQUENCE) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {name: Placed(between, Replicate()) for name in block.norms}
    if sequence_parallel:
        plan |= {block.attention: Moved(_gathered), block.mlp: Moved(_gathered)}
    for name in (block.query, block.key, block.value, block.gate, block.up):
        plan[name] = ColwiseParallel()
    for name in (block.mix, block.down):
        plan[name] = RowwiseParallel(output_layouts=between)
    for norm, matrix in ((block.query_norm, block.query), (block.key_norm, block.key)):
        if norm is not None:
            whole = _is_of_all_heads(model, norm, matrix)
            # What a norm of each head gets are other rows on each rank, whichever dimension
            # the heads are: it never looks from one row to the next.
            plan[norm] = Placed(Shard(-1), Shard(0)) if whole else Placed(Shard(0), Replicate())
    return plan


def tensor_parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    settings: EngineSettings,
    plan: Mapping[str, ParallelStyle] | None,
    *,
    loss_parallel: bool = False,
) -> None:
    """Cut a model in place. Collective over the mesh: its ranks call it with equal models.

    The model is on the CPU, not wrapped yet, whole or a pipeline's part. `mesh` is the `tp` axis.
    `plan` maps module names (with * as in torch's plans) to styles; None is a decoder's default.
    Parameters that it leaves out become copies. Their modules must work on activations that are
    equal on all ranks. With `loss_parallel`, the default plan leaves logits cut over the
    vocabulary.

    Raises:
        UsageError: the model cannot be cut that way; nothing has been changed then.
    """
    shared = _shared_parameters(model)
    if plan is None:
        sequence = settings.sequence_parallel
        styles = _default_plan(model, sequence_parallel=sequence, loss_parallel=loss_parallel)
        _check_heads(model, mesh.size())
        _refuse_rest(model, styles, sequence_parallel=settings.sequence_parallel)
    else:
        styles = expand(model, plan, whole=_is_whole(mesh))
    styles |= rest(model, styles)
    _check_sizes(model, styles, mesh.size())
    check_shared(model, styles, shared)
    if plan is None:
        _share_heads(model, mesh.size())
    parallelize_module(model, mesh, styles)
    for first, *others in shared:
        for name in others:
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner).register_parameter(own, model.get_parameter(first))
    _refuse_plain(model)
    # FSDP2 warns of logits that are a view of a DTensor's part. Its hazard, a change in place that
    # drops a hook, is an error here: autograd forbids it for such a view.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    if settings.compile != "no":
        _keep_gradients_through_compile(model, styles)


def _shared_parameters(model: nn.Module) -> list[list[str]]:
    """All names of each parameter that stands in several places; its own layers' come first.

    Where a pipeline has taken a layer out, what stands in for it may hold a tied one too.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    shared = (sorted(names, key=lambda name: _stands_in(model, name)) for names in places.values())
    return [names for names in shared if len(names) > 1]


def _stands_in(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), PassThrough)


def check_shared(
    model: nn.Module, styles: Mapping[str, ParallelStyle], shared: Sequence[Sequence[str]]
) -> None:
    """Refuse to cut one parameter in two ways: it would become two, and train apart.

    Raises:
        UsageError: with the two places.
    """
    for first, *others in shared:
        for other in others:
            if _stands_in(model, other):
                continue
            ways = {_cut(model, styles, first), _cut(model, styles, other)}
            if len(ways) > 1 or None in ways:
                raise UsageError(
                    f"engine.tp: {first} and {other} are one parameter, and "
                    "plan.tensor_parallel does not cut both alike; give both modules styles that "
                    "cut the same dimension, or the model two parameters"
                )


def _cut(model: nn.Module, styles: Mapping[str, ParallelStyle], name: str) -> Placement | None:
    """How a style lays a parameter; None for a style that we do not know."""
    owner, _, own = name.rpartition(".")
    style, module = styles[owner], model.get_submodule(owner)
    if isinstance(style, Placed):
        return style.parameters
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    if isinstance(style, ColwiseParallel) == isinstance(module, nn.Linear):
        return Shard(0)
    return Shard(1) if own == "weight" else Replicate()


def _refuse_rest(
    model: nn.Module, styles: Mapping[str, ParallelStyle], *, sequence_parallel: bool
) -> None:
    """With sequence parallelism every parameter must have a place: no activation is equal then."""
    for name, module in owners(model) if sequence_parallel else ():
        if name not in styles:
            raise UsageError(
                f"engine.sequence_parallel: {name or 'the model itself'} "
                f"({type(module).__name__}) has parameters and is no part of a common decoder; "
                f"set engine.sequence_parallel = false, or {ASK}"
            )


def rest(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Styles for the modules that a plan leaves out.

    Raises:
        UsageError: one of them has other modules inside, whose inputs are not known.
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
        styles_of_rest[name] = Placed(Replicate(), Replicate())  # the same numbers on every rank
    return styles_of_rest


def _refuse_plain(model: nn.Module) -> None:
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
    """Return a plan with each * replaced by the names that it stands for; one * for one name.

    With `whole`, every name must be there: a pipeline's part has some of them only.

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


def _check_heads(model: nn.Module, tp: int) -> None:
    """Refuse a number of ranks that would cut through a head."""
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


def _is_of_all_heads(model: nn.Module, norm: str, matrix: str) -> bool:
    """Whether a norm works on all heads of a query or key together; else on each by itself."""
    sizes = {tuple(weight.shape) for weight in model.get_submodule(norm).parameters()}
    attention = model.get_submodule(norm.rpartition(".")[0])
    width = _weight(model, matrix).shape[0]
    if sizes == {(width,)}:
        return True
    if sizes == {(getattr(attention, "head_dim", None),)}:
        return False
    raise UsageError(
        f"engine.tp: {norm} has parameters of the shapes {sorted(sizes)}, which are neither one "
        f"head's (head_dim) nor the {width} of {matrix}; {ASK}"
    )


def _weight(model: nn.Module, name: str) -> torch.Tensor:
    weight: torch.Tensor = model.get_submodule(name).get_parameter("weight")
    return weight


def _share_heads(model: nn.Module, tp: int) -> None:
    """Tell each attention how many heads this rank has, where it keeps a number."""
    for block in recognise(model).blocks:
        attention = model.get_submodule(block.attention)
        for count in HEAD_COUNTS:
            number = getattr(attention, count, None)
            if isinstance(number, int):
                setattr(attention, count, number // tp)


def _check_sizes(model: nn.Module, styles: Mapping[str, ParallelStyle], tp: int) -> None:
    """Refuse matrices that cannot be cut into equal parts."""
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


def _keep_gradients_through_compile(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
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


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The loss of each token, in fp32. Collective over `tp` where the logits are cut.

    Args:
        logits: [..., vocabulary], whole or cut over the vocabulary.
        targets: [...] integers, the same on all ranks of `tp`.
        ignore_index: A target that costs nothing.

    Returns:
        [...], as torch's `cross_entropy` with `reduction="none"`; the same on all ranks of `tp`.
    """
    if isinstance(logits, DTensor):
        if logits.placements == (Shard(logits.ndim - 1),):
            mesh = logits.device_mesh
            loss: Tensor = _Cut.apply(logits.to_local(), targets, ignore_index, mesh)  # type: ignore[no-untyped-call]
            return loss
        logits = logits.full_tensor()
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    return losses.view_as(targets)


class _Cut(torch.autograd.Function):
    """Of this rank's part of the vocabulary, and the others' sums."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, targets: Tensor, ignore_index: int, mesh: DeviceMesh
    ) -> Tensor:
        logits, group, width = part.float(), mesh.get_group(), part.shape[-1]
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        # A target of no rank keeps its index: `gather` refuses it, as the whole loss does.
        ignored = targets == ignore_index
        index = targets - mesh.get_local_rank() * width
        own = (index >= 0) & (index < width) & ~ignored
        others = (targets >= 0) & (targets < mesh.size() * width) & ~own
        index = index.masked_fill(others | ignored, 0)[..., None]
        chosen = (logits.gather(-1, index)[..., 0] - largest).masked_fill(~own, 0.0)
        sums = torch.stack(((logits - largest[..., None]).exp().sum(dim=-1), chosen))
        dist.all_reduce(sums, group=group)
        total, chosen = sums.unbind()
        ctx.save_for_backward(part, largest + total.log(), index, own, ignored)
        return (total.log() - chosen).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        part, log_total, index, own, ignored = ctx.saved_tensors
        share = (part.float() - log_total[..., None]).exp_()
        share.scatter_add_(-1, index, -own[..., None].to(share.dtype))
        share.mul_(gradients[0].masked_fill(ignored, 0.0)[..., None])
        return share.to(part.dtype), None, None, None
