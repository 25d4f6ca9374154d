"""The recipe's first steps under an engine and in one process, on the same global batches.

Both run in processes of their own on this machine and leave nothing behind. What is compared, and
what the result is, is `plan/parity.py`'s. tests/engines/test_parity.py holds the promises.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.checkpoint.tensors.boxes import State, held
from hpctrain.data.tokens import TokenFile
from hpctrain.engines.norm import clip_factor
from hpctrain.engines.parallelize import parallelize
from hpctrain.engines.precision import DTYPES, precision_of
from hpctrain.errors import UsageError
from hpctrain.plan.parity import TOLERANCE, GradientSums, ParityResult, StepRecord, compare
from hpctrain.recipes.lm import corpus
from hpctrain.recipes.lm.train import (
    BETAS,
    lr_at,
    make_batches,
    make_model,
    microbatches,
    share_of_loss,
)
from hpctrain.recipes.local_ranks import run_ranks
from hpctrain.settings.schema import EngineSettings
from hpctrain.world import gather, join_world

if TYPE_CHECKING:
    from hpctrain.checkpoint.tensors.boxes import Held
    from hpctrain.engines.engine import Engine
    from hpctrain.settings.schema import Settings
    from hpctrain.world import World

FIRST_MOMENT = ".exp_avg"
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
)


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


def check_parity(
    settings: Settings, *, ranks: int, steps: int, tolerance: float | None = None
) -> ParityResult:
    """Train some steps in one process and then on so many ranks, and compare.

    Dropout is off in both: ranks draw numbers of their own, so losses would differ by chance.

    Args:
        settings: The run's.
        ranks: Processes of the engine.
        steps: How many steps.
        tolerance: Of a loss, relative; None for the precision's own.

    Raises:
        UsageError: the settings fit neither model, engine, nor machine.
        HpctrainError: a process failed; with its error.
    """
    settings = replace(settings, train=replace(settings.train, dropout=0.0))
    start = settings.run.start_method
    if start == "fork":  # once for all ranks: the first optimizer step would import them in each
        for name in PRELOAD:
            import_module(name)
    with tempfile.TemporaryDirectory(prefix="hpctrain-parity-") as folder:
        place = Path(folder)
        train = settings.train
        corpus.build(train.data, train.data_glob, train.data_limit_mb, place / "tokens.bin")
        alone = one_process(settings, ranks)
        (one,) = run_ranks(train_steps, 1, alone, place, steps, start_method=start)
        steps_of_ranks: list[Steps] = run_ranks(
            train_steps, ranks, settings, place, steps, start_method=start
        )
    engine = steps_of_ranks[0]
    limit = TOLERANCE[engine.precision] if tolerance is None else tolerance
    return compare(one.records, engine.records, engine.gradients, limit)


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

    Without torchrun's environment the gradients are left in `place`; with it they are compared to
    those.
    """
    world = _join()
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


def _join() -> World:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    devices = torch.cuda.device_count()
    if devices and ranks > devices:
        raise UsageError(
            f"--parity on {ranks} ranks needs as many GPUs, this machine has {devices}; lower "
            "--ranks, or set CUDA_VISIBLE_DEVICES= (empty) to check on the CPU"
        )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    return join_world()


# ---- gradients: Adam's first moment is the first gradient times (1 - beta)


def _gradients(engine: Engine, world: World, path: Path, unclip: float) -> dict[str, GradientSums]:
    """Leave every parameter's gradient in a file, or compare it to what is there. Collective."""
    state = engine.state()
    moments = {
        name.removeprefix("optim.").removesuffix(FIRST_MOMENT): tensor
        for name, tensor in state.shared.items()
        if name.endswith(FIRST_MOMENT)
    }
    if not world.is_distributed:
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
