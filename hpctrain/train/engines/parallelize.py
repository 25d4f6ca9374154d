"""From a model of one process to an engine: each way of cutting it, in the order that works.

Pipeline first (it drops layers), then tensor and expert parallel (they replace parameters), then
recomputation, compilation, and at last sharding. tests/engines/test_every_engine.py holds the
promises.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpctrain.core.base.mesh import Mesh
from hpctrain.errors import UsageError
from hpctrain.ledger.plan.mesh import plan_mesh, refusal, shape_of_config
from hpctrain.train.engines.blocks import compile_blocks, every_block, recompute_blocks
from hpctrain.train.engines.deferred import DeferredModel
from hpctrain.train.engines.engine import EngineInputs
from hpctrain.train.engines.layouts import make_meshes
from hpctrain.train.engines.native import Averaged, Native, shard
from hpctrain.train.engines.norm import precision_of
from hpctrain.train.engines.pretrained import base_weights, is_adapted, open_folder, refuse_adapted
from hpctrain.train.engines.state import parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.ledger.plan.mesh import ModelShape
    from hpctrain.train.engines.engine import Engine
    from hpctrain.train.engines.pretrained import BaseWeights

log = logging.getLogger("hpctrain.engines")


@dataclass(frozen=True)
class ModelPlan:
    """How to cut a model whose layout is not a common one.

    Attributes:
        tensor_parallel: Module names to torch's parallel styles; None for a decoder's default.
        stage_order: Names of the modules that a pipeline passes its tensor through, in order; None
            for the model's children with its blocks in their place.
        shape: Sizes that the mesh must divide, where they are known.
        loss_parallel: The program's loss is made of `hpctrain.cross_entropy`: under `tp` logits
            stay cut over the vocabulary (a DTensor), and no rank holds them whole. It concerns a
            decoder's default; with `tensor_parallel` the head's style says it.
    """

    tensor_parallel: Mapping[str, Any] | None = None
    stage_order: Sequence[str] | None = None
    shape: ModelShape | None = None
    loss_parallel: bool = False


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[nn.Module], Optimizer],
    settings: EngineSettings,
    world: World,
    *,
    plan: ModelPlan | None = None,
    seed: int = 0,
    is_restored: bool = False,
    pretrained: str | Path | None = None,
) -> Engine:
    """Spread a model over the ranks. Collective: every rank calls it with the same model.

    Args:
        model: Of one process, on the CPU; or a function that makes it, which is called without
            memory for its values. Each value is made when the model is cut: no rank holds more
            than its shards and one tensor.
        optimizer: Of all its parameters, without state; or a function that makes it from the model
            as it is on this rank then.
        settings: Which engine, and its mesh.
        world: The ranks.
        plan: How to cut the model along `tp` and `pp`, where its layout is not a common one.
        seed: Of the values that a function makes.
        is_restored: A checkpoint is loaded next: what it holds gets memory, and no values before.
        pretrained: A Hugging Face folder whose weights the model begins with, None for that of the
            settings; not opened where a checkpoint is loaded next.

    Raises:
        UsageError: the optimizer has state already, or the settings do not fit model or world.
        CheckpointError: the folder's files are damaged, or do not fit the model.
    """
    _require_versions(settings)
    source = _source(model, optimizer, seed)
    source = source.begin_with(pretrained, settings, world, is_restored=is_restored)
    _refuse_without_effect(source.model, settings)
    _widen(source.model)
    plan = plan or ModelPlan()
    mesh = _mesh_of(source.model, settings, world, plan.shape)
    inputs = EngineInputs(settings, world, mesh, source.saved_names, source.base)
    if not world.is_distributed or settings.kind == "ddp":
        return _copied(source, inputs)
    if settings.kind.startswith("zero"):
        return _by_deepspeed(source, inputs)
    return _sharded(source, inputs, plan)


@dataclass(frozen=True)
class _Source:
    """The program's model and optimizer (or its maker), before they are spread.

    `names` are of the model's parameters, by identity. `awaited` names what a checkpoint fills
    next. `deferred` is None if the model has its values, `base` if all weights are in checkpoints.
    """

    model: nn.Module
    deferred: DeferredModel | None
    optimizer: Optimizer | Callable[[nn.Module], Optimizer]
    names: dict[int, str]
    awaited: frozenset[str] = frozenset()
    base: BaseWeights | None = None

    @property
    def saved_names(self) -> frozenset[str]:
        """Names of what checkpoints hold of the model, on whatever rank."""
        left_out = self.base.names if self.base is not None else frozenset()
        return frozenset(self.model.state_dict()) - left_out

    def fill(
        self, part: nn.Module, world: World, *, offload: bool = False, outlined: bool = False
    ) -> None:
        """Give a part of the model this rank's values, where it has none so far. Collective."""
        if self.deferred is not None:
            self.deferred.fill(
                part, world, offload=offload, outlined=outlined, awaited=self.awaited
            )
            self.agree(world)

    def value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's elements, whole; any where a checkpoint fills it next. See `agree`."""
        if self.deferred is None or name in self.awaited:
            return torch.empty(parameter.shape, dtype=parameter.dtype)
        return self.deferred.value(name)

    def agree(self, world: World) -> None:
        """Raise on every rank what any has met as it read (see `Pretrained.agree`). Collective."""
        if self.deferred is not None and self.deferred.pretrained is not None:
            self.deferred.pretrained.agree(world)

    def begin_with(
        self,
        pretrained: str | Path | None,
        settings: EngineSettings,
        world: World,
        *,
        is_restored: bool,
    ) -> _Source:
        """Find the values that come neither from the constructor nor from a checkpoint. Collective.

        Without `pretrained`, the settings' folder counts, if any. Before a restore (`is_restored`)
        the folder is opened for what the checkpoint leaves out.

        Raises:
            UsageError: the model has its values already, or adapters that cannot be trained.
            CheckpointError: the folder's files are damaged, or do not fit the model.
        """
        if self.deferred is None:
            if pretrained:
                raise UsageError(
                    f"run.parallelize reads {pretrained} into a model that it makes; give it a "
                    f"function that builds one: lambda: {type(self.model).__name__}(config)"
                )
            return replace(self, base=base_weights(self.model, None, "the program", world))
        deferred, source, folder = self.deferred, self, pretrained or settings.pretrained
        if folder and (is_adapted(self.model) or not is_restored):
            deferred.pretrained = open_folder(folder, self.model, world)
            base = base_weights(self.model, deferred.pretrained, str(folder), world)
            source = replace(self, base=base)
        return replace(source, awaited=source.saved_names) if is_restored else source

    def optimizer_of(self, model: nn.Module, *, may_lack: bool = False) -> Optimizer:
        """Return the optimizer of the parameters as they are now; for its errors see `point_to`."""
        if isinstance(self.optimizer, Optimizer):
            point_to(self.optimizer, model, self.names, may_lack=may_lack)
            return self.optimizer
        made = self.optimizer(model)
        if not isinstance(made, Optimizer):
            raise UsageError(
                f"run.parallelize was given a function that makes a {type(made).__name__} of the "
                "model; it has to return a torch.optim.Optimizer"
            )
        return made


