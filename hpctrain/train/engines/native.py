"""The engines that torch has itself: one process, DDP, and FSDP2 with what builds on it.

Under FSDP2 (`shard`) every parameter is spread over the ranks, and gathered when it is used: block
by block, with embedding and head by themselves. tests/engines/test_every_engine.py, test_parity.py,
test_what_steps_do.py, test_averaged.py and test_buffers.py hold the promises.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from hpctrain.checkpoint.tensors.boxes import State
from hpctrain.core.device import is_accelerator
from hpctrain.core.torch_private import cuts_over, fill_buckets, sync_buffers
from hpctrain.errors import UsageError
from hpctrain.node.control.heartbeat import VALIDATE, in_phase
from hpctrain.train.engines import state as names
from hpctrain.train.engines.blocks import every_block, find_ends
from hpctrain.train.engines.engine import Engine
from hpctrain.train.engines.experts import find_experts
from hpctrain.train.engines.norm import (
    LossScale,
    clip_factor,
    global_norm,
    global_sum,
    gradients_of,
    outer_copies,
    scale_,
    square_sum,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import TensorEntry
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.context import ContextParallel
    from hpctrain.train.engines.engine import EngineInputs, Loss, Microbatch
    from hpctrain.train.engines.layouts import DeviceMeshes


class Averaged(DistributedDataParallel):
    """Copies of a model, one for each rank, whose gradients are averaged.

    Torch's DDP, but for three things. A parameter that a backward pass has not reached gets zeros,
    so no rank waits for ever; one that no rank used has no gradient in the end. Buckets are filled
    before the first step, else a resumed first step would add in another order. Buffers are rank
    0's at the end of a step, so all ranks have one state between two steps.
    """

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


class Native(Engine):
    """See `Engine`.

    Attributes:
        context: Where ranks share sequences, how; else None.
    """

    context: ContextParallel | None = None

    def __init__(
        self, kind: str, model: nn.Module, optimizer: Optimizer, inputs: EngineInputs
    ) -> None:
        """Take a model that is wrapped already; `parallelize.py` does that."""
        super().__init__(kind, model, optimizer, inputs)
        self.loss_scale = LossScale() if self.precision is torch.float16 else None
        self._names = frozenset(names.MODEL + name for name in inputs.state_names)
        self._sharded = kind == "fsdp2"
        self._reduces_each_pass = inputs.settings.reduce_each_pass

    # ---- a step

    def accumulate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """See `Engine`."""
        with self._own_parts(microbatches, loss) as given:
            return super().accumulate(*given)

    @in_phase(VALIDATE)
    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """See `Engine`."""
        with self._own_parts(microbatches, loss) as given:
            return super().evaluate(*given)

    @contextlib.contextmanager
    def _own_parts(
        self, microbatches: Sequence[Microbatch], loss: Loss
    ) -> Iterator[tuple[Sequence[Microbatch], Loss]]:
        """What this rank has of the samples: its positions, where ranks share sequences."""
        if self.context is None:
            yield microbatches, loss
            return
        with self.context.running():
            yield [self.context.part(each) for each in microbatches], self.context.checked(loss)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Engine`."""
        with super().evaluating(), self.autocast():
            yield
        self._reshard()

    def autocast(self) -> Any:
        """Around forward passes; a sharded model casts its parameters itself."""
        enabled = self.precision is not torch.float32 and not self._sharded
        return torch.autocast(self.world.device.type, dtype=self.precision, enabled=enabled)

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """See `Engine`."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or self._reduces_each_pass)
        averaged = self.model if isinstance(self.model, Averaged) else None
        waiting = averaged.no_sync() if averaged and not last else contextlib.nullcontext()
        if averaged:
            averaged.begin()
        with waiting, self.autocast():
            yield
        if averaged and last:
            averaged.finish()

    def backward(self, loss: torch.Tensor) -> None:
        """See `Engine`."""
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale
        if isinstance(self.model, Averaged):
            factor *= self.data_ranks  # it averages
        (loss * factor).backward()  # type: ignore[no-untyped-call]

    def update(self) -> float:
        """See `Engine`."""
        gradients = gradients_of(self.optimizer)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        norm = self.norm(gradients) / scale
        counts = self.loss_scale is None or self.loss_scale.update(norm)
        if counts and self.guard is not None:
            counts = self.guard.accepts(norm)
        self.left_out = not counts
        if counts:
            scale_(gradients, clip_factor(norm, self.clip_norm) / scale)
            self._reshard()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _reshard(self) -> None:
        """Free what a forward pass without a backward pass has left gathered.

        It would outlive an update or a restore of the shards, and hide them from a save.
        """
        for module in self._sharded_modules():
            module.reshard()

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        yield from (module for module in self.model.modules() if isinstance(module, FSDPModule))

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Over all ranks. Collective."""
        if not isinstance(self.model, Averaged):
            return global_norm(gradients, self.mesh, self.world)
        own = square_sum(gradients, self.mesh, self.world)
        squares, idle = global_sum(
            self.world, torch.stack((own, own.new_tensor(self.model.idle)))
        ).tolist()
        if idle:
            self.model.drop_unused()
        return math.sqrt(squares)

    # ---- state

    def state(
        self, *, with_optimizer: bool = True, saved: Mapping[str, TensorEntry] | None = None
    ) -> State:
        """See `Engine`."""
        optimizer = self.optimizer if with_optimizer else None
        if saved is None:
            tensors = names.collect(self.model, optimizer)
        else:
            tensors = names.wanted(self.model, optimizer, saved)
        if self.base is not None:
            left_out = {names.MODEL + name for name in self.base.names}
            tensors = {name: one for name, one in tensors.items() if name not in left_out}
        copies = {}
        if self.mesh.pp > 1 or self._sharded:
            copies = {name: self._copies(tensor) for name, tensor in tensors.items()}
        return State(dict(tensors), copies=copies, elsewhere=self._names - tensors.keys())

    def apply(self, tensors: Mapping[str, Any], *, with_optimizer: bool = True) -> None:
        """See `Engine`."""
        names.apply(self.model, self.optimizer if with_optimizer else None, tensors)

    def _copies(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Which copy of its part of a tensor this rank has, beyond what the tensor knows itself."""
        place = self.world.rank % self.mesh.stage_ranks
        if not isinstance(tensor, DTensor):
            return place, self.mesh.stage_ranks
        count = outer_copies(tensor, self.mesh)
        # A tensor's mesh that leaves an axis out leaves the fastest one out: `tp`.
        return place % count, count


def shard(
    model: nn.Module, meshes: DeviceMeshes, precision: torch.dtype, settings: EngineSettings
) -> None:
    """Shard a model in place: its embedding, each block, what follows them, the rest. Collective.

    What is needed last, and the rest, stays gathered until its backward pass, which comes next.
    Gradients are added over ranks, not averaged: the loss carries its share. Experts that lie on
    several ranks are cut further over the ranks that have the same ones; their gradients are added
    over these alone, since the tokens of the others have come to them.

    Raises:
        UsageError: experts cannot be cut so.
    """
    options: dict[str, Any] = {
        "mesh": meshes.dense,
        "reshard_after_forward": settings.reshard_after_forward,
        # Experts are gathered with their block: a unit of their own inside it would count other
        # operators when the block is computed again, which selective recomputation refuses.
        "shard_placement_fn": _cuts(model, meshes),
    }
    if precision is not torch.float32:
        # Gradients are added in fp32 unless measured to be safe in less.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=precision, reduce_dtype=torch.float32
        )
    if settings.offload == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    embedding, last = find_ends(model)
    for block in every_block(model):
        fully_shard(block, **options)
    if embedding is not None:
        only_looked_up = type(embedding) is nn.Embedding
        fully_shard(embedding, **options).set_unshard_in_backward(not only_looked_up)
    options["reshard_after_forward"] = False
    if last:
        fully_shard(last, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Added over ranks, not averaged; gloo has no other than the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _cuts(model: nn.Module, meshes: DeviceMeshes) -> Callable[[nn.Parameter], Any]:
    names = {
        id(weight): f"{prefix}.{name}"
        for prefix, module in find_experts(model).items()
        for name, weight in module.named_parameters()
    }
    mesh = meshes.expert_shard
    over = None if mesh is None else cuts_over(mesh)

    def cut(weight: nn.Parameter) -> Any:
        name = names.get(id(weight))
        if name is None:
            return None
        if mesh is None or over is None:
            # Between experts, as all parameters along their first dimension. Fewer experts than
            # ranks would lie on some ranks only, and fill these: then within each.
            ranks = meshes.dense.size(-1)
            axis = None if weight.shape[0] % ranks == 0 else _even_dimension(weight, ranks)
            return None if axis is None else Shard(axis)
        return over(_within_experts(name, weight, mesh.size(-1)))

    return cut


def _within_experts(name: str, weight: nn.Parameter, ranks: int) -> Shard:
    """Cut experts that lie on several ranks already: along another dimension than the experts'.

    Along the same one a rank's part would be no single box, and could not be saved as one.
    """
    dimension = _even_dimension(weight, ranks)
    if dimension is None:
        raise UsageError(
            f"{name} of shape {list(weight.shape)} has no dimension after the experts' that can "
            f"be cut into {ranks} equal parts (engine.ep goes {ranks} times into the ranks of a "
            "copy); change the model's width, engine.ep, or the number of ranks"
        )
    return Shard(dimension)


def _even_dimension(weight: nn.Parameter, ranks: int) -> int | None:
    """The first dimension after the experts' that has so many equal parts; None without one."""
    fitting = (axis for axis in range(1, weight.ndim) if weight.shape[axis] % ranks == 0)
    return next(fitting, None)
