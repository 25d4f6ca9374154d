"""The recipe's model trained by an engine on made-up text, the same global batches at any mesh."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

SEQ_LEN, BATCH = 16, 8


@dataclass(frozen=True)
class Trained:
    """What a rank saw.

    Attributes:
        losses: Of each step.
        norms: Of the gradients, before clipping.
        weights: Whole, by name, as arrays.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Any]


def lm(*, dropout: float = 0.0, dim: int = 32, heads: int = 4, experts: int = 0) -> Any:
    """A tiny model of the recipe's, the same each time."""
    from hpctrain.recipes.lm.model import LM, LMConfig

    sizes = {"layers": 2, "dim": dim, "heads": heads, "seq_len": SEQ_LEN, "experts": experts}
    config = LMConfig(**sizes, dropout=dropout)
    return LM(config, seed=3)


def engine_of(world: Any, model: Any, *, plan: Any = None, **settings: Any) -> Any:
    """An engine with AdamW. Collective."""
    import torch

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.parallelize import parallelize

    # full_tensor() of a test is nothing that training does
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    defaults = {"kind": "fsdp2", "precision": "fp32", "clip_norm": 0.5}
    return parallelize(
        model, optimizer, EngineSettings(**{**defaults, **settings}), world, plan=plan
    )


def microbatches(engine: Any, step: int, *, per_rank: int = 2) -> list[Any]:
    """This rank's part of a step's global batch, in so many passes."""
    import torch

    from hpctrain.train.engines.engine import Microbatch

    text = torch.randint(
        0, 257, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(100 + step)
    )
    mine = text.chunk(engine.data_ranks)[engine.data_rank]
    return [Microbatch(part[:, :-1], part[:, 1:]) for part in mine.chunk(per_rank)]


def share(logits: Any, targets: Any) -> Any:
    """A microbatch's share of the mean loss."""
    from hpctrain.recipes.lm.model import token_loss

    return token_loss(logits, targets).sum() / (BATCH * SEQ_LEN)


def train(engine: Any, steps: int, *, first: int = 0) -> Trained:
    """So many steps. Collective."""
    losses, norms = [], []
    for step in range(first, first + steps):
        losses.append(engine.forward_backward(microbatches(engine, step), share))
        norms.append(engine.step())
    return Trained(losses, norms, arrays(engine.state(with_optimizer=False).shared))


def gradients(engine: Any) -> dict[str, Any]:
    """Whole gradients of one step by plain name, as arrays. Collective."""
    engine.forward_backward(microbatches(engine, 0), share)
    found = {}
    for name, parameter in engine.model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
        found[plain] = None if parameter.grad is None else _array(parameter.grad)
    return found


def arrays(tensors: dict[str, Any]) -> dict[str, Any]:
    """Whole tensors as arrays. Collective."""
    return {name: _array(tensor) for name, tensor in tensors.items()}


def _array(tensor: Any) -> Any:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone().numpy()
