"""This rank's random number generators as tensors, to travel in the checkpoint without pickle.

On another mesh the saved ones have no owner: each rank then starts from (seed, step, rank), which
is the same however often the run is disturbed.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpctrain.world import World

PREFIX = "rng."


def capture(world: World) -> dict[str, torch.Tensor]:
    """This rank's generators by name; every rank has its own names."""
    stem = f"{PREFIX}rank-{world.rank:05d}."
    version, words, gauss = random.getstate()
    state = {
        stem + "torch": torch.get_rng_state(),
        stem + "python": torch.tensor([version, *words], dtype=torch.int64),
        stem + "python_gauss": torch.tensor(
            [float("nan") if gauss is None else gauss], dtype=torch.float64
        ),
    }
    if world.device.type == "cuda":
        state[stem + "cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def apply(world: World, state: dict[str, torch.Tensor]) -> None:
    """Go on with what `capture` gave on this rank."""
    stem = f"{PREFIX}rank-{world.rank:05d}."
    torch.set_rng_state(state[stem + "torch"])
    version, *words = state[stem + "python"].tolist()
    gauss = float(state[stem + "python_gauss"].item())
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))  # noqa: PLR0124 - NaN
    if stem + "cuda" in state:
        torch.cuda.set_rng_state(state[stem + "cuda"], world.device)


def seed_anew(number: int, seed: int, step: int) -> None:
    """Start every generator from (seed, step, number).

    Args:
        number: Of the rank; ranks that must draw the same numbers have the same.
        seed: The run's.
        step: Updates applied.
    """
    value = (seed * 1_000_003 + step) * 1_000_003 + number
    value &= 0x7FFF_FFFF_FFFF_FFFF
    torch.manual_seed(value)  # CUDA's too
    random.seed(value)
