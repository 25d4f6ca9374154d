"""The recipe's first steps under an engine and in one process, on the same global batches.

Losses alone say little: a parameter that is never updated changes them in the sixth digit. So the
first step's gradients are compared by name as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.tensors.boxes import State, held
from hpctrain.core.settings.schema import EngineSettings
from hpctrain.core.world import gather
from hpctrain.recipes.lm import corpus
from hpctrain.recipes.lm.train import (
    BETAS,
    lr_at,
    make_batches,
    make_model,
    microbatches,
    share_of_loss,
)
from hpctrain.train.data.tokens import TokenFile
from hpctrain.train.engines.norm import DTYPES, clip_factor, precision_of
from hpctrain.train.engines.parallelize import parallelize
from hpctrain.train.joining_ranks import join_world
from tests.support.gloo import launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpctrain.checkpoint.tensors.boxes import Held
    from hpctrain.core.settings.schema import Settings
    from hpctrain.core.world import World
    from hpctrain.train.engines.engine import Engine

FIRST_MOMENT = ".exp_avg"

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""By precision: how far a loss may be from one process's, relative to it."""

GRADIENT_FACTOR = 10.0
"""Gradients and their norms may be so many times as far off: rounding shows in them first."""


@dataclass(frozen=True)
class StepRecord:
    """One step: its loss over the global batch, and the gradient's norm before clipping."""

    loss: float
    norm: float


@dataclass(frozen=True)
class GradientSums:
    """One parameter's gradient of the first step, as sums of squares over all its elements.

    Attributes:
        found: Of the engine's.
        wanted: Of one process's.
        apart: Of the difference; below zero where parts were counted twice.
    """

    found: float = 0.0
    wanted: float = 0.0
    apart: float = 0.0

    def __add__(self, other: GradientSums) -> GradientSums:
        return GradientSums(
            self.found + other.found, self.wanted + other.wanted, self.apart + other.apart
        )

    @property
    def relative(self) -> float:
        """Size of the difference as a part of one process's gradient."""
        if self.wanted == 0.0:
            return 0.0 if self.found == 0.0 else math.inf
        return math.sqrt(abs(self.apart) / self.wanted)


@dataclass(frozen=True)
class ParityStep:
    """A step as both did it; `off` where it left the tolerance."""

    step: int
    one: StepRecord
    engine: StepRecord
    off: bool

    @property
    def difference(self) -> float:
        """Of the losses, relative to one process's."""
        return relative(self.engine.loss, self.one.loss)


@dataclass(frozen=True)
class ParityResult:
    """What came out.

    Attributes:
        rows: The steps.
        tolerance: Of a loss; see `TOLERANCE`.
        without_gradient: Parameters that have a gradient in one process and none in the engine.
        different: Those whose gradient is another, with the relative difference, largest first.
    """

    rows: list[ParityStep]
    tolerance: float
    without_gradient: list[str]
    different: list[tuple[str, float]]

    @property
    def largest(self) -> float:
        """The largest relative difference of a loss; not a number where a loss was none."""
        differences = [row.difference for row in self.rows]
        return math.nan if any(map(math.isnan, differences)) else max(differences)

    @property
    def first_off(self) -> int | None:
        """The first step whose loss or norm left the tolerance."""
        return next((row.step for row in self.rows if row.off), None)

    @property
    def holds(self) -> bool:
        """Whether the engine trains as one process does."""
        return self.first_off is None and not self.without_gradient and not self.different


def compare(
    one: Sequence[StepRecord],
    engine: Sequence[StepRecord],
    gradients: Mapping[str, GradientSums],
    tolerance: float,
) -> ParityResult:
    """Hold an engine's steps against those of one process.

    Args:
        one: The steps of one process.
        engine: As many of the engine's.
        gradients: Of every parameter that has one in one process.
        tolerance: Of a loss, relative.
    """
    loose = GRADIENT_FACTOR * tolerance
    rows = []
    for number, (mine, theirs) in enumerate(zip(one, engine, strict=True), start=1):
        # Not "greater than": what is not a number is off.
        loss_fits = relative(theirs.loss, mine.loss) <= tolerance
        norm_fits = relative(theirs.norm, mine.norm) <= loose or _both_overflow(mine, theirs)
        rows.append(ParityStep(number, mine, theirs, off=not (loss_fits and norm_fits)))
    without = [name for name, sums in gradients.items() if sums.found == 0.0 < sums.wanted]
    different = [
        (name, sums.relative)
        for name, sums in gradients.items()
        if name not in without and not sums.relative <= loose
    ]
    return ParityResult(rows, tolerance, without, sorted(different, key=lambda pair: -pair[1]))


def relative(value: float, wanted: float) -> float:
    """How far a value is off, as a part of the wanted one."""
    if value == wanted:
        return 0.0
    return abs(value - wanted) / max(abs(wanted), math.ulp(0.0))


def summary(result: ParityResult) -> str:
    """The result in one line."""
    if result.holds:
        return f"parity holds: {_largest(result)}, within {result.tolerance:g}"
    lines = []
    if result.without_gradient:
        lines.append(f"without a gradient: {_some(result.without_gradient)}")
    if result.different:
        names = [f"{name} ({apart:.1e})" for name, apart in result.different]
        lines.append(f"another gradient: {_some(names)}")
    if result.first_off is not None:
        lines.append(f"out of tolerance from step {result.first_off} on")
    lines.append(f"{_largest(result)}, tolerance {result.tolerance:g}")
    return f"parity does not hold: {'; '.join(lines)}"


