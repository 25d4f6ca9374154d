"""A training step without memory: builds a model on no device, and tells the exact peak of a rank.

A program of its own (`python -m hpctrain.advise.strategy.measure_child`), so that neither torch nor
a foreign module is ever imported by the command line. One JSON object comes in on stdin, one
goes out in the file that is named first on the command line; what the model's own code prints goes
nowhere near it. The step is spread as hpctrain's engines spread it, over ranks that are not there
(torch's process group "fake"), under FakeTensorMode: see `step`.

Of a pipeline one stage is measured. The other stages answer nothing: the fake group takes what is
sent, and what is received has the right shape. So a step of one stage is a whole step, with as many
microbatches in flight as its schedule has there.

tests/engines/test_strategy_measured.py holds the promises.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._utils import InferenceMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _disable_current_modes

from hpctrain.advise.strategy.stand_in_device import (
    PeakTracker,
    even_exchange,
    fill,
    flash_attention,
    stand_in,
)
from hpctrain.core.base.mesh import Mesh
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import World
from hpctrain.errors import UsageError
from hpctrain.train.engines.blocks import every_block, recompute_blocks
from hpctrain.train.engines.engine import EngineInputs, Microbatch
from hpctrain.train.engines.layouts import DeviceMeshes, make_meshes
from hpctrain.train.engines.native import shard
from hpctrain.train.engines.pipeline import Pipeline, cut
from hpctrain.train.engines.tensor_parallel import tensor_parallelize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.fsdp import FSDPModule

CPU = torch.device("cpu")
STEPS = 2
"""The first makes the optimizer's moments; the second is as all others are."""


class CannotBuild(Exception):
    """The model, or its step, does not work; the message is for the user."""


@dataclass(frozen=True)
class Step:
    """What to measure."""

    kind: str  # "single", "ddp" or "fsdp2"
    ranks: int = 1  # all of them
    copies: int = 1  # HSDP: of the sharded model
    tp: int = 1  # tensor-parallel ranks
    micro: int = 1  # samples of a rank in a pass
    seq: int = 128  # positions of a sample
    passes: int = 1  # of a step
    recompute: bool = False  # blocks in full
    selective: bool = False  # all of a block but attention and matrix products
    each_pass: bool = False  # FSDP2 reduces gradients in each pass
    reshard: bool = True  # FSDP2 frees a block after its forward pass
    bf16: bool = True  # computed in; else in fp32
    real: bool = False  # computes in this machine's memory; else nothing is computed
    # FSDP2 keeps shards and moments on the host; the device's tensors are counted
    offload: bool = False
    pp: int = 1  # stages of a pipeline; one of them is measured
    stage: int = 0  # which, from 0 on
    ep: int = 1  # ranks that share experts; as many tokens are taken to come as go
    lora: int = 0  # rank of adapters on a block's matrices, which alone are trained; 0 for none

    @property
    def mesh(self) -> Mesh:
        """The ranks' axes."""
        shards = self.ranks // self.copies // self.tp // self.pp
        return Mesh(self.pp, self.copies, shards, self.tp, self.ep)

    @property
    def again(self) -> str:
        """Return what is computed again, as `engine.activation_checkpointing` names it."""
        return "full" if self.recompute else "selective" if self.selective else "no"

    @property
    def low(self) -> torch.dtype:
        """Of products."""
        return torch.bfloat16 if self.bf16 else torch.float32


