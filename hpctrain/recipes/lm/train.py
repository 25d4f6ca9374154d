"""The training program that we ship, written like any user's own.

It uses nothing that theirs could not. Every rank runs `main`. All that survives an interruption is
in the engine, in `data`, and in the step: the learning rate (`lr_at`) is a function of the step
alone, and needs no saving. tests/unit/recipes/test_schedule.py and tests/engines/test_resume.py
hold the promises.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import hpctrain
from hpctrain import (
    GlobalBatches,
    Microbatch,
    ModelPlan,
    SampleOrder,
    TokenFile,
    broadcast,
    cut_step,
)
from hpctrain.core.base import clock
from hpctrain.core.base.env import HPCTRAIN_ATTEMPT_DIR
from hpctrain.ledger.plan.mesh import shape_of
from hpctrain.recipes.lm import corpus
from hpctrain.recipes.lm.model import LM, LMConfig, flops_per_token, token_loss

if TYPE_CHECKING:
    from hpctrain import Engine, Run, StepBatch
    from hpctrain.core.settings.schema import TrainSettings
    from hpctrain.train.engines.engine import Loss

BETAS = (0.9, 0.95)
"""Of AdamW."""
VALIDATION_BATCHES = 4
"""Global batches of text that is never trained on."""
NO_RUN_DATA = Path.home() / ".cache" / "hpctrain"
"""Where the token file goes when there is no run directory."""


def lr_at(step: int, *, peak: float, warmup: int, total: int, floor: float = 0.1) -> float:
    """The rate of the update that follows `step` updates: a rise to `peak`, then half a cosine.

    Args:
        step: Updates applied so far; the first update is that of step 0.
        peak: The highest rate, reached by the last of the warm-up's updates.
        warmup: Updates of the rise; 0 begins at the peak.
        total: Updates of the run; from there on the rate stays at the floor.
        floor: The lowest rate, as a part of the peak.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def main() -> None:
    """Train until `train.steps` steps are done, or until the run is asked to stop."""
    run = hpctrain.init()
    train = run.settings.train
    tokens = _tokens(run)
    _, held_out = split(tokens, train)
    model, optimizer = make_model(train)
    plan = ModelPlan(shape=shape_of(train), loss_parallel=True)
    engine = run.parallelize(model, optimizer, plan=plan)
    data = make_batches(tokens, train, engine)
    run.track(data=data)
    step_tokens = train.global_batch * train.seq_len
    step_flops = step_tokens * flops_per_token(model.config)
    share = share_of_loss(step_tokens)
    for step in run.steps(total=train.steps):
        began = clock.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, peak=train.lr, warmup=train.warmup, total=train.steps)
        with run.timed("data"):
            batch = data.next_step()
            own = microbatches(train, run.world.device, tokens, batch)
        loss = engine.forward_backward(own, share)
        norm = engine.step()
        if train.audit and engine.is_first_reader:
            _audit(step, batch)
        if train.step_delay_s:
            clock.sleep(train.step_delay_s)
        run.log(
            loss=loss,
            grad_norm=norm,
            lr=optimizer.param_groups[0]["lr"],
            tokens=step_tokens,
            flops=step_flops,
            skipped=engine.left_out,
            step_s=clock.monotonic() - began,
        )
        if step + 1 == train.steps:
            validation = validate(run, engine, tokens, held_out)
            if validation is not None:
                run.log(val_loss=validation)
                _print(run, f"step {step + 1}: loss {loss:.4f}, validation loss {validation:.4f}")
        elif (step + 1) % 10 == 0:
            _print(run, f"step {step + 1}: loss {loss:.4f}")


def make_model(train: TrainSettings) -> tuple[LM, torch.optim.AdamW]:
    """The model with its optimizer, the same on every rank."""
    config = LMConfig(
        layers=train.layers,
        dim=train.dim,
        heads=train.heads,
        seq_len=train.seq_len,
        dropout=train.dropout,
        experts=train.experts,
        experts_per_token=train.experts_per_token,
    )
    model = LM(config, seed=train.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=train.lr, betas=BETAS, weight_decay=train.weight_decay
    )
    return model, optimizer


def split(tokens: TokenFile, train: TrainSettings) -> tuple[int, range]:
    """How many sequences are trained on, and which validate."""
    return corpus.split(tokens.len_sequences(train.seq_len), global_batch=train.global_batch)


def make_batches(tokens: TokenFile, train: TrainSettings, engine: Engine) -> GlobalBatches:
    """The walk through the text, from its first sample on."""
    size, _ = split(tokens, train)
    return GlobalBatches(
        SampleOrder(size, train.seed),
        train.global_batch,
        engine.data_rank,
        engine.data_ranks,
        train.micro_batch,
        passes=engine.passes,
    )


def _tokens(run: Run) -> TokenFile:
    """The text as tokens: made once, by rank 0, and mapped by all."""
    train = run.settings.train
    folder = run.dir.data if run.dir is not None else NO_RUN_DATA
    path = None
    if run.world.rank == 0:
        path = corpus.build(train.data, train.data_limit_mb, folder / "tokens.bin")
    return TokenFile(broadcast(run.world, path))


def microbatches(
    train: TrainSettings, device: torch.device, tokens: TokenFile, batch: StepBatch
) -> list[Microbatch]:
    """A step's passes of this rank: sequences, what follows each token, what each counts."""
    cut = []
    for piece in batch.pieces:
        sequences = torch.from_numpy(tokens.batch(piece.indices, train.seq_len)).to(device)
        weights = torch.tensor(piece.weights, device=device)
        targets = (sequences[:, 1:], weights)
        cut.append(Microbatch(sequences[:, :-1], targets, piece.leaf))
    return cut


def share_of_loss(positions: int) -> Loss:
    """A microbatch's share of the mean loss over so many tokens."""

    def loss(logits: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        following, weights = targets
        return (token_loss(logits, following) * weights).sum() / positions

    return loss


def validate(run: Run, engine: Engine, tokens: TokenFile, held_out: range) -> float | None:
    """Mean loss on text that is never trained on; None when the run was asked to stop meanwhile."""
    train = run.settings.train
    count = min(len(held_out), VALIDATION_BATCHES * train.global_batch)
    share = share_of_loss(count * train.seq_len)
    total = 0.0
    for first in range(0, count, train.global_batch):
        if run.should_stop():
            return None
        batch = cut_step(
            range(first, min(first + train.global_batch, count)),
            engine.data_rank,
            engine.data_ranks,
            train.micro_batch,
            index=held_out.__getitem__,
            passes=engine.passes,
        )
        total += engine.evaluate(
            microbatches(run.settings.train, run.world.device, tokens, batch), share
        )
    return total


def _audit(step: int, batch: StepBatch) -> None:
    """One line for each step with the samples that this rank consumed, to prove exactly-once."""
    folder = os.environ.get(HPCTRAIN_ATTEMPT_DIR)
    if folder is None:
        return
    path = Path(folder) / f"samples-{int(os.environ['RANK']):05d}.txt"
    with path.open("a") as file:
        file.write(f"{step + 1} {' '.join(map(str, batch.consumed))}\n")


def _print(run: Run, text: str) -> None:
    if run.world.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
