"""One stage of a pipeline without memory: hpctrain's own engine, on ranks that are not there.

The other stages answer nothing: torch's process group "fake" takes what is sent, and what is
received has the right shape. So a step of one stage is a whole step, with as many microbatches in
flight as its schedule has there. tests/engines/test_strategy_measured.py holds the promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._utils import InferenceMode

from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines.blocks import recompute_blocks
from hpctrain.train.engines.engine import EngineInputs, Microbatch
from hpctrain.train.engines.native import shard
from hpctrain.train.engines.pipeline import Pipeline, cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.train.engines.layouts import DeviceMeshes


class _Alone(Pipeline):
    """A stage of which the others cannot be asked."""

    def total(self, local: torch.Tensor) -> float:  # noqa: ARG002 - it has no value here
        """The step's loss is not known: nothing was computed."""
        return 0.0

    def _loss(self, stage: Any, tensor: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
        """Of any microbatch: all are alike, and their numbers have no values."""
        return super()._loss(stage, tensor, 0)  # type: ignore[arg-type]

    def _make(self, *form: Any) -> Any:
        """A schedule that does not ask the other stages what they know: all know the same."""
        schedule = super()._make(*form)

        def agreed(stages: list[Any], has_backward: bool, _done: bool) -> None:
            for stage in stages:
                late = InferenceMode.needs_dynamic(stage._user_meta, has_backward)  # noqa: SLF001
                if late:
                    raise UsageError("this torch asks the other stages for shapes: not measured")
                stage._inference_mode = InferenceMode.STATIC  # noqa: SLF001 - what the vote sets

        schedule._warmup_p2p = agreed  # noqa: SLF001
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


def stage_of(
    model: nn.Module,
    mesh: Mesh,
    meshes: DeviceMeshes,
    *,
    stage: int,
    recompute: bool,
    low: torch.dtype,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
) -> _Alone:
    """Keep a stage's layers of a model (cut in place), shard them, and make its engine.

    `recompute` recomputes blocks in full; `low` is the dtype computed in.
    """
    words = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    settings = EngineSettings(kind="fsdp2", precision=words[low], pp=str(mesh.pp))
    rank = stage * mesh.stage_ranks
    world = World(rank, 0, mesh.world_size, torch.device("cpu"), dist.group.WORLD, mesh.world_size)  # type: ignore[arg-type]
    names = frozenset(model.state_dict())
    stages = cut(model, stage, mesh.pp, settings)
    for part in stages.parts:
        if recompute:
            recompute_blocks(part, "full")
        shard(part, meshes, low, settings)
    inputs = EngineInputs(settings, world, mesh, names)
    left = stages.model
    return _Alone(left, optimizer_of(left), inputs, stages=stages, meshes=meshes)


def passes(engine: _Alone, model: Any, ids: torch.Tensor, count: int, loss: Any) -> None:
    """Run the forward and backward passes of a step's `count` microbatches.

    `model.config` has the model's sizes; `ids` are the tokens of one microbatch; `loss` takes
    logits and tokens.
    """
    config = model.config
    engine.between(ids, config.hidden_size, engine.precision, config.vocab_size)
    engine.accumulate([Microbatch(ids, ids) for _ in range(count)], loss)
