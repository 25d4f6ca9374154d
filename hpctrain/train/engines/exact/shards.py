"""Exact training of a sharded model: FSDP2 hands each leaf's gradient to the tree of sums.

`engine.py` beside it says how, tests/engines/test_exact.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.errors import UsageError
from hpctrain.train.engines.exact.engine import Exact, Round
from hpctrain.train.engines.exact.norm import PairwiseSum, exact_norm
from hpctrain.train.engines.norm import local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.train.engines.engine import EngineInputs
    from hpctrain.train.engines.layouts import DeviceMeshes


class ExactShards(Exact):
    """FSDP2, maybe with tensor parallelism inside; that stays as it is when ranks come or go."""

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        optimizer: Optimizer,
        inputs: EngineInputs,
        *,
        meshes: DeviceMeshes,
    ) -> None:
        """See `Native`; `meshes` has the groups of the mesh's axes."""
        super().__init__(kind, model, optimizer, inputs)
        self._group = meshes.dense.get_group()
        self._own = PairwiseSum()
        self._shards: list[LeafScatter] = []
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UsageError(
                "engine.exact with engine.kind fsdp2 needs torch 2.13, this is "
                f"{torch.__version__}; use engine.kind = ddp, or a newer torch"
            )
        for name, module in self.model.named_modules():
            if isinstance(module, FSDPModule):
                # A parameter that one leaf does not use has a gradient of zeros in it.
                module.set_reduce_scatter_unused_params(True, recurse=False)
                if self.data_ranks > 1:
                    self._shards.append(LeafScatter(name))
                    module.set_custom_reduce_scatter(self._shards[-1])  # type: ignore[arg-type] # torch asks no more than this of it

    def begin(self) -> None:
        """See `Exact`."""
        self._own.clear()
        for shard in self._shards:
            shard.counter.clear()

    def before_pass(self, now: Round) -> None:
        """See `Exact`."""
        for shard in self._shards:
            shard.now = now

    def after_pass(self, now: Round) -> None:
        """See `Exact`."""
        if self.data_ranks == 1:  # FSDP2 scatters nothing then
            if now.leaves:
                self._own.push([local(gradient) for gradient in self._all_gradients()])
            if now.last:
                for gradient, total in zip(self._all_gradients(), self._own.total(), strict=True):
                    local(gradient).copy_(total)
        if not now.last:
            for parameter in self.model.parameters():
                parameter.grad = None

    def finish(self, count: int) -> None:
        """See `Exact`."""
        for shard in self._shards:
            if shard.counter.count:
                raise shard.error(f"ran in {shard.counter.count} of {count} microbatches")

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """See `Native`."""
        own_parts = [local(gradient) for gradient in gradients if self._counts(gradient)]
        spread = self.world.world_size > 1
        return exact_norm(own_parts, self._size, self.world, spread=spread)

    def _all_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _counts(self, gradient: torch.Tensor) -> bool:
        """Whether this rank is the first of those that hold the same part."""
        if self._copies(gradient)[0]:
            return False
        if not isinstance(gradient, DTensor):
            return True
        at: Sequence[int] = gradient.device_mesh.get_coordinate() or []
        return not any(
            place
            for place, how in zip(at, gradient.placements, strict=True)
            if isinstance(how, Replicate)
        )


class LeafScatter:
    """In place of FSDP2's reduce-scatter: each rank gets its shard of each leaf's gradient.

    It keeps their sum, and gives FSDP2 zeros until the last round. It is what torch calls a
    `ReduceScatter`, without being one: torch has no public name for it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counter = PairwiseSum()
        self.now: Round | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is sent and received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Collective in the group."""
        del op, async_op
        now, self.now = self.now, None
        if now is None or self.counter.count != now.before:
            raise self.error("ran its backward pass twice in a microbatch, or not in each")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for shard in received.chunk(group.size())[: now.leaves]:
            self.counter.push([shard])
        if now.last:
            output_tensor.copy_(self.counter.total()[0])
        else:
            output_tensor.zero_()

    def error(self, what: str) -> UsageError:
        """A module that cannot be trained exactly."""
        name = self.name or "the model's outermost module"
        return UsageError(
            f"{name} {what}; engine.exact needs each sharded block once in every microbatch: "
            "set engine.exact = false, or have the model use it so"
        )
