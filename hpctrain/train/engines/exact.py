"""Training whose loss curve and weights are the same bits at any number of data-parallel ranks.

A step is cut into leaves, microbatches that are the same samples on any rank. Each has random
numbers of its own. What leaves leave behind (gradients, losses) is added up in an order that
depends on their number alone: gradients in the tree of `PairwiseSum`, of which each rank adds up
the part that it owns. It gets that part of every leaf's gradient from the rank that ran the leaf:
as many bytes travel as in a reduce-scatter, but for every leaf.

`exact_norm` is exact too. The promises are held by tests/engines/test_exact.py and
test_pairwise_sum.py.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from hpctrain.core.base.mesh import MicrobatchRules
from hpctrain.core.device import is_accelerator
from hpctrain.errors import UsageError
from hpctrain.node.control.heartbeat import VALIDATE, in_phase
from hpctrain.train.engines.engine import Engine
from hpctrain.train.engines.native import Native
from hpctrain.train.engines.norm import global_sum, local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.train.engines.engine import EngineInputs, Loss, Microbatch
    from hpctrain.train.engines.layouts import DeviceMeshes


LIMBS = 3
CHUNK = 1 << 22
"""Elements at a time: each needs some forty bytes beside the gradient's own."""


def exact_norm(parts: Sequence[torch.Tensor], count: int, world: World, *, spread: bool) -> float:
    """Return the 2-norm of all parts of all ranks; infinite if any element is not finite.

    Collective if `spread`: then each element is on one rank only; otherwise this rank has them all.
    `count` is at least the elements on all ranks together, and the same at any world size.
    """
    largest = torch.zeros((), dtype=torch.float64, device=world.device)
    for part in parts:
        if part.numel():
            largest = torch.maximum(largest, part.detach().abs().max().to(largest))
    # A MAX over ranks may lose what is not a number.
    largest = torch.where(largest.isfinite(), largest, math.inf)
    if spread:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    top = float(largest)
    if top == 0.0 or not math.isfinite(top):
        return top
    exponent = math.frexp(top)[1]  # every square is below 2 ** (2 * exponent)
    bits = 62 - max(1, count).bit_length()
    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=world.device)
    for part in parts:
        for chunk in torch.split(part.detach().reshape(-1), CHUNK):
            limbs += limbs_of(chunk.to(world.device), bits - 2 * exponent, bits)
    if spread:
        dist.all_reduce(limbs)
    return root_of(limbs.tolist(), bits, exponent)


