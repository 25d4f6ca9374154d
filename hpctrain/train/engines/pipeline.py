"""Pipeline parallelism: each rank has some of the layers, and microbatches pass from rank to rank.

The order of forward and backward passes is torch's (`torch.distributed.pipelining`). Each stage is
sharded by FSDP2 over the ranks that have it, be it a single one. tests/engines/test_pipeline.py
holds the promises.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules

from hpctrain.core.torch_private import add_up_gradients, without_outputs
from hpctrain.core.world import one_line
from hpctrain.errors import UsageError
from hpctrain.ledger.plan.mesh import LOOPED, passes_of
from hpctrain.node.control.heartbeat import VALIDATE, in_phase
from hpctrain.train.engines import state as names
from hpctrain.train.engines.engine import Engine
from hpctrain.train.engines.native import Native
from hpctrain.train.engines.norm import local
from hpctrain.train.engines.stages import PassThrough, Stages, Tied, cut, passed_on
from hpctrain.train.engines.state import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import TensorEntry
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.train.engines.engine import EngineInputs, Loss, Microbatch
    from hpctrain.train.engines.layouts import DeviceMeshes
    from hpctrain.train.engines.stages import Call

    Form = tuple[int, torch.Size, torch.dtype]

__all__ = ["Pipeline", "Stages", "cut"]

SCHEDULES: dict[str, tuple[Any, Any]] = {
    "gpipe": (schedules.ScheduleGPipe, schedules.ScheduleGPipe),
    "1f1b": (schedules.Schedule1F1B, schedules.ScheduleGPipe),
    "interleaved": (schedules.ScheduleInterleaved1F1B, schedules.ScheduleLoopedBFS),
    "zero_bubble": (schedules.ScheduleInterleavedZeroBubble, schedules.ScheduleLoopedBFS),
}
"""Torch's schedules for training and for evaluation; the latter take any number of microbatches."""


