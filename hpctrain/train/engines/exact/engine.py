"""Training whose loss curve and weights are the same bits at any number of data-parallel ranks.

A step is cut into leaves, microbatches that are the same samples whoever runs them. Each has random
numbers of its own. What leaves leave behind (gradients, losses) is added up in an order that
depends on their number alone: gradients in the tree of `norm.PairwiseSum`, of which each rank adds
up the part that it owns. It gets that part of every leaf's gradient from the rank that ran the
leaf: as many bytes travel as in a reduce-scatter, but for every leaf. The gradient's norm is exact
too (`norm.exact_norm`). tests/engines/test_exact.py holds the promises.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import nn

from hpctrain.core.device import is_accelerator
from hpctrain.errors import UsageError
from hpctrain.node.control.pulse import VALIDATE, in_phase
from hpctrain.train.data.batches import MicrobatchRules
from hpctrain.train.engines.engine import Engine, global_sum
from hpctrain.train.engines.native import Native

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer

    from hpctrain.core.base.mesh import Mesh
    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.engine import EngineInputs, Loss, Microbatch

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
        fix_kernels(self.world.device)
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
        for microbatch, now in zip(microbatches, self._rounds(microbatches, count), strict=True):
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

    def _rounds(self, microbatches: Sequence[Microbatch], count: int) -> Iterator[Round]:
        ranks = self.data_ranks
        for number in range(len(microbatches)):
            before = min(count, number * ranks)
            yield Round(min(ranks, count - before), before, number == len(microbatches) - 1)

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


def fix_kernels(device: torch.device) -> None:
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
