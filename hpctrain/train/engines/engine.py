"""What every engine can do: one training step, one evaluation, its state by full names.

An engine is a model that is spread over the ranks, with its optimizer. The promises are held by
tests/engines/test_every_engine.py and test_what_steps_do.py.
"""

from __future__ import annotations

import abc
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpctrain.core.base.mesh import MicrobatchRules
from hpctrain.errors import UsageError
from hpctrain.node.control.heartbeat import FORWARD_BACKWARD, OPTIMIZER, VALIDATE, in_phase
from hpctrain.train.engines.norm import global_sum, precision_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from hpctrain.checkpoint.format.manifest import TensorEntry
    from hpctrain.checkpoint.tensors.boxes import State
    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.core.world import World
    from hpctrain.train.engines.norm import LossScale
    from hpctrain.train.engines.pretrained import BaseWeights

    Loss = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Microbatch:
    """The samples of one forward and backward pass of one rank.

    Attributes:
        inputs: What the model takes, with the samples along its first dimension.
        targets: What the loss takes beside the model's output.
        leaf: Its number among all microbatches of the step, of all ranks; None where it does not
            matter, or where the samples count nothing.
    """

    inputs: torch.Tensor
    targets: Any
    leaf: int | None = None


@dataclass(frozen=True)
class EngineInputs:
    """What every engine is made from, beside the model and its optimizer.

    `state_names` are the parameters and buffers that are saved, on whatever rank. `base` are the
    weights under adapters, which are not.
    """

    settings: EngineSettings
    world: World
    mesh: Mesh
    state_names: frozenset[str]
    base: BaseWeights | None = None


class UpdateGuard(Protocol):
    """What may stand between a step's gradients and its update (`step_guard.StepGuard`)."""

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """As the engine's."""

    def accepts(self, norm: float) -> bool:
        """Whether the update with a gradient of this norm is to be applied."""

    def step(self) -> float:
        """As the engine's."""


