"""Torch's DDP with what it leaves open: parameters that a pass does not use, and how buckets fill.

Torch can look for unused parameters (`find_unused_parameters`): it then walks through the graph of
every pass, and may not be asked for an output that the loss does not use. Without it a pass that
uses fewer parameters waits for ever, or updates by gradients that were never added. Here a rank
notes which parameters a backward pass has reached, and adds zeros for the others afterwards: the
other ranks get what they wait for. A parameter that no rank used has no gradient in the end, as in
one process.

Without the search, DDP also fills its buckets anew after the first step, so that a resumed first
step would add in another order than an undisturbed one: not bit-equal from three ranks on. Here
they are filled before, in the order in which gradients usually come.

And DDP leaves each rank with running means of its own batch until the next pass begins, which then
takes rank 0's. Here they are rank 0's at the end of the step, so that all ranks have one
state between two steps.
tests/engines/test_averaged.py and test_buffers.py hold the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpctrain.core.device import is_accelerator
from hpctrain.core.torch_private import fill_buckets, sync_buffers

if TYPE_CHECKING:
    from torch import nn


class Averaged(DistributedDataParallel):
    """Copies of a model, one for each rank, whose gradients are averaged."""

    def __init__(self, model: nn.Module, device: torch.device, *, is_same: bool = False) -> None:
        """Collective: rank 0's weights are copied to the others, unless all have the same.

        That takes 250 MB at a time for what travels.
        """
        super().__init__(
            model,
            device_ids=[device] if is_accelerator(device) else None,
            gradient_as_bucket_view=True,
            init_sync=not is_same,
        )
        fill_buckets(self)
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._idle: list[nn.Parameter] = []
        """Without a gradient of this rank's own, but for zeros."""
        self._reached: list[torch.Tensor] = []
        for weight in self._trained:
            weight.register_post_accumulate_grad_hook(self._reached.append)  # type: ignore[no-untyped-call]

    def _build_params_for_reducer(self) -> Any:
        """Torch fills buckets in this order: the last parameters' gradients come first."""
        return tuple(each[::-1] for each in super()._build_params_for_reducer())  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The pass begins whose gradients travel."""
        self._reached.clear()

    def finish(self) -> None:
        """Its backward pass is done. Collective where it has not reached every parameter.

        And where there are buffers: all ranks end the step with rank 0's.
        """
        reached = {id(weight) for weight in self._reached}
        if not reached:
            return  # a forward pass alone
        missing = [weight for weight in self._trained if id(weight) not in reached]
        idle = {id(weight) for weight in self._idle}
        self._idle = [weight for weight in missing if weight.grad is None or id(weight) in idle]
        if missing:
            torch.autograd.backward(missing, [torch.zeros_like(weight) for weight in missing])
        sync_buffers(self)

    @property
    def idle(self) -> int:
        """Of how many parameters this rank's gradient is nothing but zeros in place of none."""
        return len(self._idle)

    def drop_unused(self) -> None:
        """Take the zeros away from parameters that no rank has used. Collective."""
        idle = {id(weight) for weight in self._idle}
        counts = torch.tensor([id(weight) in idle for weight in self._trained], dtype=torch.int32)
        counts = counts.to(self._trained[0].device)
        dist.all_reduce(counts, group=self.process_group)
        for weight, count in zip(self._trained, counts.tolist(), strict=True):
            if count == dist.get_world_size(self.process_group):
                weight.grad = None
        self._idle = []
