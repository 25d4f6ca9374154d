"""Expert parallelism: each rank keeps some of the experts, and tokens travel to theirs and back.

What it asks of a model: a module that holds the experts, and nothing else, says so with the
attribute ``tokens_by_expert = True``. All its parameters have the experts as dimension 0, and its
forward takes ``tokens [n, dim]``, sorted by their expert, and ``counts [experts]``, how many tokens
each one has, and gives ``[n, dim]`` in the same order. It must not ask how many experts there are
but of its parameters: on a rank it finds only those that lie there, with the tokens of all ranks of
its expert-parallel group. The router stays outside and is like any other layer.
tests/engines/test_experts.py holds the promises.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpctrain.core.torch_private import all_to_all, all_to_all_with_gradient
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Compute = Callable[[Tensor, Tensor], Tensor]

MARK = "tokens_by_expert"


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that hold experts, by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, MARK, False)}


def expert_parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts alone, and have tokens travel to theirs. In place.

    Not collective, but the forward passes become so, over `mesh`, the `ep` axis: a rank of which no
    token goes anywhere still takes part.

    Raises:
        UsageError: there are no experts, their number is not a multiple of the ranks, or a module
            that is marked as experts is not as this module says.
    """
    experts = find_experts(model)
    if not experts:
        raise UsageError(
            f"engine.ep {mesh.size()} needs a model with experts, and this one has no module "
            f"marked with {MARK} = True; set engine.ep to 1, or see `hpctrain help plan.md`"
        )
    for name, module in experts.items():
        _check(name, module, mesh.size())
        for part in module.modules():
            for own, parameter in part.named_parameters(recurse=False):
                # Every rank has the same model: nothing is sent.
                kept = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(part, own, nn.Parameter(kept, requires_grad=parameter.requires_grad))
        group = mesh.get_group()
        module.forward = functools.partial(_travel, module, module.forward, group)


def _check(name: str, module: nn.Module, ranks: int) -> None:
    shapes = {own: tuple(parameter.shape) for own, parameter in module.named_parameters()}
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) != 1:
        listed = ", ".join(f"{own} {list(shape)}" for own, shape in shapes.items()) or "none"
        raise UsageError(
            f"{name} is marked with {MARK}, but its parameters do not all have the experts as "
            f"their first dimension: {listed}; keep what is not an expert's in another module"
        )
    (experts,) = counts
    if experts % ranks:
        raise UsageError(
            f"{name} has {experts} experts, which {ranks} ranks (engine.ep) cannot share equally; "
            f"set engine.ep to a divisor of {experts}"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator] # how many travel is known only then
def _travel(
    module: nn.Module, compute: Compute, group: ProcessGroup, tokens: Tensor, counts: Tensor
) -> Tensor:
    """Send tokens to their experts' ranks, compute there, send the answers back. Collective."""
    ranks = group.size()
    sends = counts.view(ranks, -1)
    receives = all_to_all(counts, None, None, group).view(ranks, -1)
    sent, received = torch.stack((sends.sum(dim=1), receives.sum(dim=1))).tolist()
    arrived = all_to_all_with_gradient(tokens, received, sent, group)
    # They come rank by rank, each rank's sorted by expert; experts take them all together, and
    # within an expert in the order of the ranks, as one process would have them.
    local = torch.arange(sends.shape[1], device=counts.device).repeat(ranks)
    order = local.repeat_interleave(receives.flatten()).argsort(stable=True)
    with _plain_parameters(module):
        answers = compute(arrived[order], receives.sum(dim=0))
    return all_to_all_with_gradient(answers[order.argsort()], sent, received, group)


@contextlib.contextmanager
def _plain_parameters(module: nn.Module) -> Iterator[None]:
    """Let a module's own code see this rank's experts as plain tensors, as in one process."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters  # noqa: SLF001 - setattr takes no plain tensor
        held.append((parameters, dict(parameters)))
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        for parameters, before in held:
            parameters.update(before)
