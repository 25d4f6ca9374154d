"""Trains eight numbers, the same ones on every rank; a test holds it at a step.

    story.py STEPS HELD_AT [RANK]

At the beginning of step HELD_AT every rank (or RANK alone) writes `held-<attempt>-<rank>` with its
process number, and waits for the file `gate`. From there it also writes `heard-<attempt>-<rank>`
once it has got a stop signal. Its stack changes, as a sign of life, until there is a file `looked`:
then it stands still. Files are in the folder of the submit. After STEPS steps rank 0
writes `final`: a digest of all state. Without hpctrain, `reference` comes to the same.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import torch

POLL_S = 0.02


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, which has state."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One update; its data follow from the step's number."""
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(16, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit that training depends on."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in sorted(state))):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def reference(steps: int) -> str:
    """The digest after so many steps that nobody disturbed."""
    model, optimizer = build()
    for step in range(steps):
        train_step(model, optimizer, step)
    return digest(model, optimizer)


def rest(depth: int) -> None:
    """Wait a little, so deep in the stack."""
    if depth:
        return rest(depth - 1)
    return time.sleep(POLL_S)


def hold(attempt: int, rank: int) -> None:
    """Wait for the gate, and write down what comes meanwhile."""
    from hpctrain.train.runtime.stops import RankSignals

    held = Path(f"held-{attempt}-{rank}")
    held.with_suffix(".new").write_text(str(os.getpid()))
    held.with_suffix(".new").rename(held)
    listening = RankSignals._listening
    assert listening is not None
    while not Path("gate").exists():
        if listening.heard.is_set():
            Path(f"heard-{attempt}-{rank}").touch()
        if Path("looked").exists():
            time.sleep(3600)
        rest(random.randrange(20))


def main() -> None:
    import torch.distributed as dist

    import hpctrain

    steps, held_at, *only = map(int, sys.argv[1:])
    run = hpctrain.init()
    rank, attempt = run.world.rank, int(Path(os.environ["HPCTRAIN_ATTEMPT_DIR"]).name)
    model, optimizer = build()
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(steps):
        if step == held_at and only in ([], [rank]):
            hold(attempt, rank)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        train_step(model, optimizer, step)
        time.sleep(POLL_S)  # so that a stop is agreed on before the last step
    if rank == 0:
        Path("final").write_text(digest(model, optimizer))


if __name__ == "__main__":
    main()
