"""The child of `hpctrain plan --measure`, with the layouts that keep their formulas in a plan.

`python -m tests.support.plan_child ANSWER` also measures tensor parallelism, stages of a pipeline,
shared experts and DeepSpeed, so that tests can hold the formulas against them.

Of a pipeline one stage is measured. The other stages answer nothing: the fake group takes what is
sent, and what is received has the right shape. So a step of one stage is a whole step, with as many
microbatches in flight as its schedule has there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._utils import InferenceMode

from hpctrain.advise.strategy import measure_child
from hpctrain.advise.strategy.measure_child import STEPS, Ready, Step, adamw
from hpctrain.advise.strategy.stand_in_device import stand_in
from hpctrain.core.base.mesh import Mesh
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines import experts
from hpctrain.train.engines.blocks import every_block, recompute_blocks
from hpctrain.train.engines.engine import EngineInputs, Microbatch
from hpctrain.train.engines.native import shard
from hpctrain.train.engines.pipeline import Pipeline, cut
from hpctrain.train.engines.tensor_parallel import tensor_parallelize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from hpctrain.advise.strategy.stand_in_device import PeakTracker


@dataclass(frozen=True)
class CutStep(Step):
    """A step whose model is cut in other ways too."""

    tp: int = 1  # tensor-parallel ranks
    real: bool = False  # computes in this machine's memory; else nothing is computed
    pp: int = 1  # stages of a pipeline; one of them is measured
    stage: int = 0  # which, from 0 on
    ep: int = 1  # ranks that share experts; as many tokens are taken to come as go

    @property
    def mesh(self) -> Mesh:
        """The ranks' axes."""
        shards = self.ranks // self.copies // self.tp // self.pp
        return Mesh(self.pp, self.copies, shards, self.tp, self.ep)

    @property
    def rank(self) -> int:
        """The first of the measured stage."""
        return self.stage * self.mesh.stage_ranks


def measure(
    build: Callable[[], nn.Module], values: dict[str, Any], tracker: PeakTracker
) -> dict[str, Any]:
    """Measure the step that a question describes."""
    what = CutStep(**values)
    if what.kind.startswith("zero"):
        return zero_step(build, what, tracker)
    way = _stage if what.pp > 1 else _cut
    return measure_child.step(build, what, tracker, ready_of=way, context=_context(what))


@contextlib.contextmanager
def _context(what: CutStep) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not what.real:
            stack.enter_context(measure_child.no_values(what))
        if what.ep > 1:
            stack.enter_context(_even_exchange())
        yield


def _cut(build: Callable[[], nn.Module], what: CutStep, meshes: Any, device: torch.device) -> Ready:
    """Cut a model over the ranks of its meshes, then spread it as the product does."""

    def cut_model() -> nn.Module:
        model = build()
        if what.ep > 1:
            experts.expert_parallelize(model, meshes.ep)
        if what.tp > 1:
            tensor_parallelize(model, meshes.tp, EngineSettings(kind="fsdp2"), None)
        return model

    return measure_child.ready(cut_model, what, meshes, device)


def _stage(
    build: Callable[[], nn.Module], what: CutStep, meshes: Any, _device: torch.device
) -> Ready:
    """Keep a stage's layers of a model (cut in place), shard them, and make its engine."""
    model: Any = build()
    model.train()
    mesh, config = what.mesh, model.config
    words = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    settings = EngineSettings(kind="fsdp2", precision=words[what.low], pp=str(mesh.pp))
    group: Any = dist.group.WORLD
    world = World(what.rank, 0, mesh.world_size, torch.device("cpu"), group, mesh.world_size)
    names = frozenset(model.state_dict())
    stages = cut(model, what.stage, mesh.pp, settings)
    for part in stages.parts:
        if what.recompute:
            recompute_blocks(part, "full")
        shard(part, meshes, what.low, settings)
    inputs = EngineInputs(settings, world, mesh, names)
    left = stages.model
    engine = _Alone(left, adamw(left), inputs, stages=stages, meshes=meshes)
    ids = torch.zeros((what.micro, what.seq), dtype=torch.long)

    def passes() -> None:
        engine.between(ids, config.hidden_size, engine.precision, config.vocab_size)
        microbatches = [Microbatch(ids, ids) for _ in range(what.passes)]
        engine.accumulate(microbatches, measure_child.loss_of)

    return Ready(engine.optimizer, passes, engine)