def _source(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | Callable[[nn.Module], Optimizer],
    seed: int,
) -> _Source:
    if isinstance(optimizer, Optimizer) and optimizer.state:
        raise UsageError("parallelize() needs a fresh optimizer; call it before the first step")
    if isinstance(model, nn.Module):
        return _Source(model, None, optimizer, names_of(model))
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            "run.parallelize makes the model by the function that it was given, and the optimizer "
            "has other parameters; give it a function too: lambda model: "
            f"{type(optimizer).__name__}(model.parameters(), ...)"
        )
    deferred = DeferredModel(model, seed)
    return _Source(deferred.model, deferred, optimizer, {})


def _mesh_of(
    model: nn.Module, settings: EngineSettings, world: World, shape: ModelShape | None
) -> Mesh:
    """Plan the mesh as submit does, with `shape` or that of a pretrained model's config.

    Refuse settings that give no mesh, a mesh that cuts what it cannot, and adapters on one that is
    untested.
    """
    if not world.is_distributed:
        return Mesh()
    config: Any = getattr(model, "config", None)
    if shape is None and settings.pretrained and hasattr(config, "to_dict"):
        shape = shape_of_config(config.to_dict(), "the model's config")
    mesh = plan_mesh(settings, world.world_size, world.ranks_per_node, shape=shape)
    refuse_adapted(model, settings, mesh)
    return mesh