def limbs_of(values: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Return squares times 2 ** shift as integers, in digits of so many bits, each digit added up.

    The scaled squares of `values` are below 2 ** bits. The result is `LIMBS` integers, the highest
    digit's first; what is below the last one is cut off.
    """
    rest = values.to(torch.float64).square().mul_(2.0**shift)
    digits = []
    for _ in range(LIMBS):
        whole = rest.floor()
        digits.append(whole.to(torch.int64).sum())
        rest = rest.sub_(whole).mul_(2.0**bits)
    return torch.stack(digits)


def root_of(limbs: Sequence[int], bits: int, exponent: int) -> float:
    """The square root of what digits of squares add up to."""
    total = 0
    for limb in limbs:
        total = (total << bits) + limb
    return math.sqrt(math.ldexp(float(total), 2 * exponent - LIMBS * bits))


class PairwiseSum:
    """Adds up lists of tensors by element, as they come (leaf 0, leaf 1, ...); `count` so far."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[tuple[int, list[torch.Tensor]]] = []
        """Sums of 2^level adjoining leaves each, with their level, from the left."""

    def push(self, leaf: Sequence[torch.Tensor]) -> None:
        """Add the next leaf. What is kept of it is a copy: the caller may use its memory again.

        Raises:
            ValueError: its tensors are not shaped like those of the leaves before.
        """
        if self._sums:
            before = [tuple(part.shape) for part in self._sums[0][1]]
            now = [tuple(part.shape) for part in leaf]
            if before != now:
                raise ValueError(f"leaf {self.count} has shapes {now}, those before it {before}")
        level, added = 0, list(leaf)
        while self._sums and self._sums[-1][0] == level:
            _, left = self._sums.pop()
            added = [one.add_(other) for one, other in zip(left, added, strict=True)]
            level += 1
        if level == 0:
            added = [part.clone() for part in added]
        self._sums.append((level, added))
        self.count += 1

    def total(self) -> list[torch.Tensor]:
        """The sum of all leaves; the counter is empty afterwards.

        Raises:
            ValueError: there are none.
        """
        if not self._sums:
            raise ValueError("there is nothing to add up")
        _, right = self._sums.pop()
        while self._sums:
            _, left = self._sums.pop()
            right = [one.add_(other) for one, other in zip(left, right, strict=True)]
        self.count = 0
        return right

    def clear(self) -> None:
        """Forget all leaves."""
        self.count = 0
        self._sums.clear()


CUT_HINT = "cut steps with hpctrain.train.data.batches and passes=engine.passes"


@dataclass(frozen=True)
class Round:
    """One pass of every rank.

    In it, the passes of the first `leaves` ranks count; `before` leaves came in earlier rounds.
    `last` marks the step's last round.
    """

    leaves: int
    before: int
    last: bool


class Exact(Native):
    """What both ways of spreading a model have in common: leaves, random numbers, losses, norm.

    Attributes:
        seed: Of the run's random numbers in training; the same on every rank and after a resume.
    """

    def __init__(
        self, kind: str, model: nn.Module, optimizer: Optimizer, inputs: EngineInputs
    ) -> None:
        """See `Native`.

        Raises:
            UsageError: the settings, the model or the optimizer cannot keep the promise.
        """
        super().__init__(kind, model, optimizer, inputs)
        refuse(inputs.settings, model, optimizer, self.mesh)
        _fix_kernels(self.world.device)
        self.passes = MicrobatchRules(leaves=True, equal=True)
        self._group: dist.ProcessGroup | None = None
        self._size = sum(parameter.numel() for parameter in model.parameters())
        self._added = False

    # ---- a step

    def accumulate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """See `Engine`; the microbatches are leaves.

        Raises:
            UsageError: they are not all of the step's leaves, in order; or the gradients of a step
                are there already, which cannot be added to.
        """
        if self._added:
            raise UsageError(
                "with engine.exact a step's gradients are added up in one engine.forward_backward; "
                "call engine.step before the next"
            )
        count = self._agree(microbatches)
        losses = torch.zeros(count, dtype=torch.float64, device=self.world.device)
        for parameter in self.model.parameters():
            parameter.grad = None
        self.begin()
        for number, microbatch in enumerate(microbatches):
            before = min(count, number * self.data_ranks)
            leaves, last = min(self.data_ranks, count - before), number == len(microbatches) - 1
            now = Round(leaves, before, last)
            torch.manual_seed(seed_of(self.seed, self.begun, microbatch.leaf))
            self.before_pass(now)
            with self.autocast():
                value = loss(self.model(microbatch.inputs), microbatch.targets)
            self.backward(value)
            self.after_pass(now)
            self._note(losses, microbatch, value)
        self.finish(count)
        # What comes after the step draws the same numbers at any number of ranks too.
        torch.manual_seed(seed_of(self.seed, self.begun, count))
        self._added = True
        return self._sum(losses)

    @in_phase(VALIDATE)
    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """See `Engine`; the same bits at any number of data-parallel ranks too."""
        count = self._agree(microbatches)
        losses = torch.zeros(count, dtype=torch.float64, device=self.world.device)
        devices = [self.world.device] if is_accelerator(self.world.device) else []
        kept = torch.random.fork_rng(devices, device_type=self.world.device.type)
        with kept, self.evaluating(), self.autocast():
            for microbatch in microbatches:
                torch.manual_seed(seed_of(self.seed, self.begun, microbatch.leaf))
                value = loss(self.model(microbatch.inputs), microbatch.targets)
                self._note(losses, microbatch, value)
        return self._sum(losses)

    def update(self) -> float:
        """See `Engine`."""
        norm = super().update()
        self._added = False
        return norm

    def step(self) -> float:
        """See `Engine`."""
        norm = super().step()
        self.begun += 1  # for programs that do not call `at_step`
        return norm

    microbatch = Engine.microbatch  # the passes of a step go together

    # ---- what differs between sharded and copied models

    def begin(self) -> None:
        """Forget what a step that failed has left."""
        raise NotImplementedError

    def before_pass(self, now: Round) -> None:
        """A round begins."""

    def after_pass(self, now: Round) -> None:
        """This rank's backward pass of the round is done."""
        raise NotImplementedError

    def finish(self, count: int) -> None:
        """Put the sums of so many leaves where the optimizer looks for gradients."""
        raise NotImplementedError

    # ---- leaves

    def _agree(self, microbatches: Sequence[Microbatch]) -> int:
        """Return how many leaves the step has, of all ranks together. Collective.

        Refuse, on every rank, leaves that are not one for each rank, round by round.
        """
        ranks, rank = self.data_ranks, self.data_rank
        leaves = [microbatch.leaf for microbatch in microbatches]
        own_leaves = [leaf for leaf in leaves if leaf is not None]
        in_order = own_leaves == [round_ * ranks + rank for round_ in range(len(own_leaves))]
        in_order &= leaves[: len(own_leaves)] == own_leaves
        row = [len(leaves), len(own_leaves), max(own_leaves, default=-1) + 1, int(in_order)]
        rows = self._gather(row)
        count = max(row[2] for row in rows)
        fits = len({row[0] for row in rows}) == 1 and all(row[3] for row in rows)
        if not fits or sum(row[1] for row in rows) != count or count == 0:
            raise UsageError(
                f"engine.exact needs all microbatches of a step, number i on rank i % {ranks}; "
                f"rank {rank} was given {leaves}; {CUT_HINT}"
            )
        return count

    def _gather(self, row: list[int]) -> list[list[int]]:
        if not self.world.is_distributed:
            return [row]
        own_row = torch.tensor(row, device=self.world.device)
        rows = [torch.empty_like(own_row) for _ in range(self.data_ranks)]
        dist.all_gather(rows, own_row, group=self._group)
        return [theirs.tolist() for theirs in rows]

    def _note(self, losses: torch.Tensor, microbatch: Microbatch, value: torch.Tensor) -> None:
        """Each slot is filled by one rank, so that the sum over ranks adds zeros alone."""
        if microbatch.leaf is not None and self.mesh.tp_rank(self.world.rank) == 0:
            losses[microbatch.leaf] = value.detach()

    def _sum(self, losses: torch.Tensor) -> float:
        total = 0.0
        for value in global_sum(self.world, losses).tolist():
            total += value
        return total


def seed_of(seed: int, step: int, leaf: int | None) -> int:
    """The seed of a leaf's random numbers; any change of the three changes all of its bits."""
    text = f"{seed} {step} {leaf}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def _fix_kernels(device: torch.device) -> None:
    """Have torch take the same kernels whatever the machine does besides; for this process."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrix products are cut by the number of threads
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a property of the module's class
    torch.backends.cudnn.benchmark = False


def refuse(settings: EngineSettings, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> None:
    """Refuse settings, a model or an optimizer that cannot keep the promise, with a UsageError."""
    for axis in ("pp", "ep", "cp", *(("dp_replicate",) if settings.kind == "fsdp2" else ())):
        if getattr(mesh, axis) > 1:
            raise UsageError(
                f"engine.exact does not work with engine.{axis} = {getattr(mesh, axis)}; "
                f"set engine.{axis} = 1 or engine.exact = false"
            )
    if settings.compile == "inductor":
        raise UsageError(
            "engine.compile inductor chooses kernels by timing them, which engine.exact forbids; "
            "set engine.compile = aot_eager or no"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - the common base
            raise UsageError(
                f"{name} is a batch norm: its statistics depend on which rank has which samples; "
                "set engine.exact = false, or use a norm without them"
            )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(
            "a fused optimizer rounds elements by where they stand in a shard, which engine.exact "
            "forbids; build the optimizer with fused=False"
        )


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
        if self.data_ranks == 1:
            return [flat]
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        return received.chunk(self.data_ranks)

    def _join(self, share: torch.Tensor) -> torch.Tensor:
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
