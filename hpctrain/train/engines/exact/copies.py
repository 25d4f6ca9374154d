"""Exact training of copies of a model: what DDP does in averages, in a tree of sums.

`engine.py` beside it says how, tests/engines/test_exact.py holds the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpctrain.errors import UsageError
from hpctrain.train.engines.engine import global_sum
from hpctrain.train.engines.exact.engine import Exact, Round
from hpctrain.train.engines.exact.norm import PairwiseSum, exact_norm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.train.engines.engine import EngineInputs

BUCKET = 1 << 23
"""Elements of a gradient that travel together: 32 MiB of fp32."""


class ExactCopies(Exact):
    """Copies of a model, one for each rank; also the model of a single process."""

    def __init__(
        self, kind: str, model: nn.Module, optimizer: Optimizer, inputs: EngineInputs
    ) -> None:
        """See `Native`. Collective: rank 0's weights are copied to the others.

        Raises:
            UsageError: see `Exact`; or a single process would round otherwise than FSDP2 does.
        """
        super().__init__(kind, model, optimizer, inputs)
        if inputs.settings.kind == "fsdp2" and self.precision is not torch.float32:
            raise UsageError(
                "engine.exact with engine.kind fsdp2 and engine.precision bf16 or fp16 needs a "
                "process group for one rank too, since FSDP2 rounds in other places; start it "
                "with torchrun or hpctrain, or use engine.kind = ddp"
            )
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._buckets = [
            (bucket, PairwiseSum())
            for bucket in buckets([parameter.numel() for parameter in self._parameters], BUCKET)
        ]
        self._used = [False] * len(self._parameters)
        if self.data_ranks > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def begin(self) -> None:
        """See `Exact`."""
        self._used = [False] * len(self._parameters)
        for _, counter in self._buckets:
            counter.clear()

    def after_pass(self, now: Round) -> None:
        """See `Exact`."""
        for bucket, counter in self._buckets:
            for shard in self._exchange(self._flat(bucket))[: now.leaves]:
                counter.push([shard])
        counts = self.data_rank < now.leaves
        for number, parameter in enumerate(self._parameters):
            self._used[number] |= counts and parameter.grad is not None
            parameter.grad = None

    def finish(self, count: int) -> None:
        """See `Exact`."""
        del count
        used = torch.tensor(self._used, dtype=torch.int32, device=self.world.device)
        for number, uses in enumerate(global_sum(self.world, used).tolist()):
            if uses:
                self._parameters[number].grad = torch.empty_like(
                    self._parameters[number], memory_format=torch.contiguous_format
                )
        for bucket, counter in self._buckets:
            flat = self._join(counter.total()[0])
            for slice_, gradient in self._slices(bucket):
                if gradient is not None:
                    gradient.copy_(flat[slice_.offset : slice_.offset + len(slice_.elements)])

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """See `Native`; every rank has the whole gradient."""
        return exact_norm(gradients, self._size, self.world, spread=False)

    def _flat(self, bucket: list[BucketSlice]) -> torch.Tensor:
        """A bucket of this rank's gradient in fp32, with room to be cut into equal shares."""
        ranks = self.data_ranks
        size = bucket[-1].offset + len(bucket[-1].elements)
        flat = torch.zeros(-(-size // ranks) * ranks, device=self.world.device)
        for slice_, gradient in self._slices(bucket):
            if gradient is not None:
                flat[slice_.offset : slice_.offset + len(slice_.elements)] = gradient
        return flat

    def _slices(
        self, bucket: list[BucketSlice]
    ) -> Iterator[tuple[BucketSlice, torch.Tensor | None]]:
        """The slices and the elements of the gradients that they mean."""
        for slice_ in bucket:
            gradient = self._parameters[slice_.tensor].grad
            part = None
            if gradient is not None:
                elements = slice_.elements
                part = gradient.reshape(-1)[elements.start : elements.stop]
            yield slice_, part

    def _exchange(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """This rank's share of every rank's bucket."""
        if self.data_ranks == 1:
            return [flat]
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        return received.chunk(self.data_ranks)

    def _join(self, share: torch.Tensor) -> torch.Tensor:
        """The bucket of which each rank has a share."""
        if self.data_ranks == 1:
            return share
        flat = share.new_empty(share.numel() * self.data_ranks)
        dist.all_gather(list(flat.chunk(self.data_ranks)), share)
        return flat


@dataclass(frozen=True)
class BucketSlice:
    """Some elements of a flattened tensor, and where they begin in a bucket."""

    tensor: int
    elements: range
    offset: int


def buckets(sizes: Sequence[int], most: int) -> list[list[BucketSlice]]:
    """Tensors of so many elements, one after the other, cut into buckets of `most` elements."""
    filled: list[list[BucketSlice]] = []
    room = 0
    for number, size in enumerate(sizes):
        first = 0
        while first < size:
            if not room:
                filled.append([])
                room = most
            taken = min(room, size - first)
            filled[-1].append(BucketSlice(number, range(first, first + taken), most - room))
            first, room = first + taken, room - taken
    return filled