def _require_versions(settings: EngineSettings) -> None:
    """Refuse versions too old for this engine: a job may load others than submit has seen."""
    versions = {"torch": str(torch.__version__)}
    if settings.kind.startswith("zero"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions["deepspeed"] = metadata.version("deepspeed")
    if why := refusal(versions, settings):
        raise UsageError(why)


def _refuse_without_effect(model: nn.Module, settings: EngineSettings) -> None:
    """Refuse settings for blocks in a model without any, or recomputation that cannot work."""
    name = type(model).__name__
    if not every_block(model):
        for key in ("activation_checkpointing", "compile"):
            if (value := getattr(settings, key)) != "no":
                raise UsageError(
                    f"engine.{key} {value} works block by block, and {name} has no list of blocks "
                    f"(nn.ModuleList, or nn.Sequential of one class); put its layers into one, or "
                    f"set engine.{key} to no"
                )


def _widen(model: nn.Module) -> None:
    """Hold 16-bit weights and buffers in fp32, in place: the optimizer updates these masters.

    A model that was loaded in bf16 would else have moments of 16 bits and lose small updates, and
    its checkpoint would load under no engine that keeps masters. `engine.precision` says what is
    computed in.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in {torch.bfloat16, torch.float16}:
            tensor.data = tensor.data.float()


def _by_deepspeed(source: _Source, inputs: EngineInputs) -> Engine:
    from hpctrain.train.engines.zero.engine import Zero

    source.fill(source.model, inputs.world, outlined=True)
    made = None if source.deferred is None else source.value
    engine = Zero(source.model, source.optimizer_of(source.model), inputs, made)
    source.agree(inputs.world)
    return engine


def _copied(source: _Source, inputs: EngineInputs) -> Engine:
    settings, world, model = inputs.settings, inputs.world, source.model
    source.fill(model, world)
    prepare(model, settings, world)
    optimizer = source.optimizer_of(model)
    kind = "ddp" if world.is_distributed else "plain"
    if settings.exact:
        from hpctrain.train.engines.exact import ExactCopies

        return ExactCopies(kind, model, optimizer, inputs)
    if not world.is_distributed:
        return Native(kind, model, optimizer, inputs)
    # Values that a function makes are of one seed, one folder or one checkpoint.
    copies = Averaged(model, world.device, is_same=source.deferred is not None)
    return Native(kind, copies, optimizer, inputs)


def _sharded(source: _Source, inputs: EngineInputs, plan: ModelPlan) -> Engine:
    settings, world, mesh, model = inputs.settings, inputs.world, inputs.mesh, source.model
    if world.rank == 0 and not every_block(model):
        text = "%s has no list of blocks: each pass gathers the whole model at once"
        log.warning(text, type(model).__name__)
    meshes = make_meshes(mesh, world.device)
    context = None
    if meshes.cp is not None:
        from hpctrain.train.engines.context import ContextParallel

        context = ContextParallel(model, meshes.cp)
    stages = None
    if mesh.pp > 1:
        from hpctrain.train.engines.stages import cut

        stages = cut(model, mesh.pp_rank(world.rank), mesh.pp, settings, plan.stage_order)
        model = stages.model
    for part in stages.parts if stages is not None else [model]:
        if mesh.tp > 1:
            from hpctrain.train.engines.tensor_parallel import tensor_parallelize

            own, late = plan.tensor_parallel, plan.loss_parallel
            tensor_parallelize(part, meshes.root["tp"], settings, own, loss_parallel=late)
        if meshes.ep is not None:
            from hpctrain.train.engines.experts import expert_parallelize

            expert_parallelize(part, meshes.ep)
        prepare(part, settings, world)
        shard(part, meshes, precision_of(settings.precision, world.device), settings)
        source.fill(part, world, offload=settings.offload == "cpu")
    optimizer = source.optimizer_of(model, may_lack=stages is not None)
    if stages is not None:
        from hpctrain.train.engines.pipeline import Pipeline

        return Pipeline(model, optimizer, inputs, stages=stages, meshes=meshes)
    if settings.exact:
        from hpctrain.train.engines.exact import ExactShards

        return ExactShards("fsdp2", model, optimizer, inputs, meshes=meshes)
    engine = Native("fsdp2", model, optimizer, inputs)
    engine.context = context
    return engine


def prepare(model: nn.Module, settings: EngineSettings, world: World) -> None:
    """What is the same for every way of cutting: recomputation, device, compilation. In place."""
    blocks, how = every_block(model), settings.activation_checkpointing
    if how != "no":
        recompute_blocks(model, how)
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(world.device)
    if settings.compile != "no":
        # What is recomputed in full is compiled inside its wrapper: aot autograd cannot keep the
        # device mesh that a recomputed graph of tensor parallelism refers to.
        outer = blocks if how == "full" else every_block(model)
        compile_blocks(outer, settings.compile, world.device)


def names_of(model: nn.Module) -> dict[int, str]:
    """Names of a model's parameters by their identity, before they are replaced."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def point_to(
    optimizer: Optimizer, model: nn.Module, before: dict[int, str], *, may_lack: bool
) -> None:
    """Have an optimizer update the parameters that stand where its own stood.

    `before` names the parameters of the old model, by identity. With `may_lack`, some are on other
    ranks now, and are dropped from their group.

    Raises:
        UsageError: a parameter is gone that must be here: it would not train, without a word.
    """
    # Recomputation has put a wrapper around the blocks since.
    now = dict(parameters(model))
    for group in optimizer.param_groups:
        own = [before[id(parameter)] for parameter in group["params"]]
        group["params"] = [now[name] for name in own if name in now]
    left = set(before.values()) - now.keys()
    if left and not may_lack:
        raise UsageError(
            f"{min(left)} is lost while the model is spread over ranks: it would not train"
        )