class _Alone(Pipeline):
    """A stage of which the others cannot be asked."""

    def total(self, local: torch.Tensor) -> float:
        """The step's loss is not known: nothing was computed."""
        return 0.0

    def _loss(self, stage: Any, tensor: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
        """Of any microbatch: all are alike, and their numbers have no values."""
        return super()._loss(stage, tensor, 0)

    def _make(self, *form: Any) -> Any:
        """A schedule that does not ask the other stages what they know: all know the same."""
        schedule = super()._make(*form)

        def agreed(stages: list[Any], has_backward: bool, _done: bool) -> None:
            for stage in stages:
                late = InferenceMode.needs_dynamic(stage._user_meta, has_backward)
                if late:
                    raise UsageError("this torch asks the other stages for shapes: not measured")
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = agreed
        return schedule

    def between(self, ids: torch.Tensor, width: int, dtype: torch.dtype, vocab: int) -> None:
        """Tell what goes from stage to stage, which the stages would tell each other."""
        count = self._stages.count
        hidden = [(width, dtype)] * (count - 1) + [(vocab, dtype)]
        self._forms[ids.shape, ids.dtype] = [
            torch.empty_like(ids, device="meta"),
            *(
                torch.empty((*ids.shape, size), dtype=kind, device="meta", requires_grad=True)
                for size, kind in hidden
            ),
        ]


def zero_step(
    build: Callable[[], nn.Module], what: CutStep, tracker: PeakTracker
) -> dict[str, Any]:
    """The same under DeepSpeed, with real numbers: it looks at values of its buffers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpctrain.train.engines.parallelize import parallelize

    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(what.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=what.ranks)
    group: Any = dist.group.WORLD
    world = World(0, 0, what.ranks, torch.device("cpu"), group, what.ranks)
    settings = EngineSettings(kind=what.kind, precision="bf16", activation_checkpointing=what.again)
    ids = torch.zeros((what.micro, what.seq), dtype=torch.long)
    passes = update = 0
    try:
        with tracker:
            engine: Any = parallelize(build, adamw, settings, world)
            for _ in range(STEPS):
                tracker.restart()
                for number in range(what.passes):
                    with engine.microbatch(last=number == what.passes - 1):
                        engine.backward(measure_child.loss_of(engine.model(ids), ids))
                passes = tracker.peak_bytes
                tracker.restart()
                engine.step()
                update = tracker.peak_bytes
    finally:
        dist.destroy_process_group()
    return {"peak": max(passes, update), "passes": passes, "update": update}


class _Exchange(torch.autograd.Function):
    """What travels comes as another tensor, forwards and backwards."""

    @staticmethod
    def forward(_context: Any, tokens: torch.Tensor) -> torch.Tensor:
        """As many as go."""
        return tokens.clone()

    @staticmethod
    def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The same of their gradients."""
        return gradients[0].clone()


@contextlib.contextmanager
def _even_exchange() -> Iterator[None]:
    """Tokens of the other ranks come as this rank's go."""
    own: Any = experts
    counts, tokens = own.all_to_all, own.all_to_all_with_gradient

    def same(given: torch.Tensor, *_sizes: Any) -> torch.Tensor:
        return given.clone()

    def travelled(given: torch.Tensor, *_sizes: Any) -> torch.Tensor:
        return _Exchange.apply(given)

    own.all_to_all, own.all_to_all_with_gradient = same, travelled
    try:
        yield
    finally:
        own.all_to_all, own.all_to_all_with_gradient = counts, tokens


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Measure the steps of one model, or count its parameters."""
    named = question.get("callable", "")
    module, _, function = named.partition(":")
    build = getattr(importlib.import_module(module), function) if named else None
    build = build or measure_child.builder(question["config"])
    if "steps" in question:
        return {"steps": measure_child.peaks(build, question["steps"], measure)}
    with torch.device("meta"):
        model = build()
    blocks = [sum(w.numel() for w in block.parameters()) for block in every_block(model)]
    return {"params": sum(w.numel() for w in model.parameters()), "blocks": blocks}


def main() -> None:
    """Answer stdin's questions into the file that is named first."""
    questions = json.load(sys.stdin)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if any(step.get("offload") for one in questions for step in one.get("steps", [])):
        stand_in()
    Path(sys.argv[1]).write_text(json.dumps([_answer(one) for one in questions]))


if __name__ == "__main__":
    main()
