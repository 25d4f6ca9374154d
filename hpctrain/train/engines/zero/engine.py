"""DeepSpeed's engine, ZeRO stages 0 to 3, behind the same protocol as all others.

What DeepSpeed does otherwise than the other engines (it averages, it rounds weights before it makes
masters of them) is set right around it, and what it does wrong is refused. Only here is DeepSpeed
imported. tests/engines/test_zero.py holds the promises.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.ledger.plan.deepspeed import engine_config, stage_of
from hpctrain.train.engines.blocks import compile_blocks, every_block, recompute_blocks
from hpctrain.train.engines.engine import Engine
from hpctrain.train.engines.norm import (
    DTYPES,
    LossScale,
    clip_factor,
    global_norm,
    gradients_of,
    scale_,
)
from hpctrain.train.engines.state import buffers
from hpctrain.train.engines.zero.state import SPREADS_PARAMETERS, ZeroState, fill, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import TensorEntry
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.engine import EngineInputs
    from hpctrain.train.engines.zero.state import Made


class DeepSpeedScale(LossScale):
    """How far DeepSpeed scales losses; its state continues under any other engine, and back.

    DeepSpeed itself updates it. A fixed scale stays as it is.
    """

    def __init__(self, scaler: Any) -> None:
        """Take DeepSpeed's scaler: a dynamic one, or one with a fixed scale."""
        self._scaler = scaler

    @property
    def scale(self) -> float:  # type: ignore[override]
        """What losses are multiplied by now."""
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        """As `LossScale`. DeepSpeed doubles the scale one step later than torch."""
        scaler, good = self._scaler, 0
        if scaler.dynamic:
            good, window = int(scaler.cur_iter - scaler.last_overflow_iter - 1), scaler.scale_window
            good = good if good <= window else (good - 1) % int(window) + 1
        return {"scale": self.scale, "good_steps": good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `LossScale`."""
        loaded, scaler = LossScale(), self._scaler
        loaded.load_state_dict(state)
        if scaler.dynamic:
            scaler.cur_scale = loaded.scale
            scaler.last_overflow_iter = scaler.cur_iter - 1 - loaded.good_steps


class Zero(Engine):
    """See `Engine`. Its model is DeepSpeed's engine, its optimizer the program's own."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, inputs: EngineInputs, made: Made | None = None
    ) -> None:
        """Hand a model that is not wrapped over to DeepSpeed. Collective.

        `optimizer` has no state; DeepSpeed puts its own tensors into its groups, and reads rates
        from there. All axes of the mesh are data-parallel. `made` makes the values of parameters
        that have none; None if all have theirs.

        Raises:
            UsageError: DeepSpeed is not there, or cannot do right what the settings ask for.
        """
        settings, world = inputs.settings, inputs.world
        super().__init__(settings.kind, model, optimizer, inputs)
        self._stage = stage_of(settings.kind)
        self.decides_alone = self._stage > 0
        self._state_names = inputs.state_names
        config = _config(settings, self._stage, self.precision, self.data_ranks)
        deepspeed = _import_deepspeed()
        if self.precision is torch.float16 and not deepspeed.get_accelerator().is_fp16_supported():
            raise UsageError(
                f"engine.precision fp16: DeepSpeed does not run it on this {world.device.type}; "
                "use engine.precision bf16, or engine.kind fsdp2"
            )
        _drop_untrained(optimizer)
        named = dict(model.named_parameters(remove_duplicate=False))
        # Places, not tensors: moving a model to its device makes new ones.
        held = [place for place, buffer in buffers(model) if buffer is not None]
        _prepare(model, settings, world.device)  # looks for blocks by what is in them
        give = spread if self._stage == SPREADS_PARAMETERS else fill
        before = give(named, made, config, self.precision, world.device)
        self.model, self._zero, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        if self._stage and self._zero.optimizer is not optimizer:
            raise UsageError(
                f"DeepSpeed puts an optimizer of its own in the place of {type(optimizer).__name__}"
                ", so that rates set by the program would count for nothing; use AdamW, or "
                "engine.kind fsdp2"
            )
        self._zero_state = ZeroState(
            named, held, optimizer, zero=self._zero, stage=self._stage, before=before
        )
        fp16 = self.precision is torch.float16
        self.loss_scale = DeepSpeedScale(self._zero.loss_scaler) if fp16 else None
        if self.precision is not torch.float32:
            model.register_forward_pre_hook(self._cast_inputs)

    # ---- a step

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """See `Engine`. From stage 2 on gradients travel in each microbatch."""
        self.model.set_gradient_accumulation_boundary(last)  # type: ignore[operator]
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """See `Engine`."""
        share = loss * self.data_ranks  # DeepSpeed averages over ranks
        self.model.backward(share, scale_wrt_gas=False)  # type: ignore[operator]

    def update(self) -> float:
        """See `Engine`. DeepSpeed also leaves an fp32 update out where gradients are no numbers."""
        if self._stage == 0:
            return self._step_of_copies()
        self.model.step()  # type: ignore[operator]
        norm = float(self.model.get_global_grad_norm())  # type: ignore[operator]
        self._zero_state.forget_gradients()
        self.left_out = bool(self._zero.overflow)
        return norm if norm >= 0 else math.nan  # it says -1 for what is no number

    def _step_of_copies(self) -> float:
        """Stage 0: DeepSpeed adds gradients up and updates; it tells no norm."""
        gradients = gradients_of(self.optimizer)
        norm = global_norm(gradients, self.mesh, self.world)
        self.left_out = self.guard is not None and not self.guard.accepts(norm)
        if self.left_out:
            self.optimizer.zero_grad(set_to_none=True)
            return norm
        scale_(gradients, clip_factor(norm, self.clip_norm))
        self.model.step()  # type: ignore[operator]
        return norm

    def _cast_inputs(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a model of 16 bits its floating-point inputs in 16 bits, as FSDP2 does."""
        return tuple(
            value.to(self.precision)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for value in inputs
        )

    # ---- state

    def state(
        self,
        *,
        with_optimizer: bool = True,
        saved: Mapping[str, TensorEntry] | None = None,  # noqa: ARG002 - its rows have state or not
    ) -> State:
        """See `Engine`."""
        return self._zero_state.collect(
            with_optimizer=with_optimizer, state_names=self._state_names
        )

    def apply(self, tensors: Mapping[str, Any], *, with_optimizer: bool = True) -> None:
        """See `Engine`.

        Raises:
            CheckpointError: see `ZeroState.apply_counts`.
        """
        if with_optimizer:
            self._zero_state.apply_counts(tensors)
        self._zero_state.push()


def _config(
    settings: EngineSettings, stage: int, precision: torch.dtype, data_ranks: int
) -> dict[str, Any]:
    """Return DeepSpeed's configuration; refuse what would train wrongly or could not be saved."""
    if stage == 0 and precision is not torch.float32:
        raise UsageError(
            f"engine.precision {settings.precision} with engine.kind zero0: DeepSpeed begins Adam "
            "at step 1 there, and training goes wrong from the first update on; use engine.kind "
            "zero1 or ddp, or engine.precision fp32"
        )
    word = next(name for name, dtype in DTYPES.items() if dtype is precision)
    config = engine_config(settings, precision=word, data_ranks=data_ranks)
    if stage == 0:
        config["gradient_clipping"] = 0.0  # done in `_step_of_copies`, which has the norm
    return config


def _import_deepspeed() -> ModuleType:
    """Import DeepSpeed without log lines that nobody could act on; refuse if it is missing."""
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UsageError(
            f"engine.kind zero0 to zero3 needs DeepSpeed: {error}; run "
            "pip install 'hpctrain[deepspeed]'"
        ) from None
    # Else each rank would compile an operator that training never uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Torch's new names for collectives that DeepSpeed calls by the old ones, at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _prepare(model: nn.Module, settings: EngineSettings, device: torch.device) -> None:
    """Set recomputation and compilation, in place; move buffers, which DeepSpeed leaves."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if settings.activation_checkpointing != "no":
        recompute_blocks(model, settings.activation_checkpointing)
    if settings.compile == "no":
        return
    blocks = every_block(model)
    spread = settings.kind == "zero3"
    if spread and blocks:
        from deepspeed.utils import set_z3_leaf_modules  # type: ignore[import-untyped]

        # Fetched by hooks of every submodule, parameters would cut a block's graph each time.
        set_z3_leaf_modules(model, list({type(block) for block in blocks}))
    compile_blocks(blocks, settings.compile, device, inside_hooks=spread)


def _drop_untrained(optimizer: Optimizer) -> None:
    """Take parameters that are not trained out of the optimizer's groups.

    Refuse a group without others: DeepSpeed would drop it, and the program's next rate would go to
    another group.
    """
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [p for p in group["params"] if p.requires_grad]
        if not group["params"]:
            raise UsageError(
                f"group {number} of the optimizer's param_groups has no parameter that is trained; "
                "leave it out with engine.kind zero0 to zero3"
            )
