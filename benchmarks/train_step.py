"""A training step under `run.parallelize` against plain torch DDP and FSDP2: 2 ranks, turn by turn.

The same model, batches, optimizer and clipping. The plain loops are as short as torch's tutorials
have them; FSDP2 has the same units. Wall and CPU time are of one group of ranks that makes a step
of each in turn; memory is the peak of a rank that has trained by one of them alone.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any

import _measure as measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpctrain.core.world import World

RANKS = 2
BATCH = 8
CLIP = 1.0
GOAL = 1.02
KINDS = ("ddp", "fsdp2")
WAYS = ("plain", "ours")


def main() -> None:
    """Print one line for each engine and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16, help="steps of each, in turn")
    parser.add_argument("--dim", type=int, default=384, help="width of the model")
    given = parser.parse_args()
    lines = []
    for kind in KINDS:
        results = measure.on_ranks(_rounds, RANKS, kind=kind, rounds=given.rounds, dim=given.dim)
        wall = {
            name: statistics.median(max(turns) for turns in _of(results, name, "wall"))
            for name in WAYS
        }
        ratios = {}
        for what in ("wall", "cpu"):
            plain, ours = ([sum(turns) for turns in _of(results, name, what)] for name in WAYS)
            ratios[what] = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
        lines.append(
            measure.Line(
                f"step, {kind}: wall, median of {given.rounds}",
                f"{wall['ours'] * 1e3:.0f} ms",
                ratios["wall"],
                GOAL,
                "x plain torch",
            )
        )
        lines.append(
            measure.Line(
                f"step, {kind}: CPU of both ranks", "", ratios["cpu"], GOAL, "x plain torch"
            )
        )
        peaks = {
            name: max(measure.on_ranks(_peak, RANKS, kind=kind, way=name, dim=given.dim))
            for name in WAYS
        }
        lines.append(
            measure.Line(
                f"step, {kind}: peak memory of a rank",
                f"{peaks['ours'] / 1e6:.0f} MB",
                peaks["ours"] / peaks["plain"],
                1.0,
                "x plain torch",
            )
        )
    for line in lines:
        print(line)


def _of(results: list[measure.Turns], name: str, what: str) -> list[list[float]]:
    """Of each turn, what the ranks took."""
    return [
        [getattr(turn, what) for turn in turns]
        for turns in zip(*(rank[name] for rank in results), strict=True)
    ]


def _rounds(world: World, kind: str, rounds: int, dim: int) -> measure.Turns:
    acts = {name: _trainer(world, kind, name, dim) for name in WAYS}
    for act in acts.values():
        for _ in range(3):
            act()
    return measure.alternate(world, acts, rounds)


def _peak(world: World, kind: str, way: str, dim: int) -> int:
    peak = measure.Peak()
    act = _trainer(world, kind, way, dim)
    for _ in range(4):
        act()
    return peak.nbytes


def _trainer(world: World, kind: str, way: str, dim: int) -> Callable[[], object]:
    """What makes one step. Collective."""
    import torch

    from hpctrain.recipes.lm.model import LM, LMConfig

    config = LMConfig(layers=6, dim=dim, heads=6, seq_len=128, vocab=8192)
    model = LM(config, seed=3)
    torch.manual_seed(world.rank)
    tokens = torch.randint(0, config.vocab, (BATCH, config.seq_len + 1))
    make = _ours if way == "ours" else _plain
    return make(world, kind, model, tokens)


def _ours(world: World, kind: str, model: Any, tokens: Any) -> Callable[[], object]:
    import torch

    from hpctrain.core.settings.schema import EngineSettings
    from hpctrain.train.engines.engine import Microbatch
    from hpctrain.train.engines.parallelize import parallelize

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = EngineSettings(kind=kind, precision="fp32", clip_norm=CLIP)
    engine = parallelize(model, optimizer, settings, world)
    batch = [Microbatch(tokens[:, :-1], tokens[:, 1:])]

    def act() -> tuple[float, float]:
        loss = engine.forward_backward(batch, lambda out, targets: _loss(out, targets) / RANKS)
        return loss, engine.step()

    return act


def _plain(world: World, kind: str, model: Any, tokens: Any) -> Callable[[], object]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model.embedding, mesh=mesh)
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        for part in model.modules():
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def act() -> tuple[float, float]:
        loss = _loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return act


def _loss(logits: Any, targets: Any) -> Any:
    import torch.nn.functional as F  # noqa: N812, its usual name

    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
