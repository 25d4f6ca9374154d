"""A training step without memory: builds a model on no device, and tells the exact peak of a rank.

A program of its own (`python -m hpctrain.advise.strategy.measure_child`), so that neither torch nor
a foreign module is ever imported by the command line. One JSON object comes in on stdin, one
goes out in the file that is named first on the command line; what the model's own code prints goes
nowhere near it. The step is spread as hpctrain's engines spread it, over ranks that are not there
(torch's process group "fake"), under FakeTensorMode: see `step`.

tests/engines/test_strategy_measured.py holds the promises; tests/support/plan_child.py measures the
layouts whose rows keep their formulas.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _disable_current_modes

from hpctrain.advise.strategy.stand_in_device import (
    PeakTracker,
    fill,
    flash_attention,
    stand_in,
)
from hpctrain.core.base.mesh import Mesh
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.train.engines.blocks import recompute_blocks
from hpctrain.train.engines.layouts import make_meshes
from hpctrain.train.engines.native import shard

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    micro: int = 1  # samples of a rank in a pass
    seq: int = 128  # positions of a sample
    passes: int = 1  # of a step
    recompute: bool = False  # blocks in full
    selective: bool = False  # all of a block but attention and matrix products
    each_pass: bool = False  # FSDP2 reduces gradients in each pass
    reshard: bool = True  # FSDP2 frees a block after its forward pass
    bf16: bool = True  # computed in; else in fp32
    # FSDP2 keeps shards and moments on the host; the device's tensors are counted
    offload: bool = False
    lora: int = 0  # rank of adapters on a block's matrices, which alone are trained; 0 for none

    @property
    def mesh(self) -> Mesh:
        """The ranks' axes."""
        return Mesh(1, self.copies, self.ranks // self.copies, 1, 1)

    @property
    def rank(self) -> int:
        """Which of them is measured."""
        return 0

    @property
    def again(self) -> str:
        """Return what is computed again, as `engine.activation_checkpointing` names it."""
        return "full" if self.recompute else "selective" if self.selective else "no"

    @property
    def low(self) -> torch.dtype:
        """Of products."""
        return torch.bfloat16 if self.bf16 else torch.float32


def builder(values: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return what makes the model of a config.json.

    Raises:
        CannotBuild: there is no such architecture, or no transformers.
    """
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


def step(
    build: Callable[[], nn.Module],
    what: Step,
    tracker: PeakTracker,
    *,
    ready_of: Callable[..., Ready] | None = None,
    context: contextlib.AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:
    """Train two steps; return the peaks of the second one's passes and update, in bytes.

    The step: AdamW in its form for GPUs (foreach), masters in fp32, logits in fp32 for the loss,
    gradients freed after the update. bf16 is autocast's without sharding, FSDP2's own with it.
    `ready_of` spreads the model, and `context` holds the step, in place of `ready` and `no_values`.
    """
    device = stand_in() if what.offload else torch.device("cpu")
    tracker.device = device.type
    with _ranks(what, device) as meshes, context or no_values(what), tracker:
        spread = (ready_of or ready)(build, what, meshes, device)
        for _ in range(STEPS):
            tracker.restart()
            spread.passes()
            passes = tracker.peak_bytes
            tracker.restart()
            spread.optimizer.step()
            update = tracker.peak_bytes
            spread.optimizer.zero_grad()
    return {"peak": max(passes, update), "passes": passes, "update": update}


@dataclass(frozen=True)
class Ready:
    """A model that is spread: its optimizer, the passes of a step, and what lives as long as it."""

    optimizer: torch.optim.Optimizer
    passes: Callable[[], None]
    kept: Any = None


@contextlib.contextmanager
def no_values(what: Step) -> Iterator[None]:
    """Nothing is computed."""
    flash = flash_attention() if what.offload else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), flash:
        yield


def ready(build: Callable[[], nn.Module], what: Step, meshes: Any, device: torch.device) -> Ready:
    """Build a model and spread it as hpctrain's engines do."""
    if what.lora or what.offload:  # neither can be made of tensors that have no values
        with _disable_current_modes(), torch.device("meta"):
            model = adapted(build(), what.lora) if what.lora else build()
    else:
        model = build()
    model.train()
    if what.lora:
        fill(model, device)
    kept = _spread(model, what, meshes)
    if what.offload:
        fill(model, device)

    def passes() -> None:
        for number in range(what.passes):
            if what.kind == "fsdp2":
                is_last = number == what.passes - 1
                cast("FSDPModule", model).set_requires_gradient_sync(is_last or what.each_pass)
            _pass(model, what, device)

    return Ready(adamw(model), passes, kept)


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


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of what is trained, in its form for GPUs."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-4, foreach=True)


def _pass(model: nn.Module, what: Step, device: torch.device = CPU) -> None:
    ids = torch.zeros((what.micro, what.seq), dtype=torch.long, device=device)
    casts = what.bf16 and what.kind != "fsdp2"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        loss = _loss(model, ids)
        loss.backward()  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of a language model's logits. By itself, so that these end with it."""
    return loss_of(model(ids), ids)


def loss_of(out: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of what a model gave, in fp32."""
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

    dist.init_process_group("fake", store=FakeStore(), rank=what.rank, world_size=what.ranks)
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


Measure = Callable[[Callable[[], nn.Module], dict[str, Any], PeakTracker], dict[str, Any]]
"""Measures the step that a question describes."""


def _as_asked(
    build: Callable[[], nn.Module], values: dict[str, Any], tracker: PeakTracker
) -> dict[str, Any]:
    return step(build, Step(**values), tracker)


def peaks(
    build: Callable[[], nn.Module], steps: list[dict[str, Any]], measure: Measure = _as_asked
) -> list[dict[str, Any]]:
    """Return what each step takes, or its error."""
    measured = []
    for values in steps:
        try:
            measured.append(measure(build, values, PeakTracker()))
        except CannotBuild:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign model may raise anything
            measured.append({"error": f"{type(error).__name__}: {_line(error)}"})
    return measured


def main() -> None:
    """Answer stdin's question into the file that is named first."""
    question = json.load(sys.stdin)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if any(step["offload"] for step in question["steps"]):
        stand_in()  # autograd counts the devices at its first backward pass, and not again
    try:
        said: dict[str, Any] = {"steps": peaks(builder(question["model"]), question["steps"])}
    except CannotBuild as error:
        said = {"cannot": str(error)}
    Path(sys.argv[1]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