def _both_overflow(one: StepRecord, engine: StepRecord) -> bool:
    """With fp16 both left the step out: the scale was still too high."""
    return not math.isfinite(one.norm) and not math.isfinite(engine.norm)


def _largest(result: ParityResult) -> str:
    return f"largest difference of a loss {result.largest:.1e}"


def _some(names: Sequence[str]) -> str:
    shown = 5
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


@dataclass(frozen=True)
class Steps:
    """What some steps left.

    Attributes:
        records: One for each step.
        gradients: Of each parameter in the first step that counted; against one process's.
        precision: "fp32", "bf16" or "fp16": what "auto" became.
    """

    records: list[StepRecord]
    gradients: dict[str, GradientSums]
    precision: str


def check_parity(settings: Settings, place: Path, *, ranks: int, steps: int) -> ParityResult:
    """Train some steps in one process and then on so many ranks, and compare.

    Dropout is off in both: ranks draw numbers of their own, so losses would differ by chance.
    """
    train = replace(settings.train, dropout=0.0)
    settings = replace(settings, train=train)
    corpus.build(train.data, train.data_limit_mb, place / "tokens.bin")
    alone = one_process(settings, ranks)
    (one,) = launch(train_steps, 1, settings=alone, place=place, steps=steps)
    engine, *_ = launch(train_steps, ranks, settings=settings, place=place, steps=steps)
    return compare(one.records, engine.records, engine.gradients, TOLERANCE[engine.precision])


def one_process(settings: Settings, ranks: int) -> Settings:
    """The same training without anything that an engine does; passes as large as a rank's."""
    engine = EngineSettings(
        kind="ddp", precision=settings.engine.precision, clip_norm=settings.engine.clip_norm
    )
    train = settings.train
    share = train.micro_batch or math.ceil(train.global_batch / ranks)
    return replace(settings, engine=engine, train=replace(train, micro_batch=share))


def train_steps(settings: Settings, place: Path, steps: int) -> Steps:
    """The recipe's first steps. Collective: every rank calls it.

    One process leaves its gradients in `place`; several compare theirs to those.
    """
    world = join_world()
    train = settings.train
    model, optimizer = make_model(train)
    engine = parallelize(model, optimizer, settings.engine, world)
    tokens = TokenFile(place / "tokens.bin")
    data = make_batches(tokens, train, engine)
    share = share_of_loss(train.global_batch * train.seq_len)
    records: list[StepRecord] = []
    gradients: dict[str, GradientSums] | None = None
    for step in range(steps):
        engine.at_step(step)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, peak=train.lr, warmup=train.warmup, total=train.steps)
        loss = engine.forward_backward(
            microbatches(train, world.device, tokens, data.next_step()), share
        )
        norm = engine.step()
        records.append(StepRecord(loss, norm))
        if gradients is None and math.isfinite(norm):
            unclip = 1 / ((1 - BETAS[0]) * clip_factor(norm, settings.engine.clip_norm))
            gradients = _gradients(engine, world, place / "gradients.pt", unclip)
    dtype = precision_of(settings.engine.precision, world.device)
    (precision,) = (name for name, dtype_of_name in DTYPES.items() if dtype_of_name is dtype)
    return Steps(records, gradients or {}, precision)


# ---- gradients: Adam's first moment is the first gradient times (1 - beta)


def _gradients(engine: Engine, world: World, path: Path, unclip: float) -> dict[str, GradientSums]:
    """Leave every parameter's gradient in a file, or compare it to what is there. Collective."""
    state = engine.state()
    moments = {
        name.removeprefix("optim.").removesuffix(FIRST_MOMENT): tensor
        for name, tensor in state.shared.items()
        if name.endswith(FIRST_MOMENT)
    }
    if world.world_size == 1:
        torch.save({name: _whole(tensor) * unclip for name, tensor in moments.items()}, path)
        return {}
    copies = {
        name.removeprefix("optim.").removesuffix(FIRST_MOMENT): place
        for name, place in state.copies.items()
        if name.endswith(FIRST_MOMENT)
    }
    wanted: dict[str, torch.Tensor] = torch.load(path, mmap=True, weights_only=True)
    own_sums = dict.fromkeys(wanted, GradientSums())
    if world.rank == 0:  # an element that no rank holds is as far off as one that is zero
        sizes = {name: _squares(tensor) for name, tensor in wanted.items()}
        own_sums = {name: GradientSums(0.0, size, size) for name, size in sizes.items()}
    for box in held(State(dict(moments), copies=copies), world):
        name = box.piece.name
        own_sums[name] += _sums(box, wanted[name], unclip)
    total: dict[str, GradientSums] = dict.fromkeys(wanted, GradientSums())
    for part in gather(world, own_sums):
        total = {name: sums + part[name] for name, sums in total.items()}
    return total


def _sums(box: Held, wanted: torch.Tensor, unclip: float) -> GradientSums:
    """What this rank holds of a gradient; what several hold alike counts once."""
    values = box.local.detach().cpu().double() * unclip
    piece = box.piece
    if piece.flat:
        there = wanted.reshape(-1).narrow(0, piece.begin[0], piece.extent[0])
    else:
        there = wanted
        for axis, (begin, extent) in enumerate(zip(piece.begin, piece.extent, strict=True)):
            there = there.narrow(axis, begin, extent)
    apart = _squares(values - there.double()) - _squares(there)
    return GradientSums(_squares(values) / box.replicas, 0.0, apart / box.replicas)


def _whole(tensor: Any) -> torch.Tensor:
    plain: torch.Tensor = tensor.detach().cpu().float()
    return plain


def _squares(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())