class Pipeline(Native):
    """See `Engine`. A step's microbatches go together and have one shape."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        inputs: EngineInputs,
        *,
        stages: Stages,
        meshes: DeviceMeshes,
    ) -> None:
        """Take stages that are sharded already. Collective.

        `model` holds this rank's parameters by the whole model's names; `optimizer` updates these.
        """
        super().__init__("fsdp2", model, optimizer, inputs)
        settings, world, mesh = inputs.settings, inputs.world, inputs.mesh
        self.passes = passes_of(settings, mesh)
        self._name = settings.pp_schedule
        self._stages = stages
        self._group = meshes.root["pp"].get_group()
        self._ready: dict[bool, tuple[Form, Any]] = {}
        self._forms: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._share: Callable[[Any, int], Tensor] | None = None
        self._pp_rank = mesh.pp_rank(world.rank)
        own = dict(parameters(model))
        self._tied = [
            (tied, next(own[name] for name in tied.names if name in own)) for tied in stages.tied
        ]
        for module in self._sharded_modules():
            # Else each microbatch would gather every block twice. A step's gradients lie here
            # unsharded anyway, which takes as much memory again.
            module.set_reshard_after_forward(False, recurse=False)
        # NCCL: all ranks of a group must be there when it is first used, and a schedule begins
        # with sends between two of them.
        dist.all_reduce(torch.zeros(1, device=world.device), group=self._group)

    # ---- a step

    def accumulate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """See `Engine`.

        Raises:
            UsageError: the microbatches are too few, or not of one shape; or the model's forward
                cannot be cut. On all ranks of the pipeline.
        """
        count, passes = len(microbatches), self.passes
        if count < passes.at_least or count % passes.multiple_of:
            few = f"at least {passes.at_least}" if count < passes.at_least else "a multiple of"
            number = "" if count < passes.at_least else f" {passes.multiple_of}"
            raise UsageError(
                f"engine.pp_schedule {self._name} at engine.pp {self.mesh.pp} needs {few}{number} "
                f"microbatches in each step, this one has {count}; set train.micro_batch lower, "
                f"or in a loop of your own cut steps as engine.passes asks"
            )
        schedule = self._schedule(microbatches, training=True)
        value = self._run(schedule.step, microbatches, loss)
        self._add_tied()
        return value

    @in_phase(VALIDATE)
    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """See `Engine`; `accumulate` for what is raised. Any number of microbatches will do.

        Raises:
            UsageError: see `accumulate`.
        """
        schedule = self._schedule(microbatches, training=False)
        with self.evaluating():
            return self._run(schedule.eval, microbatches, loss)

    microbatch = Engine.microbatch  # the passes of a step go together
    backward = Engine.backward

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Engine`."""
        for part in self._stages.parts:
            part.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for part in self._stages.parts:
                part.train()
            self._reshard()

    def _run(self, act: Any, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        factor = 1.0 if self.loss_scale is None else self.loss_scale.scale

        def share(output: Any, number: int) -> Tensor:
            value = loss(output, microbatches[number].targets)
            total.add_(value.detach().double())
            return value * factor

        self._share = share
        first = 0 in self._stages.numbers
        inputs = [torch.cat([each.inputs for each in microbatches])] if first else []
        act(*inputs, target=torch.arange(len(microbatches)), **without_outputs(act.__self__))
        self._share = None
        return self.total(total)

    def _add_tied(self) -> None:
        """Add the gradients of parameters that two stages have. Collective over both."""
        for tied, parameter in self._tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = local(parameter.grad)
            if not own.numel():
                continue  # nor has the other
            (peer,) = {stage % self.mesh.pp for stage in tied.stages} - {self._pp_rank}
            sent = own.to(self.world.device)
            received = torch.empty_like(sent)
            place = dist.get_global_rank(self._group, peer)
            both = [
                dist.P2POp(dist.isend, sent, place, self._group),
                dist.P2POp(dist.irecv, received, place, self._group),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            own.add_(received.to(own.device))

    def norm(self, gradients: Sequence[Tensor]) -> float:
        """See `Native`; a parameter that two stages have counts on the first one."""
        second = {id(p.grad) for tied, p in self._tied if self._copy_of(tied)}
        return super().norm([each for each in gradients if id(each) not in second])

    def state(
        self, *, with_optimizer: bool = True, saved: Mapping[str, TensorEntry] | None = None
    ) -> State:
        """See `Engine`; what two stages have the first one writes, and both read."""
        state = super().state(with_optimizer=with_optimizer, saved=saved)
        copies = dict(state.copies)
        for tied, _ in self._tied:
            stems = [f"{kind}{name}" for kind in (names.MODEL, names.OPTIM) for name in tied.names]
            for name, (place, count) in state.copies.items():
                if any(name == stem or name.startswith(stem + ".") for stem in stems):
                    copies[name] = (place + self._copy_of(tied) * count, count)
        return replace(state, copies=copies)

    def _copy_of(self, tied: Tied) -> int:
        """Which copy of a parameter of two stages this rank has."""
        return int(tied.stages[0] not in self._stages.numbers)

    def _loss(self, stage: _Stage, _tensor: Tensor, number: Tensor) -> Tensor:
        """What the last stage asks for; torch knows a microbatch's targets by its number alone."""
        assert self._share is not None, "no step in hand"  # noqa: S101 - our own bug
        output, stage.output = stage.output, None
        return self._share(output, int(number))

    def _sharded_modules(self) -> Iterator[FSDPModule]:
        for part in self._stages.parts:
            yield from (module for module in part.modules() if isinstance(module, FSDPModule))

    # ---- schedules

    def _schedule(self, microbatches: Sequence[Microbatch], *, training: bool) -> Any:
        """Return torch's schedule for microbatches of this form. Collective over the pipeline.

        Only the last one of each kind is kept: each has memory to receive into.
        """
        form = _form(microbatches)
        if training not in self._ready or self._ready[training][0] != form:
            self._ready.pop(training, None)
            self._ready[training] = (form, self._make(form, microbatches[0].inputs, training))
        return self._ready[training][1]

    def _make(self, form: Form, example: Tensor, training: bool) -> Any:
        count, *key = form
        if tuple(key) not in self._forms:
            self._forms[form[1:]] = self._trace(example)
        between = self._forms[form[1:]]
        made = [
            _Stage(
                part,
                number,
                self._stages.count,
                self.world.device,
                input_args=between[number],
                output_args=between[number + 1],
                group=self._group,
            )
            for part, number in zip(self._stages.parts, self._stages.numbers, strict=True)
        ]
        kind = SCHEDULES[self._name][0 if training else 1]
        several = self._name in LOOPED
        return kind(
            made if several else made[0],
            n_microbatches=count,
            loss_fn=functools.partial(self._loss, made[-1]),
            scale_grads=False,  # a loss is its microbatch's share of the step's
        )

    def _trace(self, example: Tensor) -> list[Tensor]:
        """Return what goes into each stage, and out of the pipeline, without memory.

        Torch's own passes to find it out would clear gradients and count in layers that count.
        Collective over the pipeline's ranks: all raise what one finds.
        """
        between = [torch.empty_like(example, device="meta")]
        begun: list[Call] = []
        with self.evaluating(), torch.compiler.set_stance("force_eager"):
            for number in range(self._stages.count):
                box: list[Any] = [None]
                if number in self._stages.numbers:
                    x = example if number == 0 else _filled(between[-1])
                    box = [self._probe(number, x, begun)]
                dist.broadcast_object_list(box, group=self._group, group_src=number % self.mesh.pp)
                if isinstance(box[0], str):
                    raise UsageError(box[0])
                shape, dtype, calls = box[0]
                begun = begun or calls
                grows = dtype.is_floating_point
                between.append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=grows))
        return between

    def _probe(
        self, number: int, x: Tensor, begun: Sequence[Call]
    ) -> tuple[torch.Size, torch.dtype, list[Call]] | str:
        """Return shape and dtype of a stage's output, or why it cannot be run.

        On the first stage, also note what later stages' layers would be given beside their tensor.
        """
        part = self._stages.parts[self._stages.numbers.index(number)]
        calls: list[Call] = []
        try:
            if number or x.is_floating_point():  # tokens are no tensor that passes through layers
                self._stages.hollow.check(x.to(self.world.device), begun)
            with _noting(part, None if number else calls):
                out = passed_on(part(x.to(self.world.device)))
        except UsageError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it
            shape = list(x.shape)
            return f"pipeline stage {number} fails on a tensor of shape {shape}: {one_line(error)}"
        if out is None:
            return (
                f"engine.pp passes one tensor from stage to stage, and stage {number} of this "
                "model returns none, or several; return one alone, or one field of an object"
            )
        return out.shape, out.dtype, calls


