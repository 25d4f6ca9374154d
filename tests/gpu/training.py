"""The shipped model in a run of this process, on the device that a test was given."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpctrain.core.settings.schema import EngineSettings, Settings, replaced
from hpctrain.ledger.run.fence import take_attempt
from hpctrain.ledger.run.layout import RunDir
from hpctrain.recipes.lm.model import LM, LMConfig, token_loss
from hpctrain.train.engines.engine import Microbatch
from hpctrain.train.engines.parallelize import parallelize
from tests.support.sharded import manifest, place, restore_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpctrain.core.world import World

LARGE = {"layers": 4, "dim": 512, "heads": 8, "seq_len": 512}
"""On a GPU: 13 M parameters, and heads that flash attention takes."""
SMALL = {"layers": 2, "dim": 32, "heads": 2, "seq_len": 16}
BATCH = 8
Bits = dict[str, torch.Tensor]


def config_of(device: torch.device, **changes: Any) -> LMConfig:
    """Return a model's shape: one that keeps a GPU busy, or one for a rehearsal."""
    return LMConfig(**{**(LARGE if device.type == "cuda" else SMALL), **changes})


def batches(config: LMConfig, step: int, device: torch.device, *, passes: int = 2) -> list[Any]:
    """Return a step's microbatches, which are a function of the step."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, 200, (BATCH, 1), generator=generator)
    text = ((start + 3 * torch.arange(config.seq_len + 1)) % 257).to(device)
    parts = enumerate(text.chunk(passes))
    return [Microbatch(part[:, :-1], part[:, 1:], number) for number, part in parts]


def share(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a microbatch's share of the mean loss."""
    return token_loss(logits, targets).sum() / (BATCH * targets.shape[1])


@dataclass(frozen=True)
class Training:
    """A model of the recipe's under an engine; without a run."""

    engine: Any
    config: LMConfig

    @classmethod
    def of(cls, world: World, *, shape: dict[str, Any] | None = None, **settings: Any) -> Training:
        """Build it. Collective."""
        config = config_of(world.device, **(shape or {}))
        model = LM(config, seed=3)
        given = EngineSettings(**{"kind": "ddp", "precision": "fp32", **settings})
        return cls(parallelize(model, adamw(model), given, world), config)

    def steps(self, first: int, last: int, loss: Any = share) -> list[float]:
        """Train the steps [first, last); return the loss of each. Collective."""
        losses = []
        for step in range(first, last):
            parts = batches(self.config, step, self.engine.world.device)
            losses.append(self.engine.forward_backward(parts, loss))
            self.engine.step()
        return losses

    def save(self, root: Path, step: int) -> None:
        """Commit a checkpoint while training waits. Collective."""
        from hpctrain.checkpoint.tensors.save import save

        world = self.engine.world
        save(place(world, root), world, self.engine.state(), manifest(world, step))

    def load(self, root: Path) -> int:
        """Fill the engine from the newest checkpoint; return its step. Collective."""
        return restore_into(self.engine, place(self.engine.world, root))


def adamw(model: torch.nn.Module, *, fused: bool = False) -> torch.optim.AdamW:
    """Return the optimizer of these tests."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)


def bits(engine: Any) -> Bits:
    """Return weights and moments of this rank, in host memory. Collective."""
    return {name: _here(tensor) for name, tensor in engine.state().shared.items()}


def _here(tensor: Any) -> torch.Tensor:
    tensor = getattr(tensor, "local", tensor)  # a part of a flat buffer
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().to("cpu", copy=True)


def different(left: Bits, right: Bits) -> list[str]:
    """Return the names of tensors that are not the same to the bit, or that one side lacks."""
    unequal = [name for name in left.keys() & right.keys() if not left[name].equal(right[name])]
    return sorted([*(left.keys() ^ right.keys()), *unequal])


@contextmanager
def attempt(root: Path) -> Iterator[RunDir]:
    """The next attempt of a run that this process is the rank of."""
    run = RunDir(root)
    run.root.mkdir(parents=True, exist_ok=True)
    ours = take_attempt(run, job_id="gpu", restarts=0)
    run.attempt(ours.number).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTRAIN_RUN_DIR", str(run.root))
        patch.setenv("HPCTRAIN_ATTEMPT", json.dumps(asdict(ours)))
        patch.setenv("HPCTRAIN_ATTEMPT_DIR", str(run.attempt(ours.number)))
        yield run


def settings_of(**changes: Any) -> Settings:
    """Return settings; changes are given as section__key=value."""
    values = {"run.log_every_s": 0.0, "checkpoint.interval_steps": 2, "engine.kind": "ddp"}
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return replaced(Settings(), {**values, **named})


def run_until(
    root: Path,
    total: int,
    settings: Settings,
    *,
    fused: bool = False,
    loss: Any = lambda _step: share,
    shape: dict[str, Any] | None = None,
    at_end: Callable[[Any, Any], Any] = lambda _run, _engine: None,
) -> tuple[list[float], Bits, Any]:
    """Train a run until `total` steps are done, from its newest checkpoint on. Collective.

    Returns:
        The losses of the steps done here, the state at the end, and what `at_end(run, engine)` said
        after the last step.
    """
    import hpctrain

    with attempt(root):
        run = hpctrain.init(settings)
        config = config_of(run.world.device, **(shape or {}))
        model = LM(config, seed=3)
        engine = run.parallelize(model, adamw(model, fused=fused))
        losses, said = [], None
        for step in run.steps(total=total):
            parts = batches(config, step, run.world.device)
            losses.append(engine.forward_backward(parts, loss(step)))
            norm = engine.step()
            run.log(loss=losses[-1], grad_norm=norm, skipped=engine.left_out, tokens=BATCH)
            if step == total - 1:
                said = at_end(run, engine)
        return losses, bits(engine), said
