"""The loss of a language model, also of logits that lie on several ranks.

`ModelPlan.loss_parallel` leaves logits cut over the vocabulary. Two numbers of each token travel
then instead of its logits: how far it is from the largest one, and what its own is.
tests/engines/test_loss.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812, its usual name
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