@contextlib.contextmanager
def _noting(part: nn.Module, calls: list[Call] | None) -> Iterator[None]:
    """Have a stage's stand-ins note their calls."""
    absent = [module for module in part.modules() if isinstance(module, PassThrough)]
    for module in absent:
        module.calls = calls
    try:
        yield
    finally:
        for module in absent:
            module.calls = None


class _Stage(PipelineStage):
    """Torch's stage, for a model that returns its tensor alone or as a field of an object.

    In an evaluation it drops outputs once the loss has them; `output` keeps the last one.
    """

    output: Any = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.is_last:
            self.output = output
        return passed_on(output)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                add_up_gradients(module)  # else several microbatches' would be added in 16 bits

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return output


def _form(microbatches: Sequence[Microbatch]) -> Form:
    forms = {(each.inputs.shape, each.inputs.dtype) for each in microbatches}
    if len(forms) != 1:
        listed = sorted(f"{list(shape)} {dtype}" for shape, dtype in forms)
        raise UsageError(
            "a pipeline's microbatches have one shape and dtype, and this step's have "
            f"{' and '.join(listed) or 'none at all'}; "
            "cut steps as engine.passes asks, which fills up with samples of weight 0"
        )
    shape, dtype = forms.pop()
    return len(microbatches), shape, dtype


def _filled(like: Tensor) -> Tensor:
    """Some numbers of that form; not all alike, so that a change shows."""
    numbers = torch.linspace(-1.0, 1.0, max(1, like.numel()))[: like.numel()]
    return numbers.reshape(like.shape).to(like.dtype)