def builder(model: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """What makes the model: of a config, or of a foreign `module:callable`.

    Raises:
        CannotBuild: there is no such module, callable or architecture.
    """
    if "config" in model:
        return _of_config(model["config"])
    name, _, attribute = str(model["callable"]).partition(":")
    sys.path.append(str(Path.cwd()))  # last: a file of theirs stands in for no library
    try:
        made = importlib.import_module(name)
        for part in attribute.split("."):
            made = getattr(made, part)
    except Exception as error:
        raise CannotBuild(f"{model['callable']}: {type(error).__name__}: {_line(error)}") from error
    if not callable(made):
        raise CannotBuild(f"{model['callable']} is {type(made).__name__}, not a callable")
    return made


def _of_config(values: dict[str, Any]) -> Callable[[], nn.Module]:
    try:
        import transformers
        from transformers import masking_utils
    except ImportError as error:
        raise CannotBuild(f"a config.json is built by transformers: {_line(error)}") from error
    # Both look at values, which are not there. Without padding no mask is made on a GPU either.
    masking_utils.find_packed_sequence_indices = lambda _: None
    masking_utils.is_tracing = lambda *_: False
    architecture = (values.get("architectures") or [""])[0]
    try:
        config = transformers.AutoConfig.for_model(**values)
        config.use_cache = False
        for name in vars(config):
            if name.endswith(("dropout", "_pdrop", "dropout_prob")):
                setattr(config, name, 0.0)
        class_ = getattr(transformers, architecture, None) or transformers.AutoModelForCausalLM
        from_config = getattr(class_, "from_config", None) or class_._from_config  # noqa: SLF001
    except Exception as error:
        raise CannotBuild(f"transformers refuses the config: {_line(error)}") from error
    return lambda: from_config(config)


def describe(build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Sizes of a model, from its modules.

    Raises:
        CannotBuild: it does not build on the meta device.
    """
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise CannotBuild(
            f"it does not build on the meta device: {type(error).__name__}: {_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise CannotBuild(f"it builds a {type(model).__name__}, not an nn.Module")
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return {
        "class": type(model).__name__,
        "params": sum(weight.numel() for weight in model.parameters()),
        "trained": sum(weight.numel() for weight in trained),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "blocks": [sum(w.numel() for w in block.parameters()) for block in every_block(model)],
        "config": {key: value for key, value in values.items() if _is_plain(value)},
    }


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | list) or value is None


def step(build: Callable[[], nn.Module], what: Step, tracker: PeakTracker) -> dict[str, Any]:
    """Train two steps; tell of the second one what was taken when, and at its peak.

    The step: AdamW in its form for GPUs (foreach), masters in fp32, logits in fp32 for the loss,
    gradients freed after the update. bf16 is autocast's without sharding, FSDP2's own with it.
    """
    device = stand_in() if what.offload else torch.device("cpu")
    tracker.device = device.type
    with _ranks(what, device) as meshes, _no_values(what), tracker:
        ready = _ready(build, what, meshes, device)
        for _ in range(STEPS):
            tracker.phase = "forward"
            tracker.restart()
            ready.passes(tracker)
            passes, at_peak, kinds = tracker.peak_bytes, dict(tracker.at_peak), tracker.kinds
            tracker.phase = "optimizer"
            tracker.restart()
            ready.optimizer.step()
            update, at_update = tracker.peak_bytes, dict(tracker.at_peak)
            ready.optimizer.zero_grad()
        if update > passes:
            at_peak = at_update
    return {
        "peak": max(passes, update),
        "passes": passes,
        "update": update,
        "resting": tracker.live_bytes,
        "by_phase": at_peak,
        "kinds": [[*kind, count] for kind, count in kinds.items()],
    }


@dataclass(frozen=True)
class _Ready:
    """A model that is spread: its optimizer, the passes of a step, and what lives as long as it."""

    optimizer: torch.optim.Optimizer
    passes: Callable[[PeakTracker], None]
    kept: Any = None


@contextlib.contextmanager
def _no_values(what: Step) -> Iterator[None]:
    """Nothing is computed, unless `what` says so; and what a step needs beside that."""
    with contextlib.ExitStack() as stack:
        if not what.real:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if what.offload:
            stack.enter_context(flash_attention())
        if what.ep > 1:
            stack.enter_context(even_exchange())
        yield


def _ready(build: Callable[[], nn.Module], what: Step, meshes: Any, device: torch.device) -> _Ready:
    """Build a model and spread it as hpctrain's engines do."""
    if what.lora or what.offload:  # neither can be made of tensors that have no values
        with _disable_current_modes(), torch.device("meta"):
            model = adapted(build(), what.lora) if what.lora else build()
    else:
        model = build()
    model.train()
    if what.lora:
        fill(model, device)
    if what.pp > 1:
        return _stage(model, what, meshes)
    kept = _spread(model, what, meshes)
    if what.offload:
        fill(model, device)

    def passes(tracker: PeakTracker) -> None:
        for number in range(what.passes):
            if what.kind == "fsdp2":
                is_last = number == what.passes - 1
                cast("FSDPModule", model).set_requires_gradient_sync(is_last or what.each_pass)
            _pass(model, what, tracker, device)

    return _Ready(_adamw(model), passes, kept)


def _stage(model: nn.Module, what: Step, meshes: Any) -> _Ready:
    """One of a pipeline's."""
    engine = _stage_of(
        model,
        what.mesh,
        meshes,
        stage=what.stage,
        recompute=what.recompute,
        low=what.low,
    )
    ids = torch.zeros((what.micro, what.seq), dtype=torch.long)

    def passes(_tracker: PeakTracker) -> None:
        _run_stage(engine, model, ids, what.passes)

    return _Ready(engine.optimizer, passes, engine)


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """A model with adapters on the matrices of its blocks, as peft wraps it.

    Raises:
        CannotBuild: peft is not there, or takes no such model.
    """
    try:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(ADAPTED))
        return cast("nn.Module", get_peft_model(model, config))
    except (ImportError, ValueError) as error:
        raise CannotBuild(f"adapters are made by peft: {_line(error)}") from error


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a block like Llama's."""


def zero_step(build: Callable[[], nn.Module], what: Step, tracker: PeakTracker) -> dict[str, Any]:
    """The same under DeepSpeed, with real numbers: it looks at values of its buffers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpctrain.core.world import World
    from hpctrain.train.engines.parallelize import parallelize

    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(what.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=what.ranks)
    group: Any = dist.group.WORLD
    world = World(0, 0, what.ranks, torch.device("cpu"), group, what.ranks)
    again = "full" if what.recompute else "no"
    settings = EngineSettings(kind=what.kind, precision="bf16", activation_checkpointing=again)
    ids = torch.zeros((what.micro, what.seq), dtype=torch.long)
    passes = update = 0
    try:
        with tracker:
            engine: Any = parallelize(build, _adamw, settings, world)
            for _ in range(STEPS):
                tracker.phase = "forward"
                tracker.restart()
                for number in range(what.passes):
                    with engine.microbatch(last=number == what.passes - 1):
                        engine.backward(_loss(engine.model, ids))
                passes, at_peak = tracker.peak_bytes, dict(tracker.at_peak)
                tracker.restart()
                engine.step()
                update = tracker.peak_bytes
    finally:
        dist.destroy_process_group()
    said = {"passes": passes, "update": update, "resting": tracker.live_bytes}
    return {"peak": max(passes, update), **said, "by_phase": at_peak, "kinds": []}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, foreach=True)


def _pass(model: nn.Module, what: Step, tracker: PeakTracker, device: torch.device = CPU) -> None:
    tracker.phase = "forward"
    ids = torch.zeros((what.micro, what.seq), dtype=torch.long, device=device)
    casts = what.bf16 and what.kind != "fsdp2"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        loss = _loss(model, ids)
        tracker.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of a language model's logits. By itself, so that these end with it."""
    return _loss_of(model(ids), ids)


def _loss_of(out: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = out if isinstance(out, torch.Tensor) else getattr(out, "logits", None)
    if logits is None:
        logits = out[0] if isinstance(out, tuple | list) else None
    if logits is None or logits.dim() != 3:  # noqa: PLR2004 - sample, position, class
        raise CannotBuild(
            "measured are models that take token ids (samples x positions) and give logits "
            "(samples x positions x classes); this one does not"
        )
    with torch.autocast("cpu", enabled=False):
        return cross_entropy(logits.float().flatten(0, 1), ids.flatten())


@contextlib.contextmanager
def _ranks(what: Step, device: torch.device) -> Any:
    """This process as one of all; the meshes of an engine are made outside of FakeTensorMode."""
    if what.ranks == 1 or what.kind != "fsdp2":
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = what.stage * what.mesh.stage_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=what.ranks)
    try:
        yield make_meshes(what.mesh, device)
    finally:
        dist.destroy_process_group()


def _spread(model: nn.Module, what: Step, meshes: Any) -> list[torch.Tensor]:
    """As hpctrain's engines do it, in place; what has to live as long as the model."""
    settings = EngineSettings(
        kind="fsdp2" if what.kind == "fsdp2" else "ddp",
        reshard_after_forward=what.reshard,
        activation_checkpointing=what.again,
        offload="cpu" if what.offload else "no",
    )
    if what.ep > 1:
        from hpctrain.train.engines.experts import expert_parallelize

        expert_parallelize(model, meshes)
    if what.tp > 1:
        tensor_parallelize(model, meshes.tp, settings, None)
    if what.again != "no":
        recompute_blocks(model, what.again)
    if what.kind == "fsdp2":
        shard(model, meshes, what.low, settings)
    return _buckets(model) if what.kind == "ddp" else []


def _buckets(model: nn.Module) -> list[torch.Tensor]:
    """Stand in for DDP's buckets: gradients are copied into them, and are views of them then."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    whole = [torch.zeros_like(weight) for weight in weights]
    for weight, view in zip(weights, whole, strict=True):

        def into_bucket(weight: nn.Parameter, view: torch.Tensor = view) -> None:
            if weight.grad is not view:
                assert weight.grad is not None  # noqa: S101 - its hook is called for it
                view.copy_(weight.grad)
                weight.grad = view

        weight.register_post_accumulate_grad_hook(into_bucket)  # type: ignore[no-untyped-call]
    return whole


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for: `describe` the model, or its `steps`; `each` of several questions."""
    if "each" in question:
        return {"each": [answer(one) for one in question["each"]]}
    build = builder(question["model"])
    if "steps" not in question:
        return describe(build)
    measured = []
    for values in question["steps"]:
        tracker = PeakTracker(detailed=bool(question.get("detailed")))
        try:
            what = Step(**values)
            run = zero_step if what.kind.startswith("zero") else step
            measured.append(run(build, what, tracker))
        except CannotBuild:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign model may raise anything
            measured.append({"error": f"{type(error).__name__}: {_line(error)}"})
    return {"steps": measured}


def main() -> None:
    """Answer stdin's question into the file that is named first."""
    question = json.load(sys.stdin)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    steps = [step for one in question.get("each", [question]) for step in one.get("steps", [])]
    if any(step.get("offload") for step in steps):
        stand_in()  # autograd counts the devices at its first backward pass, and not again
    try:
        said = answer(question)
    except CannotBuild as error:
        said = {"cannot": str(error)}
    Path(sys.argv[1]).write_text(json.dumps(said))


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


def _stage_of(
    model: nn.Module,
    mesh: Mesh,
    meshes: DeviceMeshes,
    *,
    stage: int,
    recompute: bool,
    low: torch.dtype,
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
    return _Alone(left, _adamw(left), inputs, stages=stages, meshes=meshes)


def _run_stage(engine: _Alone, model: Any, ids: torch.Tensor, count: int) -> None:
    """Run the forward and backward passes of a step's `count` microbatches.

    `model.config` has the model's sizes; `ids` are the tokens of one microbatch.
    """
    config = model.config
    engine.between(ids, config.hidden_size, engine.precision, config.vocab_size)
    engine.accumulate([Microbatch(ids, ids) for _ in range(count)], _loss_of)


if __name__ == "__main__":
    main()