class Engine(abc.ABC):
    """A model that is spread over the ranks, with its optimizer.

    Attributes:
        kind: "plain", "ddp", "fsdp2", "zero0" to "zero3".
        mesh: Ranks along each axis.
        model: What the program calls; parameter names are those of the original. Under a pipeline
            it holds this rank's part alone and is not called.
        optimizer: Updates this rank's share of the parameters; the program sets its rates.
        passes: What the engine asks of the way a step's samples are cut into microbatches.
        precision: That the model computes in.
        loss_scale: With fp16, how far losses are scaled; None otherwise.
        begun: Updates applied before the step in hand.
        seed: Of the run; for engines that draw random numbers by the step.
        base: Of a model with adapters: the weights that no checkpoint holds.
        guard: Stands between gradients and update; None where no guard is on.
        left_out: The last step's update was left out: fp16 had overflowed, or a guard said so.
        decides_alone: It leaves out by itself what is not finite, and nothing else.
    """

    loss_scale: LossScale | None = None
    guard: UpdateGuard | None = None
    left_out = False
    decides_alone = False

    def __init__(
        self, kind: str, model: nn.Module, optimizer: Optimizer, inputs: EngineInputs
    ) -> None:
        self.kind = kind
        self.model = model
        self.optimizer = optimizer
        self.world = inputs.world
        self.mesh = inputs.mesh
        self.passes = MicrobatchRules()
        self.precision = precision_of(inputs.settings.precision, inputs.world.device)
        self.clip_norm = inputs.settings.clip_norm
        self.base = inputs.base
        self.begun = 0
        self.seed = 0

    def at_step(self, step: int) -> None:
        """The program begins a step: so many updates have been applied in the run's life."""
        self.begun = step

    @property
    def data_rank(self) -> int:
        """Which of the ranks that read different samples this one is."""
        return self.mesh.data_rank(self.world.rank)

    @property
    def data_ranks(self) -> int:
        """How many ranks read different samples."""
        return self.mesh.data_ranks

    @property
    def is_first_reader(self) -> bool:
        """Whether this rank is the first of those that read the same: along `tp`, `pp`, `cp`."""
        rank = self.world.rank
        mesh = self.mesh
        return mesh.tp_rank(rank) == mesh.pp_rank(rank) == mesh.cp_rank(rank) == 0

    @property
    def random_rank(self) -> int:
        """Ranks with the same number must draw the same random numbers: those along `tp`."""
        mesh, rank = self.mesh, self.world.rank
        return mesh.pp_rank(rank) * mesh.dp_ranks + mesh.dp_rank(rank)

    @in_phase(FORWARD_BACKWARD)
    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """Add up the gradients of a step. Collective: every rank calls it, with equally many.

        Args:
            microbatches: Of this rank; ranks along `tp`, `pp` and `cp` give the same ones.
            loss: Of a model's output and the microbatch's targets; a number that is this
                microbatch's share of the step's loss: losses and gradients are added, over
                microbatches and over data ranks.

        Returns:
            The step's loss, over all ranks; the same number on every rank.
        """
        if self.guard is not None:
            return self.guard.forward_backward(microbatches, loss)
        return self.accumulate(microbatches, loss)

    def accumulate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """What `forward_backward` does, which a guard may do twice. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, microbatch in enumerate(microbatches, start=1):
            with self.microbatch(last=number == len(microbatches)):
                value = loss(self.model(microbatch.inputs), microbatch.targets)
                self.backward(value)
            total += value.detach().double()
        return self.total(total)

    @in_phase(VALIDATE)
    def evaluate(self, microbatches: Sequence[Microbatch], loss: Loss) -> float:
        """The same sum without gradients, with the model in its evaluation mode. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        with self.evaluating():
            for microbatch in microbatches:
                total += loss(self.model(microbatch.inputs), microbatch.targets).double()
        return self.total(total)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients, in the evaluation mode."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    @in_phase(OPTIMIZER)
    def step(self) -> float:
        """Clip over all ranks, update, clear the gradients. Collective.

        Returns:
            The gradient's norm before clipping, the same on every rank. It is infinite or not a
            number where fp16 has overflowed; the update is left out then. `left_out` says so, and
            also what a guard has left out.
        """
        return self.update() if self.guard is None else self.guard.step()

    @abc.abstractmethod
    def update(self) -> float:
        """What `step` does, which a guard may do twice. Collective.

        Where the engine has a guard it is asked before the update. Sets `left_out`.
        """

    @abc.abstractmethod
    def state(
        self, *, with_optimizer: bool = True, saved: Mapping[str, TensorEntry] | None = None
    ) -> State:
        """Return this rank's weights (fp32 masters where there are such) and moments by full names.

        They share memory with what trains. Collective: every rank calls it.

        Args:
            with_optimizer: Whether moments are in it.
            saved: The tensors of a checkpoint that is to be loaded; then the moments are those that
                the checkpoint has, in memory that `apply` gives to the optimizer.
        """

    @abc.abstractmethod
    def apply(self, tensors: Mapping[str, Any], *, with_optimizer: bool = True) -> None:
        """Continue with what `state` gave and what was filled in since. Collective."""

    # ---- for programs with a loop of their own over microbatches

    @contextlib.contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002 - for those that can
        """Around one microbatch's forward and backward pass; gradients travel in the last only.

        Raises:
            UsageError: the engine has the passes of a step go together.
        """
        raise self._together()
        yield  # makes it a generator

    def backward(self, loss: torch.Tensor) -> None:  # noqa: ARG002 - for those that can
        """Add the gradients of a microbatch's share of the step's loss; inside `microbatch`.

        Raises:
            UsageError: see `microbatch`.
        """
        raise self._together()

    def _together(self) -> UsageError:
        return UsageError(
            f"engine {self.kind} with {self.mesh.as_dict()} cannot run microbatches one by one; "
            "call engine.forward_backward"
        )

    # ---- for engines

    def total(self, local: torch.Tensor) -> float:
        """The sum of a number over data ranks. Collective.

        Args:
            local: One fp64 number; of ranks along `tp` the first one's counts, along `pp` the
                last one's.
        """
        last = self.mesh.pp_rank(self.world.rank) == self.mesh.pp - 1
        counts = last and self.mesh.tp_rank(self.world.rank) == 0
        value = local.detach().double()
        return float(global_sum(self.world, value if counts else torch.zeros_like(value)))
